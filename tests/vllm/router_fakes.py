"""An API server that speaks vLLM 0.33's wire format over a real socket, with tokens that are a function of the prompt and
the position: whoever answers, and whenever, the right answer is the same.

A token is one byte of text, so a character of several bytes spans several tokens, as in a byte-level tokenizer.
"""

import asyncio
import json
import zlib
from collections.abc import Sequence
from typing import Any

MODEL = "tiny"
MAX_MODEL_LEN = 2048
GONE = {"error": "The model is currently scaling. Please try again later."}
RETIRED = {"error": "This data-parallel rank has been retired and is awaiting shutdown."}
PAUSED = {"error": {"message": "paused", "type": "engine_paused", "param": None, "code": 503}}
ENGINE_DEAD = {
    "error": {
        "message": "EngineCore encountered an issue. See stack trace (above) for the root cause.",
        "type": "InternalServerError",
        "param": None,
        "code": 500,
    }
}
TEXT = "the quick brown fox Äpfel 你好 jumps — over the lazy dog 🙂 and again. "
BYTES = TEXT.encode()


def right_tokens(prompt: Sequence[int], count: int) -> list[int]:
    """The answer to a prompt: bytes of TEXT, from a place that the first 8 tokens of the prompt settle. A continuation's
    prompt has the same first tokens, and is longer."""
    start = zlib.crc32(bytes(str(list(prompt[:8])), "ascii"))
    return [BYTES[(start + len(prompt) + at) % len(BYTES)] for at in range(count)]


def right_text(prompt: Sequence[int], count: int) -> str:
    """Without a character at the end that is not whole: vLLM never shows it."""
    return decode(right_tokens(prompt, count)).rstrip("\ufffd")


def decode(tokens: Sequence[int]) -> str:
    return bytes(tokens).decode(errors="replace")


def chat_prompt(messages: list[dict[str, Any]]) -> list[int]:
    return list(("".join(f"<{m['role']}>{m['content']}" for m in messages) + "<a>").encode())


class Detokenizer:
    """As vLLM's: text of whole characters only, and behind as much as could begin a stop string."""

    def __init__(self, prompt: Sequence[int], stops: Sequence[str], shown_stop: bool) -> None:
        # a stream that is primed with a prompt that ends within a character gives the prompt out as text
        self._start = 0 if decode(prompt).endswith("\ufffd") else len(prompt)
        self._all = list(prompt)
        self._stops, self._shown_stop = stops, shown_stop
        self._lag = 0 if shown_stop or not stops else max(map(len, stops)) - 1
        self._text = ""
        self._sent = 0

    def add(self, token: int) -> tuple[str, str | None]:
        """The text to send, and the stop string that is now complete."""
        self._all.append(token)
        text = decode(self._all[self._start :])
        if not text.endswith("\ufffd"):
            self._text = text
        for stop in self._stops:
            if (at := self._text.find(stop)) >= 0:
                self._text = self._text[: at + (len(stop) if self._shown_stop else 0)]
                return self.rest(), stop
        size = len(self._text) - self._lag
        text, self._sent = self._text[self._sent : max(size, self._sent)], max(size, self._sent)
        return text, None

    def rest(self) -> str:
        text, self._sent = self._text[self._sent :], len(self._text)
        return text


class Fault:
    """What a rank does to a request, after so many of its tokens: a name of `FakeRank`'s methods."""

    def __init__(self, kind: str, after: int = 0, times: int = 1) -> None:
        self.kind, self.after, self.times = kind, after, times


class Hangup(Exception):
    """Close the connection, without the end of the answer."""


class FakeRank:
    """What a test may turn: `faults`, `step_s`, `gate` (a 503's content), `paused` (503 to
    requests only), `healthy`, `load`, `chunk` (tokens in one chunk),
    `bend` (added to every token: a rank that answers differently), `reasoning` (so many tokens come as reasoning)."""

    def __init__(self) -> None:
        self.faults: list[Fault] = []
        self.step_s = 0.001
        self.gate: dict[str, Any] | None = None
        self.paused = False
        self.healthy = True
        self.load = (0, 0)
        self.chunk = 1
        self.bend = 0
        self.reasoning = 0
        self.seen: list[tuple[str, str, dict[str, str], Any]] = []
        """Method, path, headers, body of every request but probes."""
        self.looks = 0
        self.active = 0
        self.cancelled = 0
        self.port = 0
        self.hold = asyncio.Event()
        self.hold.set()
        self._server: asyncio.Server | None = None
        self._writers: set[asyncio.StreamWriter] = set()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def asked(self, path: str) -> list[Any]:
        return [body for _, seen, _, body in self.seen if seen == path]

    async def start(self) -> None:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", self.port)
        self.port = self._server.sockets[0].getsockname()[1]

    async def kill(self) -> None:
        """As SIGKILL of the process: connections are reset, nobody listens."""
        if self._server is not None:
            self._server.close()
            for writer in list(self._writers):
                writer.transport.abort()
            await self._server.wait_closed()
            self._server = None

    # --- HTTP -------------------------------------------------------------------------------------------------------

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._writers.add(writer)
        try:
            while True:
                head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
                method, path, _ = head[0].split(" ")
                headers = {k.lower(): v for k, _, v in (line.partition(": ") for line in head[1:] if line)}
                raw = await reader.readexactly(int(headers.get("content-length", 0)))
                gone = asyncio.create_task(reader.read(1))
                try:
                    await self._answer(writer, method, path, headers, raw, gone)
                finally:
                    if not gone.done():
                        gone.cancel()
                        await asyncio.gather(gone, return_exceptions=True)
                if gone.done() and not gone.cancelled():
                    return
        except (asyncio.IncompleteReadError, ConnectionError, Hangup):
            pass
        finally:
            self._writers.discard(writer)
            writer.close()

    async def _answer(
        self,
        writer: asyncio.StreamWriter,
        method: str,
        path: str,
        headers: dict[str, str],
        raw: bytes,
        gone: asyncio.Task[bytes],
    ) -> None:
        if path == "/health":
            return _send(writer, 200 if self.healthy else 503, b"")
        if self.gate is not None:
            return _send(writer, 503, json.dumps(self.gate).encode())
        if path == "/metrics":
            self.looks += 1
            running, waiting = self.load
            text = (
                "# TYPE vllm:num_requests_running gauge\n"
                f'vllm:num_requests_running{{engine="0",model_name="tiny"}} {running}.0\n'
                f'vllm:num_requests_waiting{{engine="0",model_name="tiny"}} {waiting}.0\n'
                f'vllm:num_requests_waiting_by_reason{{engine="0",reason="capacity"}} {waiting}.0\n'
            )
            return _send(writer, 200, text.encode(), "text/plain")
        try:
            body: Any = json.loads(raw) if raw else None
        except ValueError:
            body = raw
        self.seen.append((method, path, headers, body))
        if path == "/v1/models":
            models = {"object": "list", "data": [{"id": MODEL, "object": "model", "max_model_len": MAX_MODEL_LEN}]}
            return _send(writer, 200, json.dumps(models).encode())
        if path == "/detokenize":
            return _send(writer, 200, json.dumps({"prompt": decode(body["tokens"])}).encode())
        if path in ("/v1/completions", "/v1/chat/completions"):
            return await self._generate(writer, path, body, gone)
        if path.partition("?")[0] == "/v1/embeddings":
            if fault := self._fault(0):
                return self._fail_whole(writer, fault)
            return _send(writer, 200, json.dumps({"path": path, "got": body, "port": self.port}).encode())
        return _send(writer, 404, b'{"detail":"Not Found"}')

    def _fault(self, tokens: int) -> str:
        for fault in self.faults:
            if fault.after <= tokens and fault.times > 0:
                fault.times -= 1
                return fault.kind
        return ""

    def _fail_whole(self, writer: asyncio.StreamWriter, kind: str) -> None:
        if kind == "engine-dead":
            return _send(writer, 500, json.dumps(ENGINE_DEAD).encode())
        if kind == "busy":
            return _send(writer, 429, b'{"error":{"message":"full","type":"x","param":null,"code":429}}')
        if kind == "bad":
            return _send(writer, 400, b'{"error":{"message":"no such thing","type":"BadRequestError","code":400}}')
        raise Hangup

    # --- answers ----------------------------------------------------------------------------------------------------

    async def _generate(self, writer: asyncio.StreamWriter, path: str, body: Any, gone: asyncio.Task[bytes]) -> None:
        self.active += 1
        try:
            if not isinstance(body, dict):
                return self._fail_whole(writer, "bad")
            if self.paused:
                return _send(writer, 503, json.dumps(PAUSED).encode())
            if any(fault.kind in ("busy", "bad", "refuse-500") for fault in self.faults) and (kind := self._fault(0)):
                return self._fail_whole(writer, "engine-dead" if kind == "refuse-500" else kind)
            if body.get("stream"):
                await self._stream(writer, path, body, gone)
            else:
                await self._whole(writer, path, body)
        finally:
            self.active -= 1
        return None

    def _tokens(self, path: str, body: dict[str, Any]) -> tuple[list[int], int]:
        if path.endswith("chat/completions"):
            prompt = chat_prompt(body["messages"])
            limit = body.get("max_completion_tokens") or body.get("max_tokens") or MAX_MODEL_LEN - len(prompt)
        else:
            given = body["prompt"]
            prompt = list(given.encode()) if isinstance(given, str) else list(given)
            limit = body.get("max_tokens") or 16
        return prompt, limit

    def _pieces(self, prompt: list[int], limit: int, body: dict[str, Any]) -> list[dict[str, Any]]:
        stop = body.get("stop") or []
        text = Detokenizer(
            prompt, [stop] if isinstance(stop, str) else stop, bool(body.get("include_stop_str_in_output"))
        )
        pieces = []
        for at, token in enumerate(right_tokens(prompt, limit)):
            token = (token + self.bend) % 256
            said, hit = text.add(token)
            finish = "stop" if hit else ("length" if at + 1 == limit else None)
            if finish == "length":
                said += text.rest()
            pieces.append({"text": said, "ids": [token], "finish": finish, "stop": hit})
            if hit:
                break
        return pieces

    async def _whole(self, writer: asyncio.StreamWriter, path: str, body: dict[str, Any]) -> None:
        prompt, limit = self._tokens(path, body)
        pieces = self._pieces(prompt, limit, body)
        await asyncio.sleep(self.step_s * len(pieces))
        finish = pieces[-1]["finish"]
        if kind := self._fault(len(pieces)):
            if kind != "abort":
                return self._fail_whole(writer, kind)
            finish, pieces = "abort", pieces[:2]
        text = "".join(piece["text"] for piece in pieces)
        n = body.get("n") or 1
        choices = [
            {"index": index, "text": text, "logprobs": None, "finish_reason": finish, "stop_reason": None}
            for index in range(n)
        ]
        answer = {"id": "cmpl-x", "object": "text_completion", "created": 1, "model": MODEL, "choices": choices}
        return _send(writer, 200, json.dumps(answer).encode())

    async def _stream(
        self, writer: asyncio.StreamWriter, path: str, body: dict[str, Any], gone: asyncio.Task[bytes]
    ) -> None:
        chat = path.endswith("chat/completions")
        prompt, limit = self._tokens(path, body)
        ids = bool(body.get("return_token_ids"))
        usage = bool((body.get("stream_options") or {}).get("include_usage"))
        base = {
            "id": f"{'chatcmpl' if chat else 'cmpl'}-{self.port}-{len(self.seen)}",
            "object": "chat.completion.chunk" if chat else "text_completion",
            "created": self.port,
            "model": MODEL,
        }
        _start_stream(writer)
        sent = 0

        def chunk(piece: dict[str, Any], finish: str | None) -> dict[str, Any]:
            token_ids = piece["ids"] if ids else None
            if not chat:
                first = prompt if ids and sent == 0 else None
                choice = {"index": 0, "text": piece["text"], "logprobs": None, "finish_reason": finish}
                choice |= {"stop_reason": piece["stop"], "prompt_token_ids": first, "token_ids": token_ids}
                return {**base, "choices": [choice], "kv_transfer_params": None}
            name = "reasoning" if sent < self.reasoning else "content"
            choice = {"index": 0, "delta": {name: piece["text"]}, "logprobs": None, "finish_reason": finish}
            if finish is not None:
                choice["stop_reason"] = piece["stop"]
            return {**base, "choices": [choice | {"token_ids": token_ids}]}

        if chat:
            choice = {
                "index": 0,
                "delta": {"role": "assistant", "content": ""},
                "logprobs": None,
                "finish_reason": None,
            }
            _event(writer, {**base, "choices": [choice], "prompt_token_ids": prompt if ids else None})
        pieces = self._pieces(prompt, limit, body)
        groups = [pieces[at : at + self.chunk] for at in range(0, len(pieces), self.chunk)]
        for group in groups:
            await self._step(gone)
            kind = self._fault(sent)
            if kind == "abort":
                piece: dict[str, Any] = {"text": "", "ids": [], "stop": None}
                _event(writer, chunk(piece, "abort"))
                return _end_stream(writer)
            if kind == "error-event":
                _event(writer, ENGINE_DEAD)
                return _end_stream(writer)
            if kind == "bad-event":
                _event(writer, {"error": {"message": "mine", "type": "BadRequestError", "param": None, "code": 400}})
                return _end_stream(writer)
            if kind == "hangup":
                raise Hangup
            if kind == "reset":
                writer.transport.abort()
                raise Hangup
            if kind == "short":
                return _end_stream(writer)
            if kind == "stall":
                await gone
                self.cancelled += 1
                raise Hangup
            merged = {
                "text": "".join(piece["text"] for piece in group),
                "ids": [token for piece in group for token in piece["ids"]],
                "stop": group[-1]["stop"],
            }
            finish = group[-1]["finish"]
            if finish and any(fault.kind == "lose-finish" for fault in self.faults):
                _event(writer, chunk(merged, None))
                self.faults.clear()
                raise Hangup
            _event(writer, chunk(merged, finish))
            sent += len(group)
            if finish and any(fault.kind == "lose-done" for fault in self.faults):
                self.faults.clear()
                raise Hangup
        if usage:
            counts = {"prompt_tokens": len(prompt), "completion_tokens": sent, "total_tokens": len(prompt) + sent}
            _event(writer, {**base, "choices": [], "usage": counts})
        return _end_stream(writer)

    async def _step(self, gone: asyncio.Task[bytes]) -> None:
        if not self.hold.is_set():
            await asyncio.wait([gone, asyncio.ensure_future(self.hold.wait())], return_when=asyncio.FIRST_COMPLETED)
        await asyncio.wait([gone], timeout=self.step_s)
        if gone.done():
            self.cancelled += 1
            raise Hangup


def _send(writer: asyncio.StreamWriter, status: int, body: bytes, kind: str = "application/json") -> None:
    head = f"HTTP/1.1 {status} X\r\ncontent-type: {kind}\r\ncontent-length: {len(body)}\r\nx-rank: yes\r\n\r\n"
    writer.write(head.encode() + body)


def _start_stream(writer: asyncio.StreamWriter) -> None:
    writer.write(
        b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream; charset=utf-8\r\ntransfer-encoding: chunked\r\n\r\n"
    )


def _part(writer: asyncio.StreamWriter, data: bytes) -> None:
    writer.write(f"{len(data):x}\r\n".encode() + data + b"\r\n")


def _event(writer: asyncio.StreamWriter, chunk: dict[str, Any]) -> None:
    _part(writer, b"data: " + json.dumps(chunk).encode() + b"\n\n")


def _end_stream(writer: asyncio.StreamWriter) -> None:
    _part(writer, b"data: [DONE]\n\n")
    writer.write(b"0\r\n\r\n")
