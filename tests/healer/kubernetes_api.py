"""The part of a Kubernetes API server that leases need, with its rules: `coordination.k8s.io/v1`, as of Kubernetes 1.31.

A replacement is taken only with the newest `resourceVersion` (409 otherwise, 422 without one) and makes an object that is not
there; names, times and numbers are validated (422); refusals are Status objects.
"""

import json
import re
import threading
import uuid
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

MICRO_TIME = re.compile(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{6}(Z|[+-]\d\d:\d\d)")
PATH = re.compile(r"/apis/coordination\.k8s\.io/v1/namespaces/([a-z0-9-]+)/leases(?:/([a-z0-9.-]+))?")


class ApiServer(ThreadingHTTPServer):
    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.objects: dict[str, dict[str, Any]] = {}
        self.namespaces = {"serving"}
        self.token = "secret-token"
        self.refuse: dict[str, tuple[int, str]] = {}
        """By method: what is answered instead, and why."""
        self.versions = 1000
        self.lock = threading.Lock()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"


class _Handler(BaseHTTPRequestHandler):
    server: ApiServer

    def do_GET(self) -> None:
        self._handle()

    def do_POST(self) -> None:
        self._handle()

    def do_PUT(self) -> None:
        self._handle()

    def _handle(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers.get("Content-Length") or 0)) or "null")
        with self.server.lock:
            code, answer = self._answer(body)
        content = json.dumps(answer).encode()
        self.send_response(code)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def _answer(self, body: Any) -> tuple[int, dict[str, Any]]:
        server, match = self.server, PATH.fullmatch(self.path)
        if self.headers.get("Authorization") != f"Bearer {server.token}":
            return _status(401, "Unauthorized")
        if self.command in server.refuse:
            return _status(*server.refuse[self.command])
        if match is None:
            return _status(404, "the server could not find the requested resource")
        namespace, name = match[1], match[2]
        if self.command == "GET":
            found = server.objects.get(self.path)
            return (200, found) if found else _status(404, f'leases.coordination.k8s.io "{name}" not found')
        if problem := _invalid(body, namespace):
            return _status(422, problem)
        meta = body["metadata"]
        path = self.path if name else f"{self.path}/{meta['name']}"
        found = server.objects.get(path)
        if self.command == "POST":
            if "resourceVersion" in meta:
                return _status(400, "resourceVersion should not be set on objects to be created")
            if namespace not in server.namespaces:
                return _status(404, f'namespaces "{namespace}" not found')
            if found:
                return _status(409, f'leases.coordination.k8s.io "{meta["name"]}" already exists')
        elif not meta.get("resourceVersion"):
            return _status(422, "metadata.resourceVersion: Invalid value: 0x0: must be specified for an update")
        elif found and found["metadata"]["resourceVersion"] != meta["resourceVersion"]:
            return _status(409, "the object has been modified; please apply your changes to the latest version")
        elif found and meta.get("uid", found["metadata"]["uid"]) != found["metadata"]["uid"]:
            return _status(409, "Precondition failed: UID in precondition")
        server.versions += 1
        meta["resourceVersion"] = str(server.versions)
        meta["uid"] = found["metadata"]["uid"] if found else str(uuid.uuid4())
        server.objects[path] = body
        return 200 if found else 201, body

    def log_message(self, *_: Any) -> None:
        pass


def _invalid(body: Any, namespace: str) -> str:
    """What the server's validation would find; empty: nothing."""
    if (body.get("apiVersion"), body.get("kind")) != ("coordination.k8s.io/v1", "Lease"):
        return "no Lease of coordination.k8s.io/v1"
    meta, spec = body["metadata"], body["spec"]
    if meta.get("namespace", namespace) != namespace:
        return "the namespace of the object does not match the namespace of the request"
    if any(not isinstance(v, str) for v in (meta.get("annotations") or {}).values()):
        return "metadata.annotations: expected strings"
    for key in ("renewTime", "acquireTime"):
        if spec.get(key) is not None and not MICRO_TIME.fullmatch(spec[key]):
            return f"spec.{key}: {spec[key]!r} is no MicroTime"
    if spec.get("leaseDurationSeconds") is not None and not 0 < spec["leaseDurationSeconds"] < 2**31:
        return "spec.leaseDurationSeconds: must be greater than 0"
    if spec.get("leaseTransitions") is not None and not 0 <= spec["leaseTransitions"] < 2**31:
        return "spec.leaseTransitions: must be greater than or equal to 0"
    return ""


def _status(code: int, message: str) -> tuple[int, dict[str, Any]]:
    return code, {"kind": "Status", "apiVersion": "v1", "status": "Failure", "message": message, "code": code}
