"""Servers that healer did not start: attached ranks with and without hooks, and one server with internal load balancing."""

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from elastic.controller.records import Event, RankBeat, RankGone, SequenceEnded
from elastic.errors import ElasticError, Infeasible
from healer.authority import Authority
from healer.policy.load import parse_policy
from healer.targets.vllm import make_target
from healer.targets.vllm.machine import State
from healer.targets.vllm.ray import RayTarget
from healer.targets.vllm.target import VllmGroupTarget

DEADLINE_S = 20.0
POLICY = """\
apiVersion: healer/v1
kind: Policy
metadata: {{name: there}}
spec:
  target:
    kind: vllm
    runDir: {folder}/run
    mode: attach
    loadBalancing: {balancing}
    ranks: 2
    maxRanks: {most}
    urls: {urls}
    args: [--served-model-name, m, --no-enable-prefix-caching]
    gateway: {{port: 0}}
    canary: {{interval: 500ms, deadline: 1s}}
    deadlines: {{start: 5s, scale: 5s, gate: 1s, retry: 3s, settle: 300ms, stall: 2s, drain: 0s, end: 1s}}
    hooks: {hooks}
  hooks:
    touch: {{kind: exec, command: [/bin/sh, -c, 'echo $HEALER_CAUSE $HEALER_SLOT >> {folder}/called']}}
  detection: {{heartbeatInterval: 100ms, stallAfter: 600ms, silentAfter: 1500ms}}
  bounds: {{minRanks: 2}}
"""


class Server:
    """The answers of an API server; a test sets what is wrong with it."""

    def __init__(self) -> None:
        self.size, self.generated = 2, 0
        self.hangs = self.dead = False
        self.scale_status = 200
        self._server: asyncio.Server | None = None
        self.port = 0

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    async def open(self) -> None:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", self.port)
        self.port = self._server.sockets[0].getsockname()[1]

    async def close(self) -> None:
        if self._server is not None:
            self._server.close()
            self._server = None

    async def _answer(self, path: str, body: Any) -> tuple[int, Any]:
        if path == "/health":
            return (503 if self.dead else 200), ""
        if path == "/version":
            return 200, {"version": "0.33.0"}
        if path == "/is_scaling_elastic_ep":
            return 200, {"is_scaling_elastic_ep": False, "phase": "idle"}
        if path == "/metrics":
            lines = []
            for engine in range(4):  # an engine that has left still shows its last figures
                label = f'{{engine="{engine}"}}'
                lines += [f"vllm:num_requests_running{label} {float(self.hangs)}"]
                lines += [f"vllm:generation_tokens_total{label} {self.generated}.0"]
            return 200, "\n".join(lines) + "\n"
        if path == "/v1/completions":
            while self.hangs:  # noqa: ASYNC110
                await asyncio.sleep(0.02)
            self.generated += body["max_tokens"]
            ids = list(range(body["max_tokens"]))
            return 200, {"choices": [{"text": "x", "finish_reason": "length", "token_ids": ids}]}
        if path == "/scale_elastic_ep":
            if self.scale_status == 200:
                self.size = body["new_data_parallel_size"]
            return self.scale_status, {"message": "x"}
        return 404, {}

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
            while self._server is not None:
                head = (await reader.readuntil(b"\r\n\r\n")).decode().split("\r\n")
                sizes = [int(line.split(":")[1]) for line in head if line.lower().startswith("content-length:")]
                raw = await reader.readexactly(sizes[0] if sizes else 0)
                status, found = await self._answer(head[0].split(" ")[1], json.loads(raw) if raw else None)
                data = found.encode() if isinstance(found, str) else json.dumps(found).encode()
                writer.write(b"HTTP/1.1 %d X\r\ncontent-length: %d\r\n\r\n" % (status, len(data)) + data)
                await writer.drain()
        writer.close()


async def until(condition: Any) -> None:
    async with asyncio.timeout(DEADLINE_S):
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(0.02)


@contextlib.asynccontextmanager
async def attached(
    tmp_path: Path, balancing: str, count: int, hooks: str = "{}"
) -> AsyncIterator[tuple[list[Server], Any, list[Event]]]:
    servers = [Server() for _ in range(count)]
    for server in servers:
        await server.open()
    urls = json.dumps([server.url for server in servers])
    most = count if balancing == "external" else 4
    text = POLICY.format(folder=tmp_path, balancing=balancing, most=most, urls=urls, hooks=hooks)
    events: list[Event] = []
    target = make_target(parse_policy(text, name="p", base=tmp_path), events.append, Authority())
    try:
        await target.start()
        yield servers, target, events
    finally:
        await target.stop()
        for server in servers:
            await server.close()


async def test_attached_ranks_without_hooks_are_taken_up_again_when_somebody_has_restarted_them(tmp_path: Path) -> None:
    async with attached(tmp_path, "external", 2) as (servers, target, events):
        assert isinstance(target, VllmGroupTarget)
        assert target.observe().live == (0, 1)
        await until(lambda: {e.member.slot for e in events if isinstance(e, RankBeat)} == {0, 1})
        await servers[1].close()
        await until(lambda: any(isinstance(e, RankGone) and e.member.slot == 1 for e in events))
        target.lose([1], cause="agent-lost", detected=0.0, replace=True)
        await until(lambda: target.group.machine.state == State.RESTARTING)
        await servers[1].open()
        await until(lambda: target.observe().live == (0, 1))
        assert {h.slot: h.incarnation for h in target.group.held()} == {0: 1, 1: 1}


async def test_hooks_end_and_start_attached_ranks(tmp_path: Path) -> None:
    async with attached(tmp_path, "external", 2, "{start: touch, stop: touch}") as (_, target, _events):
        target.lose([1], cause="hang", detected=0.0, replace=True)
        await until(lambda: target.observe().live == (0, 1) and target.group.incarnations == {0: 1, 1: 1})
        called = (tmp_path / "called").read_text().split("\n")[:-1]
        assert called == ["fence 0", "fence 1", "start 0", "start 1"]


async def test_a_ray_server_is_scaled_and_engines_that_left_are_not_counted(tmp_path: Path) -> None:
    async with attached(tmp_path, "internal", 1) as (servers, target, events):
        assert isinstance(target, RayTarget)
        assert target.scale(3, reason="test") == (0, 1, 2)
        await until(lambda: target.observe().live == (0, 1, 2))
        target.scale(2, reason="test")
        await until(lambda: target.observe().live == (0, 1))
        assert servers[0].size == 2
        assert [e.report.outcome for e in events if isinstance(e, SequenceEnded)] == ["committed", "committed"]
        for wanted in (1, 5, [0, 2]):
            with pytest.raises(Infeasible):
                target.scale(wanted, reason="test")


async def test_a_ray_server_that_refuses_a_size_keeps_its_own(tmp_path: Path) -> None:
    async with attached(tmp_path, "internal", 1) as (servers, target, events):
        servers[0].scale_status = 400
        target.scale(3, reason="test")
        await until(lambda: any(isinstance(e, SequenceEnded) for e in events))
        assert (target.observe().live, target.observe().target, target.observe().gateway) == ((0, 1), (0, 1), "")


async def test_a_failed_scaling_of_a_ray_server_is_not_followed_by_another(tmp_path: Path) -> None:
    async with attached(tmp_path, "internal", 1) as (servers, target, events):
        servers[0].scale_status = 500
        target.scale(3, reason="test")
        await until(lambda: any(isinstance(e, SequenceEnded) for e in events))
        assert "restart the server" in target.observe().gateway
        with pytest.raises(Infeasible, match="restart the server"):
            target.scale(3, reason="test")


async def test_a_lost_engine_of_a_ray_server_is_a_humans_and_healer_says_why(tmp_path: Path) -> None:
    async with attached(tmp_path, "internal", 1) as (servers, target, events):
        with pytest.raises(ElasticError, match="restart the vLLM server"):
            target.lose([0], cause="hang", detected=0.0, replace=True)
        servers[0].dead = True
        await until(lambda: {e.member.slot for e in events if isinstance(e, RankGone)} == {0, 1})
        assert "does not serve" in target.observe().gateway


async def test_a_hung_ray_server_beats_no_more_though_health_is_200(tmp_path: Path) -> None:
    async with attached(tmp_path, "internal", 1) as (servers, _target, events):
        await until(lambda: any(isinstance(e, RankBeat) for e in events))
        servers[0].hangs = True
        await asyncio.sleep(1.5)
        count = len(events)
        await asyncio.sleep(0.5)
        assert len(events) == count
        servers[0].hangs = False
