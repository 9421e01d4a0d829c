"""One simulated group with its daemon, for tests: faults by slot, crashes by point, and the checks that follow each."""

import asyncio
import contextlib
import json
import shutil
import signal
import tempfile
import time
import uuid
from collections import Counter
from collections.abc import Iterable
from itertools import pairwise
from pathlib import Path
from typing import Any

import httpx
import msgspec

from elastic import process
from elastic.channel import Channel
from elastic.client import Answer, Traffic, random_prompts
from elastic.controller.state import GroupState
from elastic.paths import read_json, socket_path, state_path
from elastic.protocol import Hello, Query, Status
from elastic.view import Member
from healer.deployment import eventually
from healer.journal import incident_entries, open_readonly
from tests.durable import forkserver
from tests.durable.forkserver import Forked, Order
from tests.durable.points import Points
from tests.durable.simulated_launcher import comm, daemon_comm
from tests.durable.simulated_rank import FAILS, Accepted, answer
from tests.gateway.gateway_fakes import VOCAB, make_checkpoint

ONCE = frozenset({"Stage", "Switch", "Abort", "Commit", "Resume", "Leave"})
"""Commands that a rank accepts once for an epoch. A planned stop may be asked for again with a later round, a connection is
ordered in two steps, and a load of what is there already does nothing."""

SETTLE_S = 60.0


class SimulatedGroup:
    """Four ranks of six slots, with `slots` expert slots each for 8 experts. `end` it."""

    def __init__(
        self,
        server: str,
        *,
        prepare_s: float = 10.0,
        commit_s: float = 5.0,
        silent_s: float = 4.0,
        redundant: int = 4,
        slots: int = 4,
    ) -> None:
        self.root = Path(tempfile.mkdtemp(prefix="sim-", dir="/tmp"))
        self.run_dir = self.root / "run"
        self.run_dir.mkdir()
        self.points = Points(self.root / "points")
        self.daemon: Forked | None = None
        self._server = server
        spec: dict[str, Any] = {
            "target": {
                "kind": "embedded",
                "checkpoint": str(make_checkpoint(self.root / "model")),
                "runDir": str(self.run_dir),
                "ranks": 4,
                "maxRanks": 6,
                "slotsPerRank": slots,
                "redundantExperts": redundant,
                "gateway": {"port": 0},
                "hostTier": False,
            },
            "api": {"port": 0},
            "detection": {"stallAfter": "1.5s", "silentAfter": f"{silent_s:g}s", "heartbeatInterval": "100ms"},
            "healing": {"deadlines": {"prepare": f"{prepare_s:g}s", "commit": f"{commit_s:g}s"}},
            "sensors": {"nvml": {"enabled": False}, "kernelLog": {"enabled": False}},
        }
        policy = {"apiVersion": "healer/v1", "kind": "Policy", "metadata": {"name": "simulated"}, "spec": spec}
        self.policy = self.root / "policy.yaml"
        self.policy.write_text(json.dumps(policy, indent=1))
        self._http = httpx.AsyncClient(trust_env=False, verify=False, timeout=10.0)

    # --- the daemon -----------------------------------------------------------------------------------------------

    def spawn(self) -> None:
        arguments = (str(self.policy), str(self.root / "points"), self._server)
        order = Order("daemon", daemon_comm(self.run_dir), str(self.root / "daemon.log"), arguments)
        self.daemon = forkserver.ask(self._server, order)

    @property
    def daemon_lives(self) -> bool:
        return self.daemon is not None and process.is_alive(self.daemon.pid, self.daemon.pid_start)

    def kill_daemon(self) -> None:
        if self.daemon is not None:
            process.send_signal(self.daemon.pid, self.daemon.pid_start, signal.SIGKILL)
            while self.daemon_lives:
                time.sleep(0.001)

    def signal_daemon(self, signum: signal.Signals) -> None:
        assert self.daemon is not None
        process.send_signal(self.daemon.pid, self.daemon.pid_start, signum)

    async def status(self) -> Any:
        assert self.daemon is not None
        address = json.loads((self.run_dir / "healer.json").read_text())
        if address["pid"] != self.daemon.pid:
            raise OSError("the daemon has not published its address yet")
        return (await self._http.get(address["http"] + "/status")).raise_for_status().json()

    async def scale(self, slots: list[int]) -> None:
        await self.post("/scale", {"slots": slots})

    async def post(self, path: str, body: dict[str, Any]) -> None:
        """Ask once; the daemon may die while it answers."""
        address = json.loads((self.run_dir / "healer.json").read_text())
        with contextlib.suppress(httpx.HTTPError):
            answer = await self._http.post(
                address["http"] + path, json=body, headers={"Idempotency-Key": uuid.uuid4().hex}
            )
            assert answer.is_success, answer.text

    async def settled(self, slots: Iterable[int], deadline_s: float = SETTLE_S) -> Any:
        """Until these slots, and no others, are live, no sequence runs and no incident is open."""
        want, last = sorted(slots), ""

        async def probe() -> Any:
            nonlocal last
            if not self.daemon_lives:
                raise AssertionError(f"the daemon ended: {self.log()[-2000:]}")
            found = await self.status()
            group = found["group"]
            last = f"live {group['live']}, target {group['target']}, {group['sequence']}, why {found['why']!r}"
            done = found["state"] == "ok" and group["live"] == group["target"] == want and not group["sequence"]
            return found if done else None

        try:
            return await eventually(probe, f"slots {want} serve", deadline_s)
        except Exception as error:
            raise AssertionError(f"{error}; {last}; log: {self.log()[-3000:]}") from error

    def log(self) -> str:
        return (self.root / "daemon.log").read_text()

    # --- ranks ----------------------------------------------------------------------------------------------------

    def members(self) -> dict[int, Member]:
        return {m.slot: m for m in read_json(state_path(self.run_dir), GroupState).members}

    def signal(self, slot: int, signum: signal.Signals = signal.SIGKILL) -> None:
        member = self.members()[slot]
        process.send_signal(member.pid, member.pid_start, signum)

    def fail_boots(self, count: int) -> None:
        (self.run_dir / FAILS).write_text(str(count))

    async def rank(self, slot: int, incarnation: int, term: int = 0) -> Status:
        """What a rank says of itself."""
        hello = Hello(role="controller", group=self.group, term=term)
        address = socket_path(self.run_dir, slot, incarnation)
        channel = await Channel.open(address, hello, f"rank {slot}", deadline_s=5.0)
        channel.start()
        try:
            return await channel.call(Query(id=channel.next_id()), Status, deadline_s=10.0)
        finally:
            await channel.aclose()

    @property
    def group(self) -> str:
        return str(json.loads((self.run_dir / "config.json").read_text())["name"])

    def accepted(self) -> dict[str, list[Accepted]]:
        """What each incarnation has accepted, in order."""
        folder = self.run_dir / "commands"
        return {
            path.stem: [msgspec.json.decode(line, type=Accepted) for line in path.read_bytes().splitlines()]
            for path in sorted(folder.glob("*.jsonl"))
        }

    # --- requests -------------------------------------------------------------------------------------------------

    def traffic(self, count: int, tokens: int, seed: int) -> tuple[Traffic, list[list[int]]]:
        """Requests, and the tokens that they must get."""
        prompts = random_prompts(count, 256, seed)
        gateway = json.loads((self.run_dir / "gateway.json").read_text())["http"]
        return Traffic(gateway, prompts, tokens, deadline_s=SETTLE_S), [answer(p, tokens, VOCAB) for p in prompts]

    # --- checks ---------------------------------------------------------------------------------------------------

    async def check(self, slots: Iterable[int]) -> None:
        """The invariants of a group that has settled."""
        want, members = sorted(slots), self.members()
        assert sorted(members) == want, f"the state file has slots {sorted(members)}, not {want}"
        found = [await self.rank(m.slot, m.incarnation) for m in members.values()]
        assert {s.phase for s in found} == {"serving"}, {s.slot: s.phase for s in found}
        views = {(s.view.epoch, s.view.hash, s.view.live) for s in found if s.view is not None}
        assert len(views) == 1, f"ranks disagree: {views}"
        assert all(s.view is not None for s in found)
        assert next(iter(views))[2] == tuple(want)
        assert {s.counters.captures for s in found} == {1}, "a rank captured again"
        self.check_commands()
        self.check_processes(members)
        self.check_journal()

    def check_commands(self) -> None:
        for rank, commands in self.accepted().items():
            assert_never_back(rank, [c.epoch for c in commands], "epoch")
            assert_never_back(rank, [c.term for c in commands], "term")
            twice = [k for k, n in Counter((c.epoch, c.kind) for c in commands if c.kind in ONCE).items() if n > 1]
            assert not twice, f"{rank} accepted twice: {twice}"

    def check_processes(self, members: dict[int, Member]) -> None:
        """Nobody but the members, one gateway and one daemon."""
        gateway = json.loads((self.run_dir / "gateway.json").read_text())["pid"]
        running = {p.pid for p in forkserver.named(comm(self.run_dir))}
        extra = running - {m.pid for m in members.values()} - {gateway}
        assert not extra, f"processes of nobody: {extra}"
        assert {m.pid for m in members.values()} <= running
        assert gateway in running
        assert len(forkserver.named(daemon_comm(self.run_dir))) == 1
        sockets = {path.name for path in self.run_dir.glob("rank-*.sock*")}
        assert sockets == {Path(m.address).name for m in members.values()}, sockets

    def check_journal(self) -> None:
        """It opens whole, and every incident in it is closed."""
        assert not list(self.run_dir.glob("journal.db.corrupt*")), "the journal was damaged"
        with contextlib.closing(open_readonly(self.run_dir / "journal.db")) as journal:
            entries = incident_entries(journal, 1000)
        events: dict[str, set[str]] = {}
        for entry in entries:
            if entry.kind == "lifecycle":
                events.setdefault(entry.incident, set()).add(str(entry.body.get("event")))
        still_open = [i for i, said in events.items() if "incident-closed" not in said]
        assert not still_open, f"incidents that never closed: {still_open}"

    async def end(self) -> None:
        await self._http.aclose()
        self.kill_daemon()
        while left := forkserver.named(comm(self.run_dir)):
            for each in left:
                process.send_signal(each.pid, each.pid_start, signal.SIGKILL)
            await asyncio.sleep(0.01)
        shutil.rmtree(self.root, ignore_errors=True)


def assert_never_back(rank: str, numbers: list[int], what: str) -> None:
    """For terms: a controller that lost its lease has given no order after its successor. Reads what the ranks accepted."""
    for before, after in pairwise(numbers):
        assert before <= after, f"{rank} accepted {what} {after} after {before}"


def assert_answers(answers: list[Answer], expected: list[list[int]]) -> None:
    for i, (got, want) in enumerate(zip(answers, expected, strict=True)):
        assert got.error is None, f"request {i}: {got.error}"
        assert got.tokens == want, f"request {i}: {len(got.tokens)} tokens, not the right ones"
        assert got.finish == "length"
