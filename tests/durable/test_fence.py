"""A controller that was elected later shuts out the one before it: at each rank, at the gateway, whatever the first was doing."""

import asyncio
import contextlib
import json
import os
import shutil
import signal
import sys
import tempfile
from collections.abc import AsyncIterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from elastic import process
from elastic.channel import Channel
from elastic.client import Traffic, random_prompts
from elastic.config import GroupConfig
from elastic.controller.executor import Executor
from elastic.controller.records import Event, Fenced, RankGone
from elastic.controller.state import GroupState
from elastic.errors import Retryable, Superseded
from elastic.paths import read_json, state_path
from elastic.protocol import Counters, GatewayQuery, GatewayStatus, Hello, Leave, Query, Status
from elastic.rank.agent import Agent
from elastic.rank.gate import Gate
from elastic.view import Member
from healer.deployment import eventually
from tests.durable import forkserver
from tests.durable.forkserver import Forked, Order
from tests.durable.points import COUNTING, Points
from tests.durable.scenarios import sample
from tests.durable.simulated_group import assert_answers, assert_never_back
from tests.durable.simulated_launcher import SimulatedLauncher, comm, daemon_comm
from tests.durable.simulated_rank import Accepted, answer
from tests.gateway.gateway_fakes import VOCAB, make_checkpoint


def hello(term: int) -> Hello:
    return Hello(role="controller", group="g", term=term)


class Watched:
    """An agent by itself, and connections to it."""

    def __init__(self, folder: Path, prepare_deadline_s: float = 60.0) -> None:
        self.address = str(folder / "rank-0.1.sock")
        config = GroupConfig(
            name="g",
            run_dir="r",
            checkpoint="c",
            ranks=1,
            max_ranks=1,
            slots_per_rank=1,
            prepare_deadline_s=prepare_deadline_s,
        )
        quiet: Any = SimpleNamespace(
            poll_faults=list,
            waiting=0,
            running=0,
            counters=Counters(),
            waiting_on=tuple,
            view=None,
            contents=tuple,
            endpoint=lambda: b"",
        )
        self.gate = Gate(lambda: None)
        Agent(config, 0, 1, self.address, "", self.gate, quiet, quiet, quiet, quiet).start()

    async def connect(self, term: int) -> Channel:
        channel = await Channel.open(self.address, hello(term), f"term {term}", deadline_s=5)
        channel.start()
        return channel


async def ask(channel: Channel) -> Status:
    return await channel.call(Query(id=channel.next_id()), Status, deadline_s=5)


async def test_a_rank_ends_the_connections_of_lower_terms_before_it_answers_the_newcomer(tmp_path: Path) -> None:
    agent = Watched(tmp_path)
    old, same = await agent.connect(1), await agent.connect(1)
    assert (await ask(old)).term == (await ask(same)).term == 1
    new = await agent.connect(2)
    assert (await ask(new)).term == 2
    for channel in (old, same):
        await eventually(lambda c=channel: _closed(c), "the older connection is closed", 5)
        with pytest.raises(Superseded, match="term 1 is over: a controller of term 2 has taken this group"):
            await ask(channel)
    assert (await ask(new)).term == 2
    await new.aclose()


async def test_a_rank_refuses_a_controller_whose_term_is_over_and_says_so(tmp_path: Path) -> None:
    agent = Watched(tmp_path)
    new = await agent.connect(7)
    await ask(new)
    await new.aclose()
    # remembered without anybody who holds it
    for term in (6, 0):
        late = await agent.connect(term)
        with pytest.raises(Superseded, match=f"term {term} is over: a controller of term 7"):
            await ask(late)


async def test_a_command_that_lay_unread_when_its_controller_was_superseded_is_not_carried_out(tmp_path: Path) -> None:
    agent = Watched(tmp_path)
    old = await agent.connect(1)
    await ask(old)
    new = await agent.connect(2)
    # both reach the agent in one turn of its loop at most; the fence comes first or the command is answered
    leaving = asyncio.create_task(old.call(Leave(id=99, epoch=1), object, deadline_s=5))
    await ask(new)
    with contextlib.suppress(Superseded, Retryable):
        await leaving
    with pytest.raises(Superseded):
        await ask(old)
    await new.aclose()


async def test_a_rank_that_no_controller_comes_for_ends_itself(tmp_path: Path) -> None:
    agent = Watched(tmp_path, prepare_deadline_s=0.5)
    controller = await agent.connect(1)
    await asyncio.sleep(1.2)
    assert (await ask(controller)).phase == "booted", "somebody holds it, however long it takes"
    assert agent.gate.in_round is False
    await controller.aclose()
    began = asyncio.get_running_loop().time()
    assert await asyncio.to_thread(agent.gate.next) == "exit"
    assert 0.5 < asyncio.get_running_loop().time() - began < 5.0


async def test_a_second_process_for_the_same_rank_does_not_take_its_place(tmp_path: Path) -> None:
    first = Watched(tmp_path)
    code = (
        "import sys; from pathlib import Path; from tests.durable.test_fence import Watched; "
        "Watched(Path(sys.argv[1])); import time; time.sleep(30)"
    )
    second = await asyncio.create_subprocess_exec(
        sys.executable, "-c", code, str(tmp_path), stderr=asyncio.subprocess.PIPE, cwd=Path(__file__).parents[2]
    )
    _, said = await asyncio.wait_for(second.communicate(), 60)
    assert second.returncode
    assert b"another process is this rank already" in said
    controller = await first.connect(1)
    assert (await ask(controller)).pid == os.getpid()
    await controller.aclose()
    assert [path.name for path in tmp_path.iterdir()] == ["rank-0.1.sock"]


async def _closed(channel: Channel) -> bool | None:
    return True if channel.closed else None


# --- executors in this process, ranks and gateway as processes -----------------------------------------------------------


class Place:
    """A run directory for one simulated group, and what runs in it."""

    def __init__(self, server: str) -> None:
        self.root = Path(tempfile.mkdtemp(prefix="sim-", dir="/tmp"))
        self.run_dir = self.root / "run"
        self.run_dir.mkdir()
        self.server = server
        self.config = GroupConfig(
            name="g",
            run_dir=str(self.run_dir),
            checkpoint=str(make_checkpoint(self.root / "model")),
            ranks=3,
            max_ranks=4,
            slots_per_rank=4,
            redundant_experts=2,
            host_tier=False,
            heartbeat_s=0.1,
            prepare_deadline_s=3.0,
        )
        (self.root / "config.json").write_bytes(msgspec.json.encode(self.config))

    def candidate(self, name: str) -> tuple[Forked, Points]:
        page = self.root / f"points-{name}"
        points = Points(page)
        arguments = (str(self.root / "config.json"), str(page), self.server, name)
        log = str(self.root / f"{name}.log")
        return forkserver.ask(self.server, Order("holder", daemon_comm(self.run_dir), log, arguments)), points

    def said(self, name: str) -> str:
        path = self.root / f"{name}.log"
        return path.read_text() if path.exists() else ""

    def members(self) -> dict[int, Member]:
        return {m.slot: m for m in read_json(state_path(self.run_dir), GroupState).members}

    def running(self) -> set[int]:
        return {p.pid for p in forkserver.named(comm(self.run_dir))}

    def assert_terms_never_go_back(self) -> set[int]:
        """Returns the terms whose commands were accepted."""
        terms: set[int] = set()
        for path in (self.run_dir / "commands").glob("*.jsonl"):
            accepted = [msgspec.json.decode(line, type=Accepted) for line in path.read_bytes().splitlines()]
            assert_never_back(path.stem, [c.term for c in accepted], "term")
            assert_never_back(path.stem, [c.epoch for c in accepted], "epoch")
            terms |= {c.term for c in accepted}
        return terms

    def gateway(self) -> str:
        return str(json.loads((self.run_dir / "gateway.json").read_text())["http"])

    async def end(self) -> None:
        names = (daemon_comm(self.run_dir), comm(self.run_dir))
        while left := [p for name in names for p in forkserver.named(name)]:
            for each in left:
                process.send_signal(each.pid, each.pid_start, signal.SIGKILL)
            await asyncio.sleep(0.01)
        shutil.rmtree(self.root, ignore_errors=True)


@pytest.fixture
async def place(fork_server: str) -> AsyncIterator[Place]:
    made = Place(fork_server)
    yield made
    await made.end()


class Owner:
    def __init__(self, place: Place, term: int) -> None:
        self.fenced: list[str] = []
        self.executor = Executor(place.config, self.on_event, SimulatedLauncher(place.config, place.server), term=term)

    def on_event(self, event: Event) -> None:
        if isinstance(event, RankGone):
            self.executor.lose([event.member.slot], cause="death", detected=event.at)
        elif isinstance(event, Fenced):
            self.fenced.append(event.why)


async def test_a_controller_that_is_superseded_touches_nothing_any_more(place: Place) -> None:
    first, second = Owner(place, 1), Owner(place, 2)
    await first.executor.start()
    processes = place.running()
    assert "nothing to do" in await second.executor.start()
    await eventually(lambda: _true(first.fenced), "the first controller knows", 5)
    assert "term 1 is over: a controller of term 2" in first.fenced[0]
    with pytest.raises(Superseded):
        first.executor.scale(4, reason="test")
    first.executor.lose([0], cause="test", detected=0.0)
    await first.executor.stop()
    assert place.running() == processes
    assert len(first.fenced) == 1
    # and the second one heals as ever
    old = place.members()
    process.send_signal(old[1].pid, old[1].pid_start, signal.SIGKILL)
    await eventually(lambda: _replaced(place, 1, old), "slot 1 has a new process", 20)
    await second.executor.settled(deadline_s=20)
    assert {s: m for s, m in place.members().items() if s != 1} == {s: m for s, m in old.items() if s != 1}
    assert place.assert_terms_never_go_back() == {1, 2}
    channel = await Channel.open(str(place.run_dir / "gateway.sock"), hello(2), "gateway", deadline_s=5)
    channel.start()
    status = await channel.call(GatewayQuery(id=channel.next_id()), GatewayStatus, deadline_s=5)
    assert (status.term, status.epoch) == (2, second.executor.status().epoch)
    await channel.aclose()
    await second.executor.stop()
    assert not place.running()


async def test_a_controller_whose_term_is_over_is_refused_at_its_start_and_ends_nobody(place: Place) -> None:
    owner = Owner(place, 5)
    await owner.executor.start()
    processes, members = place.running(), place.members()
    for term in (4, 0):
        late = Owner(place, term)
        with pytest.raises(Superseded, match=f"term {term} is over"):
            await late.executor.start()
        assert place.running() == processes
        assert place.members() == members
    assert not owner.fenced
    await owner.executor.settled(deadline_s=5)
    await owner.executor.stop()


async def test_a_controller_whose_lease_is_over_neither_starts_nor_ends_a_process(place: Place) -> None:
    owner = Owner(place, 1)
    armed = [True]
    owner.executor = Executor(
        place.config,
        owner.on_event,
        SimulatedLauncher(place.config, place.server),
        term=1,
        armed=lambda: armed[0],
    )
    await owner.executor.start()
    processes = place.running()
    armed[0] = False
    with pytest.raises(Superseded, match="the lease of term 1 is over"):
        owner.executor.scale(4, reason="test")
    owner.executor.lose([0, 1], cause="test", detected=0.0)
    await owner.executor.stop()
    assert place.running() == processes


# --- two candidates as processes, the holder stopped at a point and woken when its successor has the group ------------------

SAMPLED, SAMPLED_SLOWLY = 3, 30


async def stop_and_wake(place: Place, at: int | None) -> int:
    """Two candidates; a rank dies; the holder is stopped at its `at`-th point from then on, longer than its lease lasts, and
    set going again when the other has made the group whole. Without `at`: how many points there are."""
    first, points = place.candidate("first")
    await eventually(lambda: _said(place, "first", "formed"), "the first candidate has formed the group", 30)
    place.candidate("second")
    old, prompts = place.members(), random_prompts(2, 256, seed=at or 0)
    traffic = Traffic(place.gateway(), prompts, 40, deadline_s=60.0)
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(traffic.run())
        await traffic.reached(8)
        points.arm(at or COUNTING, signal.SIGSTOP)
        process.send_signal(old[1].pid, old[1].pid_start, signal.SIGKILL)
        if at is not None:
            await eventually(lambda: _stopped(first), f"the holder stops at point {at}", 20)
            await eventually(lambda: _said(place, "second", "adopted"), "the second candidate takes over", 30)
        await eventually(lambda: _replaced(place, 1, old), "slot 1 has a new process", 30)
        await eventually(lambda: _whole(place, [0, 1, 2]), "the group is whole", 30)
    if at is not None:
        members, running = place.members(), place.running()
        process.send_signal(first.pid, first.pid_start, signal.SIGCONT)
        await eventually(lambda: _said(place, "first", "let go"), "the first candidate lets go", 20)
        assert place.members() == members, f"{points.label}: the woken holder wrote the state file"
        # one that it was about to launch when it was stopped ends by itself: its name is taken, or nobody comes for it
        await eventually(lambda: _is(place.running(), running), f"{points.label}: nobody was started or ended", 10)
        process.send_signal(members[2].pid, members[2].pid_start, signal.SIGKILL)
        await eventually(lambda: _replaced(place, 2, members), "the second candidate heals", 30)
        await eventually(lambda: _whole(place, [0, 1, 2]), "the group is whole again", 30)
        assert place.assert_terms_never_go_back() == {1, 2}, points.label
    assert_answers(traffic.answers, [answer(p, 40, VOCAB) for p in prompts])
    return points.count


@pytest.mark.parametrize("share", range(SAMPLED))
async def test_a_holder_that_is_stopped_beyond_its_lease_and_woken_is_never_a_second_writer(
    fork_server: str, share: int
) -> None:
    await sampled(fork_server, SAMPLED, [share])


@pytest.mark.slow
@pytest.mark.timeout(1200)
async def test_a_holder_may_be_stopped_at_any_point(fork_server: str) -> None:
    await sampled(fork_server, SAMPLED_SLOWLY, range(SAMPLED_SLOWLY))


async def sampled(fork_server: str, size: int, shares: Any) -> None:
    counted = Place(fork_server)
    try:
        points = await stop_and_wake(counted, None)
    finally:
        await counted.end()
    # the last points may not come, where two writes are one
    chosen = sample(points - 8, size, "stop and wake")
    for share in shares:
        place = Place(fork_server)
        try:
            await stop_and_wake(place, chosen[share])
        except BaseException as error:
            error.add_note(
                f"point {chosen[share]} of {points}; first: {place.said('first')}; second: {place.said('second')}"
            )
            raise
        finally:
            await place.end()


async def _true(found: object) -> bool | None:
    return True if found else None


async def _said(place: Place, name: str, word: str) -> bool | None:
    return True if word in place.said(name) else None


async def _is(found: object, wanted: object) -> bool | None:
    return True if found == wanted else None


async def _stopped(forked: Forked) -> bool | None:
    return True if process.state(forked.pid, forked.pid_start) == "T" else None


async def _replaced(place: Place, slot: int, old: dict[int, Member]) -> bool | None:
    now = place.members()
    return True if slot in now and now[slot] != old[slot] else None


async def _whole(place: Place, slots: list[int]) -> bool | None:
    """All of them have resumed, or gone over to, the same newest view."""
    resumed = []
    for member in place.members().values():
        path = place.run_dir / "commands" / f"rank-{member.slot}.{member.incarnation}.jsonl"
        accepted = [msgspec.json.decode(line, type=Accepted) for line in path.read_bytes().splitlines()]
        resumed.append((member.slot, accepted[-1].kind, accepted[-1].epoch) if accepted else (member.slot, "", 0))
    same = len({epoch for _, _, epoch in resumed}) == 1 and {kind for _, kind, _ in resumed} <= {"Resume", "Switch"}
    return True if same and sorted(slot for slot, _, _ in resumed) == slots else None
