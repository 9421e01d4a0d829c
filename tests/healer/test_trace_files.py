"""Trace files: written by the daemon, bounded, readable by themselves, and refused with the place where they are wrong."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from healer.diagnosis import Cause, Hardware
from healer.evidence import Evidence, Severity, What
from healer.replay import Replay
from healer.trace import EvidenceLine, Recorder, Trace, TraceError, view_line
from tests.healer.stage import HOST, Stage, advise, gpu
from tests.healer.support import LIMITS, rank

REPOSITORY = Path(__file__).parents[2]
HARDWARE = Hardware(gpus=(gpu(0), gpu(1)), placed={rank(1): gpu(1)}, host=HOST)
LIVE = (rank(0), rank(1))


def seen(seq: int, what: What = What.SILENCE, value: float = 1.0) -> Evidence:
    return Evidence(
        source="test", seq=seq, subject=rank(1), what=what, value=value, severity=Severity.WARNING, at=100.0 + seq,
        wall=1.79e9,
    )  # fmt: skip


def evidence(path: Path) -> list[Evidence]:
    return [line.evidence for line in Trace(path) if isinstance(line, EvidenceLine)]


def test_what_is_recorded_is_read_back_as_it_was(tmp_path: Path) -> None:
    recorder = Recorder(tmp_path / "t.jsonl", LIMITS)
    recorder.view(view_line(100.0, LIVE, HARDWARE, driver="580.1", generation="hopper"))
    recorder.evidence([seen(1), seen(2)], ())
    recorder.view(view_line(103.0, LIVE[:1], HARDWARE, driver="580.1", generation="hopper"))
    recorder.view(view_line(104.0, LIVE[:1], HARDWARE, driver="580.1", generation="hopper"))
    recorder.close()
    trace = Trace(tmp_path / "t.jsonl")
    assert trace.header.limits == LIMITS
    assert (trace.header.view.live, trace.header.view.gpus) == (LIVE, HARDWARE.gpus)
    assert [(p.rank, p.gpu) for p in trace.header.view.placed] == [(rank(1), gpu(1))]
    assert evidence(tmp_path / "t.jsonl") == [seen(1), seen(2)]
    assert len(list(trace)) == 3, "a view that says the same is not written again"


def test_a_full_file_makes_room_for_one_that_can_be_read_by_itself(tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    recorder = Recorder(path, LIMITS, max_bytes=4000)
    recorder.view(view_line(100.0, LIVE, HARDWARE))
    standing = [seen(1, What.REMAP_PENDING)]
    for seq in range(2, 200):
        recorder.evidence([seen(seq)], standing)
    recorder.close()
    assert {p.name for p in tmp_path.iterdir()} == {"t.jsonl", "t.jsonl.1"}
    assert all(p.stat().st_size < 5000 for p in tmp_path.iterdir())
    newest, before = evidence(path), evidence(Path(f"{path}.1"))
    assert newest[0] == standing[0], "what stood when the file was begun"
    assert newest[-1].seq == 199
    assert before[-1].seq + 1 == newest[1].seq, "nothing was lost in between"


def test_a_recording_goes_on_in_a_new_file_after_a_restart(tmp_path: Path) -> None:
    for number in (1, 2):
        recorder = Recorder(tmp_path / "t.jsonl", LIMITS)
        recorder.view(view_line(100.0, LIVE, HARDWARE))
        recorder.evidence([seen(number)], ())
        recorder.close()
    assert [e.seq for e in evidence(tmp_path / "t.jsonl")] == [2]
    assert [e.seq for e in evidence(tmp_path / "t.jsonl.1")] == [1]


def test_a_place_that_cannot_be_written_ends_the_recording_with_the_reason(tmp_path: Path) -> None:
    recorder = Recorder(tmp_path / "no" / "t.jsonl", LIMITS)
    recorder.view(view_line(100.0, LIVE, HARDWARE))
    recorder.evidence([seen(1)], ())
    assert recorder.error == f"{tmp_path}/no/t.jsonl: cannot be written: No such file or directory"
    recorder.close()


def test_a_last_line_that_was_cut_off_does_not_count_and_is_told(tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    whole = Stage().encoded()
    path.write_bytes(whole[:-20])
    trace, last = Trace(path), len(whole.splitlines())
    assert len(list(trace)) == last - 2
    assert trace.cut == f"{path}:{last}: the last line was cut off and does not count"
    done = diagnose(str(path))
    # wherever the path of this test makes it wrap
    assert f"note: {trace.cut}".split() == done.stdout.split()[-len(f"note: {trace.cut}".split()) :]
    assert json.loads(diagnose(str(path), "--json").stdout)["cut"] == trace.cut


def test_a_last_line_that_only_lacks_its_end_of_line_counts(tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    whole = Stage().encoded()
    path.write_bytes(whole.rstrip(b"\n"))
    trace = Trace(path)
    assert (len(list(trace)), trace.cut) == (len(whole.splitlines()) - 1, "")


def view(at: float, slots: str = '{"kind": "rank", "slot": 0, "incarnation": 1}') -> str:
    return f'{{"line": "view", "at": {at}, "live": [{slots}]}}'


def load(at: float, wall: float = 1.0, rest: str = "") -> str:
    return f'{{"line": "load", "at": {at}, "wall": {wall}, "values": {{"waiting": 1.0}}{rest}}}'


@pytest.mark.parametrize(
    ("lines", "why"),
    [
        ((view(1500), view(1400)), "3: is at 1400 s, before line 2 at 1500 s, expected a time not before it"),
        ((load(1500), load(1400)), "3: is at 1400 s, before line 2 at 1500 s, expected a time not before it"),
        ((view(-1),), "2: is at -1 s, expected seconds from 0 to 1e+10"),
        ((view(1e12),), "2: is at 1e+12 s, expected seconds from 0 to 1e+10"),
        ((load(500, 1e300),), "2: has the wall clock 1e+300, expected seconds since 1970"),
        ((load(500, rest=', "idle": ["waiting"]'),), "2: waiting has a value and is idle, expected one of the two"),
        ((view(500, '{"kind": "rank", "slot": -1, "incarnation": 1}'),), "2: names slot -1, incarnation 1, expected"),
        (
            (view(500, ", ".join(['{"kind": "rank", "slot": 3, "incarnation": 1}'] * 2)),),
            "2: names slot 3 twice, expected each once",
        ),
    ],
)
def test_a_line_with_a_time_or_a_slot_that_cannot_be_is_named(tmp_path: Path, lines: tuple[str, ...], why: str) -> None:
    path = tmp_path / "t.jsonl"
    header = Stage().encoded().decode().splitlines()[0]
    path.write_text("\n".join((header, *lines)) + "\n")
    with pytest.raises(TraceError, match=re.escape(f"{path}:{why}")):
        list(Trace(path).lines())


def test_evidence_that_is_told_late_is_no_error(tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    recorder = Recorder(path, LIMITS)
    recorder.view(view_line(500.0, LIVE, HARDWARE))
    recorder.evidence([seen(1)], ())
    recorder.view(view_line(501.0, LIVE[:1], HARDWARE))
    recorder.close()
    assert [one.at for one in evidence(path)] == [101.0]


@pytest.mark.parametrize(
    ("number", "line", "why"),
    [
        (1, "", r"t\.jsonl:1: the file is empty, expected the header of a trace"),
        (1, "{}", r"t\.jsonl:1: .*missing required field.*, expected the header of a trace"),
        (1, '{"line": "view"}', r"t\.jsonl:1: .*'view'.*, expected the header"),
        (1, "NEWER", r"t\.jsonl:1: version 99 is not known, expected 1"),
        (2, "nonsense", r"t\.jsonl:2: JSON is malformed.*, expected a line of evidence, or of a view"),
        (2, '{"line": "evidence", "evidence": 3}', r"t\.jsonl:2: Expected `object`, got `int`.*, expected a line of"),
        (3, '{"line": "view", "at": 1.0, "live": [], "more": 1}', r"t\.jsonl:3: .*unknown field `more`"),
    ],
)
def test_a_line_that_is_wrong_is_named_with_what_was_expected(tmp_path: Path, number: int, line: str, why: str) -> None:
    lines = Stage().encoded().decode().splitlines()
    newer = lines[0].replace('"version":1', '"version":99')
    lines[number - 1] = newer if line == "NEWER" else line
    path = tmp_path / "t.jsonl"
    path.write_text("\n".join(lines) + "\n")
    with pytest.raises(TraceError, match=why):
        list(Trace(path))


def test_limits_in_a_trace_that_do_not_fit_each_other_are_refused_where_they_stand(tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    path.write_bytes(Stage().encoded().replace(b'"silent_after_s":10.0', b'"silent_after_s":0.5'))
    with pytest.raises(TraceError, match=r":1: silent_after_s 0\.5 is below stall_after_s 1.*limits"):
        Trace(path)


def test_a_recording_that_began_in_the_middle_of_a_fault_judges_as_the_daemon_did(tmp_path: Path) -> None:
    stage = Stage()
    path = tmp_path / "t.jsonl"
    recorder = Recorder(path, LIMITS, max_bytes=1)
    recorder.view(stage.header.view)
    standing: list[Evidence] = []
    stage.say("nvml", stage.gpus[1], What.RECOVERY_ACTION, 1, Severity.CRITICAL)
    for line in stage.lines:
        if isinstance(line, EvidenceLine):
            recorder.evidence([line.evidence], standing)
            standing.append(line.evidence)
    recorder.close()
    replay = Replay(Trace(path), lambda view: advise)
    list(replay)
    assert [(i.cause, i.slots) for i in replay.incidents] == [(Cause.RECOVERY_ACTION, (1,))]


# --- the command ------------------------------------------------------------------------------------------------------


def diagnose(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "healer.cli", "diagnose", *arguments]
    return subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, timeout=60, check=False)


def test_the_command_shows_what_changed_and_the_incidents_within_100_columns() -> None:
    done = diagnose("tests/healer/traces/sigkill.jsonl")
    assert done.returncode == 0, done.stderr
    assert re.search(r"2\.200 s +unhealthy +rank 0\.0 is dead: lifeline-cut \(Z\)", done.stdout)
    assert "inc-1: process-death, slots 0, opened 2.200 s, closed 14.2" in done.stdout
    assert max(map(len, done.stdout.splitlines())) <= 100


def test_the_command_gives_the_same_as_json() -> None:
    found = json.loads(diagnose("tests/healer/traces/sigkill.jsonl", "--json").stdout)
    assert [one["cause"] for one in found["incidents"]] == ["process-death"]
    assert found["moments"][-1]["verdicts"][0]["subject"] == {"kind": "rank", "slot": 0, "incarnation": 1}


def test_a_file_that_is_no_trace_is_one_clear_error(tmp_path: Path) -> None:
    (tmp_path / "x").write_text("hello\n")
    for place, why in ((tmp_path / "x", "x:1: JSON is malformed"), (tmp_path / "y", "y: cannot be read: No such file")):
        done = diagnose(str(place))
        assert (done.returncode, len(done.stderr.splitlines())) == (1, 1)
        assert why in done.stderr


@pytest.mark.parametrize("value", ['"notanumber"', "1" + "0" * 400, "1e300"])
def test_evidence_whose_value_cannot_be_is_an_error_with_its_line(tmp_path: Path, value: str) -> None:
    text = (Path(__file__).parent / "traces" / "xid-31.jsonl").read_text()
    bad = re.sub(r'("what":"xid","value":)31', rf"\g<1>{value}", text)
    assert bad != text
    (tmp_path / "trace.jsonl").write_text(bad)
    with pytest.raises(TraceError, match=r"trace\.jsonl:\d+: "):
        list(Trace(tmp_path / "trace.jsonl"))
