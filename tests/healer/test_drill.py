"""A drill's figures: read from an incident as the API gives it, and from what the clients saw."""

import json
from typing import Any

import msgspec
import pytest

from elastic.client import Answer
from elastic.controller.records import Outcome, Phase, SequenceKind, SequenceReport
from elastic.errors import ElasticError
from elastic.protocol import Loaded, Source
from healer import drill

SUMMARY = {"id": "inc-3", "slots": [1], "causes": ["process-death"], "outcome": "healed"}
VERDICT = {"health": "unhealthy", "since": 100.002, "sentence": "rank 1.1 is dead: lifeline-cut (Z)"}
FAULT_AT = 100.0


def entry(kind: str, body: object) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(msgspec.json.encode({"kind": kind, "monotonic": 100.0025, "body": body}))
    return found


def report(
    kind: SequenceKind,
    phases: dict[str, tuple[float, float]],
    outcome: Outcome = "committed",
    pause_s: dict[int, float] | None = None,
    loaded: dict[int, Loaded] | None = None,
) -> dict[str, Any]:
    made = SequenceReport(
        kind=kind,
        outcome=outcome,
        reason="",
        slots=(1,),
        live=(0, 2, 3),
        epoch=2,
        began=100.002,
        ended=max(end for _, end in phases.values()) + 1,
        phases=tuple(Phase(name, start, end) for name, (start, end) in phases.items()),
        pause_s=pause_s or {},
        loaded=loaded or {},
    )
    return entry("outcome", {"report": made})


LOSS = report(
    "loss",
    {"detect": (100.002, 100.003), "park": (100.003, 100.01), "commit": (100.01, 100.02), "resume": (100.02, 100.03)},
    pause_s={0: 0.03, 2: 0.05},
    loaded={0: Loaded(host=Source(2, 200)), 2: Loaded(host=Source(1, 100))},
)
JOIN = report(
    "join",
    {"boot": (100.03, 102.0), "capture 1": (102.0, 102.1), "commit": (102.1, 102.2), "resume": (102.2, 102.3)},
    pause_s={0: 0.02, 2: 0.08},
    loaded={1: Loaded(peer=Source(9, 900))},
)


def test_the_moments_count_from_the_fault_and_the_longest_pause_of_each_survivor_is_kept() -> None:
    healing = drill.healing_of(SUMMARY, [entry("verdict", {"verdict": VERDICT}), LOSS, JOIN], FAULT_AT)
    assert healing.evidence == VERDICT["sentence"]
    assert healing.detect_s == pytest.approx(0.002)
    assert healing.verdict_s == pytest.approx(0.0025)
    assert healing.coverage_s == pytest.approx(0.03)
    assert healing.capacity_s == pytest.approx(2.3)
    assert healing.pause_s == {0: 0.03, 2: 0.08}
    assert healing.cover["host"] == Source(3, 300)
    assert healing.refill["peer"] == Source(9, 900)
    names = [step.name for step in healing.steps]
    assert names[:5] == ["detect", "decide", "park", "commit", "resume"]
    assert names[5:] == ["refill: boot", "refill: capture", "refill: commit", "refill: resume"]


def test_a_sequence_that_was_given_up_is_shown_and_its_figures_do_not_count() -> None:
    first = report("loss", {"park": (100.003, 100.01), "commit": (100.01, 100.5)}, "superseded")
    healing = drill.healing_of(SUMMARY, [entry("verdict", {"verdict": VERDICT}), first, LOSS, JOIN], FAULT_AT)
    assert "commit (superseded)" in [step.name for step in healing.steps]
    assert healing.coverage_s == pytest.approx(0.03)


@pytest.mark.parametrize("entries", [[], [LOSS], [entry("verdict", {"verdict": VERDICT}), LOSS]])
def test_an_incident_without_a_refill_is_no_healing(entries: list[dict[str, Any]]) -> None:
    with pytest.raises(ElasticError, match="inc-3 is healed without a commit and a refill"):
        drill.healing_of(SUMMARY, entries, FAULT_AT)


def test_only_silences_that_touch_the_span_count() -> None:
    answers = [Answer(times=[1.0, 1.5, 3.0, 3.1]), Answer(times=[2.0, 2.2]), Answer()]
    assert drill.longest_gap_s(answers, 1.6, 2.0) == 1.5
    assert drill.longest_gap_s(answers, 1.0, 1.2) == 0.5
    assert drill.longest_gap_s(answers, 3.2, 9.0) == 0.0
    assert drill.in_flight(answers, 2.1) == 2
    assert drill.in_flight(answers, 3.1) == 0


def test_every_way_to_be_wrong_is_named() -> None:
    answers = [
        Answer([1, 2, 3], finish="length"),
        Answer([1, 9, 3], finish="length"),
        Answer([1, 2], finish="length"),
        Answer([1, 2, 3]),
        Answer([1], error="503: no rank"),
    ]
    found = drill.wrong(answers, [[1, 2, 3]] * 5)
    assert [line.split()[1] for line in found] == ["1", "2", "3", "4"]
    for line, word in zip(found, ("from token 1 on", "in length: 2, not 3", "no end", "503: no rank"), strict=True):
        assert word in line
