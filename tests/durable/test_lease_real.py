"""Two real daemons with real ranks under a lease: the holder is stopped for longer than its lease lasts and woken again.

Never two writers: each rank writes down the term of every command that it accepts, and the terms never go back.
"""

import asyncio
import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Coroutine, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import httpx
import msgspec
import pytest

from elastic import process
from elastic.client import Tokens, Traffic, random_prompts
from healer.deployment import Deployment, eventually
from healer.journal import Entry, exported, open_readonly
from tests.durable.points import COUNTING, Points
from tests.durable.scenarios import sample
from tests.durable.simulated_group import assert_never_back
from tests.durable.simulated_rank import Accepted
from tests.e2e.harness import assert_same, members, send

T = TypeVar("T")

ROOT = Path(__file__).parents[2]
VOCAB, REQUESTS, ANSWER = 512, 6, 48
BASE = [0, 1, 2]
TTL_S = 4.0
LEASE = {"store": "folder", "ttl": f"{TTL_S:g}s", "renew": "300ms", "deadline": "1s", "margin": "1s"}
LEASE_LOST = 4


@dataclass(frozen=True)
class Candidate:
    daemon: "subprocess.Popen[bytes]"
    points: Points
    log: Path

    @property
    def stopped(self) -> bool:
        return process.state(self.daemon.pid, process.start_time(self.daemon.pid)) == "T"


class Pair(Deployment):
    """Daemons of one group, started one by one; each has points of its own."""

    def __init__(self, checkpoint: Path) -> None:
        super().__init__(checkpoint, target={"ranks": 3, "maxRanks": 4})
        self.change(lease={**LEASE, "folder": str(self.root / "lease")})
        self.candidates: list[Candidate] = []

    def candidate(self) -> Candidate:
        self.write_policy()
        number = len(self.candidates)
        page, path = self.root / f"points-{number}", self.root / f"daemon-{number}.log"
        points = Points(page)
        with path.open("ab") as log:
            daemon = subprocess.Popen(
                [sys.executable, "-m", "tests.durable.real_daemon", "run", "--policy", str(self.policy)],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                cwd=ROOT,
                env=os.environ | {"CRASH_POINTS": str(page), "PYTHONPATH": str(ROOT), "RECORDING_RANKS": "1"},
            )
        self.candidates.append(Candidate(daemon, points, path))
        return self.candidates[-1]

    async def acts(self, candidate: Candidate) -> bool | None:
        assert candidate.daemon.poll() is None, candidate.log.read_text()[-2000:]
        address = json.loads((self.run_dir / "healer.json").read_text())
        if address["pid"] != candidate.daemon.pid:
            return None
        status = await self.get("/status")
        live = status["group"]["live"]
        return True if status["state"] == "ok" and status["acts"] and live == BASE else None

    async def stands_by(self, candidate: Candidate) -> bool | None:
        address = json.loads((self.run_dir / f"standby-{candidate.daemon.pid}.json").read_text())
        async with httpx.AsyncClient(trust_env=False, verify=False) as client:
            status = (await client.get(address["http"] + "/status", timeout=5)).json()
        return True if status["state"] == "standby" and status["lease"]["holder"] else None

    def ranks(self) -> set[int]:
        """Pids of the ranks and gateways that run."""
        mine = ("elastic.rank", "elastic.gateway")
        return {p.pid for p in self.processes() if any(m in p.cmdline() for m in mine)}

    def accepted_terms(self) -> set[int]:
        terms: set[int] = set()
        for path in sorted((self.run_dir / "commands").glob("*.jsonl")):
            accepted = [msgspec.json.decode(line, type=Accepted) for line in path.read_bytes().splitlines()]
            assert_never_back(path.stem, [c.term for c in accepted], "term")
            assert_never_back(path.stem, [c.epoch for c in accepted], "epoch")
            terms |= {c.term for c in accepted}
        return terms

    def journal(self) -> list[Entry]:
        with contextlib.closing(open_readonly(self.run_dir / "journal.db")) as journal:
            return list(exported(journal))

    def end(self, *, keep: bool = False) -> None:
        for each in self.candidates:
            each.daemon.kill()
            each.daemon.wait()
        super().end(keep=keep)

    def _owns(self, line: list[str]) -> bool:
        ours = "-m" in line[:-1] and line[line.index("-m") + 1].startswith(("elastic.", "healer.", "tests.durable."))
        return ours and any(self.root.name in argument for argument in line)


@pytest.fixture
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    folder = tmp_path_factory.mktemp("model") / "tiny-moe"
    command = [sys.executable, "-m", "elastic.tools.make_checkpoint", str(folder), "--layers", "2"]
    subprocess.run([*command, "--vocab", str(VOCAB)], check=True, capture_output=True)
    made = Pair(folder)
    yield made
    made.end()


@pytest.mark.slow
async def test_a_real_holder_stopped_beyond_its_lease_and_woken_never_writes_beside_its_successor(pair: Pair) -> None:
    await campaign(pair, sampled=1)


@pytest.mark.slow
@pytest.mark.timeout(1200)
async def test_a_real_holder_may_be_stopped_at_twelve_points_of_a_healing(pair: Pair) -> None:
    await campaign(pair, sampled=12)


async def campaign(pair: Pair, sampled: int) -> None:
    holder = pair.candidate()
    await eventually(lambda: pair.acts(holder), "the first candidate has formed the group", 120)
    prompts = random_prompts(REQUESTS, VOCAB, seed=3)
    answers = await Traffic(pair.gateway(), prompts, ANSWER).run()
    assert [a.error for a in answers] == [None] * REQUESTS
    want = [a.tokens for a in answers]
    points = await told(pair, heal(pair, holder, prompts, want))
    for at in sample(points - 8, sampled + 2, "stop a real holder")[1:-1]:
        holder = await told(pair, stop_and_wake(pair, holder, at, prompts, want))
    assert pair.accepted_terms() == set(range(1, sampled + 2))


async def told(pair: Pair, work: Coroutine[Any, Any, T]) -> T:
    """`work`; where it fails, with the points and the last words of the daemons."""
    try:
        return await work
    except BaseException as error:
        for each in pair.candidates[-2:]:
            error.add_note(f"point {each.points.count}, {each.points.label!r}: {each.log.read_text()[-2500:]}")
        raise


async def heal(pair: Pair, holder: Candidate, prompts: list[Tokens], want: list[Tokens]) -> int:
    """One loss under traffic, healed by who holds the lease; returns how many points that has."""
    holder.points.arm(COUNTING)
    await lose(pair, 1, prompts, want, holder)
    return holder.points.count


async def stop_and_wake(pair: Pair, holder: Candidate, at: int, prompts: list[Tokens], want: list[Tokens]) -> Candidate:
    """The holder is stopped at its `at`-th point after a loss, until another has taken over and made the group whole."""
    successor = pair.candidate()
    await eventually(lambda: pair.stands_by(successor), "the second candidate stands by", 60)
    holder.points.arm(at, signal.SIGSTOP)
    await lose(pair, 1, prompts, want, successor)
    assert holder.stopped, "it did not come to this point"
    before, running, entries = members(pair), pair.ranks(), len(pair.journal())
    holder.daemon.send_signal(signal.SIGCONT)
    assert await asyncio.to_thread(holder.daemon.wait, 30) == LEASE_LOST
    assert members(pair) == before, f"{holder.points.label}: the woken holder wrote the state file"

    async def as_before() -> bool | None:
        # one that it was about to launch when it was stopped is ended at once, by itself or by the woken holder
        return True if pair.ranks() == running else None

    await eventually(as_before, f"{holder.points.label}: nobody was started or ended", 30)
    assert await pair.acts(successor)
    assert [e.kind for e in pair.journal()[entries:] if e.kind in ("action", "outcome")] == []
    await lose(pair, 2, prompts, want, successor)
    return successor


async def lose(pair: Pair, slot: int, prompts: list[Tokens], want: list[Tokens], healer: Candidate) -> None:
    """SIGKILL a rank under traffic; wait until `healer` has made the group whole."""
    old = members(pair)
    traffic = Traffic(pair.gateway(), prompts, ANSWER)

    async def replaced() -> bool | None:
        now = members(pair)
        return True if slot in now and now[slot] != old[slot] and await pair.acts(healer) else None

    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(traffic.run())
        await traffic.reached(30)
        send(pair, [slot], signal.SIGKILL)
        await eventually(replaced, f"slot {slot} has a new process and the group is whole", 60)
    assert_same(traffic.answers, want)
    now = members(pair)
    assert {s: m for s, m in now.items() if s != slot} == {s: m for s, m in old.items() if s != slot}
