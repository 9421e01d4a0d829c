"""Who only observes: sees the group under any controller's term, follows it through losses, and changes nothing."""

import asyncio
import json
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from elastic import process
from elastic.channel import Channel
from elastic.controller.observer import Observer
from elastic.controller.records import Event, RankBeat, RankGone
from elastic.errors import ElasticError, NeedsReplan
from elastic.protocol import Done, Hello, Leave, Query, Status, Steps, StepsTaken
from healer.deployment import eventually
from tests.durable.simulated_group import SimulatedGroup, assert_answers
from tests.durable.test_fence import Owner, Place, _replaced

ROOT = Path(__file__).parents[2]


@pytest.fixture
async def place(fork_server: str) -> AsyncIterator[Place]:
    made = Place(fork_server)
    yield made
    await made.end()


async def test_an_observer_follows_a_group_whatever_its_controllers_term_and_raises_none(place: Place) -> None:
    owner, events = Owner(place, 7), list[Event]()
    await owner.executor.start()
    observer = Observer(place.config, events.append)
    assert await observer.start() == "observes the running group: slots [0, 1, 2] at epoch 1"
    seen, known = observer.status(), owner.executor.status()
    assert (seen.live, seen.target, seen.term, seen.epoch) == ((0, 1, 2), (0, 1, 2), 7, known.epoch)
    assert (seen.placement_hash, seen.uncovered, seen.gateway) == (known.placement_hash, 0, "")
    assert observer.gateway_http == place.gateway()
    old = place.members()
    process.send_signal(old[1].pid, old[1].pid_start, signal.SIGKILL)
    await eventually(lambda: _replaced(place, 1, old), "slot 1 has a new process", 20)
    await owner.executor.settled(deadline_s=20)

    async def followed() -> bool | None:
        found, now = observer.status(), place.members()
        held = {s.slot: s.member for s in found.slots if s.state == "live"}
        fresh = found.epoch == owner.executor.status().epoch and {s: m.pid for s, m in now.items()} == {
            s: m.pid for s, m in held.items() if m is not None
        }
        return True if fresh else None

    await eventually(followed, "the observer has followed", 10)
    assert [e.member.slot for e in events if isinstance(e, RankGone)] == [1]
    newest = place.members()[1].pid

    async def heard() -> bool | None:
        return True if any(isinstance(e, RankBeat) and e.member.pid == newest for e in events) else None

    await eventually(heard, "it hears the new rank too", 5)
    running = place.running()
    await observer.close()
    assert not owner.fenced
    assert place.running() == running
    assert place.assert_terms_never_go_back() == {7}
    await owner.executor.stop()


async def test_an_order_of_an_observer_is_refused_and_its_questions_are_answered(place: Place) -> None:
    owner = Owner(place, 3)
    await owner.executor.start()
    member = place.members()[0]
    channel = await Channel.open(member.address, Hello(role="observer", group="g"), "rank 0", deadline_s=5)
    channel.start()
    status = await channel.call(Query(id=channel.next_id()), Status, deadline_s=5)
    assert (status.term, status.phase) == (3, "serving")
    await channel.call(Steps(id=channel.next_id(), since=0), StepsTaken, deadline_s=5)
    with pytest.raises(NeedsReplan, match="an observer gives no orders"):
        await channel.call(Leave(id=channel.next_id(), epoch=99), Done, deadline_s=5)
    status = await channel.call(Query(id=channel.next_id()), Status, deadline_s=5)
    assert (status.phase, status.epoch) == ("serving", owner.executor.status().epoch)
    await channel.aclose()
    await owner.executor.stop()


async def test_an_observer_starts_no_group(place: Place) -> None:
    observer = Observer(place.config, lambda _: None)
    with pytest.raises(ElasticError, match="no group serves here"):
        await observer.start()
    assert not place.running()
    assert list(place.run_dir.iterdir()) == []


async def test_a_dry_run_beside_the_daemon_that_acts_decides_for_itself_and_touches_nothing(
    simulated: SimulatedGroup,
) -> None:
    group, policy = simulated, json.loads(simulated.policy.read_text())
    policy["spec"]["dryRun"] = True
    path = group.root / "dry-run.yaml"
    path.write_text(json.dumps(policy))
    daemon = spawn(path, group.root / "dry-run.log")
    try:

        async def observed() -> dict[str, Any] | None:
            address = json.loads((group.run_dir / "dry-run" / "healer.json").read_text())
            async with httpx.AsyncClient(trust_env=False) as client:
                found: dict[str, Any] = (await client.get(address["http"] + "/status")).json()
            whole = found["dry_run"] and found["state"] == "ok"
            members = {s["slot"]: s["member"]["pid"] for s in found["group"]["slots"] if s["state"] == "live"}
            return found if whole and members == {s: m.pid for s, m in group.members().items()} else None

        await eventually(observed, "the dry run sees a healthy group", 30)
        traffic, expected = group.traffic(2, 60, seed=1)
        old = group.members()
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(traffic.run())
            await traffic.reached(8)
            group.signal(1)
            await eventually(lambda: _is_another(group, old[1].pid), "slot 1 is replaced", 30)
        await group.settled(range(4))
        assert_answers(traffic.answers, expected)
        await eventually(observed, "the dry run has followed", 30)

        def healer(*arguments: str) -> "subprocess.CompletedProcess[str]":
            command = [sys.executable, "-m", "healer.cli", *arguments, "--policy", str(path)]
            return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60, check=False)

        history = await asyncio.to_thread(healer, "export")
        bodies = [json.loads(line) for line in history.stdout.splitlines()]
        decisions = [e["body"] for e in bodies if e["kind"] == "decision"]
        assert any("dry" in d["sentence"].lower() and "1" in d["sentence"] for d in decisions), decisions
        assert not [e for e in bodies if e["kind"] == "action"]
        stopped = await asyncio.to_thread(healer, "stop")
        assert (stopped.returncode, "dryRun" in stopped.stderr) == (1, True), stopped
        await group.check(range(4))
    finally:
        daemon.send_signal(signal.SIGTERM)
        assert await asyncio.to_thread(daemon.wait, 20) == 0
    await group.settled(range(4))
    assert os.listdir(group.run_dir / "dry-run")
    await group.check(range(4))


def spawn(policy: Path, log: Path) -> "subprocess.Popen[bytes]":
    command = [sys.executable, "-m", "healer.cli", "run", "--policy", str(policy)]
    with log.open("wb") as file:
        return subprocess.Popen(command, cwd=ROOT, stdout=file, stderr=subprocess.STDOUT)


async def _is_another(group: SimulatedGroup, pid: int) -> bool | None:
    now = group.members()
    return True if 1 in now and now[1].pid != pid else None
