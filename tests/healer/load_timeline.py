"""Timelines of load in data files: what the group is asked to do, second by second, and what the load rules must make of it.

    fear:    what a user would fear, as a sentence
    seen:    where it was complained about; optional
    spec:    parts of the policy's `spec`
    ranks:   target at the start, all live; default 4
    begins:  wall clock at the start; default 2026-06-01T00:00:00Z
    boot_s:  a larger size is live after this, and no change is begun meanwhile; default 5
    events:  by second: signals (a number, idle or missing; it stays until changed), live, target (somebody changed it),
             held, least, refuse (the executor refuses from now on)
    ends:    last second
    changes: every change of size by the rules, [second, from, to], and no other
    says:    by second, the decision's reason, or a part of its sentence

A size that somebody asks for is live at once. Forecasts are given as `forecast: {rule: [step seconds, values…]}`.
"""

from datetime import datetime
from pathlib import Path
from typing import Any

from ruamel.yaml import YAML

from healer.load.decision import ScaleDecision
from healer.load.engine import Group, ScalerState, Seen, evaluate, refused
from healer.load.forecast import Forecast
from healer.load.plan import compile_rules
from healer.load.readings import MISSING, Known, Level
from healer.policy.load import parse_policy
from healer.policy.schedules import Calendar
from healer.policy.schema import Policy

GOLDEN = Path(__file__).parent / "golden"

BASE: dict[str, Any] = {
    "kind": "embedded",
    "checkpoint": "x",
    "runDir": "x",
    "ranks": 1,
    "maxRanks": 64,
    "slotsPerRank": 8,
}


def policy_of(spec: dict[str, Any]) -> Policy:
    import json

    document = {"apiVersion": "healer/v1", "kind": "Policy", "metadata": {"name": "golden"}}
    target = BASE | spec.get("target", {})
    text = json.dumps(document | {"spec": spec | {"target": target}})
    return parse_policy(text, name="golden", base=Path("/tmp"))


def read(file: Path) -> dict[str, Any]:
    found: dict[str, Any] = YAML(typ="safe").load(file.read_text())
    return found


class Timeline:
    """Plays one scenario. `decisions` are those of every second."""

    def __init__(self, scenario: dict[str, Any]) -> None:
        self._scenario, self._rules = scenario, compile_rules(policy_of(scenario["spec"]))
        self._levels: dict[str, Level] = {}
        self._facts: dict[str, Any] = {"held": "", "least": 1, "refuse": ""}
        self.target = self.live = int(scenario.get("ranks", 4))
        self._ready_at = -1
        self.decisions: list[ScaleDecision] = []
        self.changes: list[list[int]] = []
        self._forecasts: dict[str, Forecast] = {}

    def play(self) -> "Timeline":
        state, calendar = ScalerState(), Calendar(self._rules.policy.spec.schedules)
        begins = datetime.fromisoformat(self._scenario.get("begins", "2026-06-01T00:00:00+00:00")).timestamp()
        events = {int(second): event for second, event in self._scenario["events"].items()}
        hours = 0.0
        for second in range(int(self._scenario["ends"]) + 1):
            self._happen(events.get(second, {}), second)
            if self._ready_at == second:
                self.live, self._ready_at = self.target, -1
            held = self._facts["held"] or ("a join is under way" if self._ready_at >= 0 else "")
            group = Group(self.target, self.live, held, self._facts["least"])
            hours += self.live / 3600
            seen = Seen(group, self._levels, self._forecasts, calendar.at(begins + second), hours)
            decision, state = evaluate(self._rules, state, seen, float(second))
            self.decisions.append(decision)
            if decision.acts and self._facts["refuse"]:
                state = refused(state, self._facts["refuse"], float(second))
            elif decision.acts:
                self.changes.append([second, self.target, decision.size])
                self._resize(decision.size, second)
        return self

    def _happen(self, event: dict[str, Any], second: int) -> None:
        for name, value in event.get("signals", {}).items():
            self._levels[name] = _level(value)
        for name, (step_s, *values) in event.get("forecast", {}).items():
            self._forecasts[name] = Forecast(float(second), float(step_s), tuple(map(float, values)))
        self._facts |= {key: event[key] for key in self._facts if key in event}
        self.live = event.get("live", self.live)
        if "target" in event:
            self.target = self.live = event["target"]

    def _resize(self, size: int, second: int) -> None:
        if size > self.target:
            self._ready_at = second + int(self._scenario.get("boot_s", 5))
        else:
            self.live = size
        self.target = size


def _level(value: Any) -> Level:
    if value == "missing":
        return MISSING
    return Level(Known.IDLE) if value == "idle" else Level(Known.VALUE, float(value))
