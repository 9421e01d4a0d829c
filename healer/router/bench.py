"""What the router costs: time added to a request and to a token, processor time for each, memory.

    python -m healer.router.bench --out docs/results/router-cpu.json

The ranks are one small process that speaks vLLM's wire format and computes nothing, so all that is measured is the way. Each
token carries the time at which it was sent, and is read beside a client that asks the rank directly.
"""

import argparse
import asyncio
import json
import multiprocessing
import os
import platform
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import msgspec
import psutil

from elastic.paths import read_json, write_json
from healer.router.files import Announcement

PROMPT = "x" * 200
PROMPT_IDS = list(range(200))
START_DEADLINE_S = 30.0
MODEL = "none"

HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream; charset=utf-8\r\ntransfer-encoding: chunked\r\n\r\n"


# --- the rank ------------------------------------------------------------------------------------------------------------


async def _rank(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    try:
        while True:
            head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").lower()
            size = next(
                (int(line.split(":")[1]) for line in head.split("\r\n") if line.startswith("content-length:")), 0
            )
            body = json.loads(await reader.readexactly(size)) if size else {}
            if head.startswith("post"):
                # the pace is asked for in a field that real servers ignore
                await _answer(writer, body["max_tokens"], int(body["user"]) / 1000)
            else:
                writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n")
            await writer.drain()
    except (asyncio.IncompleteReadError, ConnectionError):
        pass
    finally:
        writer.close()


async def _answer(writer: asyncio.StreamWriter, count: int, step_s: float) -> None:
    writer.write(HEAD)
    for at in range(count):
        if step_s:
            await asyncio.sleep(step_s)
        choice = {
            "index": 0,
            "text": f"{time.monotonic():.6f} ",
            "logprobs": None,
            "finish_reason": "length" if at + 1 == count else None,
            "stop_reason": None,
            "prompt_token_ids": None if at else PROMPT_IDS,
            "token_ids": [at],
            "weight_versions": None,
        }
        chunk = {"id": "cmpl-1", "object": "text_completion", "created": 1, "model": MODEL, "choices": [choice]}
        _event(writer, msgspec.json.encode(chunk))
        if not step_s:
            await writer.drain()
    _event(writer, b"[DONE]")
    writer.write(b"0\r\n\r\n")


def _event(writer: asyncio.StreamWriter, data: bytes) -> None:
    data = b"data: " + data + b"\n\n"
    writer.write(b"%x\r\n%b\r\n" % (len(data), data))


def _run_rank(told: Connection) -> None:
    async def serve() -> None:
        server = await asyncio.start_server(_rank, "127.0.0.1", 0)
        told.send(server.sockets[0].getsockname()[1])
        await server.serve_forever()

    asyncio.run(serve())


# --- the client ----------------------------------------------------------------------------------------------------------


async def _tokens(port: int, count: int, step_ms: int) -> AsyncIterator[tuple[float, float]]:
    """Times at which each token was sent and read; read with as little code as possible."""
    body = {"model": MODEL, "prompt": PROMPT, "max_tokens": count, "stream": True, "user": str(step_ms)}
    content = msgspec.json.encode(body | {"return_token_ids": False})
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        head = f"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: {len(content)}\r\n\r\n"
        writer.write(head.encode() + content)
        while line := await reader.readline():
            if line.startswith(b"data: {"):
                now = time.monotonic()
                text = line.split(b'"text":"', 1)[1].split(b'"', 1)[0]
                yield float(text), now
            elif line.startswith(b"data: [DONE]"):
                return
        raise RuntimeError("the stream ended before its end was said")
    finally:
        writer.close()


async def _delays_ms(port: int, streams: int, count: int, step_ms: int) -> list[float]:
    """How late each token was read."""

    async def one() -> list[float]:
        return [(read - sent) * 1000 async for sent, read in _tokens(port, count, step_ms)]

    return [delay for many in await asyncio.gather(*(one() for _ in range(streams))) for delay in many]


async def _first_ms(port: int, requests: int) -> list[float]:
    """From the request to its first token, one request after another."""
    found = []
    for _ in range(requests):
        began = time.monotonic()
        async for _, read in _tokens(port, 1, 0):
            found.append((read - began) * 1000)
    return found


def _summary(samples: Sequence[float]) -> dict[str, float]:
    ranked = sorted(samples)
    return {
        "median": round(statistics.median(ranked), 3),
        "p95": round(ranked[int(len(ranked) * 0.95)], 3),
        "max": round(ranked[-1], 3),
        "count": len(ranked),
    }


async def _cost_us(port: int, router: psutil.Process, streams: int, count: int) -> dict[str, float]:
    """Processor time of the router for what it passes on as fast as it can: several tokens arrive at once."""
    before, began = router.cpu_times(), time.monotonic()
    await asyncio.gather(*(_drain(port, count) for _ in range(streams)))
    after, wall_s = router.cpu_times(), time.monotonic() - began
    spent = after.user + after.system - before.user - before.system
    passed = streams * count
    return {
        "cpu_us_per_token": round(spent / passed * 1e6, 1),
        "tokens_per_s": round(passed / wall_s),
        "streams": streams,
        "tokens_per_stream": count,
    }


async def _drain(port: int, count: int) -> None:
    async for _ in _tokens(port, count, 0):
        pass


async def measure(rank_port: int, router_port: int, router: psutil.Process) -> dict[str, Any]:
    found: dict[str, Any] = {"rss_idle_mb": round(router.memory_info().rss / 1e6, 1)}
    for name, port in (("direct", rank_port), ("router", router_port)):
        await _first_ms(port, 20)
        found[f"first_token_ms_{name}"] = _summary(await _first_ms(port, 200))
        for streams in (1, 32):
            delays = await _delays_ms(port, streams, 100, 20)
            found[f"token_delay_ms_{name}_{streams}_streams"] = _summary(delays)
    before = router.cpu_times()
    await _first_ms(router_port, 300)
    after = router.cpu_times()
    spent = after.user + after.system - before.user - before.system
    found["cpu_us_per_request_of_one_token"] = round(spent / 300 * 1e6)
    before = router.cpu_times()
    await _delays_ms(router_port, 32, 100, 20)
    after = router.cpu_times()
    spent = after.user + after.system - before.user - before.system
    found["cpu_us_per_token_alone"] = round(spent / 3200 * 1e6)
    found["throughput"] = await _cost_us(router_port, router, 16, 1000)
    await _delays_ms(router_port, 256, 10, 100)
    found["rss_after_256_streams_mb"] = round(router.memory_info().rss / 1e6, 1)
    return found


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m healer.router.bench", description=__doc__)
    parser.add_argument("--out", type=Path, help="where the figures are written; they are printed too")
    out: Path | None = parser.parse_args().out
    receiving, telling = multiprocessing.Pipe(duplex=False)
    rank = multiprocessing.get_context("spawn").Process(target=_run_rank, args=(telling,), daemon=True)
    rank.start()
    with tempfile.TemporaryDirectory(prefix="router-bench-") as folder:
        config, announced = Path(folder) / "routes.json", Path(folder) / "router.json"
        port = receiving.recv()
        ranks = [{"slot": 0, "incarnation": 0, "url": f"http://127.0.0.1:{port}", "admit": True}]
        write_json(config, {"epoch": 0, "ranks": ranks})
        began = time.monotonic()
        router = subprocess.Popen(
            [sys.executable, "-m", "healer.router", "--config", str(config)], stderr=subprocess.DEVNULL
        )
        try:
            while not (announced.exists() and read_json(announced, Announcement).epoch == 0):
                if router.poll() is not None or time.monotonic() - began > START_DEADLINE_S:
                    print("the router did not start", file=sys.stderr)
                    return 1
                time.sleep(0.01)
            start_s = time.monotonic() - began
            at = int(read_json(announced, Announcement).http.rpartition(":")[2])
            time.sleep(0.5)  # the first look at the rank
            load_before = os.getloadavg()[0]
            figures = asyncio.run(measure(port, at, psutil.Process(router.pid)))
        finally:
            router.send_signal(signal.SIGTERM)
            router.wait(timeout=10)
            rank.terminate()
    figures |= {
        "start_s": round(start_s, 2),
        "python": platform.python_version(),
        "cores": os.cpu_count(),
        "load_before": round(load_before, 1),
        "load_after": round(os.getloadavg()[0], 1),
    }
    print(json.dumps(figures, indent=2))
    if out is not None:
        write_json(out, figures)
    return 0


if __name__ == "__main__":
    sys.exit(main())
