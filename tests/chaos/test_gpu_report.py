"""The arithmetic of the GPU benchmark: from step times and reports to figures, targets and a table."""

import msgspec
import pytest

from chaos.gpu_bench import alone, breakdown, parts, report, timeline
from chaos.gpu_bench.clients import Told, judged
from chaos.gpu_bench.group import sample_of, with_answers
from chaos.gpu_bench.ranks import Seen
from chaos.gpu_bench.records import Part, Results, Sample
from chaos.machine import Machine
from elastic.client import Answer
from elastic.controller.records import Joiner, Phase, SequenceReport
from elastic.errors import ElasticError
from elastic.protocol import Counters, Loaded, Peer, Source, Status, StepTaken, Work
from elastic.view import Member

WORKS = (Work("connect exchange", 100.5, 100.51), Work("settle", 101.004, 101.0041))
MEMBER = Member(slot=0, incarnation=1, pid=7, pid_start=70, address="/nowhere")


def seen(ends: tuple[float, ...], captures: int = 7, pid: int = 7) -> Seen:
    status = Status(
        id=1,
        slot=0,
        incarnation=1,
        pid=pid,
        pid_start=70,
        lifeline="",
        epoch=1,
        phase="serving",
        round=1,
        view=None,
        contents=(),
        peer=Peer(0, 1, b"", b""),
        counters=Counters(captures=captures),
        waiting=0,
        running=0,
    )
    steps = tuple(StepTaken(end, 1 + (end > 100.004) + (end > 101.0), 1e-4, 2e-4, 1e-3, 3e-4) for end in ends)
    return Seen(MEMBER, status, steps, WORKS)


def sequence(kind: str, phases: dict[str, tuple[float, float]], **more: object) -> SequenceReport:
    facts: dict[str, object] = {
        "kind": kind,
        "outcome": "committed",
        "reason": "",
        "slots": (1,),
        "live": (0,),
        "epoch": 2 if kind == "loss" else 3,
        "began": min(start for start, _ in phases.values()),
        "ended": max(end for _, end in phases.values()),
        "phases": tuple(Phase(name, start, end) for name, (start, end) in phases.items()),
        "pause_s": {},
        "loaded": {},
    }
    return SequenceReport(**(facts | more))  # type: ignore[arg-type]


LOSS = {
    "detect": (100.001, 100.002),
    "park": (100.002, 100.006),
    "release": (100.002, 100.004),
    "commit": (100.006, 100.009),
    "cover": (100.006, 100.008),
    "resume": (100.009, 100.012),
}
JOIN = {
    "boot": (100.1, 100.3),
    "capture 1": (100.4, 100.5),
    "load": (100.3, 100.5),
    "connect": (100.5, 100.51),
    "park": (101.0, 101.001),
    "commit": (101.001, 101.003),
    "resume": (101.003, 101.004),
}
# steps of 2 ms; the loss costs 99.999 to 100.012; a connect of 11 ms at 100.5; the join 100.999 to 101.005
ENDS = (
    *(round(99.0 + 0.002 * i, 6) for i in range(500)),
    99.999,
    100.003,  # committed although the fault had come: no step of the new map
    *(round(100.012 + 0.002 * i, 6) for i in range(245)),
    *(round(100.511 + 0.002 * i, 6) for i in range(245)),
    *(round(101.005 + 0.002 * i, 6) for i in range(250)),
)


def killed() -> Sample:
    loaded = {0: Loaded(host=Source(40, 1_000_000), seconds=0.0005)}
    joiner = Joiner(spare=True, boot_s={"weights": 0.2, "model": 0.1}, reach_s=0.05, load_s=0.02, capture_s=0.1)
    reports = [sequence("loss", LOSS, loaded=loaded), sequence("join", JOIN, joiners={1: joiner})]
    before = {0: seen(tuple(e for e in ENDS if e < 100))}
    return sample_of("kill", (1,), 100.0, reports, before, {0: seen(ENDS)})


def test_a_kill_is_told_from_the_records_of_ranks_and_executor() -> None:
    figures = report.figures_of(killed(), ceiling=4e9)
    milliseconds = {
        "seen_s": 1.0,
        "released_s": 4.0,
        "parked_s": 6.0,
        "covered_s": 8.0,
        "committed_s": 9.0,
        "stepped_s": 12.0,
        "loss_pause_s": 13.0,
        "capacity_s": 1004.0,
        # 100.999 (245 steps behind 100.511) to 101.005
        "refill_pause_s": 6.0,
        "refill_excess_s": 4.0,
        "refill_gap_s": 11.0,
        "refill_process_s": 0.0,
        "refill_memory_s": 300.0,
        "refill_load_s": 70.0,
        "refill_capture_s": 100.0,
        "refill_connect_s": 10.0,
        "step_before_s": 2.0,
        "step_after_s": 2.0,
        "copy_s": 0.5,
    }
    assert {name: round(1e3 * figures[name], 3) for name in milliseconds} == pytest.approx(milliseconds, abs=1.1e-3)
    assert figures["copy_bytes_per_s"] == pytest.approx(2e9)
    assert figures["copy_over_ceiling_percent"] == pytest.approx(50)
    assert "planned_pause_s" not in figures
    assert "grow_s" not in figures


def test_the_worst_survivor_counts_not_the_first() -> None:
    sample = killed()
    slow = msgspec.structs.replace(sample.sequences[0], first_step_s={0: 0.012, 2: 0.03}, pause_s={0: 0.013, 2: 0.031})
    sample = msgspec.structs.replace(sample, sequences=(slow, sample.sequences[1]))
    assert report.figures_of(sample)["stepped_s"] == 0.03
    assert report.figures_of(sample)["loss_pause_s"] == 0.031


def test_a_planned_change_is_no_refill() -> None:
    grown = sample_of("grow", (1,), 100.05, [sequence("join", JOIN)], {0: seen(ENDS[:10])}, {0: seen(ENDS)})
    figures = report.figures_of(grown)
    assert figures["planned_pause_s"] == pytest.approx(0.006)
    assert figures["planned_gap_s"] == pytest.approx(0.011)
    assert figures["grow_s"] == pytest.approx(0.954)
    assert not {"refill_pause_s", "seen_s", "stepped_s", "step_change_percent"} & figures.keys()


def test_a_sequence_that_was_superseded_gives_no_figures() -> None:
    cut = sequence("loss", {"detect": (100.0005, 100.001), "park": (100.001, 100.002)}, outcome="superseded")
    reports = [cut, sequence("loss", LOSS, slots=(1, 2))]
    sample = sample_of("kill", (1, 2), 100.0, reports, {0: seen(ENDS[:10])}, {0: seen(ENDS)})
    assert report.figures_of(sample)["parked_s"] == pytest.approx(0.006)
    assert report.figures_of(sample)["stepped_s"] == pytest.approx(0.012)


def test_a_survivor_that_was_replaced_is_an_error_not_a_figure() -> None:
    with pytest.raises(ElasticError, match=r"slots \[0\] were not hurt"):
        sample_of("kill", (1,), 100.0, [sequence("loss", LOSS)], {0: seen(ENDS, pid=8)}, {0: seen(ENDS)})


def test_gaps_at_the_edges_of_what_is_known() -> None:
    steps = [StepTaken(end, epoch, 0.0, 0.0, 0.0, 0.0) for end, epoch in ((1.0, 4), (2.0, 4), (4.0, 6))]
    assert timeline.last_before(steps, 2.0) == 1
    assert timeline.last_before(steps, 0.5) is None
    assert timeline.first_under(steps, 5) == 2
    assert timeline.first_under(steps, 7) is None
    assert timeline.longest(steps, 0.0, 9.0) == 2
    assert timeline.longest(steps, 0.0, 2.0) == 1
    assert timeline.longest(steps, 3.0, 3.1) == 2
    assert timeline.longest(steps[:1], 0.0, 9.0) is None
    assert timeline.gaps(steps, 1.0, 3.0) == [1.0]


def test_where_a_pause_went_adds_up_and_names_what_ran_meanwhile() -> None:
    (gap,) = killed().sequences[1].gaps.values()
    assert gap.took_s == pytest.approx(0.006)
    assert gap.took_s == pytest.approx(gap.settle_s + gap.stand_s + gap.build_s + gap.launch_s + gap.wait_s)
    assert [name for name, *_ in gap.works] == ["settle"]
    longest = killed().survivors[0].longest
    assert longest is not None
    assert longest.took_s == pytest.approx(0.011)
    text = "\n".join(breakdown.markdown(part("kill", killed())))
    assert "| in all | 6.00 ms | 6.00 ms |" in text
    assert "| connect exchange | 1 | 10.00 ms | 10.00 ms |" in text


def test_an_answer_counts_for_every_fault_that_it_lived_through() -> None:
    first, second = killed(), msgspec.structs.replace(killed(), at=110.0)
    told = [
        Told(began=99.9, ended=100.2, wrong="", longest_gap_s=0.1),
        Told(began=101.2, ended=110.5, wrong="differs", longest_gap_s=0.1),
        Told(began=105.0, ended=106.0, wrong="", longest_gap_s=0.1),
    ]
    one, two = with_answers([first, second], told)
    assert (one.answers, one.tokens_equal, one.wrong) == (2, False, ("differs",))
    assert (two.answers, two.tokens_equal) == (1, False)
    assert with_answers([first], [])[0].tokens_equal is None


def test_clients_tell_a_wrong_token_from_an_answer_that_never_ended() -> None:
    assert judged(Answer(tokens=[1, 2], finish="length"), 0.0, [1, 2]).wrong == ""
    assert "from token 1 on" in judged(Answer(tokens=[1, 3], finish="length"), 0.0, [1, 2]).wrong
    assert "no end" in judged(Answer(tokens=[1, 2]), 0.0, [1, 2]).wrong
    assert "503" in judged(Answer(error="503: gone"), 0.0, [1, 2]).wrong


def part(name: str, *samples: Sample, **more: object) -> Part:
    facts: dict[str, object] = {
        "name": name,
        "title": name.title(),
        "config": {"ranks": 2},
        "budget_s": 10.0,
        "began": "2026-01-01T00:00:00Z",
        "took_s": 1.0,
        "wanted": 3,
        "samples": samples,
        "figures": {},
        "error": "",
    }
    return Part(**(facts | more))  # type: ignore[arg-type]


def results(*found: Part) -> Results:
    return Results(
        machine=Machine("cpu", 2, 8.0, "6.1", (0.0, 0.0, 0.0)),
        gpus=("H200",),
        versions={"torch": "2.11"},
        began="2026-01-01T00:00:00Z",
        seed=0,
        cpu=False,
        checkpoints_s={"narrow": 1.0},
        took_s=3.0,
        parts=found,
    )


def verdicts(found: Results) -> dict[tuple[str, str], str]:
    return {(v.target.part, v.target.figure): v.word for v in report.verdicts(found)}


def test_targets_are_judged_from_the_samples_and_what_is_missing_is_not_met() -> None:
    again = part("recapture", figures={"narrow": {"first_s": 1.0, "recapture_s": [0.7, 0.61, 0.5], "sizes": [1, 2]}})
    grown = msgspec.structs.replace(killed(), what="grow", sequences=killed().sequences[1:])
    words = verdicts(results(part("kill", killed()), part("scale", grown), again))
    assert words["kill", "stepped_s"] == "met"
    assert words["kill", "refill_pause_s"] == "missed"
    # ... of which an ordinary round takes 2 ms
    assert words["kill", "refill_excess_s"] == "met"
    assert words["kill", "refill_gap_s"] == "met"
    # 0.61 s over 6 ms
    assert words["recapture", "recapture_over_commit_pause"] == "met"
    assert words["scale", "planned_pause_s"] == "missed"
    assert words["scale", "planned_excess_s"] == "met"
    assert words["orphans", "copy_over_ceiling_percent"] == "not measured"
    ceiling = part("copy", figures={"bytes": 1, "bytes_per_s": [4e9], "ceiling_bytes_per_s": 4e9})
    assert verdicts(results(part("orphans", killed()), ceiling))["orphans", "copy_over_ceiling_percent"] == "missed"


def test_one_slow_kill_of_ten_misses_a_95th_percentile() -> None:
    fast = killed()
    slow = msgspec.structs.replace(
        fast, sequences=(msgspec.structs.replace(fast.sequences[0], first_step_s={0: 0.03}), fast.sequences[1])
    )
    assert verdicts(results(part("kill", *[fast] * 9, slow)))["kill", "stepped_s"] == "missed"
    assert verdicts(results(part("kill", *[fast] * 19, slow)))["kill", "stepped_s"] == "met"


def test_a_capture_a_wrong_token_or_a_part_that_ended_early_makes_the_run_a_failure() -> None:
    good = killed()
    assert report.problems(results(part("kill", good))) == []
    survivor = msgspec.structs.replace(good.survivors[0], captures=(7, 9), address_changes=(0, 1))
    bad = msgspec.structs.replace(good, survivors=(survivor,), answers=5, wrong=("differs",))
    found = report.problems(results(part("kill", good, bad), part("scale", error="Retryable: not in time")))
    assert found == [
        "scale: Retryable: not in time",
        "kill: 1 of 5 answers differ or did not complete",
        "kill: survivors captured 2 graphs and saw 1 addresses change",
    ]


def test_the_table_names_every_figure_and_survives_json() -> None:
    notices = [{"lifeline": 0.0005, "socket": 0.001}, {"lifeline": 0.0004}]
    found = results(
        part("copy", figures={"bytes": 1 << 30, "bytes_per_s": [5e10], "ceiling_bytes_per_s": 5e10}),
        part("kill", killed(), killed()),
        part("witnesses", figures={"notices_s": notices}),
        part(
            "agent",
            figures=alone.overhead(
                [{"agent": i % 2 == 1, "steps": 9, "round_s": 0.002, "step_s": 0.001} for i in range(6)]
            ),
        ),
        part("stop", error="TimeoutError: too late"),
    )
    text = report.markdown(msgspec.json.decode(msgspec.json.encode(found), type=Results))
    assert "| fault to the first correct step of every survivor | 2 | 12.00 ms | 12.00 ms | 12.00 ms |" in text
    assert "| kill | 0 | 0 | no client | 2 of 2 |" in text
    assert "best 50.0 GB/s" in text
    assert "| lifeline | 2 | 0.40 ms | 0.50 ms | 0.50 ms |" in text
    assert "overhead +0.00 % (noise 0.00 %)" in text
    assert "Ended early: TimeoutError: too late" in text


def test_the_agents_overhead_is_the_median_of_pairs_with_their_noise() -> None:
    times = [1.0, 1.01, 2.0, 2.04, 1.0, 1.02]
    blocks = [{"agent": i % 2 == 1, "steps": 9, "round_s": t, "step_s": t} for i, t in enumerate(times)]
    found = alone.overhead(blocks)["round_s"]
    assert found["overhead_percent"] == pytest.approx(2.0)
    assert found["noise_percent"] == pytest.approx(0.5)


def test_logits_are_compared_up_to_the_first_token_that_differs() -> None:
    left = [([1, 2, 3], [[0.0, 1.0], [1.0, 2.0], [4.0, 4.0]])]
    right = [([1, 5, 3], [[0.0, 1.0], [1.0, 2.5], [9.0, 9.0]])]
    assert parts.differences(left, left) == {"tokens_equal": True, "max_abs": 0.0, "max_rel": 0.0}
    assert parts.differences(left, right) == {"tokens_equal": False, "max_abs": 0.5, "max_rel": 0.2}


@pytest.mark.parametrize(("count", "slots"), [(4, ((0,), (2,), (3,), (1, 2))), (8, ((0,), (4,), (7,), (3, 4)))])
def test_first_middle_last_and_two_at_once_die(count: int, slots: tuple[tuple[int, ...], ...]) -> None:
    assert parts.removals(count) == slots
