"""Engines, API servers and the coordination process as the daemon sees them, kept at the HTTP layer and the socket."""

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Callable, Collection, Coroutine
from pathlib import Path

import httpx
import msgspec

from elastic.vllm.client import Coordination, RankClient
from elastic.vllm.records import (
    Bootstrap,
    CoordinationInfo,
    EngineInfo,
    GuardState,
    Info,
    Phase,
    RefillAnswer,
    RefillPrepare,
    Refusal,
    ShrinkOrder,
    ShrinkResult,
)

Answer = Callable[[httpx.Request], Coroutine[None, None, httpx.Response]]


def client(answer: Answer, slot: int = 0) -> RankClient:
    return RankClient(f"http://rank-{slot}", transport=httpx.MockTransport(answer))


def fixed(status: int, body: bytes | str) -> Answer:
    async def answer(request: httpx.Request) -> httpx.Response:
        return httpx.Response(status, content=body)

    return answer


class FakeRanks:
    """Engines that keep vLLM's side of the bargain, at the HTTP layer, and the processes behind them."""

    def __init__(self, slots: Collection[int]) -> None:
        self.clients = {slot: client(self._answer(slot), slot) for slot in slots}
        self.live = tuple(slots)
        self.epoch = dict.fromkeys(slots, 0)
        self.dead: set[int] = set()
        self.fenced: list[int] = []
        self.mute: set[int] = set()
        self.mute_once_prepared: set[int] = set()
        self.no: set[int] = set()
        self.told: list[tuple[str, int]] = []
        self.refill_error = ""
        self.commit_fails = False
        self.prepares = asyncio.Event()
        self.stands_in_a_step = asyncio.Event()
        """Set: whoever lives answers no abort, since its engine waits for a dead one."""

    def alive(self, slot: int) -> bool:
        return slot not in self.dead

    async def fence(self, slots: Collection[int]) -> None:
        self.fenced += sorted(slots)
        self.dead |= set(slots)

    def _answer(self, slot: int) -> Answer:
        async def answer(request: httpx.Request) -> httpx.Response:
            if slot in self.dead or slot in self.mute:
                raise httpx.ConnectError("refused", request=request)
            what = request.url.path.removeprefix("/v1/healer/in-place").strip("/")
            self.told.append((what, slot))
            if what == "refill/abort" and self.stands_in_a_step.is_set():
                await asyncio.sleep(3600)
            return self._serve(slot, what, request.content)

        return answer

    def _serve(self, slot: int, what: str, body: bytes) -> httpx.Response:
        if what == "health":
            return httpx.Response(200)
        if what == "":
            engine = EngineInfo(
                slot, 3, self.live, self.epoch[slot], "healthy", "", None, "", self.refill_error, 1, 0, 0, 8, 4
            )
            return httpx.Response(200, content=msgspec.json.encode(Info(1, GuardState.READY, "", "0.33.0", engine)))
        if what == "shrink":
            return self._shrink(slot, msgspec.json.decode(body, type=ShrinkOrder))
        if what == "refill/prepare":
            prepare = msgspec.json.decode(body, type=RefillPrepare)
            self.epoch[slot] = prepare.epoch
            self.prepares.set()
            self.mute |= self.mute_once_prepared & {slot}
            return httpx.Response(200, content=msgspec.json.encode(RefillAnswer(prepare.epoch, slot, True, "key")))
        epoch = json.loads(body)["epoch"]
        ok = not (what == "refill/commit" and self.commit_fails)
        return httpx.Response(200 if ok else 409, content=msgspec.json.encode(RefillAnswer(epoch, slot, ok, "paused")))

    def _shrink(self, slot: int, order: ShrinkOrder) -> httpx.Response:
        if order.epoch <= self.epoch[slot]:
            refused = ShrinkResult(order.epoch, slot, False, Phase.PARK, "over", Refusal.STALE)
            return httpx.Response(409, content=msgspec.json.encode(refused))
        self.epoch[slot] = order.epoch
        missing = [s for s in order.survivors if s in self.dead | self.mute]
        if missing:
            result = ShrinkResult(order.epoch, slot, False, Phase.MEET, f"slots {missing} did not come")
        elif slot in self.no:
            result = ShrinkResult(order.epoch, slot, False, Phase.WORKERS, "worker 0: sticky error")
        elif self.no & set(order.survivors):
            result = ShrinkResult(order.epoch, slot, False, Phase.VOTE, "another survivor voted no")
        else:
            self.live = order.survivors
            result = ShrinkResult(order.epoch, slot, True, Phase.SERVE)
        return httpx.Response(200, content=msgspec.json.encode(result))


class FakeCoordination(Coordination):
    """The far end of the socket, and a joiner behind it that comes as far as `reaches`."""

    def __init__(self, folder: Path, reaches: str) -> None:
        super().__init__(folder)
        self._path, self._reaches = folder / "coordination.sock", reaches
        self.did: list[str] = []
        self._kept: list[bool] = []

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while line := await reader.readline():
            order = json.loads(line)
            if order["do"] != "info":
                self.did.append(order["do"] + (f" {order['keep']}" if "keep" in order else ""))
            hello = (1,) if self._reaches != "nothing" else ()
            keys = ["eep_ready/0", "eep_ready/2"] + (["eep_ready/1"] if self._reaches == "ready" else [])
            info = CoordinationInfo(
                pid=1,
                host="127.0.0.1",
                rpc_port=9,
                store_port=5,
                coordinator_addresses=("", "", ""),
                coordinator_pid=2,
                coordinator_starts=1,
                expected=(1,),
                hello=hello,
                answered=(),
                ready=(),
                trouble="slot 1 was started with another configuration" if self._reaches == "trouble" else "",
                refill=Bootstrap(3, "127.0.0.1", 1, (2, 3), 6),
                refill_epoch=1,
                refill_keys=tuple(keys) if "answer" in self.did else (),
            )
            writer.write(msgspec.json.encode(info) + b"\n")
            await writer.drain()
        writer.close()

    @contextlib.asynccontextmanager
    async def listening(self) -> AsyncIterator["FakeCoordination"]:
        async with await asyncio.start_unix_server(self.serve, self._path):
            yield self
