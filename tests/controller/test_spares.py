"""Warm spares: real processes that stand by, are adopted, and are killed at bad moments."""

import asyncio
import contextlib
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path

import pytest

from elastic import process
from elastic.client import Tokens, Traffic, random_prompts
from elastic.config import GroupConfig
from elastic.controller.ending import end_group
from elastic.controller.executor import Executor
from elastic.controller.records import BootFailed, Event, RankGone, SequenceEnded, SequenceReport, SpareState
from elastic.launch.base import Launched
from elastic.launch.local import LocalLauncher
from elastic.paths import log_path
from elastic.rank.spare import prepared_for, slots_of_gpu
from elastic.view import Member

VOCAB = 512
PROMPTS = random_prompts(6, VOCAB, seed=11)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model") / "tiny"
    command = [sys.executable, "-m", "elastic.tools.make_checkpoint", str(folder), "--layers", "2"]
    subprocess.run([*command, "--vocab", str(VOCAB)], check=True, capture_output=True)
    return folder


@pytest.fixture
def run_dir() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="sp-", dir="/tmp") as folder:
        yield Path(folder)


class Owner:
    """Condemns the dead."""

    def __init__(self, config: GroupConfig, launcher: LocalLauncher | None = None) -> None:
        self.reports: list[SequenceReport] = []
        self.boots_failed: list[BootFailed] = []
        self.executor = Executor(config, self.on_event, launcher)

    def on_event(self, event: Event) -> None:
        if isinstance(event, SequenceEnded):
            self.reports.append(event.report)
        elif isinstance(event, BootFailed):
            self.boots_failed.append(event)
        elif isinstance(event, RankGone):
            self.executor.lose([event.member.slot], cause="death", detected=event.at)

    def member(self, slot: int) -> Member:
        member = self.executor.status().slots[slot].member
        assert member is not None
        return member

    def spares(self) -> tuple[SpareState, ...]:
        return self.executor.status().spares

    async def stand_by(self) -> None:
        await until(lambda: all(s.state == "ready" for s in self.spares()))

    async def killed(self, *slots: int) -> None:
        """Kill ranks and wait until others serve in their slots."""
        pids = {slot: self.member(slot).pid for slot in slots}
        for slot in slots:
            kill(self.member(slot).pid)
        await until(lambda: not set(slots) & set(self.executor.status().live) or self._replaced(pids))
        await self.executor.settled(deadline_s=40)
        await until(lambda: self._replaced(pids))

    def _replaced(self, pids: dict[int, int]) -> bool:
        slots = self.executor.status().slots
        return all(slots[s].state == "live" and (m := slots[s].member) and m.pid != pid for s, pid in pids.items())

    async def answers(self) -> list[Tokens]:
        answers = await Traffic(self.executor.gateway_http, PROMPTS, 16).run()
        assert [a.error for a in answers] == [None] * len(PROMPTS)
        return [a.tokens for a in answers]

    def refills(self) -> list[bool]:
        """Of each joiner since the group was formed: whether it was a spare."""
        joins = [r for r in self.reports if r.kind == "join" and r.outcome == "committed"]
        return [joiner.spare for r in joins for joiner in r.joiners.values()]


def config(checkpoint: Path, run_dir: Path, spares: int) -> GroupConfig:
    return GroupConfig(
        name="g",
        run_dir=str(run_dir),
        checkpoint=str(checkpoint),
        ranks=3,
        max_ranks=3,
        slots_per_rank=16,
        redundant_experts=16,
        spares=spares,
    )


@contextlib.asynccontextmanager
async def group(configuration: GroupConfig, launcher: LocalLauncher | None = None) -> AsyncIterator[Owner]:
    owner = Owner(configuration, launcher)
    try:
        await owner.executor.start()
        await owner.stand_by()
        yield owner
    finally:
        await owner.executor.stop()


async def test_a_spare_takes_the_place_of_a_dead_rank_and_another_takes_its_own(
    checkpoint: Path, run_dir: Path
) -> None:
    async with group(config(checkpoint, run_dir, 1)) as owner:
        want = await owner.answers()
        for slot in (0, 2):
            await owner.stand_by()
            (spare,) = owner.spares()
            await owner.killed(slot)
            assert owner.member(slot).pid == spare.pid
            assert await owner.answers() == want
        assert owner.refills() == [True, True]
        # what it says now goes where the rank's words are looked for
        log = log_path(owner.executor.config.root, "rank-2.2").read_text()
        assert f"pid {owner.member(2).pid}" in log


async def test_no_process_starts_beside_a_group_that_changes(
    checkpoint: Path, run_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("elastic.controller.spares.CALM_S", 3600.0)
    async with group(config(checkpoint, run_dir, 1)) as owner:
        await owner.stand_by()
        await owner.killed(1)
        (spare,) = owner.spares()
        assert (spare.state, spare.pid) == ("absent", 0)
        assert not list(owner.executor.config.root.glob("spare-*.sock*"))


@pytest.mark.slow
async def test_two_deaths_with_one_spare_are_refilled_by_it_and_a_new_process(checkpoint: Path, run_dir: Path) -> None:
    async with group(config(checkpoint, run_dir, 1)) as owner:
        want = await owner.answers()
        await owner.killed(0, 1)
        assert sorted(owner.refills()) == [False, True]
        assert await owner.answers() == want
        assert not owner.boots_failed


async def test_an_idle_spare_that_dies_is_replaced_and_no_rank_is_touched(checkpoint: Path, run_dir: Path) -> None:
    async with group(config(checkpoint, run_dir, 1)) as owner:
        pids, epoch = [owner.member(s).pid for s in range(3)], owner.executor.status().epoch
        (first,) = owner.spares()
        kill(first.pid)
        await until(lambda: owner.spares()[0].state != "ready")
        await owner.stand_by()
        assert owner.spares()[0].pid != first.pid
        assert owner.executor.status().live == (0, 1, 2)
        assert [owner.member(s).pid for s in range(3)] == pids
        assert owner.executor.status().epoch == epoch


@pytest.mark.slow
async def test_spares_that_keep_dying_are_given_up_until_somebody_asks_anew(
    checkpoint: Path, run_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("elastic.controller.spares.BACKOFF_S", (0.0,))
    launcher = FailingSpares(config(checkpoint, run_dir, 1))
    async with contextlib.AsyncExitStack() as stack:
        owner = Owner(launcher.config, launcher)
        stack.push_async_callback(owner.executor.stop)
        await owner.executor.start()
        await until(lambda: owner.spares()[0].state == "given-up")
        assert launcher.launched == 3
        assert "no such spare" in owner.spares()[0].why
        # the group heals without any
        await owner.killed(1)
        assert owner.refills() == [False]
        launcher.fails = False
        owner.executor.scale(3, reason="asked anew")
        await owner.stand_by()


async def test_a_spare_killed_while_it_is_adopted_costs_no_attempt(checkpoint: Path, run_dir: Path) -> None:
    async with group(config(checkpoint, run_dir, 1)) as owner:
        want = await owner.answers()
        (spare,) = owner.spares()
        # stopped, it takes the order in its socket and does not answer: killed then, it is in the middle of it
        process.send_signal(spare.pid, process.start_time(spare.pid), signal.SIGSTOP)
        pid = owner.member(1).pid
        kill(pid)
        await until(lambda: 1 in {s.slot for s in owner.executor.status().slots if s.state == "booting"})
        await until(lambda: not any(s.state == "ready" for s in owner.spares()))
        kill(spare.pid)
        await owner.executor.settled(deadline_s=40)
        assert owner.member(1).pid not in (pid, spare.pid)
        assert owner.refills() == [False]
        assert not owner.boots_failed
        assert await owner.answers() == want


async def test_the_next_controller_takes_over_the_spares_of_the_last(checkpoint: Path, run_dir: Path) -> None:
    async with group(config(checkpoint, run_dir, 2)) as owner:
        pids = [s.pid for s in owner.spares()]
        await owner.executor.close()
        # one is asked less of now: the other is a stray
        again = Owner(config(checkpoint, run_dir, 1))
        await again.executor.start()
        owner.executor = again.executor
        await owner.stand_by()
        assert [s.pid for s in owner.spares()] == pids[:1]
        await until(lambda: not process.is_alive(pids[1], process.start_time(pids[1])))


async def test_no_spare_outlives_its_group(checkpoint: Path, run_dir: Path) -> None:
    async with group(config(checkpoint, run_dir, 1)) as owner:
        (spare,) = owner.spares()
        start = process.start_time(spare.pid)
    assert not process.is_alive(spare.pid, start)
    assert not list(run_dir.glob("spare-*.sock*"))


async def test_a_group_that_no_controller_holds_is_ended_with_its_spares(checkpoint: Path, run_dir: Path) -> None:
    owner = Owner(config(checkpoint, run_dir, 1))
    await owner.executor.start()
    await owner.stand_by()
    (spare,) = owner.spares()
    start = process.start_time(spare.pid)
    await owner.executor.close()
    assert process.is_alive(spare.pid, start)
    await asyncio.to_thread(end_group, run_dir)
    await until(lambda: not process.is_alive(spare.pid, start))
    assert not list(run_dir.glob("spare-*.sock*"))


@pytest.mark.parametrize(
    ("gpus", "slots", "gpu", "count", "may_take"),
    [
        ((), 2, 1, 2, (1,)),
        ((), 4, 0, 2, (0, 2)),
        ((0, 0, 1), 3, 0, 2, (0, 1)),
        # a GPU that is no slot's: two ranks that were apart do not come to share one
        ((0, 1), 2, 2, 3, (0, 1)),
    ],
)
def test_a_spare_never_brings_a_rank_to_the_gpu_of_another(
    gpus: tuple[int, ...], slots: int, gpu: int, count: int, may_take: tuple[int, ...]
) -> None:
    sizes = GroupConfig(
        name="g", run_dir="/r", checkpoint="/c", ranks=slots, max_ranks=slots, slots_per_rank=1, gpus=gpus
    )
    assert slots_of_gpu(sizes, gpu, count) == may_take


class FailingSpares(LocalLauncher):
    def __init__(self, configuration: GroupConfig) -> None:
        super().__init__(configuration)
        self.config = configuration
        self.fails = True
        self.launched = 0

    def launch_spare(self, number: int) -> Launched:
        self.launched += 1
        if self.fails:
            raise OSError("no such spare")
        return super().launch_spare(number)


def kill(pid: int) -> None:
    assert process.send_signal(pid, process.start_time(pid), signal.SIGKILL)


async def until(condition: Callable[[], object], deadline_s: float = 30.0) -> None:
    end = time.monotonic() + deadline_s
    while not condition():
        assert time.monotonic() < end, "not in time"
        await asyncio.sleep(0.005)


@pytest.mark.parametrize(
    ("spare_gpus", "prepared"),
    [
        ((), (0, 1, 2, 3, 0, 1, 2, 3)),
        ((0, 1), (0, 1, 2, 3, 0, 1, 2, 3)),
        ((1,), (1, 3, 1, 3)),
        ((0, 0, 1, 1), (0, 2, 1, 3, 0, 2)),
    ],
)
def test_every_slot_of_a_gpu_has_a_spare_prepared_for_it_before_one_has_two(
    spare_gpus: tuple[int, ...], prepared: tuple[int, ...]
) -> None:
    """Four slots on two GPUs in turn."""
    sizes = GroupConfig(
        name="g", run_dir="r", checkpoint="c", ranks=4, max_ranks=4, slots_per_rank=1, spare_gpus=spare_gpus
    )

    def gpu(number: int) -> int:
        return spare_gpus[number % len(spare_gpus)] if spare_gpus else number % 4 % 2

    found = [prepared_for(sizes, number, slots_of_gpu(sizes, gpu(number), 2)) for number in range(len(prepared))]
    assert tuple(found) == prepared
