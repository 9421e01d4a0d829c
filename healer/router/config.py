"""The router's file. The daemon writes it as a whole and sends SIGHUP; the epoch in it never goes back.

The first reading settles where the router listens; later ones may change all else.
"""

import json
from pathlib import Path
from typing import Annotated

import httpx
import msgspec

from elastic.errors import ElasticError, NeedsReplan

Natural = Annotated[int, msgspec.Meta(ge=0)]
Positive = Annotated[int, msgspec.Meta(ge=1)]
Seconds = Annotated[float, msgspec.Meta(gt=0, le=86400)]


class RankSpec(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One API server of vLLM. A slot that is left out, or that names a later incarnation, is lost: its requests continue
    elsewhere at once."""

    slot: Natural
    incarnation: Natural
    url: str
    """Base, such as http://10.0.0.1:8100; without /v1."""
    admit: bool
    """False: nothing new is sent there, what is in flight may end."""


class Limits(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    max_in_flight: Positive = 4096
    """Requests, those that wait included; 429 beyond."""
    max_queued: Positive = 1024
    """Requests on no rank; 429 beyond."""
    max_body_bytes: Positive = 32 << 20
    """Of a request; 413 beyond. Images come inside it."""
    hold_s: Seconds = 300.0
    """How long a request waits for a rank that takes it, then 503. It is to outlast a restart of all ranks; see
    docs/vllm-router.md for what was measured."""
    silence_s: Seconds = 300.0
    """How long a rank may say nothing to a request, which is then tried elsewhere."""
    request_s: Seconds = 3600.0
    """A request's whole time; a client may ask for less with the header x-request-timeout-s."""
    grace_s: Annotated[float, msgspec.Meta(ge=0)] = 30.0
    """After SIGTERM: how long requests in flight may take to end."""
    max_answer_bytes: Positive = 64 << 20
    """Of an answer that is not streamed."""


class Files(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Lists of the ranks that take requests, for proxies that are to reach them directly; empty: not written."""

    envoy: str = ""
    """An endpoint discovery file (EDS)."""
    envoy_cluster: str = "vllm"
    nginx: str = ""
    """The `server` lines of an `upstream` block."""


class RouterConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    epoch: Natural
    ranks: tuple[RankSpec, ...]
    host: str = "127.0.0.1"
    port: Annotated[int, msgspec.Meta(ge=0, le=65535)] = 0
    """0 picks a free one; the announcement names it."""
    announce: str = ""
    """Where the router says who it is and which epoch is in force; empty: router.json beside the file."""
    poll_s: Annotated[float, msgspec.Meta(ge=0.05, le=60)] = 1.0
    """Between two looks at a rank's health and load."""
    limits: Limits = Limits()
    files: Files = Files()

    def __post_init__(self) -> None:
        slots = [rank.slot for rank in self.ranks]
        for index, rank in enumerate(self.ranks):
            if rank.slot in slots[:index]:
                raise ValueError(f"slot {rank.slot} is named twice")
            try:
                url = httpx.URL(rank.url)
            except httpx.InvalidURL as error:
                raise ValueError(f"url {rank.url!r} of slot {rank.slot}: {error}") from None
            if url.scheme not in ("http", "https") or not url.host or url.path != "/" or url.query or url.fragment:
                raise ValueError(
                    f"url {rank.url!r} of slot {rank.slot}: expected http://HOST:PORT and nothing behind it"
                )


def read_config(path: Path) -> RouterConfig:
    """Raises ElasticError naming the file, the place in it and what was expected."""
    try:
        text = path.read_bytes()
    except OSError as error:
        raise ElasticError(f"{path}: cannot be read: {error.strerror or error}") from None
    try:
        return msgspec.json.decode(text, type=RouterConfig)
    except msgspec.ValidationError as error:
        raise ElasticError(f"{path}: {error}") from None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ElasticError(f"{path}: {_place(text, error)}") from None


def _place(text: bytes, error: Exception) -> str:
    try:
        json.loads(text)
    except json.JSONDecodeError as found:
        return f"line {found.lineno}, column {found.colno}: not JSON: {found.msg}"
    except UnicodeDecodeError as found:
        line = text.count(b"\n", 0, found.start) + 1
        return f"line {line}: not UTF-8"
    return f"not JSON: {error}"


def check_update(old: RouterConfig, new: RouterConfig) -> None:
    """Whether the file may follow the one in force. Raises NeedsReplan for an older epoch, ElasticError for another
    address."""
    if new.epoch < old.epoch:
        raise NeedsReplan(f"epoch {new.epoch} is older than epoch {old.epoch} in force")
    if (new.host, new.port, new.announce) != (old.host, old.port, old.announce):
        raise ElasticError("host, port and announce cannot change while the router runs: restart it")
