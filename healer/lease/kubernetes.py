"""The record in a Kubernetes Lease (coordination.k8s.io/v1), for deployments that run there: the API server is a store that
all hosts reach, and its `resourceVersion` makes a replacement conditional. Read with `kubectl get lease`.

The service account needs get, create and update on leases in its namespace. Times inside the object are for people: nobody
decides by them. Labels, annotations and owners that others put on the object stay.

The API server refuses a replacement whose `resourceVersion` is not the newest (409), and any without one (422). Where the
object was deleted between a read and a replacement, the replacement makes it anew, unless somebody else has done so.
"""

import datetime
import os
from pathlib import Path
from typing import Any

import httpx

from elastic.errors import ElasticError
from healer.lease import Record, Versioned

ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount")
TERM, BEAT, TTL = "healer/term", "healer/beat", "healer/ttl"
KEPT = ("labels", "annotations", "ownerReferences", "finalizers", "uid")
"""Metadata of others."""
MICRO_TIME = "%Y-%m-%dT%H:%M:%S.%fZ"
"""RFC 3339 with six digits, as the API writes it."""


class KubernetesStore:
    """`api`, for tests and for use outside a pod: the server's address. The token is read anew for each call, since the
    kubelet rotates it."""

    def __init__(
        self, name: str, *, namespace: str | None = None, api: str | None = None, account: Path = ACCOUNT
    ) -> None:
        """Raises ElasticError where this is no pod and no address is given."""
        host, port = os.environ.get("KUBERNETES_SERVICE_HOST", ""), os.environ.get("KUBERNETES_SERVICE_PORT", "443")
        if api is None and not host:
            raise ElasticError("lease: not in a Kubernetes pod (KUBERNETES_SERVICE_HOST is not set)")
        self._api = api or f"https://{f'[{host}]' if ':' in host else host}:{port}"
        self._account, self._name = account, name
        self._namespace = namespace or self._secret("namespace")
        self._seen: dict[str, Any] = {}
        """The object as last read."""

    def __str__(self) -> str:
        return f"lease {self._namespace}/{self._name} at {self._api}"

    def read(self, *, deadline_s: float) -> Versioned | None:
        answer = self._call("GET", self._path, None, deadline_s)
        if answer.status_code == 404:
            return None
        found = self._seen = self._json(answer)
        meta, spec = found["metadata"], found.get("spec") or {}
        marks = meta.get("annotations") or {}
        try:
            record = Record(spec.get("holderIdentity") or "", int(marks[TERM]), int(marks[BEAT]), float(marks[TTL]))
        except (KeyError, ValueError) as error:
            raise ElasticError(f"{self}: not written by healer ({error!r}); name another lease") from error
        return Versioned(record, str(meta["resourceVersion"]))

    def replace(self, record: Record, version: str | None, *, deadline_s: float) -> bool:
        now = datetime.datetime.now(datetime.UTC).strftime(MICRO_TIME)
        known = self._seen if version is not None else {}
        theirs, before = known.get("metadata") or {}, known.get("spec") or {}
        marks = {TERM: str(record.term), BEAT: str(record.beat), TTL: str(record.ttl_s)}
        metadata: dict[str, Any] = {key: theirs[key] for key in KEPT if key in theirs} | {
            "name": self._name,
            "namespace": self._namespace,
            "annotations": {**(theirs.get("annotations") or {}), **marks},
        }
        same = before.get("holderIdentity") == record.holder and before.get("acquireTime")
        spec = {
            "holderIdentity": record.holder or None,
            "leaseTransitions": record.term,
            "leaseDurationSeconds": max(1, round(record.ttl_s)),
            "acquireTime": before["acquireTime"] if same else now,
            "renewTime": now,
        }
        body = {"apiVersion": "coordination.k8s.io/v1", "kind": "Lease", "metadata": metadata, "spec": spec}
        if version is None:
            # not found: there is no such namespace
            answer = self._call("POST", self._path.rpartition("/")[0], body, deadline_s)
        else:
            metadata["resourceVersion"] = version
            answer = self._call("PUT", self._path, body, deadline_s)
        if answer.status_code == 409:
            return False
        self._json(answer)
        return True

    @property
    def _path(self) -> str:
        return f"/apis/coordination.k8s.io/v1/namespaces/{self._namespace}/leases/{self._name}"

    def _call(self, method: str, path: str, body: dict[str, Any] | None, deadline_s: float) -> httpx.Response:
        headers = {"Authorization": f"Bearer {self._secret('token')}"}
        authority = self._account / "ca.crt"
        try:
            verify: Any = False
            if self._api.startswith("https"):
                import ssl

                verify = ssl.create_default_context(cafile=str(authority))
            with httpx.Client(timeout=deadline_s, trust_env=False, verify=verify) as client:
                return client.request(method, self._api + path, json=body, headers=headers)
        except (httpx.HTTPError, OSError) as error:
            raise ElasticError(f"{self}: no answer: {error or type(error).__name__}") from error

    def _json(self, answer: httpx.Response) -> Any:
        try:
            found = answer.json()
        except ValueError as error:
            if answer.is_success:
                raise ElasticError(f"{self}: the answer is not JSON") from error
            found = answer.text
        if answer.is_success and isinstance(found, dict):
            return found
        # the API tells why in a Status object
        why = found.get("message", found) if isinstance(found, dict) else found
        raise ElasticError(f"{self}: status {answer.status_code}: {str(why)[:300]}")

    def _secret(self, name: str) -> str:
        path = self._account / name
        try:
            return path.read_text().strip()
        except OSError as error:
            raise ElasticError(f"{path}: cannot be read: {error.strerror}") from error
