"""What a sceptic reads must be what was recorded."""

import re
from html.parser import HTMLParser
from pathlib import Path

import msgspec
import pytest
from typer.testing import CliRunner

from chaos import records
from chaos.cli import app
from chaos.report import compare, figures, page, source, summary
from elastic.errors import ElasticError
from elastic.flight import Stepped
from tests.chaos.record_builder import BEGAN, kill, loss, request, steps, write_run


def made(path: Path) -> summary.Report:
    return summary.summarise(source.read(path))


def healed(path: Path, repairs_s: tuple[float, ...] = (0.04, 0.05, 0.06)) -> Path:
    """A run with a kill every 5 s, each repaired in its time."""
    faults = tuple(kill(n + 1, BEGAN + 2 + 5 * n, n % 4) for n in range(len(repairs_s)))
    reports = tuple(loss(fault, s) for fault, s in zip(faults, repairs_s, strict=True))
    return write_run(path, faults=faults, reports=reports)


class Links(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found += [value for name, value in attrs if name in ("src", "href") and value]


def test_the_page_needs_no_network_and_no_other_file(tmp_path: Path) -> None:
    out = tmp_path / "page.html"
    read = source.read(healed(tmp_path / "run"))
    page.write(read, summary.summarise(read), out)
    links = Links()
    links.feed(out.read_text())
    assert not links.found
    assert "<svg" in out.read_text()
    assert not re.search(r"url\((?!#)", out.read_text())


def test_the_parts_of_a_repair_add_up_to_it(tmp_path: Path) -> None:
    report = made(healed(tmp_path / "run"))
    assert len(report.recoveries) == 3
    for recovery in report.recoveries:
        assert sum(recovery.phases_s.values()) == pytest.approx(recovery.coverage_s)
    assert report.times["coverage"].p50 == pytest.approx(0.05)
    assert report.times["coverage"].p50_low <= 0.05 <= report.times["coverage"].p50_high
    assert report.times["capacity"].max == pytest.approx(3.0)
    assert report.restart is not None
    assert report.restart.p50 == 12.0


def test_a_client_that_waited_longer_than_the_repair_is_seen(tmp_path: Path) -> None:
    fault = kill(1, BEGAN + 2, 0)
    waited = request(0, BEGAN + 1.9, hole=(BEGAN + 1.95, BEGAN + 2.9))
    path = write_run(tmp_path / "run", faults=(fault,), reports=(loss(fault, 0.05),), requests=(waited,))
    (recovery,) = made(path).recoveries
    assert recovery.silence_s is not None
    assert recovery.silence_s > 0.9


def test_a_second_without_tokens_counts_as_down(tmp_path: Path) -> None:
    silent = request(0, BEGAN, hole=(BEGAN + 0.2, BEGAN + 1.2))
    found = made(write_run(tmp_path / "run", requests=(silent,))).availability
    assert found.down_s == pytest.approx(1.0, abs=0.03)
    assert found.share < 1
    assert page.percent(0.9999999) != "100 %"


def test_another_client_that_is_served_does_not_hide_that_one_waits(tmp_path: Path) -> None:
    silent = request(0, BEGAN, hole=(BEGAN + 0.2, BEGAN + 1.2))
    served = [request(n, BEGAN + 0.3 * n) for n in range(1, 5)]
    found = made(write_run(tmp_path / "run", requests=(silent, *served))).availability
    assert found.down_s == 0
    assert found.longest_gap_s == pytest.approx(1.0, abs=0.03)


@pytest.mark.parametrize("outcome", ["lost", "duplicated", "differs"])
def test_one_wrong_answer_is_in_the_first_sentence(tmp_path: Path, outcome: records.RequestOutcome) -> None:
    path = write_run(
        tmp_path / "run", requests=(request(0, BEGAN), request(1, BEGAN, outcome=outcome)), verdict="failed", why="w"
    )
    read = source.read(path)
    text = page.page(read, summary.summarise(read))
    verdict = text[text.index('class="verdict failed"') : text.index('class="tiles"')]
    assert "Failed" in verdict
    assert re.search(r'class="bad">[^<]*\b1 ' + {"differs": "differing"}.get(outcome, outcome), verdict)


def test_a_rank_that_was_removed_without_a_fault_is_named(tmp_path: Path) -> None:
    honest, invented = kill(1, BEGAN + 2, 0), kill(2, BEGAN + 8, 3)
    path = write_run(tmp_path / "run", faults=(honest,), reports=(loss(honest, 0.05), loss(invented, 0.05)))
    report = made(path)
    assert len(report.unneeded_removals) == 1
    assert "slot 3" in report.unneeded_removals[0]
    assert not report.quiet.runs


def test_a_removal_before_its_fault_is_no_healing(tmp_path: Path) -> None:
    early, late = kill(1, BEGAN + 2, 0), kill(1, BEGAN + 9, 0)
    assert made(write_run(tmp_path / "run", faults=(late,), reports=(loss(early, 0.05),))).unneeded_removals


def test_a_false_alarm_in_a_quiet_run_is_told(tmp_path: Path) -> None:
    write_run(tmp_path / "all" / "calm")
    invented = kill(1, BEGAN + 2, 1)
    write_run(tmp_path / "all" / "noisy", reports=(loss(invented, 0.05),))
    report = made(tmp_path / "all")
    assert report.quiet.runs == 2
    assert len(report.quiet.removals) == 1


def test_a_survivor_that_captured_a_graph_or_moved_a_tensor_is_counted(tmp_path: Path) -> None:
    lines = steps(0, BEGAN + 2)
    recaptured = [*lines[:-1], msgspec.structs.replace(lines[-1], captures=6)]
    moved = [*lines[:-1], msgspec.structs.replace(lines[-1], address_hash="dd")]
    path = write_run(tmp_path / "run", steps_of={0: lines, 1: recaptured, 2: moved})
    found = made(path).survivors
    assert (found.lives, found.recaptured, found.moved) == (3, 1, 1)


def test_a_new_process_may_capture_its_own_graphs(tmp_path: Path) -> None:
    lines = steps(0, BEGAN + 9, died=BEGAN + 2, reborn=BEGAN + 6)
    second = [
        msgspec.structs.replace(x, captures=9) if isinstance(x, Stepped) and x.incarnation == 2 else x for x in lines
    ]
    path = write_run(tmp_path / "run", steps_of={0: second})
    found = made(path).survivors
    assert (found.lives, found.recaptured) == (2, 0)


def test_a_run_that_was_cut_short_is_no_success(tmp_path: Path) -> None:
    write_run(tmp_path / "all" / "a")
    cut = write_run(tmp_path / "all" / "b", steps_of={0: steps(0, BEGAN + 1)})
    (cut / records.RUN).unlink()
    campaign = records.Campaign(
        command=("healer-chaos", "run"),
        seed=1,
        began_wall=1.0,
        ended_wall=2.0,
        machine=source.read(tmp_path / "all" / "a").runs[0].run.machine,
        versions={},
        runs=("a", "b"),
        verdicts={"passed": 1},
        faults=0,
    )
    records.write(tmp_path / "all" / records.CAMPAIGN, campaign)
    report = made(tmp_path / "all")
    assert report.unfinished == ("b",)
    assert report.verdict == "error"


def test_faults_that_were_refused_are_not_counted_as_injected(tmp_path: Path) -> None:
    done, refused = kill(1, BEGAN + 2, 0), msgspec.structs.replace(kill(2, 0.0, 1), done_at=0.0, refused="no such slot")
    path = write_run(tmp_path / "run", faults=(done, refused), reports=(loss(done, 0.04),))
    report = made(path)
    assert report.faults == 1
    assert [(cell.injected, cell.refused) for cell in report.matrix] == [(1, 1)]


def test_the_curve_falls_at_the_fault_and_says_when_it_is_back(tmp_path: Path) -> None:
    fault = kill(1, BEGAN + 6, 0)
    stream = tuple(request(n, BEGAN + 0.05 * n, hole=(BEGAN + 6, BEGAN + 7)) for n in range(320))
    path = write_run(tmp_path / "run", faults=(fault,), reports=(loss(fault, 1.0),), requests=stream)
    (curve,) = made(path).curves
    after = [value for n, value in enumerate(curve.mean) if 0.1 < curve.from_s + n * curve.bin_s < 0.8]
    assert max(after) == 0
    assert curve.back_s is not None
    assert curve.back_s >= 1.0


def test_more_samples_narrow_the_interval() -> None:
    values = [0.01 * n for n in range(1, 11)]
    few, many = figures.spread(values), figures.spread(values * 20)
    assert many.p50_high - many.p50_low < few.p50_high - few.p50_low
    assert (few.p50, few.p95, few.max) == (0.05, 0.1, 0.1)


def test_a_damaged_record_names_file_and_line(tmp_path: Path) -> None:
    path = healed(tmp_path / "run")
    with (path / records.REQUESTS).open("ab") as file:
        file.write(b'{"n": "seven"}\n')
    count = len((path / records.REQUESTS).read_bytes().splitlines())
    with pytest.raises(ElasticError, match=rf"requests\.jsonl:{count}: "):
        source.read(path)


@pytest.mark.parametrize(
    "arguments", [["nowhere"], ["a", "b"], ["--compare", "a"], ["--compare", "nowhere", "nowhere"]]
)
def test_wrong_use_is_one_line(tmp_path: Path, arguments: list[str]) -> None:
    where = [a if a.startswith("-") else str(tmp_path / a) for a in arguments]
    result = CliRunner().invoke(app, ["report", *where])
    assert result.exit_code == 2
    assert result.stderr.count("\n") == 1


def test_a_slower_repair_is_a_regression_and_the_same_run_is_none(tmp_path: Path) -> None:
    fast, slow = healed(tmp_path / "a", (0.04, 0.041, 0.042)), healed(tmp_path / "b", (0.08, 0.081, 0.082))
    for path in (fast, slow):
        assert CliRunner().invoke(app, ["report", str(path)]).exit_code == 0
    same = CliRunner().invoke(app, ["report", "--compare", str(fast), str(fast)])
    assert same.exit_code == 0
    assert "worse" not in same.stdout
    worse = CliRunner().invoke(app, ["report", "--compare", str(fast), str(slow), "--json"])
    assert worse.exit_code == 1
    rows = msgspec.json.decode(worse.stdout, type=list[compare.Row])
    assert {row.name for row in rows if row.judgement == "worse"} >= {"coverage p50", "coverage p95"}
    better = CliRunner().invoke(app, ["report", "--compare", str(slow), str(fast)])
    assert better.exit_code == 0


def test_a_scenario_that_fails_now_is_a_regression(tmp_path: Path) -> None:
    write_run(tmp_path / "a" / "one")
    write_run(tmp_path / "b" / "one", verdict="failed", why="w")
    rows = compare.compare(made(tmp_path / "a"), made(tmp_path / "b"))
    assert [row for row in rows if row.name == "one" and row.judgement == "worse"]
