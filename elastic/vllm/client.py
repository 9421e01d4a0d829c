"""For the daemon: orders to the ranks' API servers and to the coordination process. Without torch and without vLLM.

Every call has a deadline of the caller's: the API server of a rank that dies accepts a POST and never answers it.
"""

import asyncio
import contextlib
import json
from pathlib import Path
from types import TracebackType
from typing import TypeVar

import httpx
import msgspec

from elastic.errors import ElasticError
from elastic.vllm.records import (
    NOT_IN_FORCE,
    PREFIX,
    CoordinationInfo,
    Info,
    RefillAbort,
    RefillAnswer,
    RefillCommit,
    RefillPrepare,
    ShrinkOrder,
    ShrinkResult,
)
from elastic.vllm.worker.interface import RefillOrder

SOCKET_NAME = "coordination.sock"
LONGEST_ANSWER = 1 << 20

_Record = TypeVar("_Record", bound=msgspec.Struct)


class NoAnswer(ElasticError):
    """Nothing that can be relied on came back: not in time, no connection, or not what this plugin answers. What was ordered may
    have happened all the same."""


class NotInForce(ElasticError):
    """This rank runs stock vLLM; the message says why."""


class RankClient:
    def __init__(self, url: str, *, api_key: str = "", transport: httpx.AsyncBaseTransport | None = None) -> None:
        headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        # no connection is kept: one to a process that is gone is found out only by using it
        limits = httpx.Limits(max_keepalive_connections=0)
        self.url = url
        self._http = httpx.AsyncClient(
            base_url=url, headers=headers, limits=limits, transport=transport, trust_env=False, timeout=None
        )

    async def __aenter__(self) -> "RankClient":
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.aclose()

    async def aclose(self) -> None:
        await self._http.aclose()

    async def info(self, *, deadline_s: float) -> Info:
        """Raises NoAnswer; a stock vLLM without the plugin's routes is NotInForce."""
        return await self._ask("GET", "", None, Info, deadline_s)

    async def shrink(self, order: ShrinkOrder, *, deadline_s: float) -> ShrinkResult:
        """Also a refused order is a result. Raises NoAnswer, NotInForce."""
        return await self._ask("POST", "/shrink", order, ShrinkResult, deadline_s)

    async def refill_prepare(self, order: RefillPrepare, *, deadline_s: float) -> RefillAnswer:
        return await self._ask("POST", "/refill/prepare", order, RefillAnswer, deadline_s)

    async def refill_commit(self, order: RefillCommit, *, deadline_s: float) -> RefillAnswer:
        return await self._ask("POST", "/refill/commit", order, RefillAnswer, deadline_s)

    async def refill_abort(self, order: RefillAbort, *, deadline_s: float) -> RefillAnswer:
        return await self._ask("POST", "/refill/abort", order, RefillAnswer, deadline_s)

    async def healthy(self, *, deadline_s: float) -> bool:
        """/health says 200."""
        with contextlib.suppress(httpx.HTTPError, TimeoutError):
            async with asyncio.timeout(deadline_s):
                return (await self._http.get("/health")).status_code == 200
        return False

    async def _ask(
        self, method: str, path: str, order: msgspec.Struct | None, kind: type[_Record], deadline_s: float
    ) -> _Record:
        content = msgspec.json.encode(order) if order is not None else None
        headers = {"Content-Type": "application/json"} if content is not None else {}
        where = f"{method} {self.url}{PREFIX}{path}"
        try:
            async with asyncio.timeout(deadline_s):
                status, body = await self._read(method, PREFIX + path, content, headers)
        except TimeoutError as error:
            raise NoAnswer(f"{where}: no answer within {deadline_s:g} s") from error
        except httpx.HTTPError as error:
            raise NoAnswer(f"{where}: {type(error).__name__}: {error}") from error
        if status in (404, 405):
            raise NotInForce(f"{where}: no such route: the plugin is not loaded")
        if status == 503 and NOT_IN_FORCE.encode() in body:
            raise NotInForce(f"{where}: {_message(body)}")
        if status in (200, 409):
            with contextlib.suppress(msgspec.MsgspecError):
                return msgspec.json.decode(body, type=kind)
        raise NoAnswer(f"{where}: {status}: {_message(body)}")

    async def _read(self, method: str, path: str, content: bytes | None, headers: dict[str, str]) -> tuple[int, bytes]:
        async with self._http.stream(method, path, content=content, headers=headers) as answer:
            body = b""
            async for part in answer.aiter_bytes():
                body += part
                if len(body) > LONGEST_ANSWER:
                    raise httpx.DecodingError(f"an answer of more than {LONGEST_ANSWER} bytes")
            return answer.status_code, body


def _message(body: bytes) -> str:
    with contextlib.suppress(ValueError, KeyError, TypeError):
        return str(json.loads(body)["error"]["message"])
    return body[:200].decode(errors="replace")


class Coordination:
    """The process that `python -m elastic.vllm.coordination RUN_DIR` is. One connection for each order."""

    def __init__(self, run_dir: Path) -> None:
        self._path = run_dir / SOCKET_NAME

    async def info(self, *, deadline_s: float) -> CoordinationInfo:
        """Raises NoAnswer, as all of these do."""
        return await self._tell({"do": "info"}, deadline_s)

    async def start(self, slots: list[int], *, deadline_s: float) -> CoordinationInfo:
        """A whole group is about to be launched."""
        return await self._tell({"do": "start", "slots": slots}, deadline_s)

    async def live(self, count: int, *, deadline_s: float) -> CoordinationInfo:
        """So many engines are there: what a coordinator that starts anew waits for."""
        return await self._tell({"do": "live", "count": count}, deadline_s)

    async def stand_by(self, *, deadline_s: float) -> CoordinationInfo:
        """Have a process that can become the next coordinator at once."""
        return await self._tell({"do": "stand-by"}, deadline_s)

    async def refill(
        self, order: RefillOrder, *, size: int, redundant_experts: int, max_size: int, deadline_s: float
    ) -> CoordinationInfo:
        """Open the handshake for joiners; the store in `order` is filled in there."""
        told = {"do": "refill", "order": order._asdict(), "size": size}
        return await self._tell(told | {"redundant_experts": redundant_experts, "max_size": max_size}, deadline_s)

    async def answer(self, *, deadline_s: float) -> CoordinationInfo:
        return await self._tell({"do": "answer"}, deadline_s)

    async def end(self, *, keep: bool, deadline_s: float) -> CoordinationInfo:
        """Of a refill. keep: it was committed, its store is the group's from now on."""
        return await self._tell({"do": "end", "keep": keep}, deadline_s)

    async def quit(self, *, deadline_s: float) -> None:
        await self._tell({"do": "quit"}, deadline_s)

    async def _tell(self, order: dict[str, object], deadline_s: float) -> CoordinationInfo:
        line = b""
        try:
            async with asyncio.timeout(deadline_s):
                reader, writer = await asyncio.open_unix_connection(self._path, limit=LONGEST_ANSWER)
                try:
                    writer.write(json.dumps(order).encode() + b"\n")
                    await writer.drain()
                    line = await reader.readline()
                finally:
                    writer.close()
            return msgspec.json.decode(line, type=CoordinationInfo)
        except TimeoutError as error:
            raise NoAnswer(f"coordination: no answer to {order['do']} within {deadline_s:g} s") from error
        except (OSError, ValueError) as error:
            raise NoAnswer(f"coordination, {order['do']}: {_refusal(error, line)}") from error


def _refusal(error: Exception, line: bytes) -> str:
    with contextlib.suppress(ValueError, KeyError, TypeError):
        return str(json.loads(line)["error"])
    return f"{type(error).__name__}: {error}"
