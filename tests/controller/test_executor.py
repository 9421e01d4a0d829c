"""The executor by itself, with an owner that decides as each test wants: real ranks, real signals."""

import asyncio
import contextlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import msgspec
import pytest

from elastic import process
from elastic.channel import Channel
from elastic.client import Tokens, Traffic, random_prompts
from elastic.config import GroupConfig
from elastic.controller.executor import Executor
from elastic.controller.link import RankLink
from elastic.controller.records import BootFailed, Event, RankGone, SequenceEnded, SequenceReport
from elastic.errors import ElasticError, NeedsReplan
from elastic.launch.base import Launched
from elastic.launch.local import LocalLauncher
from elastic.protocol import Abort, Commit, Done, Hello, Leave, Query, Status, StopAt, encode
from elastic.rank.gate import Phase
from elastic.view import Member

VOCAB = 512


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model") / "tiny"
    command = [sys.executable, "-m", "elastic.tools.make_checkpoint", str(folder), "--layers", "2"]
    subprocess.run([*command, "--vocab", str(VOCAB)], check=True, capture_output=True)
    return folder


@pytest.fixture
def run_dir() -> Iterator[Path]:
    folder = Path(tempfile.mkdtemp(prefix="ex-"))
    yield folder
    shutil.rmtree(folder, ignore_errors=True)


class Launcher(LocalLauncher):
    """Stops the first process that is launched in a slot of `stops`."""

    stops: frozenset[int] = frozenset()

    def launch(self, slot: int, incarnation: int) -> Launched:
        started = super().launch(slot, incarnation)
        if slot in self.stops:
            self.stops -= {slot}
            assert process.send_signal(started.pid, started.pid_start, signal.SIGSTOP)
        return started


class Owner:
    """Takes events; condemns the dead, and nobody else, while `heals`."""

    def __init__(self, config: GroupConfig) -> None:
        self.heals = True
        self.reports: list[SequenceReport] = []
        self.boots_failed: list[BootFailed] = []
        self.launcher = Launcher(config)
        self.executor = Executor(config, self.on_event, self.launcher)

    def on_event(self, event: Event) -> None:
        if isinstance(event, BootFailed):
            self.boots_failed.append(event)
        if isinstance(event, SequenceEnded):
            self.reports.append(event.report)
        if isinstance(event, RankGone) and self.heals:
            self.executor.lose([event.member.slot], cause="death", detected=event.at)

    def member(self, slot: int) -> Member:
        member = self.executor.status().slots[slot].member
        assert member is not None
        return member

    def signal(self, slot: int, signum: signal.Signals) -> None:
        member = self.member(slot)
        assert process.send_signal(member.pid, member.pid_start, signum)

    async def answers(self, prompts: list[Tokens]) -> list[Tokens]:
        traffic = Traffic(self.executor.gateway_http, prompts, 32)
        answers = await traffic.run()
        assert [a.error for a in answers] == [None] * len(prompts)
        return [a.tokens for a in answers]


@contextlib.asynccontextmanager
async def group(checkpoint: Path, run_dir: Path, **changes: object) -> AsyncIterator[Owner]:
    sizes: dict[str, object] = {"ranks": 3, "max_ranks": 4, "slots_per_rank": 8, "redundant_experts": 8}
    config = GroupConfig(name="g", run_dir=str(run_dir), checkpoint=str(checkpoint), **(sizes | changes))  # type: ignore[arg-type]
    owner = Owner(config)
    try:
        await owner.executor.start()
        yield owner
    finally:
        await owner.executor.stop()


async def test_ranks_that_masked_a_paused_peer_by_themselves_agree_again_without_a_restart(
    checkpoint: Path, run_dir: Path
) -> None:
    async with group(checkpoint, run_dir, ep_timeout_s=0.3, commit_deadline_s=4.0) as owner:
        prompts = random_prompts(6, VOCAB, seed=3)
        want = await owner.answers(prompts)
        pids = [owner.member(s).pid for s in range(3)]
        traffic = Traffic(owner.executor.gateway_http, prompts, 32)
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(traffic.run())
            await traffic.reached(30)
            owner.signal(1, signal.SIGSTOP)
            # nobody condemns it; the others' own timeout masks it, and they stand
            await until(lambda: any(r.kind == "loss" for r in owner.reports) or parked(owner), 10)
            owner.signal(1, signal.SIGCONT)
        assert [a.tokens for a in traffic.answers] == want
        await owner.executor.settled(deadline_s=20)
        assert [owner.member(s).pid for s in range(3)] == pids
        assert any(r.kind == "loss" and r.slots == () and r.outcome == "committed" for r in owner.reports)


async def test_a_step_that_is_run_again_by_the_same_ranks_loses_no_token_and_no_rank(
    checkpoint: Path, run_dir: Path
) -> None:
    async with group(checkpoint, run_dir) as owner:
        prompts = random_prompts(6, VOCAB, seed=6)
        want = await owner.answers(prompts)
        pids = [owner.member(s).pid for s in range(3)]
        traffic = Traffic(owner.executor.gateway_http, prompts, 32)
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(traffic.run())
            await traffic.reached(30)
            # a hiccup: it stands for a moment, the owner gives it time and has the others drop their step
            owner.signal(1, signal.SIGSTOP)
            owner.executor.release()
            await until(lambda: owner.executor.status().sequence is not None, 10)
            owner.signal(1, signal.SIGCONT)
        assert [a.tokens for a in traffic.answers] == want
        await owner.executor.settled(deadline_s=20)
        assert [owner.member(s).pid for s in range(3)] == pids
        report = next(r for r in owner.reports if r.reason.startswith("the step is run again, as the owner asked"))
        assert (report.kind, report.slots, report.outcome) == ("loss", (), "committed")


async def test_survivors_let_go_of_the_lost_at_once_however_busy_the_controller_s_loop_is(
    checkpoint: Path, run_dir: Path
) -> None:
    async with group(checkpoint, run_dir) as owner:
        prompts = random_prompts(6, VOCAB, seed=9)
        want = await owner.answers(prompts)
        traffic = Traffic(owner.executor.gateway_http, prompts, 32)
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(traffic.run())
            await traffic.reached(30)
            owner.heals = False
            owner.signal(1, signal.SIGSTOP)
            addresses = {slot: owner.member(slot).address for slot in (0, 2)}
            owner.executor.lose([1], cause="hang", detected=time.monotonic())
            with ThreadPoolExecutor(1) as elsewhere:
                # this waits without giving the loop back: no sequence has begun
                elsewhere.submit(lambda: asyncio.run(all_stand(addresses))).result(20)
            assert owner.executor.status().sequence is None
        assert [a.tokens for a in traffic.answers] == want


async def all_stand(addresses: dict[int, str]) -> None:
    """Raises where these ranks are not parked in time."""
    for slot, address in addresses.items():
        link = await RankLink.open(slot, 0, address, "g", lambda _: None, deadline_s=5, observe=True)
        try:
            async with asyncio.timeout(5):
                while (await link.refresh(deadline_s=5)).phase != Phase.PARKED:
                    pass
        finally:
            await link.aclose()


async def test_a_rank_that_answers_no_commit_is_given_up_and_the_others_go_on(checkpoint: Path, run_dir: Path) -> None:
    async with group(checkpoint, run_dir, ep_timeout_s=0.3, commit_deadline_s=1.0) as owner:
        prompts = random_prompts(6, VOCAB, seed=4)
        want = await owner.answers(prompts)
        pid = owner.member(2).pid
        traffic = Traffic(owner.executor.gateway_http, prompts, 32)
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(traffic.run())
            await traffic.reached(30)
            owner.signal(2, signal.SIGSTOP)
        assert [a.tokens for a in traffic.answers] == want
        await owner.executor.settled(deadline_s=30)
        assert owner.member(2).pid != pid


async def test_a_replacement_that_is_stopped_while_it_boots_is_given_up_long_before_its_deadline(
    checkpoint: Path, run_dir: Path
) -> None:
    async with group(checkpoint, run_dir, prepare_deadline_s=600.0) as owner:
        owner.launcher.stops = frozenset({1})
        owner.signal(1, signal.SIGKILL)
        await until(lambda: bool(owner.boots_failed), 60)
        assert "stopped while it booted" in owner.boots_failed[0].why
        await until(lambda: owner.executor.status().live == (0, 1, 2), 60)
        assert owner.member(1).incarnation == 3


async def test_a_running_group_of_other_sizes_is_refused_and_left_alone(checkpoint: Path, run_dir: Path) -> None:
    async with group(checkpoint, run_dir) as owner:
        prompts = random_prompts(4, VOCAB, seed=5)
        want = await owner.answers(prompts)
        await owner.executor.close()
        config = GroupConfig(
            name="g", run_dir=str(run_dir), checkpoint=str(checkpoint), ranks=3, max_ranks=4, slots_per_rank=16
        )
        with pytest.raises(ElasticError, match="slots_per_rank 8 \\(now 16\\)"):
            await Executor(config, lambda _: None).start()
        again = Owner(owner.executor.config)
        assert "nothing to do" in await again.executor.start()
        assert await again.answers(prompts) == want
        owner.executor = again.executor


async def test_a_controller_that_was_left_behind_can_change_nothing(checkpoint: Path, run_dir: Path) -> None:
    async with group(checkpoint, run_dir) as owner:
        prompts = random_prompts(4, VOCAB, seed=6)
        want = await owner.answers(prompts)
        status = owner.executor.status()
        hello = Hello(role="controller", group="g")
        channel = await Channel.open(owner.member(0).address, hello, "rank 0", deadline_s=5)
        channel.start()
        view = (await channel.call(Query(id=channel.next_id()), Status, deadline_s=5)).view
        assert view is not None
        old = status.epoch - 1
        commit = Commit(id=2, epoch=old, view=view, peers=(), moves=(), round=0, base=0)
        for order in (
            Abort(id=3, epoch=old, lost=(1,)),
            StopAt(id=4, epoch=old, round=10**9),
            Leave(id=5, epoch=old),
            commit,
        ):
            with pytest.raises(NeedsReplan, match=f"epoch {old} is older than {status.epoch}"):
                await channel.call(order, Done, deadline_s=5)
        # a command that does not fit the phase is refused too, whatever its epoch
        with pytest.raises(NeedsReplan, match="serving, not parked"):
            await channel.call(msgspec.structs.replace(commit, epoch=status.epoch), Done, deadline_s=5)
        await channel.aclose()
        assert await owner.answers(prompts) == want
        assert owner.executor.status().epoch == status.epoch


async def test_garbage_on_a_rank_s_socket_hurts_nobody(checkpoint: Path, run_dir: Path) -> None:
    async with group(checkpoint, run_dir) as owner:
        prompts = random_prompts(4, VOCAB, seed=6)
        want = await owner.answers(prompts)
        for garbage in (b"GET / HTTP/1.1\r\n\r\n", b"\0\0\0\4abcd", b"\xff" * 64, encode(Query(id=1)), b""):
            reader, writer = await asyncio.open_unix_connection(owner.member(1).address)
            writer.write(garbage)
            writer.write_eof()
            async with asyncio.timeout(5):
                assert await reader.read() == b""
            writer.close()
        assert await owner.answers(prompts) == want


async def test_stop_leaves_no_process_and_no_shared_memory(checkpoint: Path, run_dir: Path) -> None:
    async with group(checkpoint, run_dir) as owner:
        pids = [(owner.member(s).pid, owner.member(s).pid_start) for s in range(3)]
    assert not any(process.is_alive(pid, start) for pid, start in pids)
    assert not [name for name in os.listdir("/dev/shm") if run_dir.name in name]
    assert not list(run_dir.glob("rank-*.sock"))


def parked(owner: Owner) -> bool:
    return owner.executor.status().sequence is not None


async def until(condition, deadline_s: float) -> None:  # type: ignore[no-untyped-def]
    end = time.monotonic() + deadline_s
    while not condition():
        assert time.monotonic() < end, "not in time"
        await asyncio.sleep(0.005)
