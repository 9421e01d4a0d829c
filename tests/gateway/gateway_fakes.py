"""A rank agent that speaks the gateway's side of the protocol over a real Unix socket, with tokens that are a function of
prompt and position: whoever answers, and whenever, the right answer is the same. Also runs as a process of its own:
`python gateway_fakes.py SOCKET GROUP STEP_S`.
"""

import asyncio
import contextlib
import json
import os
import sys
import time
from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path

import httpx
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from elastic.channel import Channel, read_frame
from elastic.gateway.server import Options, serve
from elastic.protocol import (
    AnyMessage,
    Cancel,
    Emitted,
    GatewayQuery,
    GatewayStatus,
    Hello,
    Load,
    Rejected,
    Route,
    Routes,
    Submit,
    encode,
)

GROUP = "test"
MODEL = "tiny"
EOS = 256
VOCAB = 300
"""256 bytes, one end token, and ids without text as real checkpoints pad them."""
MAX_POSITION = 512
ENVIRONMENT = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
"""For child processes: they import what the tests import."""
ALPHABET = sorted(pre_tokenizers.ByteLevel.alphabet())


def make_checkpoint(folder: Path) -> Path:
    tokenizer = Tokenizer(models.BPE(vocab={char: i for i, char in enumerate(ALPHABET)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<end>"])
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {
        "model_type": "qwen3_moe",
        "num_hidden_layers": 2,
        "num_experts": 8,
        "hidden_size": 16,
        "vocab_size": VOCAB,
        "max_position_embeddings": MAX_POSITION,
        "eos_token_id": EOS,
    }
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def right_token(prompt: Sequence[int], position: int) -> int:
    """Printable ASCII, so that text and tokens can both be compared."""
    return ALPHABET.index(chr(97 + (sum(prompt) * 7 + position * position + 3 * position) % 26))


def right_answer(prompt: Sequence[int], count: int) -> list[int]:
    return [right_token(prompt, position) for position in range(count)]


class FakeRank:
    """What a test may turn: `token` (the function), `step_s`, `gate` (cleared: no step), `mangle` (what is sent in place
    of an emission), `refuse` (a reason: every request is rejected)."""

    def __init__(self, address: str, group: str = GROUP) -> None:
        self.address, self.group = address, group
        self.token: Callable[[Sequence[int], int], int] = right_token
        self.step_s = 0.0
        self.gate = asyncio.Event()
        self.gate.set()
        self.mangle: Callable[[Emitted], list[AnyMessage]] = lambda emitted: [emitted]
        self.refuse = ""
        self.deaf = False
        """Accepts connections and never reads or answers."""
        self.submits: list[Submit] = []
        self.cancels: list[Cancel] = []
        self.emitted = 0
        self._server: asyncio.Server | None = None
        self._writers: set[asyncio.StreamWriter] = set()
        self._steps: dict[str, asyncio.Task[None]] = {}

    async def start(self) -> "FakeRank":
        self._server = await asyncio.start_unix_server(self._serve, self.address)
        return self

    async def die(self) -> None:
        """As the kernel does it for a killed process: everything is closed at once, nothing is said."""
        if self._server is not None:
            self._server.close()
            self._server = None
        for task in self._steps.values():
            task.cancel()
        self._steps.clear()
        self.hang_up()
        Path(self.address).unlink(missing_ok=True)
        await asyncio.sleep(0)

    def hang_up(self) -> None:
        """Close the connections, live on."""
        for writer in list(self._writers):
            writer.transport.abort()

    def tell(self, message: AnyMessage) -> None:
        for writer in self._writers:
            writer.write(encode(message))

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._writers.add(writer)
        try:
            hello = await read_frame(reader)
            assert isinstance(hello, Hello)
            assert (hello.role, hello.group) == ("gateway", self.group)
            writer.write(encode(Load(waiting=0, running=0, max_seqs=16)))
            while True:
                message = await read_frame(reader)
                if isinstance(message, Submit):
                    self.submits.append(message)
                    if self.refuse:
                        rejected = Rejected(request=message.request, attempt=message.attempt, why=self.refuse)
                        writer.write(encode(rejected))
                        continue
                    start = len(message.tokens) - message.prompt_len
                    taken = Emitted(request=message.request, attempt=message.attempt, start=start, tokens=())
                    writer.write(encode(taken))
                    task = asyncio.create_task(self._answer(message, writer))
                    self._steps[message.request] = task
                elif isinstance(message, Cancel):
                    self.cancels.append(message)
                    if task := self._steps.pop(message.request, None):
                        task.cancel()
        except (asyncio.IncompleteReadError, OSError):
            pass
        finally:
            self._writers.discard(writer)
            writer.close()

    async def _answer(self, submit: Submit, writer: asyncio.StreamWriter) -> None:
        prompt = submit.tokens[: submit.prompt_len]
        for position in range(len(submit.tokens) - submit.prompt_len, submit.max_tokens):
            await asyncio.sleep(self.step_s)
            await self.gate.wait()
            token = self.token(prompt, position)
            finish = "stop" if token in submit.stop_ids else None
            if finish is None and position + 1 == submit.max_tokens:
                finish = "length"
            emitted = Emitted(
                request=submit.request, attempt=submit.attempt, start=position, tokens=(token,), finish=finish
            )
            for message in self.mangle(emitted):
                writer.write(encode(message))
            self.emitted += 1
            if finish:
                return


async def until(condition: Callable[[], object], what: str, deadline_s: float = 10.0) -> None:
    end = time.monotonic() + deadline_s
    while not condition():
        assert time.monotonic() < end, f"not within {deadline_s:g} s: {what}"
        await asyncio.sleep(0.002)


class Harness:
    """A gateway in this process, its controller, its ranks, its clients: all over real sockets."""

    def __init__(self, root: Path, checkpoint: Path) -> None:
        self.root, self.checkpoint = root, checkpoint
        self.ranks: dict[int, FakeRank] = {}
        self.incarnations: dict[int, int] = {}
        self.epoch = 0
        self.client = httpx.AsyncClient(verify=False)
        self.controller: Channel | None = None
        self._stop = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    async def start(self, *, max_queued: int = 64, request_timeout_s: float = 20.0, grace_s: float = 5.0) -> "Harness":
        options = Options(
            group=GROUP,
            run_dir=str(self.root),
            checkpoint=str(self.checkpoint),
            model=MODEL,
            max_queued=max_queued,
            request_timeout_s=request_timeout_s,
            grace_s=grace_s,
        )
        ready = asyncio.Event()
        self._task = asyncio.create_task(serve(options, stop=self._stop, ready=ready))
        waiting = asyncio.create_task(ready.wait())
        await asyncio.wait({waiting, self._task}, return_when=asyncio.FIRST_COMPLETED, timeout=10)
        waiting.cancel()
        if self._task.done():
            await self._task
        address = json.loads((self.root / "gateway.json").read_text())["http"]
        self.client = httpx.AsyncClient(base_url=address, timeout=20, verify=False)
        await self.connect()
        return self

    async def connect(self) -> None:
        hello = Hello(role="controller", group=GROUP)
        self.controller = await Channel.open(str(self.root / "gateway.sock"), hello, "gateway", deadline_s=5)
        self.controller.start()

    async def rank(self, slot: int) -> FakeRank:
        """A new incarnation for a slot; in the routes only after `route`."""
        incarnation = self.incarnations[slot] = self.incarnations.get(slot, 0) + 1
        rank = FakeRank(str(self.root / f"r{slot}.{incarnation}"))
        self.ranks[slot] = await rank.start()
        return rank

    async def route(self, *slots: int, draining: Sequence[int] = ()) -> GatewayStatus:
        """Name the ranks; returns when those are connected that can be."""
        self.epoch += 1
        routes = tuple(
            Route(
                slot=slot,
                incarnation=self.incarnations[slot],
                address=self.ranks[slot].address,
                admit=slot not in draining,
            )
            for slot in slots
        )
        assert self.controller is not None
        message = Routes(id=self.controller.next_id(), epoch=self.epoch, routes=routes)
        answer = await self.controller.call(message, GatewayStatus, deadline_s=5)
        wanted = len(slots) - len(draining)
        if wanted:
            await self.until_admitting(wanted)
        return answer

    async def until_admitting(self, count: int) -> None:
        end = time.monotonic() + 10
        while (await self.client.get("/health")).json()["ranks"] != count:
            assert time.monotonic() < end, f"not {count} admitting ranks within 10 s"
            await asyncio.sleep(0.005)

    async def until_queued(self, count: int) -> None:
        async with asyncio.timeout(10):
            while (await self.status()).queued != count:
                pass

    async def status(self) -> GatewayStatus:
        assert self.controller is not None
        query = GatewayQuery(id=self.controller.next_id())
        return await self.controller.call(query, GatewayStatus, deadline_s=5)

    async def complete(self, **body: object) -> httpx.Response:
        return await self.client.post("/v1/completions", json=asked(**body))

    @contextlib.asynccontextmanager
    async def stream(self, **body: object) -> AsyncIterator["Stream"]:
        async with self.client.stream("POST", "/v1/completions", json=asked(stream=True, **body)) as response:
            yield Stream(response)

    def stop_gateway(self) -> "asyncio.Task[None]":
        self._stop.set()
        assert self._task is not None
        return self._task

    async def aclose(self) -> None:
        await self.client.aclose()
        for rank in self.ranks.values():
            await rank.die()
        if self.controller is not None:
            await self.controller.aclose()
        self._stop.set()
        if self._task is not None:
            await asyncio.wait_for(self._task, 15)


def asked(**body: object) -> dict[str, object]:
    return {"model": MODEL, "prompt": [1, 2, 3], "temperature": 0, "return_token_ids": True, **body}


class Stream:
    """An answer as an OpenAI client reads it."""

    def __init__(self, response: httpx.Response) -> None:
        self.response = response
        self.chunks: list[dict] = []
        self.done = False
        self.error: dict | None = None
        self._events = self._read()

    async def _read(self) -> AsyncIterator[dict]:
        async for line in self.response.aiter_lines():
            if not line:
                continue
            assert line.startswith("data: "), f"not an event: {line!r}"
            data = line.removeprefix("data: ")
            assert not self.done, f"after the end: {line!r}"
            if data == "[DONE]":
                self.done = True
                continue
            event = json.loads(data)
            if "error" in event:
                self.error = event["error"]
                continue
            self.chunks.append(event)
            yield event

    async def take(self, tokens: int) -> None:
        """Read until this many tokens have come in all."""
        while len(self.tokens) < tokens:
            await asyncio.wait_for(anext(self._events), 10)

    async def rest(self) -> "Stream":
        async with asyncio.timeout(20):
            async for _ in self._events:
                pass
        return self

    @property
    def choices(self) -> list[dict]:
        return [choice for chunk in self.chunks for choice in chunk["choices"]]

    @property
    def tokens(self) -> list[int]:
        return [token for choice in self.choices for token in choice["token_ids"]]

    @property
    def text(self) -> str:
        return "".join(choice["text"] for choice in self.choices)

    @property
    def finish(self) -> str | None:
        return self.choices[-1]["finish_reason"]


async def _main(address: str, group: str, step_s: float) -> None:
    rank = FakeRank(address, group)
    rank.step_s = step_s
    await rank.start()
    print("ready", flush=True)
    await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(_main(sys.argv[1], sys.argv[2], float(sys.argv[3])))
