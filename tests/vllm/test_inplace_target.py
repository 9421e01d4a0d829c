"""The daemon's side of healing in place: the coordination process that it starts and adopts, and orders to whoever can take them."""

import asyncio
import json
import os
import signal
import stat
import sys
from pathlib import Path
from typing import Any

import httpx
import pytest
from typer.testing import CliRunner

from elastic import process
from elastic.errors import ElasticError
from elastic.vllm.client import NoAnswer, RankClient
from elastic.vllm.driver import HealFailed, RefillFailed, RefillLimits
from elastic.vllm.records import GuardState
from healer.cli import app
from healer.policy.schema import VllmTarget
from healer.targets.vllm import commands, in_place
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
            with open(os.path.join(sys.argv[3], "orders"), "ab") as orders:
                orders.write(line)
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


@pytest.mark.parametrize("warm", [True, False], ids=["with spares", "without"])
async def test_a_group_with_spares_has_a_coordinator_stand_by_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, warm: bool
) -> None:
    found = place(tmp_path, python(tmp_path))
    one = await found.up()
    try:
        monkeypatch.setattr(in_place, "ASK_S", 0.1)
        watch = asyncio.create_task(found.watch(lambda: 2, warm=lambda: warm))
        orders = tmp_path / "orders"
        async with asyncio.timeout(10):
            while orders.read_bytes().count(b"\n") < 4:  # noqa: ASYNC110
                await asyncio.sleep(0.02)
        watch.cancel()
        assert (b"stand-by" in orders.read_bytes()) == warm
    finally:
        process.send_signal(one.pid, process.start_time(one.pid), signal.SIGKILL)


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
    await in_place.quit(tmp_path)
    with pytest.raises(NoAnswer):
        await place(tmp_path)._coordination.info(deadline_s=1)


ARGUMENTS = ("--enable-elastic-ep", "--enable-expert-parallel", "--enable-eplb", "--enable-fault-tolerance")


def target(folder: Path, executable: str = "/nowhere/vllm", **changes: Any) -> VllmTarget:
    fields: dict[str, Any] = {
        "kind": "vllm",
        "runDir": str(folder / "run"),
        "ranks": 3,
        "maxRanks": 4,
        "model": "m",
        "executable": executable,
        "args": ARGUMENTS,
    }
    return VllmTarget.model_validate(fields | changes)


def says(folder: Path, text: str) -> str:
    """A command `vllm` whose interpreter answers so."""
    command = folder / "vllm"
    command.write_text(f"#!{python(folder, text)}\n")
    command.chmod(0o755)
    return str(command)


async def verdict(found: VllmTarget) -> in_place.Verdict:
    return await in_place.verdict(found, commands.arguments(found))


@pytest.mark.parametrize("missing", ARGUMENTS)
async def test_arguments_without_which_a_group_cannot_be_healed_in_place_are_named(
    tmp_path: Path, missing: str
) -> None:
    found = await verdict(target(tmp_path, args=[each for each in ARGUMENTS if each != missing]))
    assert (found.state, found.reason) == (GuardState.OFF, f"{missing} is not set")


async def test_it_can_be_switched_off_in_the_policy(tmp_path: Path) -> None:
    found = await verdict(target(tmp_path, inPlace="off"))
    assert (found.state, found.reason) == (GuardState.OFF, "spec.target.inPlace is off")


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("import no_such_module_here", "ModuleNotFoundError"),
        ("print('[1]')", "not beside vLLM"),
        ('print(\'{"parts": {"worker": {"state": "odd", "reason": "x"}}, "plugins": []}\')', "not beside vLLM"),
        (
            'print(\'{"parts": {"worker": {"state": "stock", "reason": "f not as known"}}, "plugins": []}\')',
            "f not as known",
        ),
    ],
)
async def test_a_vllm_that_is_not_known_stays_stock_and_the_reason_is_told(
    tmp_path: Path, text: str, told: str
) -> None:
    found = await verdict(target(tmp_path, says(tmp_path, text)))
    assert found.state == GuardState.STOCK
    assert told in found.reason


def test_healer_vllm_check_says_whether_healing_in_place_is_in_force(tmp_path: Path) -> None:
    answer = 'print(\'{"parts": {"engine": {"state": "ready", "reason": ""}}, "plugins": []}\')'
    policy = tmp_path / "p.yaml"
    for executable, state in ((says(tmp_path, answer), "ready"), ("/nowhere/vllm", "stock")):
        text = {"kind": "vllm", "runDir": "run", "ranks": 3, "maxRanks": 4, "model": "m", "args": [*ARGUMENTS]}
        spec = {"target": text | {"executable": executable}, "bounds": {"minRanks": 2}}
        document = {"apiVersion": "healer/v1", "kind": "Policy", "metadata": {"name": "p"}, "spec": spec}
        policy.write_text(json.dumps(document))
        assert f"healing in place: {state}" in CliRunner().invoke(app, ["vllm", "check", str(policy)]).output
        told = CliRunner().invoke(app, ["vllm", "check", "--json", str(policy)]).output
        assert json.loads(told)["in_place"]["state"] == state


def test_the_users_own_plugins_stay_loaded_beside_healers() -> None:
    def plugins(user: dict[str, str]) -> str:
        return in_place.environment(user, joins=False, coordinated=True, installed=["theirs"])["VLLM_PLUGINS"]

    assert plugins({}) == "theirs,healer_in_place", "a list takes away those that it does not name"
    assert plugins({"VLLM_PLUGINS": ""}) == "healer_in_place"
    assert plugins({"VLLM_PLUGINS": "mine"}) == "mine,healer_in_place"


async def test_experts_rows_of_an_earlier_launch_are_not_those_of_the_next_one(tmp_path: Path) -> None:
    found = place(tmp_path)
    copy = Path(found.variables(joins=False)["HEALER_EXPERT_COPY"])
    async with FakeCoordination(tmp_path, "nothing").listening():
        copy.write_bytes(b"old")
        await found.begin([0, 1, 2])
        assert not copy.exists()
        copy.write_bytes(b"last")
        await in_place.quit(tmp_path)
    assert not copy.exists()


async def test_a_place_for_experts_rows_that_the_user_names_is_left_alone(tmp_path: Path) -> None:
    mine = os.environ | {"HEALER_EXPERT_COPY": "/dev/shm/mine"}
    found = InPlace(tmp_path, "/nowhere/python", Processes(tmp_path), host="127.0.0.1", env=mine)
    assert "HEALER_EXPERT_COPY" not in found.variables(joins=True)
    assert found.variables(joins=True)["HEALER_REFILL"] == "1"
