"""The command line's way to a daemon: found through its run directory, asked through its API."""

import getpass
import socket
import time
import uuid
from pathlib import Path
from typing import Any

import httpx

from elastic.errors import ElasticError
from healer.address import DaemonAddress, read_address

TIMEOUT_S = 10.0
ATTEMPTS, PAUSE_S = 3, 0.5
"""Of a control call that gets no answer, under one key: it is carried out once, however often it arrives."""


class NoDaemon(ElasticError):
    """Nobody answers for this run directory."""


class Client:
    def __init__(self, run_dir: Path) -> None:
        """Raises NoDaemon."""
        self.run_dir = run_dir
        found = read_address(run_dir)
        if found is None:
            raise NoDaemon(f"{run_dir}: no daemon runs here; start one with `healer run --policy FILE`")
        self.address: DaemonAddress = found

    def get(self, path: str) -> Any:
        """Raises ElasticError with the API's reason."""
        return self._call("GET", path, None, {})

    def post(self, path: str, body: dict[str, Any]) -> Any:
        """Raises ElasticError with the API's reason."""
        headers = {"Idempotency-Key": uuid.uuid4().hex, "From": _asker()} | self._authorization()
        for left in reversed(range(ATTEMPTS)):
            try:
                return self._call("POST", path, body, headers)
            except NoDaemon:
                if not left or not self.address.alive:
                    raise
                time.sleep(PAUSE_S)
        raise AssertionError("the last attempt returns or raises")

    def _authorization(self) -> dict[str, str]:
        if not self.address.token_file:
            return {}
        try:
            return {"Authorization": f"Bearer {Path(self.address.token_file).read_text().strip()}"}
        except OSError as error:
            raise ElasticError(f"{self.address.token_file}: cannot be read: {error.strerror}") from error

    def _call(self, method: str, path: str, body: dict[str, Any] | None, headers: dict[str, str]) -> Any:
        try:
            # the daemon is on this machine: a proxy from the environment is not for it
            answer = httpx.request(
                method, self.address.http + path, json=body, headers=headers, timeout=TIMEOUT_S, trust_env=False
            )
        except httpx.HTTPError as error:
            raise NoDaemon(
                f"{self.address.http}: the daemon (pid {self.address.pid}) does not answer: {error}"
            ) from None
        try:
            content = answer.json()
        except ValueError:
            raise ElasticError(
                f"{self.address.http}{path}: the answer is not JSON (status {answer.status_code})"
            ) from None
        if answer.is_error and path != "/healthz":
            raise ElasticError(str(content.get("error", content)) if isinstance(content, dict) else str(content))
        return content


def _asker() -> str:
    """Of whoever runs the command; what the daemon writes down."""
    try:
        return f"{getpass.getuser()}@{socket.gethostname()}"
    except (OSError, KeyError):
        return f"somebody@{socket.gethostname()}"
