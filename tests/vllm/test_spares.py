"""Spares over real processes and the fake vLLM: who they become, what becomes of them, and what they leave behind."""

import asyncio
import contextlib
import errno
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import msgspec
import pytest

from elastic import process
from elastic.controller.records import BootFailed
from elastic.launch.base import Launched
from healer.policy.load import parse_policy
from healer.policy.schema import VllmTarget
from healer.targets.vllm import spare, spares, target
from healer.targets.vllm.processes import Processes, sessions
from healer.targets.vllm.records import Part
from healer.targets.vllm.spares import Spares
from tests.vllm.stand import FAKE, POLICY, Stand, free_base, standing

pytestmark = pytest.mark.timeout(60)

ROOT = Path(__file__).parents[2]
KEY = "a-secret-that-nobody-else-may-read"
NVML = "PYTORCH_NVML_BASED_CUDA_CHECK"
PACKAGE = f"import os\nos.environ[{NVML!r}] = '1'\n"
"""As vLLM does at its import, so that the engine's torch does not initialise CUDA before it forks the worker."""
COMMAND = f"""\
import json, os, pathlib, runpy, sys, threading
def main():
    names = ("VLLM_WORKER_MULTIPROC_METHOD", "VLLM_API_KEY", "VLLM_ELASTIC_EP_SCALE_UP_LAUNCH", "CUDA_VISIBLE_DEVICES", {NVML!r})
    found = {{"argv": sys.argv, "env": {{n: os.environ.get(n) for n in names}}, "imported": len(sys.modules)}}
    pathlib.Path(os.environ["FAKE_VLLM"], f"rank-{{os.getpid()}}").write_text(json.dumps(found))
    print("this is a rank")
    runpy.run_path({str(FAKE)!r}, run_name="__main__")
"""


@pytest.fixture(autouse=True)
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(spares, "CALM_S", 0.2)
    monkeypatch.setattr(spares, "PAUSE_S", 0.2)
    monkeypatch.setattr(spares, "POLL_S", 0.05)


def make_vllm(folder: Path, command: str = COMMAND, package: str = "") -> None:
    """A vLLM whose command can be imported, and whose script names its interpreter."""
    place = folder / "site/vllm/entrypoints/cli"
    place.mkdir(parents=True, exist_ok=True)
    for each in (place, place.parent):
        (each / "__init__.py").touch()
    (folder / "site/vllm/__init__.py").write_text(package)
    (place / "main.py").write_text(command)
    script = folder / "vllm"
    script.write_text(f"#!{sys.executable} -SE\nimport runpy\nrunpy.run_path({str(FAKE)!r}, run_name='__main__')\n")
    script.chmod(0o755)


def with_spares(stand: Stand, count: int = 2, **changes: object) -> None:
    """Of a stand that has not started."""
    make_vllm(stand.folder, package=PACKAGE)
    (stand.folder / "key").write_text(KEY)
    before = stand.policy.spec.target
    assert isinstance(before, VllmTarget)
    env = {**before.env, "PYTHONPATH": f"{ROOT}:{stand.folder / 'site'}"}
    found = {"spares": count, "env": env, "api_key_file": str(stand.folder / "key"), **changes}
    spec = stand.policy.spec.model_copy(update={"target": before.model_copy(update=found)})
    stand.policy = stand.policy.model_copy(update={"spec": spec})
    stand.another()


def ready(stand: Stand) -> set[int]:
    return {one.pid for one in stand.target.observe().spares if one.state == "ready"}


async def all_ready(stand: Stand, count: int = 2) -> set[int]:
    await stand.until(lambda: len(ready(stand)) == count)
    return ready(stand)


def pids(stand: Stand) -> dict[int, int]:
    return {held.slot: held.pid for held in stand.target.group.held()}


def alone(folder: Path, **changes: object) -> Spares:
    """Without a group."""
    text = POLICY.format(folder=folder, ranks=2, port=free_base())
    (folder / "run").mkdir(exist_ok=True)
    (folder / "group").mkdir(exist_ok=True)
    found = parse_policy(text, name="p", base=folder).spec.target
    assert isinstance(found, VllmTarget)
    env = {**found.env, "PYTHONPATH": f"{ROOT}:{folder / 'site'}"}
    return Spares(found.model_copy(update={"spares": 1, "env": env, **changes}), Processes(folder / "run"))


@contextlib.asynccontextmanager
async def kept(found: Spares, calm: Callable[[], bool] = lambda: True) -> AsyncIterator[Spares]:
    task = asyncio.create_task(found.keep(calm))
    try:
        yield found
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        await found.end()


async def until_state(found: Spares, state: str, why: str = "") -> None:
    async with asyncio.timeout(20):
        while found.status()[0].state != state or why not in found.status()[0].why:  # noqa: ASYNC110
            await asyncio.sleep(0.02)


async def test_a_joiner_and_a_restarted_group_are_spares_that_are_replaced(tmp_path: Path) -> None:
    async with standing(tmp_path, prepare=with_spares) as stand:
        spare_pids = await all_ready(stand)
        stand.target.scale(3, reason="test")
        await stand.serves(0, 1, 2)
        joiner = pids(stand)[2]
        assert joiner in spare_pids
        said = json.loads((tmp_path / f"group/rank-{joiner}").read_text())
        assert said["env"] == {
            "VLLM_WORKER_MULTIPROC_METHOD": "fork",
            "VLLM_API_KEY": KEY,
            "VLLM_ELASTIC_EP_SCALE_UP_LAUNCH": "1",
            "CUDA_VISIBLE_DEVICES": os.environ.get("CUDA_VISIBLE_DEVICES"),
            NVML: "1",
        }
        assert said["argv"][:3] == [str(tmp_path / "vllm"), "serve", "m"]
        assert "this is a rank" in (tmp_path / "run/logs/rank-2.0.log").read_text()
        spare_pids = await all_ready(stand)
        assert joiner not in spare_pids, "it was replaced"
        os.kill(stand.pid(1, Part.ENGINE), signal.SIGKILL)
        stand.target.lose([1], cause="process-death", detected=0.0, replace=True)
        await stand.until(lambda: stand.incarnations() == {0: 1, 1: 1, 2: 1})
        stand.clean()
        await stand.serves(0, 1, 2)
        assert spare_pids < set(pids(stand).values()), "two of the three, and one that was launched as ever"
        for slot, pid in pids(stand).items():
            if pid in spare_pids:
                said = json.loads((tmp_path / f"group/rank-{pid}").read_text())
                assert said["env"]["VLLM_ELASTIC_EP_SCALE_UP_LAUNCH"] is None
                assert said["argv"][said["argv"].index("--data-parallel-rank") + 1] == str(slot)
        spare_pids |= await all_ready(stand)
        files = [path for path in (tmp_path / "run").rglob("*") if path.is_file()]
        assert not [path for path in files if KEY.encode() in path.read_bytes()]
        assert not [pid for pid in spare_pids if KEY.encode() in Path(f"/proc/{pid}/cmdline").read_bytes()]
        left = [(pid, process.start_time(pid)) for pid in spare_pids]
    assert not [pid for pid, start in left if process.is_alive(pid, start)]
    assert not (tmp_path / "run/spares.json").exists()


async def test_a_spare_that_does_not_take_its_order_is_ended_and_the_rank_is_launched_as_ever(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(spare, "ANSWER_S", 0.3)

    async with standing(tmp_path, prepare=lambda stand: with_spares(stand, 1)) as stand:
        (pid,) = await all_ready(stand, 1)
        start = process.start_time(pid)
        os.kill(pid, signal.SIGSTOP)
        stand.target.scale(3, reason="test")
        await stand.serves(0, 1, 2)
        assert pids(stand)[2] != pid
        assert not process.is_alive(pid, start)
        assert [r.outcome for r in stand.reports("join")] == ["committed"]
        assert await all_ready(stand, 1) != {pid}


async def test_what_failed_as_a_spare_is_launched_as_ever_the_next_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(target, "PAUSE_S", 0.2)

    def prepare(stand: Stand) -> None:
        with_spares(stand)
        make_vllm(tmp_path, "def main():\n    raise SystemExit('this GPU does not bear a fork')\n")

    async with standing(tmp_path, prepare=prepare) as stand:
        spare_pids = await all_ready(stand)
        stand.target.scale(3, reason="test")
        await stand.serves(0, 1, 2)
        assert stand.incarnations()[2] == 1, "the first one has failed"
        assert pids(stand)[2] not in spare_pids
        (failed,) = [event for event in stand.events if isinstance(event, BootFailed)]
        assert "bear a fork" in failed.why


async def test_a_spare_that_dies_is_replaced_and_the_group_serves_on(tmp_path: Path) -> None:
    async with standing(tmp_path, prepare=lambda stand: with_spares(stand, 1)) as stand:
        before = pids(stand)
        (pid,) = await all_ready(stand, 1)
        os.kill(pid, signal.SIGKILL)
        await stand.until(lambda: "while it stood by" in stand.target.observe().spares[0].why)
        assert await all_ready(stand, 1) != {pid}
        assert pids(stand) == before


async def test_a_daemon_that_ends_leaves_its_ranks_and_no_spares(tmp_path: Path) -> None:
    async with standing(tmp_path, prepare=with_spares) as stand:
        left = [(pid, process.start_time(pid)) for pid in await all_ready(stand)]
        await stand.target.close()
        assert not [pid for pid, start in left if process.is_alive(pid, start)]
        await stand.another().start()
        await stand.serves(0, 1)
        await all_ready(stand)


def test_a_spare_ends_when_its_daemon_is_killed(tmp_path: Path) -> None:
    make_vllm(tmp_path)
    ours, its = socket.socketpair()
    environment = {**os.environ, "PYTHONPATH": f"{ROOT}:{tmp_path / 'site'}"}
    with its, subprocess.Popen([sys.executable, "-m", spare.MODULE], stdin=its.fileno(), env=environment) as one:
        its.close()
        assert json.loads(ours.makefile("rb").readline()) == {"ready": True}
        ours.close()
        assert one.wait(10) == 0


async def test_what_an_earlier_daemon_left_is_ended_and_its_ranks_are_not(tmp_path: Path) -> None:
    make_vllm(tmp_path)
    async with kept(alone(tmp_path)) as found:
        await until_state(found, "ready")
        pid = found.status()[0].pid
        one = Launched(pid, process.start_time(pid))
        os.kill(pid, signal.SIGSTOP)
        listed = (tmp_path / "run/spares.json").read_bytes()
        await spares.end_left(tmp_path / "run", Processes(tmp_path / "run"), [one])
        assert process.is_alive(*one), "it is a rank by now"
        (tmp_path / "run/spares.json").write_bytes(listed)
        await spares.end_left(tmp_path / "run", Processes(tmp_path / "run"))
        assert not process.is_alive(*one)


async def test_who_became_a_rank_is_listed_until_the_group_has_written_it_down(tmp_path: Path) -> None:
    """A daemon that is killed between the two must not leave a rank that nobody knows."""
    make_vllm(tmp_path, "import time\ndef main():\n    time.sleep(1000)\n")
    calm, looks = True, 0

    def is_calm() -> bool:
        nonlocal looks
        looks += 1
        return calm

    def listed() -> list[int]:
        return [one["pid"] for one in json.loads((tmp_path / "run/spares.json").read_bytes())]

    async def looked(more: int) -> None:
        seen = looks
        async with asyncio.timeout(20):
            while looks < seen + more:  # noqa: ASYNC110
                await asyncio.sleep(0.02)

    found = alone(tmp_path)
    async with kept(found, is_calm):
        await until_state(found, "ready")
        calm = False
        await looked(1)
        rank = await found.become(["vllm", "serve"], os.environ, "rank-0.0")
        assert rank is not None
        try:
            await looked(2)
            assert listed() == [rank.pid]
            calm = True
            await looked(2)
            assert rank.pid not in listed()
            assert process.is_alive(*rank)
        finally:
            await Processes(tmp_path / "run").fence([rank])


async def test_a_launch_that_is_cut_off_leaves_no_half_made_rank(tmp_path: Path) -> None:
    make_vllm(tmp_path)
    found = alone(tmp_path)
    async with kept(found):
        await until_state(found, "ready")
        pid = found.status()[0].pid
        one = Launched(pid, process.start_time(pid))
        os.kill(one.pid, signal.SIGSTOP)
        launch = asyncio.create_task(found.become(["vllm", "serve"], os.environ, "rank-0.0"))
        async with asyncio.timeout(20):
            while found.status()[0].pid == pid:  # noqa: ASYNC110
                await asyncio.sleep(0.02)
        launch.cancel()
        await asyncio.gather(launch, return_exceptions=True)
        assert not process.is_alive(*one)


async def test_who_has_no_spares_of_its_own_leaves_the_list_of_another_daemon_alone(tmp_path: Path) -> None:
    make_vllm(tmp_path)
    found = alone(tmp_path)
    (tmp_path / "run/spares.json").write_text("[]")
    await found.end()
    assert (tmp_path / "run/spares.json").exists()


def listed(folder: Path) -> list[int]:
    path = spares.path_of(folder / "run")
    return [one["pid"] for one in json.loads(path.read_text())] if path.exists() else []


async def listed_in_time(folder: Path, pids: list[int]) -> None:
    async with asyncio.timeout(20):
        while listed(folder) != pids:  # noqa: ASYNC110
            await asyncio.sleep(0.02)


async def test_a_daemon_whose_lease_is_over_leaves_the_list_of_the_next_one_alone(tmp_path: Path) -> None:
    make_vllm(tmp_path)
    old, new, acts = alone(tmp_path), alone(tmp_path), [True]
    async with kept(old, lambda: acts[0]):
        await until_state(old, "ready")
        pid = old.status()[0].pid
        acts[0] = False
        async with kept(new):
            await until_state(new, "ready")
            theirs = [new.status()[0].pid]
            await listed_in_time(tmp_path, theirs)
            os.kill(pid, signal.SIGKILL)
            await until_state(old, "given-up")
            await old.end()
            assert listed(tmp_path) == theirs


async def test_a_list_that_did_not_fit_on_the_disk_is_written_when_there_is_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_vllm(tmp_path)
    found = alone(tmp_path)
    with monkeypatch.context() as full:

        def refuse(*_: object) -> None:
            raise OSError(errno.ENOSPC, "no space")

        full.setattr(spares, "write_json", refuse)
        task = asyncio.create_task(found.keep(lambda: True))
        await until_state(found, "ready")
        assert not listed(tmp_path)
    await listed_in_time(tmp_path, [found.status()[0].pid])
    task.cancel()
    await found.end()


async def test_a_spare_that_does_not_come_up_is_given_up_with_its_reason_and_tried_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(spares, "UP_S", 0.5)
    make_vllm(
        tmp_path, package=f"import os, time\nif not os.path.exists({str(tmp_path / 'go')!r}):\n    time.sleep(99)\n"
    )
    async with kept(alone(tmp_path)) as found:
        await until_state(found, "given-up", "not up within 0.5 s")
        monkeypatch.setattr(spares, "UP_S", 20.0)
        (tmp_path / "go").touch()
        await until_state(found, "ready")
        assert found.status()[0].why == ""


async def test_without_the_package_or_vllm_the_status_says_why_there_are_none(tmp_path: Path) -> None:
    make_vllm(tmp_path)
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\nexec {sys.executable} -SE "$@"\n')
    python.chmod(0o755)
    bare = tmp_path / "bare"
    bare.write_text(f"#!{python}\n")
    async with kept(alone(tmp_path, executable=str(bare))) as found:
        await until_state(found, "given-up", "healer's package is not beside vLLM")
    async with kept(alone(tmp_path, executable="/nowhere/vllm")) as found:
        assert "/nowhere/vllm" in found.status()[0].why
    (tmp_path / "site/vllm/entrypoints/cli/main.py").unlink()
    async with kept(alone(tmp_path)) as found:
        await until_state(found, "given-up", "vllm.entrypoints.cli.main")


async def test_a_module_that_initialises_cuda_is_left_out_of_the_next_spare(tmp_path: Path) -> None:
    make_vllm(tmp_path)
    python = tmp_path / "python"
    python.write_text(
        f"#!{sys.executable}\nimport os, sys\nsaid = b'ready\": true' if 'a.b' in sys.argv else b'unfit\": \"a.b\"'\n"
        "os.write(0, b'{\"' + said + b'}\\n')\nos.read(0, 9)\n"
    )
    python.chmod(0o755)
    script = tmp_path / "other"
    script.write_text(f"#!{python}\n")
    async with kept(alone(tmp_path, executable=str(script))) as found:
        await until_state(found, "ready")


async def test_all_that_a_spare_that_is_ended_has_started_is_ended_too(tmp_path: Path) -> None:
    make_vllm(tmp_path, "import subprocess\nsubprocess.Popen(['sleep', '1000'])\n")
    async with kept(alone(tmp_path)) as found:
        await until_state(found, "ready")
        leader = found.status()[0].pid
        left = sessions({leader})[leader]
        assert len(left) == 2
    assert not [one.pid for one in left if process.is_alive(one.pid, one.pid_start)]


def test_several_api_servers_of_a_rank_rule_spares_out(tmp_path: Path) -> None:
    make_vllm(tmp_path)
    (one,) = alone(tmp_path, args=("--api-server-count", "2")).status()
    assert (one.state, "--api-server-count" in one.why) == ("given-up", True)
    assert msgspec.to_builtins(one)["pid"] == 0
