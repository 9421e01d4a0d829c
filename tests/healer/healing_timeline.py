"""Timelines of faults in data files: what is seen, second by second, and what healing must decide.

    fear:      what a user would fear, as a sentence
    seen:      where it was complained about; optional
    spec:      parts of the policy's `spec`
    ranks:     target at the start, all live and healthy; default 4
    boot_s:    a replacement is live after this; default 2
    hook_s:    a hook ends after this; default 1
    events:    by second, see `World.event`
    ends:      last second
    decisions: by second, every decision that is new or acts, as "step slots reason", and no other; the healthy group's
               first sentence at second 0 is left out

The roster, the actions and the journal are the real ones; the group and the hooks are simulated, and time is given.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import msgspec
from ruamel.yaml import YAML

from elastic.errors import Infeasible
from healer.actions import NOTE, Actions, asked, recalled
from healer.authority import Authority
from healer.casebook import Casebook
from healer.diagnosis import Cause, Confidence, Health, Verdict
from healer.evidence import Evidence, Severity, What
from healer.hooks import HookFacts, HookResult, HookRunner
from healer.journal import Journal, Kind
from healer.logs import LateLog
from healer.metrics import Metrics
from healer.orders import Cancel, Drain, Order, Pause, Quarantine, Release, Replace, ResetBreaker, Resume
from healer.policy.decide import Decision, Reason, Step, decide
from healer.policy.load import parse_policy
from healer.policy.memory import Memory
from healer.policy.records import State
from healer.policy.schema import Policy
from healer.requests import Requests
from healer.roster import Roster
from tests.healer.simulated_group import Group
from tests.healer.support import FakeClock, rank

GOLDEN = Path(__file__).parent / "golden"

BASE: dict[str, Any] = {
    "kind": "embedded",
    "checkpoint": "x",
    "runDir": "x",
    "ranks": 1,
    "maxRanks": 8,
    "slotsPerRank": 8,
}


class Shape(msgspec.Struct, frozen=True):
    """What is held against a rank."""

    health: Health
    cause: Cause
    confidence: Confidence
    evidence: tuple[Evidence, ...]
    lasting: bool
    """Its evidence is renewed every second."""


def policy_of(case: dict[str, Any]) -> Policy:
    spec = dict(case.get("spec", {}))
    target = {**BASE, "ranks": case.get("ranks", 4), **spec.pop("target", {})}
    document = {
        "apiVersion": "healer/v1",
        "kind": "Policy",
        "metadata": {"name": "golden"},
        "spec": {"target": target, **spec},
    }
    return parse_policy(msgspec.json.encode(document).decode(), name="golden", base=Path("/base"))


class World:
    """One timeline at work."""

    def __init__(self, case: dict[str, Any], journal: Path) -> None:
        self.case, self.policy, self.clock = case, policy_of(case), FakeClock()
        self.start = self.clock.now
        self.group = Group(case.get("ranks", 4), self.clock, case.get("boot_s", 2))
        self.shapes: dict[int, Shape] = {}
        self.late = False
        self.log: list[tuple[int, Decision]] = []
        self.hook_results: dict[str, list[bool]] = {}
        self.hooks: list[tuple[float, HookFacts]] = []
        self.hook_s = case.get("hook_s", 1)
        self.states: list[tuple[tuple[Verdict, ...], State, float, tuple[Decision, ...]]] = []
        self._path, self._seq = journal, 0
        self._said: tuple[Decision, ...] = ()
        self.begin()

    def begin(self) -> None:
        """A daemon starts: only the group and the journal are still there."""
        self.journal = Journal.open(self._path, self.clock)
        self.roster = Roster(self.group.observe())
        world = self

        class Hooks(HookRunner):
            def start(self, facts: HookFacts) -> None:
                world.hooks.append((world.clock.now + world.hook_s, facts))

        log = LateLog("test")
        metrics = Metrics(cast(Any, None), lambda: 0)
        casebook = Casebook(self.journal, self.clock, metrics, log)
        self.authority = Authority()
        self.actions = Actions(
            cast(Any, self.group),
            self.roster,
            casebook,
            self.journal,
            metrics,
            log,
            self.clock,
            self.policy,
            Hooks,
            self.authority,
        )
        self.roster.refresh(self.group.observe())

    def end(self) -> None:
        self.journal.close()

    @property
    def second(self) -> int:
        return round(self.clock.now - self.start)

    def event(self, what: dict[str, Any]) -> None:
        """`dead`, `hung`, `suspected`, `well`: slots. `sick`: cause by slot, conclusive, seen once. `verdicts`: by slot
        health, cause, confidence, evidence (what, value, source, by, severity, age). `late`: the daemon was late or not.
        `busy`: the executor's sequence. `survivable`: losses. `boots_fail`: number by slot. `hook_fails`: names whose next
        call fails. `refuse`: why the target refuses. `drain_hangs`: a rank that leaves never does; `drain_s`: how long it
        takes. `superseded`: another daemon holds the lease, and why this one may not act. `restart`: of the daemon. `pause`,
        `resume`, `reset_breaker`, `release`, `quarantine`, `drain`, `replace`, `cancel`, `scale`: an operator's requests."""
        for name, value in what.items():
            getattr(self, f"_on_{name}")(value)

    def step(self) -> None:
        """One second's worth: the group moves, the daemon looks, notes, decides and acts."""
        for failure in self.group.step():
            self.roster.boot_failed(failure)
        due = [facts for at, facts in self.hooks if self.clock.now >= at]
        self.hooks = [(at, facts) for at, facts in self.hooks if self.clock.now < at]
        for facts in due:
            results = self.hook_results.get(facts.hook, [])
            ok = results.pop(0) if results else True
            self.actions._hook_ended(facts, HookResult(ok, f"exit code {0 if ok else 1}", 1.0))
        self.roster.refresh(self.group.observe())
        verdicts, evidence = self._look()
        state = self.roster.state(evidence, wall=self.clock.wall())
        state = self.roster.observe(self.policy, verdicts, state, self.clock.now)
        decisions = decide(self.policy, verdicts, state, self.clock.now)
        self.states.append((verdicts, state, self.clock.now, decisions))
        said, self._said = {d.key for d in self._said}, decisions
        for decision in decisions:
            if decision.acts or decision.key not in said:
                self.actions.record(decision)
                self.log.append((self.second, decision))
            if decision.acts:
                self.actions.carry_out(decision)
                self.roster.refresh(self.group.observe())
        self.journal.flush()

    def _look(self) -> tuple[tuple[Verdict, ...], list[Evidence]]:
        verdicts: list[Verdict] = []
        standing: list[Evidence] = []
        for one in sorted(self.roster.live):
            shape = self.shapes.get(one.slot)
            if shape is not None and shape.evidence and shape.evidence[0].subject != one:
                del self.shapes[one.slot]  # it was about the rank before
                shape = None
            if self.late and (shape is None or shape.confidence != Confidence.CONCLUSIVE):
                verdicts.append(_verdict(one.slot, one.incarnation, Health.UNKNOWN, Cause.TELEMETRY_LOST))
                continue
            if shape is None:
                verdicts.append(_verdict(one.slot, one.incarnation, Health.HEALTHY, Cause.NONE))
                continue
            evidence = shape.evidence
            if shape.lasting:
                evidence = tuple(msgspec.structs.replace(e, at=self.clock.now) for e in evidence)
            standing += evidence
            verdicts.append(_verdict(one.slot, one.incarnation, shape.health, shape.cause, shape.confidence, evidence))
        return tuple(verdicts), standing

    # --- events -------------------------------------------------------------------------------------------------------

    def _on_dead(self, slots: list[int]) -> None:
        for slot in slots:
            found = self._evidence(slot, {"what": "lifeline-cut", "value": "Z", "source": "lifeline"})
            self.shapes[slot] = Shape(
                Health.UNHEALTHY, Cause.PROCESS_DEATH, Confidence.CONCLUSIVE, (found,), lasting=False
            )

    def _on_hung(self, slots: list[int]) -> None:
        for slot in slots:
            found = self._evidence(slot, {"what": "silence", "value": 2.0, "source": "heartbeats"})
            self.shapes[slot] = Shape(Health.UNHEALTHY, Cause.HANG, Confidence.QUORUM, (found,), lasting=True)

    def _on_suspected(self, slots: list[int]) -> None:
        for slot in slots:
            found = self._evidence(slot, {"what": "silence", "value": 0.5, "source": "heartbeats"})
            self.shapes[slot] = Shape(Health.UNKNOWN, Cause.SUSPECTED, Confidence.NONE, (found,), lasting=True)

    def _on_sick(self, causes: dict[int, str]) -> None:
        for slot, cause in causes.items():
            found = self._evidence(slot, {"what": "ecc-uncorrectable", "source": "nvml"})
            self.shapes[slot] = Shape(Health.UNHEALTHY, Cause(cause), Confidence.CONCLUSIVE, (found,), lasting=False)

    def _on_verdicts(self, verdicts: dict[int, dict[str, Any]]) -> None:
        for slot, told in verdicts.items():
            evidence = tuple(self._evidence(slot, one) for one in told.get("evidence", ()))
            self.shapes[slot] = Shape(
                Health(told.get("health", "unhealthy")),
                Cause(told["cause"]),
                Confidence(told.get("confidence", "conclusive")),
                evidence,
                lasting=told.get("lasting", False),
            )

    def _on_well(self, slots: list[int]) -> None:
        for slot in slots:
            self.shapes.pop(slot, None)

    def _on_late(self, late: bool) -> None:
        self.late = late

    def _on_busy(self, sequence: str) -> None:
        self.group.sequence = sequence

    def _on_survivable(self, losses: int) -> None:
        self.group.survivable = losses

    def _on_boots_fail(self, failing: dict[int, int]) -> None:
        self.group.failing.update(failing)

    def _on_hook_fails(self, names: list[str]) -> None:
        for name in names:
            self.hook_results.setdefault(name, []).append(False)

    def _on_refuse(self, why: str) -> None:
        self.group.refuse = why

    def _on_drain_hangs(self, hangs: bool) -> None:
        self.group.drain_hangs = hangs

    def _on_drain_s(self, seconds: float) -> None:
        self.group.drain_s = seconds

    def _on_superseded(self, why: str) -> None:
        self.authority.end(why)

    def _on_restart(self, _: bool) -> None:
        self.end()
        self._said = ()
        self.hooks = []  # the daemon's own children end with it
        self.begin()

    def _on_pause(self, who: str) -> None:
        self._order(Pause(), who)

    def _on_resume(self, who: str) -> None:
        self._order(Resume(), who)

    def _on_reset_breaker(self, who: str) -> None:
        self._order(ResetBreaker(), who)

    def _on_release(self, slot: int) -> None:
        self._order(Release(slot))

    def _on_quarantine(self, slot: int) -> None:
        self._order(Quarantine(slot))

    def _on_drain(self, slot: int) -> None:
        self._order(Drain(slot))

    def _on_replace(self, slot: int) -> None:
        self._order(Replace(slot))

    def _on_cancel(self, _: bool) -> None:
        self._order(Cancel())

    def _order(self, order: Order, who: str = "alice") -> None:
        requests = Requests(cast(Any, self.group), self.roster, self.actions, self.journal, self.clock)
        try:
            sentence = requests.carry_out(order, who=who, refuse="").sentence
            reason = Reason.OPERATOR
        except Infeasible as error:
            sentence, reason = str(error), Reason.REFUSED
        self.roster.refresh(self.group.observe())
        self.log.append((self.second, asked(Step.NONE, reason, (), sentence)))

    def _on_scale(self, asked_for: int | list[int]) -> None:
        wanted = tuple(asked_for) if isinstance(asked_for, list) else asked_for
        try:
            slots, sentence = self.actions.scale(wanted, who="alice", refuse=""), ""
            step, reason = Step.SCALE, Reason.OPERATOR
        except Infeasible as error:
            slots, sentence = (), str(error)
            step, reason = Step.NONE, Reason.REFUSED
        self.log.append((self.second, asked(step, reason, slots, sentence)))

    def _evidence(self, slot: int, told: dict[str, Any]) -> Evidence:
        self._seq += 1
        return Evidence(
            source=told.get("source", "test"),
            seq=self._seq,
            subject=rank(slot, self.group.live.get(slot, 0)),
            what=What(told["what"]),
            value=told.get("value", 1),
            severity=Severity(told.get("severity", "critical")),
            reporter=rank(told["by"]) if "by" in told else None,
            at=self.clock.now - told.get("age", 0),
            wall=0.0,
        )


def _verdict(
    slot: int,
    incarnation: int,
    health: Health,
    cause: Cause,
    confidence: Confidence = Confidence.NONE,
    evidence: tuple[Evidence, ...] = (),
) -> Verdict:
    return Verdict(
        subject=rank(slot, incarnation),
        health=health,
        cause=cause,
        confidence=confidence,
        evidence=tuple(e.id for e in evidence),
        since=min((e.at for e in evidence), default=0.0),
        sentence=f"rank {slot}.{incarnation} is {health} ({cause})",
        xids=tuple(int(e.value) for e in evidence if e.what == What.XID),
    )


def read(path: Path) -> dict[str, Any]:
    found: dict[str, Any] = YAML(typ="safe", pure=True).load(path.read_text())
    return found


def play(
    case: dict[str, Any], journal: Path, check: Callable[[World], None] = lambda world: None
) -> tuple[World, dict[int, list[str]]]:
    """Run a timeline. Returns the world at its end, and the decisions by second as text. `check` is called each second."""
    world = World(case, journal)
    try:
        for second in range(case["ends"] + 1):
            world.clock.now = world.start + second
            if second in case["events"]:
                world.event(case["events"][second])
            world.step()
            check(world)
    finally:
        world.end()
    told: dict[int, list[str]] = {}
    for second, one in world.log:
        if second == 0 and one.reason == Reason.ALL_HEALTHY:
            continue
        told.setdefault(second, []).append(show(one))
    return world, told


def show(one: Decision) -> str:
    slots = ",".join(map(str, one.slots))
    words = ["dry"] if one.dry_run else []
    words += [one.step.value, slots, one.reason.value]
    words += [one.hook] if one.hook else []
    return " ".join(word for word in words if word)


def remembered(journal: Path) -> Memory:
    """What a daemon that starts now would remember."""
    clock = FakeClock()
    opened = Journal.open(journal, clock)
    try:
        entries = [e for e in opened.recent(Kind.LIFECYCLE, 100_000) if e.body.get("event") == NOTE]
        return recalled(entries, clock, entries[0].body["boot"] if entries else "")
    finally:
        opened.close()
