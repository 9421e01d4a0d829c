"""The gateway as a process: start, control socket, a daemon that dies, the end."""

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from elastic import process
from elastic.channel import Channel
from elastic.errors import NeedsReplan
from elastic.front import listen
from elastic.protocol import GatewayQuery, GatewayStatus, Hello, Query, Route, Routes, encode
from tests.gateway import gateway_fakes as fakes
from tests.gateway.gateway_fakes import GROUP, right_answer, until

PROMPT = [1, 2, 3]


class Gateways:
    def __init__(self, run_dir: Path, checkpoint: Path) -> None:
        self.run_dir, self.checkpoint = run_dir, checkpoint
        self.started: list[subprocess.Popen[str]] = []

    def start(self, *extra: str, checkpoint: Path | None = None) -> subprocess.Popen[str]:
        arguments = {
            "--group": GROUP,
            "--run-dir": str(self.run_dir),
            "--checkpoint": str(checkpoint or self.checkpoint),
            "--model": fakes.MODEL,
        }
        command = [
            sys.executable,
            "-m",
            "elastic.gateway",
            *[word for pair in arguments.items() for word in pair],
            *extra,
        ]
        started = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=fakes.ENVIRONMENT)
        self.started.append(started)
        return started

    async def ready(self, gateway: subprocess.Popen[str]) -> dict:
        path = self.run_dir / "gateway.json"

        def announced() -> bool:
            assert gateway.poll() is None, gateway.stderr and gateway.stderr.read()
            return path.exists() and json.loads(path.read_text())["pid"] == gateway.pid

        await until(announced, "the gateway is announced", 20)
        return json.loads(path.read_text())

    def failure(self, gateway: subprocess.Popen[str]) -> str:
        _, err = gateway.communicate(timeout=20)
        assert gateway.returncode == 1
        assert "Traceback" not in err
        (line,) = err.splitlines()
        return line


@pytest.fixture
def gateways(run_dir: Path, checkpoint: Path) -> Iterator[Gateways]:
    gateways = Gateways(run_dir, checkpoint)
    yield gateways
    for started in gateways.started:
        if started.poll() is None:
            started.kill()
        started.wait()
        if started.stderr is not None:
            started.stderr.close()


async def connect(run_dir: Path) -> Channel:
    hello = Hello(role="controller", group=GROUP)
    channel = await Channel.open(str(run_dir / "gateway.sock"), hello, "gateway", deadline_s=5)
    channel.start()
    return channel


async def test_serving_goes_on_when_the_daemon_is_gone_and_ends_in_order(gateways: Gateways, run_dir: Path) -> None:
    gateway = gateways.start("--port", "0")
    announced = await gateways.ready(gateway)
    assert process.is_alive(announced["pid"], announced["pid_start"])
    ranks = [await fakes.FakeRank(str(run_dir / f"r{slot}")).start() for slot in range(2)]
    controller = await connect(run_dir)
    routes = tuple(Route(slot=i, incarnation=1, address=rank.address, admit=True) for i, rank in enumerate(ranks))
    try:
        await controller.call(Routes(id=1, epoch=3, routes=routes), GatewayStatus, deadline_s=5)
        await controller.aclose()
        async with httpx.AsyncClient(base_url=announced["http"], timeout=20, verify=False) as client:
            answer = await client.post("/v1/completions", json=fakes.asked(max_tokens=20))
            assert answer.json()["choices"][0]["token_ids"] == right_answer(PROMPT, 20)
            # no controller, and a rank dies
            ranks[0].step_s = 0.001
            async with client.stream(
                "POST", "/v1/completions", json=fakes.asked(max_tokens=90, stream=True)
            ) as response:
                stream = fakes.Stream(response)
                await stream.take(5)
                await ranks[0].die()
                # told to end, with an answer on its way: that is finished, nothing new is taken
                ranks[1].step_s = 0.002
                gateway.send_signal(signal.SIGTERM)

                async def refused() -> bool:
                    return (await client.post("/v1/completions", json=fakes.asked())).status_code == 503

                async with asyncio.timeout(10):
                    while not await refused():
                        pass
                await stream.rest()
            assert stream.tokens == right_answer(PROMPT, 90)
        assert await asyncio.to_thread(gateway.wait, 15) == 0
        assert not (run_dir / "gateway.json").exists()
        assert not (run_dir / "gateway.sock").exists()
    finally:
        for rank in ranks:
            await rank.die()


async def test_request_that_outlives_the_grace_gets_an_explicit_error(gateway) -> None:
    group = await gateway(1, grace_s=0.1)
    group.ranks[0].mangle = lambda emitted: [emitted] if emitted.start < 3 else []
    async with group.stream(max_tokens=10) as stream:
        await stream.take(3)
        stopped = group.stop_gateway()
        await stream.rest()
    assert stream.error is not None
    assert stream.error["code"] == "shutting_down"
    await asyncio.wait_for(stopped, 10)


async def test_garbage_on_the_control_socket_closes_that_connection_only(gateway) -> None:
    group = await gateway(1)
    address = str(group.root / "gateway.sock")
    hello = encode(Hello(role="controller", group=GROUP))
    for garbage in (
        b"GET / HTTP/1.1\r\n\r\n",
        b"\xff" * 64,
        b"\x00\x00\x00\x03abc",
        b"\x00\x00\x00\x00",
        encode(GatewayQuery(id=1)),
        encode(Hello(role="gateway", group=GROUP)),
        encode(Hello(role="controller", group="other")),
        encode(Hello(role="controller", group=GROUP, version=99)),
        hello + b"\x00\x00\x00\x03abc",
        hello + encode(Query(id=1)),
        hello + hello,
    ):
        reader, writer = await asyncio.open_unix_connection(address)
        writer.write(garbage)
        assert await asyncio.wait_for(reader.read(), 5) == b"", garbage
        writer.close()
        await writer.wait_closed()
    _, writer = await asyncio.open_unix_connection(address)
    writer.write(b"\x00\x00")
    writer.close()
    assert (await group.complete(max_tokens=4)).json()["choices"][0]["token_ids"] == right_answer(PROMPT, 4)
    assert (await group.status()).completed == 1


async def test_routes_of_an_older_epoch_are_refused(gateway) -> None:
    group = await gateway(1)
    assert group.controller is not None
    with pytest.raises(NeedsReplan, match="epoch 0"):
        await group.controller.call(Routes(id=77, epoch=0, routes=()), GatewayStatus, deadline_s=5)
    status = await group.status()
    assert (status.per_slot, status.epoch) == ({0: 0}, 1)


async def test_new_controller_takes_over_while_the_old_one_hangs(gateway) -> None:
    group = await gateway(1)
    old = group.controller
    await group.connect()
    assert (await group.route(0)).per_slot == {0: 0}
    assert old is not None
    await old.aclose()
    assert (await group.complete(max_tokens=2)).status_code == 200


def test_first_token_does_not_wait_for_a_delayed_acknowledgement() -> None:
    """The event loop sends small packets at once only on a socket that says it is TCP."""
    with listen("127.0.0.1", 0, "") as listener:
        assert listener.proto == socket.IPPROTO_TCP


def test_port_in_use_is_one_clear_line(gateways: Gateways) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        line = gateways.failure(gateways.start("--port", str(port)))
    assert f"127.0.0.1:{port}" in line
    assert "in use" in line
    assert "--port" in line
    assert not (gateways.run_dir / "gateway.json").exists()


async def test_second_gateway_is_refused_and_one_after_a_kill_is_not(gateways: Gateways) -> None:
    first = gateways.start()
    await gateways.ready(first)
    assert "another gateway runs here" in await asyncio.to_thread(gateways.failure, gateways.start())
    first.kill()
    first.wait()
    second = gateways.start()
    await gateways.ready(second)
    channel = await connect(gateways.run_dir)
    assert (await channel.call(GatewayQuery(id=1), GatewayStatus, deadline_s=5)).accepted == 0
    await channel.aclose()
    second.send_signal(signal.SIGTERM)
    assert await asyncio.to_thread(second.wait, 15) == 0


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--port", "70000"), "65535"),
        (("--port", "-1"), "--port"),
        (("--max-queued", "0"), "--max-queued"),
        (("--request-timeout", "nan"), "--request-timeout"),
        (("--host", "no such host"), "cannot listen on no such host:0"),
    ],
)
def test_bad_arguments_end_in_one_clear_error(gateways: Gateways, arguments: tuple[str, str], said: str) -> None:
    gateway = gateways.start(*arguments)
    _, err = gateway.communicate(timeout=20)
    assert gateway.returncode in (1, 2)
    assert said in err.splitlines()[-1]
    assert "Traceback" not in err


def test_checkpoint_that_cannot_be_read_is_one_clear_line(gateways: Gateways, tmp_path: Path) -> None:
    assert "config.json: no such file" in gateways.failure(gateways.start(checkpoint=tmp_path / "nothing"))


def test_the_gateway_never_loads_torch() -> None:
    code = "import sys, elastic.gateway.server; sys.exit(bool({'torch', 'numpy', 'healer'} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code], env=fakes.ENVIRONMENT, check=False).returncode == os.EX_OK
