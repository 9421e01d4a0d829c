"""One rank's API server, asked over HTTP: every call has a deadline and a bound on what it reads, and ends in a record or in
one of two errors. An answer is never taken for more than it proves: 200 with another shape than the contract's is no answer.
"""

import asyncio
import logging
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any, TypeVar

import httpx
import msgspec

from elastic.errors import ElasticError, Retryable
from healer.router.foreign import UNREADABLE, TooLong, read_answer

logging.getLogger("httpx").setLevel(logging.WARNING)  # a line for every question, several a second

FAULT_PATHS = ("/fault_tolerance", "/v1/fault_tolerance")
"""Of vLLM 0.33, and of pull request 46370."""
MAX_ANSWER_BYTES = 8 << 20
"""The metrics of a large deployment take some hundred kB."""
SHOWN_CHARS = 200

T = TypeVar("T")


class BadAnswer(ElasticError):
    """The server answered, and not as vLLM 0.33 does."""


class Closed(Retryable):
    """Nobody takes connections there."""


class Refused(ElasticError):
    """The server answered a request to scale with another status than 200. 400: it did nothing."""

    def __init__(self, message: str, status: int) -> None:
        super().__init__(message)
        self.status = status


class Phase(StrEnum):
    IDLE = "idle"
    PREPARING = "preparing"
    COMMITTING = "committing"
    FAILED = "failed"
    COMPLETED = "completed"


class Scaling(msgspec.Struct, frozen=True):
    """Of POST /is_scaling_elastic_ep. With internal load balancing the prepare phase reads as idle."""

    is_scaling_elastic_ep: bool
    phase: Phase = Phase.IDLE
    epoch: Annotated[str, msgspec.Meta(pattern="^[0-9a-f]+$")] | None = None
    """The number of the last scaling that was asked for, in hexadecimal digits."""
    error: str | None = None
    requested_data_parallel_size: int | None = None


class EngineStatus(StrEnum):
    HEALTHY = "healthy"
    UNHEALTHY = "unhealthy"
    DEAD = "dead"


class Engine(msgspec.Struct, frozen=True):
    id: int
    status: EngineStatus
    fault_info: str = ""
    last_ft_request_id: str | None = None
    ft_error: str | None = None
    """Of the last instruction; stays when the engine is healthy again."""


class FaultStatus(msgspec.Struct, frozen=True):
    """Of GET /fault_tolerance/status: the client's memory, no proof of life."""

    schema_version: int
    total_engines: int
    engines: tuple[Engine, ...]


class Removal(msgspec.Struct, frozen=True):
    """Dead DP ranks to go on without, as vLLM pull request 46370 has it. The same object goes to every survivor."""

    request_id: str
    """Of the round: it namespaces the keys that the survivors meet by."""
    dp_ranks: tuple[int, ...]
    """As they were numbered at the launch."""
    master: tuple[str, int] | None = None
    """Address and port for the store that ranks meet at; needed where rank 0, which has it, is among the dead."""


class Gate(StrEnum):
    """Whether the server lets requests in, from the status of GET /v1/models and the words of a 503."""

    OPEN = "open"
    SCALING = "scaling"
    RETIRED = "retired"
    SHUT = "shut"
    """503 for another reason."""


class Completion(msgspec.Struct, frozen=True):
    text: str
    tokens: tuple[int, ...]
    finish_reason: str | None


class _Choice(msgspec.Struct):
    text: str
    finish_reason: str | None = None
    token_ids: list[int] | None = None


class _Choices(msgspec.Struct):
    choices: list[_Choice]


class _Success(msgspec.Struct):
    success: bool


class _Message(msgspec.Struct):
    message: str


class Endpoints:
    """Of one API server. Made in the event loop; `aclose` it."""

    def __init__(self, base: str, *, api_key: str = "", transport: httpx.AsyncBaseTransport | None = None) -> None:
        self.base = base
        headers = {"Accept-Encoding": "identity"} | ({"Authorization": f"Bearer {api_key}"} if api_key else {})
        # no proxy from the environment, and no CA bundle, which takes 15 ms to load: these are our own servers
        self._client = httpx.AsyncClient(
            base_url=base, headers=headers, trust_env=False, verify=base.startswith("https"), transport=transport
        )
        self._faults: str | None = None
        """Where fault tolerance is found: one of FAULT_PATHS, once a server has answered there."""

    async def aclose(self) -> None:
        await self._client.aclose()

    async def health(self, *, deadline_s: float) -> bool:
        """The server's own opinion: false for a dead engine. True through hangs and faults, and after retirement.

        Raises Retryable where nothing answers in time."""
        status, _ = await self._call("GET", "/health", None, deadline_s)
        return status == 200

    async def gate(self, *, deadline_s: float) -> Gate:
        """Raises as `health`."""
        status, body = await self._call("GET", "/v1/models", None, deadline_s)
        if status != 503:
            # 401 too: the gate is asked before the key
            return Gate.OPEN
        if b"retired" in body:
            return Gate.RETIRED
        return Gate.SCALING if b"scaling" in body else Gate.SHUT

    async def scaling(self, *, deadline_s: float) -> Scaling:
        """Raises Retryable, BadAnswer."""
        return await self._read("POST", "/is_scaling_elastic_ep", None, Scaling, deadline_s)

    async def scale(self, size: int, *, deadline_s: float) -> str:
        """Ask for a size and wait to the end of its commit, which may take minutes. Returns the server's sentence.

        Raises Refused with its words when it refused or failed, BadAnswer for 200 with other words than vLLM's, Retryable when
        it gave no answer in time: then nobody knows, and `scaling` must be asked. Never to be sent while a rank is not known to
        be alive: it would wait for that rank with its gate shut, and never open it again."""
        if isinstance(size, bool) or size < 1:
            raise ValueError(f"size {size!r}")  # vLLM takes true for 1
        status, body = await self._call("POST", "/scale_elastic_ep", {"new_data_parallel_size": size}, deadline_s)
        if status == 200:
            return self._decode("/scale_elastic_ep", status, body, _Message).message
        raise Refused(f"{self.base}: scale to {size} was refused with status {status}: {_message(body)}", status)

    async def fault_status(self, *, deadline_s: float) -> FaultStatus | None:
        """None: fault tolerance is off. Raises Retryable, BadAnswer."""
        for prefix in FAULT_PATHS if self._faults is None else (self._faults,):
            status, body = await self._call("GET", f"{prefix}/status", None, deadline_s)
            if status != 404:
                found = self._decode(f"{prefix}/status", status, body, FaultStatus)
                self._faults = prefix
                return found
        if self._faults is not None:
            raise BadAnswer(f"{self.base}{self._faults}/status: status 404, and it was there before")
        return None

    async def retry(self, request_id: str, *, deadline_s: float) -> None:
        """Queue the instruction `retry`; whether it worked, only a served request shows. `request_id`: the same for all ranks of
        the round; stock 0.33 makes its own. Raises ElasticError, Retryable."""
        await self._apply({"instruction": "retry", "params": {}, "request_id": request_id}, deadline_s)

    async def can_remove(self, *, deadline_s: float) -> bool:
        """Whether this server knows `scale_down`, asked with a request that every version refuses before it does anything: stock
        0.33 for the instruction, pull request 46370 for the empty request id. Whatever else it answers counts as no.

        To be sent while the engine is healthy: it then refuses a second time. Raises Retryable, BadAnswer."""
        if self._faults is None and await self.fault_status(deadline_s=deadline_s) is None:
            return False
        content = {"instruction": "scale_down", "params": {"removed_dp_ranks": []}, "request_id": ""}
        status, body = await self._call("POST", f"{self._faults}/apply", content, deadline_s)
        return status == 400 and "request_id" in _message(body)

    async def remove(self, removal: Removal, *, deadline_s: float) -> None:
        """Queue the instruction `scale_down`. Only for a server that `can_remove`, whose engine says `unhealthy`, when the ranks
        named are known to be dead. Raises ElasticError, Retryable: then this rank may wait for the others without end."""
        params: dict[str, Any] = {"removed_dp_ranks": list(removal.dp_ranks)}
        if removal.master is not None:
            params |= {"dp_master_ip": removal.master[0], "dp_store_port": removal.master[1]}
        content = {"instruction": "scale_down", "params": params, "request_id": removal.request_id}
        await self._apply(content, deadline_s)

    async def _apply(self, content: dict[str, Any], deadline_s: float) -> None:
        status, body = await self._call("POST", f"{self._faults or FAULT_PATHS[0]}/apply", content, deadline_s)
        if status != 202:
            instruction = content["instruction"]
            raise ElasticError(f"{self.base}: {instruction} was refused with status {status}: {_message(body)}")

    async def reset_prefix_cache(self, *, deadline_s: float) -> bool:
        """False: blocks are still held, or the developer mode is off. Raises Retryable."""
        status, body = await self._call("POST", "/reset_prefix_cache", None, deadline_s)
        if status != 200:
            return False
        try:
            return msgspec.json.decode(body, type=_Success).success
        except UNREADABLE:
            return False

    async def metrics(self, *, deadline_s: float) -> str:
        """Prometheus text. Raises Retryable, BadAnswer (503 during a commit)."""
        status, body = await self._call("GET", "/metrics", None, deadline_s)
        if status != 200:
            raise BadAnswer(f"{self.base}/metrics: status {status}")
        return body.decode(errors="replace")

    async def version(self, *, deadline_s: float) -> str:
        """Raises Retryable, BadAnswer."""
        found = await self._read("GET", "/version", None, dict[str, str], deadline_s)
        return found.get("version", "")

    async def canary(self, model: str, prompt: tuple[int, ...], tokens: int, *, deadline_s: float) -> Completion:
        """Generate greedily from token ids. Proves that the engine computes; compare with what it gave when it was sound.

        Raises Retryable where nothing came in time, BadAnswer for an error, an abort, or fewer tokens than asked for."""
        content = {
            "model": model,
            "prompt": list(prompt),
            "max_tokens": tokens,
            "min_tokens": tokens,
            "temperature": 0,
            "ignore_eos": True,
            "return_token_ids": True,
        }
        found = await self._read("POST", "/v1/completions", content, _Choices, deadline_s)
        if not found.choices:
            raise BadAnswer(f"{self.base}/v1/completions: no choice in the answer")
        choice = found.choices[0]
        got = tuple(choice.token_ids or ())
        if choice.finish_reason != "length" or (choice.token_ids is not None and len(got) != tokens):
            raise BadAnswer(
                f"{self.base}/v1/completions: {len(got)} of {tokens} tokens, finish_reason {choice.finish_reason!r}"
            )
        return Completion(choice.text, got, choice.finish_reason)

    async def _read(self, method: str, path: str, content: Any, kind: type[T], deadline_s: float) -> T:
        status, body = await self._call(method, path, content, deadline_s)
        return self._decode(path, status, body, kind)

    def _decode(self, path: str, status: int, body: bytes, kind: type[T]) -> T:
        if status != 200:
            raise BadAnswer(f"{self.base}{path}: status {status}: {_message(body)}")
        try:
            return msgspec.json.decode(body, type=kind)
        except UNREADABLE as error:
            raise BadAnswer(f"{self.base}{path}: not what vLLM 0.33 answers: {error}") from None

    async def _call(self, method: str, path: str, content: Any, deadline_s: float) -> tuple[int, bytes]:
        """The whole call within the deadline, however slowly the bytes come."""
        try:
            async with (
                asyncio.timeout(deadline_s),
                self._client.stream(method, path, json=content, timeout=deadline_s) as answer,
            ):
                return answer.status_code, await read_answer(answer, MAX_ANSWER_BYTES)
        except TooLong as error:
            raise BadAnswer(f"{self.base}{path}: {error}") from None
        except httpx.ConnectError as error:
            raise Closed(f"{self.base}{path}: takes no connection: {str(error)[:SHOWN_CHARS]}") from None
        except (httpx.HTTPError, httpx.InvalidURL, OSError, TimeoutError, RuntimeError) as error:
            if isinstance(error, RuntimeError) and not self._client.is_closed:
                raise
            what = str(error) or type(error).__name__
            raise Retryable(f"{self.base}{path}: no answer within {deadline_s:g} s: {what[:SHOWN_CHARS]}") from None


def read_key(path: str | None) -> str:
    """The API key in a file; empty where there is none. Raises ElasticError naming the file."""
    if path is None:
        return ""
    try:
        return Path(path).read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise ElasticError(f"spec.target.apiKeyFile {path}: cannot be read: {error}") from None


def _message(body: bytes) -> str:
    """The words in vLLM's envelopes, `{"error": {"message": …}}`, `{"error": …}` and `{"message": …}`; else the text."""
    try:
        found = msgspec.json.decode(body)
    except UNREADABLE:
        return body[:SHOWN_CHARS].decode(errors="replace")
    if isinstance(found, dict):
        error = found.get("error", found.get("message", found))
        found = error.get("message", error) if isinstance(error, dict) else error
    return str(found)[:SHOWN_CHARS]
