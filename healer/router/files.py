"""What the router writes: who it is, and the ranks that take requests, for proxies that reach them without it. Each file is
replaced as a whole, and only when its content changes."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import httpx
import msgspec
import structlog

from healer.router.config import Files
from healer.router.pool import Rank

log = structlog.get_logger("healer.router")

CLUSTER_TYPE = "type.googleapis.com/envoy.config.endpoint.v3.ClusterLoadAssignment"
NOWHERE = "127.0.0.1:9"
"""The discard port: nginx refuses an upstream without servers."""


class Announcement(msgspec.Struct, frozen=True):
    """The content of `router.json`."""

    pid: int
    pid_start: int
    http: str
    """Base URL."""
    epoch: int
    """Of the file in force; -1: none yet, the router does not listen."""
    refused: str = ""
    """Why the file as it is now was not taken; empty: it was."""


def replace_text(path: Path, text: str) -> None:
    """A reader sees the old content or the new, never half."""
    temporary = path.with_name(f".{path.name}.part")
    temporary.write_text(text)
    temporary.replace(path)


class ProxyFiles:
    """Raises nothing: a list that cannot be written is logged, and written at the next change."""

    def __init__(self) -> None:
        self._written: dict[str, str] = {}

    def update(self, files: Files, ranks: Sequence[Rank]) -> None:
        if files.envoy:
            self._put(files.envoy, envoy_text(files.envoy_cluster, ranks))
        if files.nginx:
            self._put(files.nginx, nginx_text(ranks))

    def _put(self, path: str, text: str) -> None:
        if self._written.get(path) == text:
            return
        try:
            replace_text(Path(path), text)
        except OSError as error:
            self._written.pop(path, None)
            log.error("list_not_written", path=path, why=str(error))
        else:
            self._written[path] = text


def _address(rank: Rank) -> tuple[str, int]:
    url = httpx.URL(rank.route.address)
    return url.host, url.port or (443 if url.scheme == "https" else 80)


def envoy_text(cluster: str, ranks: Sequence[Rank]) -> str:
    """A DiscoveryResponse for a cluster of type EDS; a rank that takes nothing new is DRAINING. Envoy wants addresses there,
    not names."""
    endpoints: list[dict[str, Any]] = []
    for rank in ranks:
        host, port = _address(rank)
        endpoints.append(
            {
                "endpoint": {"address": {"socket_address": {"address": host, "port_value": port}}},
                "health_status": "HEALTHY" if rank.open else "DRAINING",
            }
        )
    resource = {"@type": CLUSTER_TYPE, "cluster_name": cluster, "endpoints": [{"lb_endpoints": endpoints}]}
    found = msgspec.json.format(msgspec.json.encode({"resources": [resource]}))
    return found.decode() + "\n"


def nginx_text(ranks: Sequence[Rank]) -> str:
    """For `include` in an `upstream` block."""
    lines = []
    for rank in ranks:
        host, port = _address(rank)
        name = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
        lines.append(f"server {name}{'' if rank.open else ' down'}; # slot {rank.id.slot}\n")
    return "".join(lines) or f"server {NOWHERE} down;\n"
