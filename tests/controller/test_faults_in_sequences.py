"""Faults that hit in the middle of a sequence: whoever is not at fault stays, and nothing is left behind."""

import asyncio
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from elastic import process
from elastic.client import random_prompts
from elastic.controller import roster as roster_module
from elastic.controller.executor import Executor
from elastic.controller.state import GatewayProcess
from elastic.errors import ElasticError
from elastic.launch.base import Launched
from elastic.launch.local import LocalLauncher
from elastic.paths import gateway_path, read_json
from tests.controller.test_executor import VOCAB, Owner, checkpoint, group, run_dir, until

__all__ = ["checkpoint", "run_dir"]


def rank_processes(owner: Owner) -> int:
    launcher = LocalLauncher(owner.executor.config)
    found = [p for p in launcher.strays() if process.is_alive(p.pid, p.pid_start)]
    return sum(b"elastic.rank" in Path(f"/proc/{p.pid}/cmdline").read_bytes() for p in found)


def sockets(run_dir: Path) -> set[str]:
    return {path.name for path in run_dir.glob("rank-*.sock")}


def once(owner: Owner, place: Any, name: str, act: Callable[[], Any], kind: str = "join") -> None:
    """Run `act` before the first call of the coroutine function `place.name` in a sequence of this kind."""
    original = getattr(place, name)

    async def wrapped(*args: Any, **kwargs: Any) -> Any:
        recorder = owner.executor._sequences.recorder
        if recorder is not None and recorder.kind == kind:
            setattr(place, name, original)
            if (waiting := act()) is not None:
                await waiting
        return await original(*args, **kwargs)

    setattr(place, name, wrapped)


def signal_joiner(owner: Owner, slot: int, signum: signal.Signals) -> None:
    member = owner.executor._boots.ready[slot].member
    assert process.send_signal(member.pid, member.pid_start, signum)


async def test_a_rank_that_is_not_wanted_any_more_while_it_boots_leaves_no_process(
    checkpoint: Path, run_dir: Path
) -> None:
    async with group(checkpoint, run_dir) as owner:
        before = sockets(run_dir)
        owner.executor.scale(4, reason="test")
        await until(lambda: owner.executor.status().slots[3].state == "booting" and rank_processes(owner) == 4, 10)
        owner.executor.scale(3, reason="test")
        await until(lambda: owner.executor.status().slots[3].state == "empty", 10)
        await until(lambda: rank_processes(owner) == 3, 10)
        assert sockets(run_dir) == before


async def test_a_retired_rank_leaves_no_socket(checkpoint: Path, run_dir: Path) -> None:
    async with group(checkpoint, run_dir) as owner:
        executor = owner.executor

        async def hang() -> None:
            # it has no time to clean up behind itself
            owner.signal(2, signal.SIGSTOP)

        once(owner, executor._sequences, "_dismiss", hang, kind="retire")
        executor.scale(2, reason="test")
        await executor.settled(deadline_s=20)
        assert sockets(run_dir) == {"rank-0.1.sock", "rank-1.1.sock"}
        assert rank_processes(owner) == 2


async def test_a_joiner_that_dies_while_the_group_parks_for_it_fails_no_sequence(
    checkpoint: Path, run_dir: Path
) -> None:
    async with group(checkpoint, run_dir) as owner:
        executor = owner.executor
        pids = [owner.member(s).pid for s in range(3)]

        async def die() -> None:
            signal_joiner(owner, 3, signal.SIGKILL)
            await until(lambda: 3 not in executor._boots.ready, 10)

        once(owner, executor._group, "agree", die)
        executor.scale(4, reason="test")
        await executor.settled(deadline_s=30)
        assert [r.outcome for r in owner.reports if r.kind != "form"] == ["rolled-back", "committed"]
        assert [owner.member(s).pid for s in range(3)] == pids
        assert rank_processes(owner) == 4


async def test_a_joiner_that_hangs_costs_no_survivor(checkpoint: Path, run_dir: Path) -> None:
    async with group(checkpoint, run_dir, prepare_deadline_s=12.0) as owner:
        executor = owner.executor
        pids = [owner.member(s).pid for s in range(3)]
        once(owner, executor._sequences._joining, "prepare", lambda: signal_joiner(owner, 3, signal.SIGSTOP))
        executor.scale(4, reason="test")
        await executor.settled(deadline_s=40)
        assert [r.outcome for r in owner.reports if r.kind != "form"] == ["rolled-back", "committed"]
        assert [owner.member(s).pid for s in range(3)] == pids
        assert rank_processes(owner) == 4


async def test_a_death_while_a_joiner_hangs_is_covered_at_once(checkpoint: Path, run_dir: Path) -> None:
    """The survivors' workers wait for the joiner; the commit must not wait behind them until its deadline passes."""
    async with group(checkpoint, run_dir, max_ranks=5) as owner:
        executor = owner.executor
        prompts = random_prompts(6, VOCAB, seed=8)
        want = await owner.answers(prompts)
        pids = [owner.member(s).pid for s in range(2)]

        def hang() -> None:
            signal_joiner(owner, 3, signal.SIGSTOP)
            asyncio.get_running_loop().call_later(0.3, owner.signal, 2, signal.SIGKILL)

        once(owner, executor._sequences._joining, "prepare", hang)
        executor.scale(4, reason="test")
        await until(lambda: any(r.kind == "loss" for r in owner.reports), 20)
        loss = next(r for r in owner.reports if r.kind == "loss")
        assert (loss.outcome, loss.live) == ("committed", (0, 1))
        assert [owner.member(s).pid for s in range(2)] == pids
        assert await owner.answers(prompts) == want


async def test_a_full_disk_does_not_end_healing(
    checkpoint: Path, run_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with group(checkpoint, run_dir) as owner:

        def full(*_: object) -> None:
            raise OSError(28, os.strerror(28))

        monkeypatch.setattr(roster_module, "save_state", full)
        pid = owner.member(1).pid
        owner.signal(1, signal.SIGKILL)
        await until(lambda: any(r.kind == "loss" for r in owner.reports), 10)
        await owner.executor.settled(deadline_s=30)
        assert owner.member(1).pid != pid
        monkeypatch.undo()
        prompts = random_prompts(4, VOCAB, seed=10)
        await owner.answers(prompts)


@pytest.mark.parametrize("before", ["agree", "switch"])
async def test_a_controller_that_ends_while_the_group_stands_sets_it_going_first(
    checkpoint: Path, run_dir: Path, before: str
) -> None:
    async with group(checkpoint, run_dir) as owner:
        executor, reached = owner.executor, asyncio.Event()
        prompts = random_prompts(4, VOCAB, seed=11)
        want = await owner.answers(prompts)

        async def stand() -> None:
            reached.set()
            await asyncio.Event().wait()

        once(owner, executor._group, before, stand)
        executor.scale(4, reason="test")
        async with asyncio.timeout(30):
            await reached.wait()
        await executor.close()
        async with asyncio.timeout(20):
            assert await owner.answers(prompts) == want


async def test_a_move_to_other_slots_altogether_takes_nobody_away_before_the_others_are_there(
    checkpoint: Path, run_dir: Path
) -> None:
    async with group(checkpoint, run_dir, ranks=2, redundant_experts=0) as owner:
        executor = owner.executor
        prompts = random_prompts(4, VOCAB, seed=12)
        want = await owner.answers(prompts)
        executor.scale([2, 3], reason="test")
        while executor.status().live != (2, 3):
            assert await owner.answers(prompts) == want
        await executor.settled(deadline_s=20)
        assert await owner.answers(prompts) == want
        assert {r.outcome for r in owner.reports} == {"committed"}


async def test_ranks_are_healed_while_no_gateway_can_be_started(checkpoint: Path, run_dir: Path) -> None:
    class Launcher(LocalLauncher):
        broken = True

        def launch_gateway(self) -> Launched:
            if self.broken:
                raise ElasticError("the port is taken")
            return super().launch_gateway()

    async with group(checkpoint, run_dir) as owner:
        prompts = random_prompts(4, VOCAB, seed=13)
        want = await owner.answers(prompts)
        await owner.executor.close()
        gateway = read_json(gateway_path(run_dir), GatewayProcess)
        assert process.send_signal(gateway.pid, gateway.pid_start, signal.SIGKILL)
        await until(lambda: not process.is_alive(gateway.pid, gateway.pid_start), 5)
        launcher = Launcher(owner.executor.config)
        owner.executor = Executor(owner.executor.config, owner.on_event, launcher)
        assert "nothing to do" in await owner.executor.start()
        pid = owner.member(1).pid
        owner.signal(1, signal.SIGKILL)
        await until(lambda: any(r.kind == "loss" for r in owner.reports), 10)
        await owner.executor.settled(deadline_s=30)
        assert owner.member(1).pid != pid
        launcher.broken = False
        await until(lambda: owner.executor.gateway_http not in ("", gateway.http), 20)
        await until(lambda: gateway_path(run_dir).exists(), 5)
        assert await owner.answers(prompts) == want
