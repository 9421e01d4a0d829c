"""The daemon's side of healing in place: the coordination process that it starts and adopts, and orders to whoever can take them."""

import os
import signal
import stat
import sys
from pathlib import Path

import httpx
import pytest

from elastic import process
from elastic.errors import ElasticError
from elastic.vllm.client import NoAnswer, RankClient
from elastic.vllm.driver import HealFailed, RefillFailed, RefillLimits
from healer.targets.vllm import in_place
from healer.targets.vllm.in_place import InPlace, interpreter
from healer.targets.vllm.processes import Processes
from tests.vllm.inplace_fakes import FakeCoordination, FakeRanks, fixed

SERVER = """\
import json, os, socketserver, sys
INFO = {"pid": os.getpid(), "host": "127.0.0.1", "rpc_port": 9, "store_port": 5, "coordinator_addresses": ["", "", ""],
        "coordinator_pid": 1, "coordinator_starts": 1, "expected": [], "hello": [], "answered": [], "ready": [],
        "trouble": "", "refill": None, "refill_epoch": 0, "refill_keys": []}
class Handler(socketserver.StreamRequestHandler):
    def handle(self):
        for line in self.rfile:
            self.wfile.write(json.dumps(INFO).encode() + b"\\n")
path = os.path.join(sys.argv[3], "coordination.sock")
if os.path.exists(path):
    os.unlink(path)
socketserver.ThreadingUnixStreamServer(path, Handler).serve_forever()
"""
"""In the place of vLLM's interpreter: what `-m elastic.vllm.coordination RUN_DIR` answers."""


def python(folder: Path, text: str = SERVER) -> str:
    path = folder / "python"
    path.write_text(f"#!{sys.executable}\n{text}")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return str(path)


def place(folder: Path, interpreter_path: str = "/nowhere/python") -> InPlace:
    return InPlace(folder, interpreter_path, Processes(folder), host="127.0.0.1", env=os.environ)


def with_ranks(found: InPlace, ranks: FakeRanks, monkeypatch: pytest.MonkeyPatch) -> None:
    by_url = {client.url: client for client in ranks.clients.values()}
    monkeypatch.setattr(in_place, "RankClient", lambda url, api_key="": by_url[url])
    found.know({slot: client.url for slot, client in ranks.clients.items()}, "")


async def test_the_coordination_process_is_started_once_and_adopted_by_the_next_daemon(tmp_path: Path) -> None:
    first = await place(tmp_path, python(tmp_path)).up()
    try:
        assert (await place(tmp_path).up()).pid == first.pid
    finally:
        process.send_signal(first.pid, process.start_time(first.pid), signal.SIGKILL)


async def test_a_coordination_process_that_does_not_come_up_is_told_with_its_last_words(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(in_place, "UP_S", 1.5)
    with pytest.raises(ElasticError, match="ModuleNotFoundError"):
        await place(tmp_path, python(tmp_path, "import no_such_module_here\n")).up()


async def test_survivors_go_on_with_a_number_above_all_that_they_have_seen(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ranks, found = FakeRanks([0, 1, 2]), place(tmp_path)
    ranks.epoch = {0: 6, 1: 9, 2: 7}
    ranks.dead.add(1)
    with_ranks(found, ranks, monkeypatch)
    async with FakeCoordination(tmp_path, "nothing").listening() as coordination:
        healed = await found.go_on([0, 2], ranks, timeout_s=0.2)
    assert (healed.survivors, healed.epoch) == ((0, 2), 8)
    assert coordination.did == ["live"]


async def test_a_rank_that_runs_stock_says_so_and_is_not_ordered_about(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ranks, found = FakeRanks([0, 1]), place(tmp_path)
    ranks.clients[1] = RankClient("http://rank-1", transport=httpx.MockTransport(fixed(404, '{"detail":"Not Found"}')))
    with_ranks(found, ranks, monkeypatch)
    infos = await found.infos([0, 1])
    assert "not loaded" in in_place.why_not([0, 1], least=2, infos=infos)


async def test_nobody_that_can_go_on_leaves_the_restart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ranks, found = FakeRanks([0, 1]), place(tmp_path)
    ranks.no |= {0, 1}
    with_ranks(found, ranks, monkeypatch)
    async with FakeCoordination(tmp_path, "nothing").listening():
        with pytest.raises(HealFailed):
            await found.go_on([0, 1], ranks, timeout_s=0.2)


async def test_a_slot_is_filled_with_the_port_that_the_coordination_process_names(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ranks, found, launched = FakeRanks([0, 1, 2]), place(tmp_path), list[int]()
    ranks.live = (0, 2)
    with_ranks(found, ranks, monkeypatch)

    async def launch(rpc_port: int) -> str:
        launched.append(rpc_port)
        return ranks.clients[1].url

    limits = RefillLimits(hello_s=1, prepare_s=1, commit_s=1, serve_s=1)
    async with FakeCoordination(tmp_path, "ready").listening():
        filled = await found.fill([0, 2], 1, ranks, launch, api_key="", limits=limits)
    assert launched == [9]
    assert set(filled.pauses_s) == {0, 2}


async def test_a_joiner_that_cannot_be_launched_leaves_the_slot_empty_and_says_why(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ranks, found = FakeRanks([0, 2]), place(tmp_path)
    with_ranks(found, ranks, monkeypatch)

    async def launch(rpc_port: int) -> str:
        raise ElasticError("vllm: cannot be started: no such file")

    async with FakeCoordination(tmp_path, "nothing").listening() as coordination:
        with pytest.raises(RefillFailed, match="no such file"):
            await found.fill([0, 2], 1, ranks, launch, api_key="", limits=RefillLimits())
    assert coordination.did[-1] == "end False"


def test_the_interpreter_is_that_of_the_command(tmp_path: Path) -> None:
    assert interpreter(python(tmp_path)) == sys.executable
    (tmp_path / "binary").write_bytes(b"\x7fELF\0\0")
    with pytest.raises(ElasticError, match="binary"):
        interpreter(str(tmp_path / "binary"))
    with pytest.raises(ElasticError, match="nowhere"):
        interpreter(str(tmp_path / "nowhere"))


async def test_no_coordination_process_ends_in_order(tmp_path: Path) -> None:
    await place(tmp_path).quit()
    with pytest.raises(NoAnswer):
        await place(tmp_path)._coordination.info(deadline_s=1)
