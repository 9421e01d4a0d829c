"""What healing remembers across restarts, and the small pure functions around it."""

import itertools
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from elastic.placement import initial, losses_without_load
from elastic.placement.maps import HOLE, Placement
from healer.actions import NOTE, recalled
from healer.diagnosis import Cause
from healer.journal import Entry, Kind
from healer.policy import bounds, guards
from healer.policy.decide import Reason, State, Step
from healer.policy.load import parse_policy
from healer.policy.memory import (
    Began,
    BreakerOpened,
    Ended,
    Fault,
    FaultsSeen,
    Memory,
    Note,
    Phase,
    Quarantined,
    RefillFailed,
    recall,
)
from healer.policy.reasons import document
from healer.policy.schema import Policy
from tests.healer.support import POLICY, FakeClock, rank

NOTES: tuple[Note, ...] = (
    FaultsSeen((Fault(rank(3), Cause.ECC, True),), 90.0),
    Began(
        ranks=(rank(3),),
        rule="r",
        cause=Cause.ECC,
        rung=1,
        step=Step.HOOK,
        phase=Phase.RUNNING,
        destructive=True,
        at=91.0,
    ),
    Ended(3, 1, False, "exit code 1", 92.0),
    Quarantined(3, 500.0, "2 failures", 93.0),
    BreakerOpened("many", 94.0),
    RefillFailed(2, "r", "no memory", 95.0),
)


def entries(notes: tuple[Note, ...], *, boot: str, monotonic: float = 100.0, wall: float = 0.0) -> list[Entry]:
    """As `Journal.recent` gives them: newest first."""
    return [
        Entry(
            seq=seq,
            wall=wall,
            monotonic=monotonic,
            kind=Kind.LIFECYCLE,
            incident="",
            body={"event": NOTE, "boot": boot, "note": msgspec.json.decode(msgspec.json.encode(note))},
        )
        for seq, note in enumerate(notes, 1)
    ][::-1]


def policy(more: str = "") -> Policy:
    return parse_policy(POLICY + more, name="p.yaml", base=Path("/base"))


def test_a_restart_remembers_everything() -> None:
    assert recalled(entries(NOTES, boot="b"), FakeClock(), "b") == recall(NOTES)


def test_a_summary_stands_for_all_notes_before_it() -> None:
    told = entries((*NOTES[:3], recall(NOTES[:3]), *NOTES[3:]), boot="b")
    assert recalled(told, FakeClock(), "b") == recall(NOTES)
    assert recalled(told[:4], FakeClock(), "b") == recall(NOTES), "what is before the summary is not needed"


def test_a_reboot_of_the_host_does_not_shorten_a_quarantine_nor_make_old_faults_new() -> None:
    clock = FakeClock()
    clock.now = 20.0  # the host has just booted; an hour of wall time has passed
    written = entries(NOTES, boot="before", monotonic=100.0, wall=clock.wall() - 3600.0)
    memory = recalled(written, clock, "after")
    before = recall(NOTES)
    by_s = 20.0 - 100.0 - 3600.0
    assert memory.quarantined[3].until == pytest.approx(500.0 + by_s)
    assert memory.faults[3] == pytest.approx((90.0 + by_s,))
    assert memory.breaker_open_since == pytest.approx(94.0 + by_s)
    assert memory.ladders[3].attempts == before.ladders[3].attempts
    summary = recalled(entries((before,), boot="before", monotonic=100.0, wall=clock.wall() - 3600.0), clock, "after")
    assert summary.quarantined[3].until == pytest.approx(500.0 + by_s)
    assert summary.ladders[3].at == pytest.approx(memory.ladders[3].at)


def test_an_entry_of_a_later_version_is_passed_over() -> None:
    strange = Entry(9, 0.0, 0.0, Kind.LIFECYCLE, "", {"event": NOTE, "boot": "b", "note": {"type": "from-the-future"}})
    other = Entry(8, 0.0, 0.0, Kind.LIFECYCLE, "", {"event": "daemon-started"})
    assert recalled([strange, other, *entries(NOTES, boot="b")], FakeClock(), "b") == recall(NOTES)


def test_an_action_that_ended_does_not_end_the_next_one() -> None:
    began = NOTES[1]
    assert isinstance(began, Began)
    second = msgspec.structs.replace(began, rung=2)
    memory = recall((began, second, Ended(3, 1, True, "", 99.0)))
    assert memory.ladders[3].phase == Phase.RUNNING


@pytest.mark.parametrize(
    ("slots", "more", "reason"),
    [
        ((0, 1), "", None),
        ((0,), "  bounds: {minRanks: 2}\n", Reason.BELOW_MIN_RANKS),
        ((0, 1, 2, 3, 4), "  bounds: {maxRanks: 4}\n", Reason.ABOVE_MAX_RANKS),
        ((0, 1, 2), "  bounds: {divisibility: 2}\n", Reason.NOT_DIVISIBLE),
        ((0, 1), "  bounds: {redundancyFloor: 2}\n", Reason.BELOW_REDUNDANCY),
        ((0, 1, 2), "  bounds: {redundancyFloor: 2}\n", None),
        ((1, 2, 3, 4), "  bounds: {redundancyFloor: 3}\n", None),
    ],
)
def test_no_request_leaves_the_bounds(slots: tuple[int, ...], more: str, reason: Reason | None) -> None:
    state = State(
        live=tuple(rank(s) for s in range(4)), target=(0, 1, 2, 3), sequence="", failed={}, losses_survivable=3
    )
    block = bounds.wanted(policy(more), state, slots)
    assert (block.reason if block else None) == reason


@pytest.mark.parametrize(
    ("target", "used"),
    [
        ("", 0),
        ("    epBackend: nixl-ep\n", 4),
        ("    epBackend: nixl-ep\n    gpus: [0, 0, 1, 1]\n", 2),
        ("    epBackend: nixl-ep\n    gpus: [0, 1]\n    spares: 1\n    spareGpus: [7]\n", 3),
    ],
)
def test_gpus_are_counted_once_however_many_ranks_share_them(target: str, used: int) -> None:
    made = parse_policy(POLICY + target, name="p.yaml", base=Path("/base"))
    assert bounds.gpus_used(made, range(4)) == used


def test_no_more_gpus_are_taken_than_there_are() -> None:
    made = parse_policy(POLICY + "    epBackend: nixl-ep\n  bounds: {maxGpus: 5}\n", name="p.yaml", base=Path("/base"))
    state = State(live=(), target=(), sequence="", failed={}, gpus=4)
    assert bounds.larger(made, state, range(4)) is None
    assert (bounds.larger(made, state, range(5)) or pytest.fail("allowed")).reason == Reason.ABOVE_GPUS
    block = bounds.larger(made, msgspec.structs.replace(state, gpus=8), range(6))
    assert block is not None
    assert "bounds.maxGpus 5" in block.text


def test_healing_comes_before_scaling() -> None:
    live = State(live=tuple(rank(s) for s in range(4)), target=(0, 1, 2, 3), sequence="", failed={})
    change: Any = msgspec.structs.replace
    assert guards.scaling(policy(), (), live, 1.0) is None
    for state, reason in (
        (change(live, sequence="loss: park"), Reason.QUEUED),
        (change(live, live=live.live[:3]), Reason.HEALING_FIRST),
        (change(live, memory=Memory(paused_by="alice")), Reason.PAUSED),
        (change(live, memory=Memory(telemetry_lost=True)), Reason.TELEMETRY_LOST),
        (change(live, memory=Memory(telemetry_back_at=0.5)), Reason.TELEMETRY_SETTLING),
    ):
        hold = guards.scaling(policy(), (), state, 1.0)
        assert hold is not None
        assert hold.reason == reason


def test_a_maintenance_window_for_healing_only_holds_scaling_and_not_healing() -> None:
    made = policy("  bounds: {maintenance: [{name: night, cron: '0 0 * * *', for: 24h, mode: heal-only}]}\n")
    state = State(live=(rank(0),), target=(0,), sequence="", failed={}, wall=1_700_000_000.0)
    assert guards.observing(made, state) is None
    hold = guards.scaling(made, (), state, 1.0)
    assert hold is not None
    assert hold.text == "maintenance night"


@st.composite
def _placements(draw: st.DrawFn) -> tuple[Placement, tuple[int, ...]]:
    experts, capacity, width, layers = (draw(st.integers(1, n)) for n in (4, 5, 3, 2))
    row = st.lists(st.integers(HOLE, experts - 1), min_size=capacity * width, max_size=capacity * width)
    rows = tuple(tuple(draw(row)) for _ in range(layers))
    live = draw(st.lists(st.integers(0, capacity - 1), unique=True))
    return Placement(experts, capacity, width, rows), tuple(live)


@given(_placements())
def test_as_many_losses_as_told_can_be_survived_whichever_they_are_and_no_more(
    given_: tuple[Placement, tuple[int, ...]],
) -> None:
    placement, live = given_

    def survives(count: int) -> bool:
        lost = itertools.combinations(live, count)
        return all(not placement.uncovered(set(live) - set(gone)) for gone in lost)

    told = losses_without_load(placement, live)
    if placement.uncovered(live):
        assert told == 0
        return
    assert survives(told)
    assert told == len(live) - 1 or not survives(told + 1)


def test_the_losses_of_a_real_map() -> None:
    once = initial(experts=8, layers=2, capacity=4, slots_per_rank=4, live=range(4), redundant=0)
    assert losses_without_load(once, range(4)) == 0
    twice = initial(experts=8, layers=2, capacity=4, slots_per_rank=4, live=range(4), redundant=8)
    assert losses_without_load(twice, range(4)) == 1


def test_every_reason_and_step_is_documented_and_the_file_is_up_to_date() -> None:
    text = (Path(__file__).parents[2] / "docs" / "decisions.md").read_text()
    assert text == document(), "run: python -m healer.policy.reasons > docs/decisions.md"
    assert all(f"| `{one}` |" in text for one in (*Reason, *Step))
