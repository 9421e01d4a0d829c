"""What a policy would have done with a recording.

The recording is followed as it was: ranks die and come back when they did. A rank that the policy ends is not decided upon
again in its incarnation; one that it only gives time (`retry`), or for which it only calls a hook, is. Hooks are taken to
succeed at once. The size is the policy's own: it grows `boot_s` after it was asked to, and what the ranks share, such as
waiting requests, is as recorded whatever the size; latencies are as recorded too, since nobody knows better.
"""

import math
from collections.abc import Iterable
from itertools import pairwise

import msgspec

from healer.evidence import RankRef
from healer.load.decision import ScaleDecision
from healer.load.engine import Group, ScalerState, Seen, evaluate
from healer.load.forecast import POINTS, Forecast, History, fit
from healer.load.plan import compile_rules
from healer.load.readings import Known, Level
from healer.policy import guards
from healer.policy.begun import notes_of
from healer.policy.decide import Decision, State, decide
from healer.policy.memory import Ended, Memory, remember
from healer.policy.observe import observe
from healer.policy.reasons import ACTS, Step
from healer.policy.recording import Frame
from healer.policy.schedules import Calendar
from healer.policy.schema import Policy, Predictive
from healer.trace import LoadLine

MOST_TICKS = 20_000
"""Between two samples of load: where a recording was silent for days, time goes on in longer steps."""


class Row(msgspec.Struct, frozen=True):
    """Something that was decided, when it was new."""

    at_s: float
    """Since the begin of the recording."""
    part: str
    """`healing` or `scaling`."""
    what: str
    """The step, or "4 -> 6"; "keep" where nothing would be done."""
    reason: str
    rule: str
    sentence: str
    acts: bool
    matters: bool
    """Something was done, or would have been but for `dryRun`, or a human was asked."""

    @property
    def key(self) -> tuple[str, ...]:
        """Two rows of two policies with the same key say the same."""
        return self.part, self.what, self.reason, self.rule


class Replayed(msgspec.Struct, frozen=True, kw_only=True):
    policy: str
    rows: tuple[Row, ...]
    sizes: tuple[tuple[float, int], ...]
    """At each change: seconds, target size."""
    load: dict[str, tuple[tuple[float, float], ...]]
    """By signal: seconds, value."""
    span_s: float
    rank_hours: float
    notes: tuple[str, ...]
    """What could not be replayed."""

    @property
    def actions(self) -> int:
        return sum(row.acts for row in self.rows)

    @property
    def calls(self) -> int:
        """How often a human was asked."""
        return sum(row.matters and row.part == "healing" and row.what.startswith(Step.HUMAN) for row in self.rows)

    @property
    def reversals(self) -> int:
        """Changes of size in the other direction than the one before."""
        steps = [after - before for (_, before), (_, after) in pairwise(self.sizes)]
        return sum((a > 0) != (b > 0) for a, b in pairwise(steps))


class Player:
    """Gives one policy the frames of a recording, in order; then `result`."""

    def __init__(self, policy: Policy, boot_s: float = 30.0) -> None:
        load = policy.spec.load
        self._policy, self._rules, self._boot_s = policy, compile_rules(policy), boot_s
        self._calendar = Calendar(policy.spec.schedules)
        self._memory, self._scaler = Memory(), ScalerState()
        self._predictive = tuple(rule for rule in load.rules if isinstance(rule, Predictive))
        self._histories = {rule.name: History(rule.season_s) for rule in self._predictive}
        self._forecasts: dict[str, Forecast] = {}
        self._condemned: set[RankRef] = set()
        self._said: set[tuple[object, ...]] = set()
        self._begin: float | None = None
        self._now = self._last_load = 0.0
        self._wall: float | None = None
        self._slots: set[int] = set()
        self._last: dict[int, RankRef] = {}
        self.size = 0
        self._ready_at = math.inf
        self._ready = 0
        self._hours = 0.0
        self._rows: list[Row] = []
        self._sizes: list[tuple[float, int]] = []
        self._load: dict[str, list[tuple[float, float]]] = {}
        self._notes: dict[str, None] = {}
        self._said_scale: tuple[object, ...] = ()
        self._levels: dict[str, Level] = {}

    def play(self, frames: Iterable[Frame]) -> Replayed:
        for frame in frames:
            self._take(frame)
        if self._begin is None:
            self._notes["the recording is empty"] = None
        elif not self._load and self._policy.spec.load.rules:
            self._notes["the recording holds no load, so no load rule was tried"] = None
        return self.result()

    def result(self) -> Replayed:
        return Replayed(
            policy=self._policy.metadata.name,
            rows=tuple(self._rows),
            sizes=tuple(self._sizes),
            load={name: tuple(points) for name, points in self._load.items()},
            span_s=self._now - (self._begin or 0.0) if self._begin is not None else 0.0,
            rank_hours=self._hours,
            notes=tuple(self._notes),
        )

    def _take(self, frame: Frame) -> None:
        if self._begin is None:
            self._begin = self._now = frame.at
            self.size = self._ready = len(frame.live)
            self._sizes.append((0.0, self.size))
        self._hours += self.size * max(0.0, frame.at - self._now) / 3600
        self._now = frame.at
        self._slots |= {rank.slot for rank in frame.live}
        self._last |= {rank.slot: rank for rank in frame.live}
        if frame.note:
            self._notes[frame.note] = None
        self._heal(frame)
        if frame.load is not None:
            self._scale(frame, frame.load)

    # --- healing --------------------------------------------------------------------------------------------------

    def _state(self, frame: Frame) -> State:
        return State(
            live=tuple(rank for rank in frame.live if rank not in self._condemned),
            target=tuple(sorted(self._slots)),
            sequence="",
            failed={},
            memory=self._memory,
            evidence=frame.evidence,
            wall=self._wall,
        )

    def _heal(self, frame: Frame) -> None:
        self._condemned &= set(frame.live)
        verdicts = tuple(v for v in frame.verdicts if v.subject not in self._condemned)
        for note in observe(self._policy, verdicts, self._state(frame), frame.at):
            self._memory = remember(self._memory, note)
        if not verdicts:
            return
        decisions = decide(self._policy, verdicts, self._state(frame), frame.at)
        for one in decisions:
            if one.acts or one.key not in self._said:
                self._row(_healing_row(one, self._since(frame.at)))
            if one.acts:
                self._act(one, frame.at)
        self._said = {one.key for one in decisions}

    def _act(self, one: Decision, at: float) -> None:
        notes = list(notes_of(one, self._last_in_slot, at))
        if one.step is Step.HOOK:
            notes += [Ended(slot, one.rung, True, "", at) for slot in one.slots]
        for note in notes:
            self._memory = remember(self._memory, note)
        if one.step not in (Step.RETRY, Step.HOOK):
            self._condemned |= {v.rank for v in one.verdicts if isinstance(v.subject, RankRef)}

    def _last_in_slot(self, slot: int) -> RankRef:
        return self._last.get(slot, RankRef(slot, 0))

    # --- scaling --------------------------------------------------------------------------------------------------

    def _scale(self, frame: Frame, line: LoadLine) -> None:
        policy, at = self._policy, frame.at
        for name, value in line.values.items():
            self._load.setdefault(name, []).append((self._since(at), value))
        self._wall = line.wall
        if not policy.spec.load.rules and not policy.spec.schedules:
            return
        stale_s = min((s.stale_after_s for s in policy.spec.load.signals.values()), default=math.inf)
        # between two samples time goes on: conditions hold, windows pass, samples age
        step_s = max(policy.spec.load.interval_s, (at - self._last_load) / MOST_TICKS)
        if self._last_load:
            quiet = self._last_load + step_s
            while quiet < at:
                self._tick(frame, line, quiet, {} if quiet - self._last_load > stale_s else None)
                quiet += step_s
        self._levels = _levels(line)
        self._last_load = at
        for missing in policy.spec.load.signals.keys() - self._load.keys():
            self._notes[f"signal {missing} is not in the recording"] = None
        self._expect(frame, at)
        self._tick(frame, line, at, None)

    def _tick(self, frame: Frame, line: LoadLine, at: float, levels: dict[str, Level] | None) -> None:
        if at >= self._ready_at:
            self._ready, self._ready_at = self.size, math.inf
        wall = line.wall - (frame.at - at)
        held = guards.scaling(self._policy, frame.verdicts, self._state(frame), at)
        text = held.text if held is not None else "a join is under way" if self._ready_at < math.inf else ""
        lost = max(0, len(self._slots) - len(frame.live))
        group = Group(self.size, max(0, min(self._ready, self.size) - lost), text)
        known = self._levels if levels is None else levels
        seen = Seen(group, known, self._forecasts, self._calendar.at(wall), 0.0)
        decision, self._scaler = evaluate(self._rules, self._scaler, seen, at)
        self._scaled(decision, at)

    def _scaled(self, decision: ScaleDecision, at: float) -> None:
        if decision.acts or decision.key != self._said_scale:
            self._row(_scaling_row(decision, self._since(at)))
        self._said_scale = decision.key
        if decision.acts:
            grows = decision.size > self.size
            self.size = decision.size
            self._ready_at = at + self._boot_s if grows else math.inf
            self._ready = min(self._ready, self.size)
            self._sizes.append((self._since(at), self.size))

    def _expect(self, frame: Frame, at: float) -> None:
        for rule in self._predictive:
            level, history = self._levels.get(rule.signal), self._histories[rule.name]
            if level is None or level.known is not Known.VALUE:
                continue
            before = history.end
            shared = rule.signal in self._rules.extensive
            history.add(at, level.value if shared else level.value * max(1, len(frame.live)))
            if history.end == before or not history.enough:
                continue
            steps = math.ceil(rule.horizon_s / history.step_s) + 1
            try:
                values = tuple(fit(history.points, POINTS, steps))
            except ModuleNotFoundError as error:
                self._notes[f"no forecasts: {error.name} is not installed, pip install 'healer[forecast]'"] = None
                return
            self._forecasts[rule.name] = Forecast(history.end or at, history.step_s, values)

    def _since(self, at: float) -> float:
        return at - (self._begin or 0.0)

    def _row(self, row: Row) -> None:
        self._rows.append(row)


def _levels(line: LoadLine) -> dict[str, Level]:
    found = {name: Level(Known.VALUE, value) for name, value in line.values.items()}
    return found | {name: Level(Known.IDLE) for name in line.idle}


def _healing_row(one: Decision, at_s: float) -> Row:
    slots = f" {', '.join(map(str, one.slots))}" if one.slots else ""
    matters = one.step in ACTS or one.step is Step.HUMAN
    return Row(at_s, "healing", f"{one.step.value}{slots}", one.reason.value, one.rule, one.sentence, one.acts, matters)


def _scaling_row(one: ScaleDecision, at_s: float) -> Row:
    what = f"{one.current} -> {one.size}" if one.size != one.current else "keep"
    matters = one.size != one.current
    return Row(at_s, "scaling", what, one.reason.value, one.rule, one.sentence, one.acts, matters)
