"""The demo as its user meets it: a command that shows a real healing and leaves nothing behind, however it ends."""

import contextlib
import itertools
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

REPOSITORY = Path(__file__).parents[2]
LOSS = ["detect", "decide", "release", "park", "cover", "commit", "resume"]
REFILL = [f"refill: {step}" for step in ("boot", "load", "capture", "connect", "park", "commit", "resume")]


class Demo:
    """Runs the command with a directory for temporary files of its own."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.children: list[subprocess.Popen[str]] = []

    def start(self, *options: str) -> subprocess.Popen[str]:
        child = subprocess.Popen(
            [sys.executable, "-m", "healer.cli", "demo", *options],
            cwd=REPOSITORY,
            env=os.environ | {"TMPDIR": str(self.folder), "PYTHONUNBUFFERED": "1"},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        self.children.append(child)
        return child

    def started_until(self, line: str, *options: str) -> subprocess.Popen[str]:
        """Start it, and return when it has printed `line`."""
        child = self.start(*options)
        assert child.stdout is not None
        seen = ""
        while line not in seen:
            new = child.stdout.readline()
            assert new, f"ended without {line!r}: {seen}{child.stderr.read() if child.stderr else ''}"
            seen += new
        return child

    def processes(self, module: str = "") -> list[psutil.Process]:
        """Those that name the directory, and the module if one is given."""
        found = []
        for each in psutil.process_iter():
            with contextlib.suppress(psutil.Error):
                line = each.cmdline()
                named = any(str(self.folder) in part for part in line) and (not module or module in line)
                if named and each.status() != psutil.STATUS_ZOMBIE:
                    found.append(each)
        return found

    def assert_nothing_is_left(self) -> None:
        assert self.processes() == []
        assert list(self.folder.iterdir()) == []
        assert list(Path("/dev/shm").glob(f"*{self.folder.name}*")) == []

    def end(self) -> None:
        for child in self.children:
            child.kill()
            child.communicate()
        for each in self.processes():
            with contextlib.suppress(psutil.Error):
                each.kill()
        shutil.rmtree(self.folder, ignore_errors=True)
        for tier in Path("/dev/shm").glob(f"*{self.folder.name}*"):
            tier.unlink()


@pytest.fixture
def demo() -> Iterator[Demo]:
    made = Demo(Path(tempfile.mkdtemp(prefix="demo-", dir="/tmp")))
    yield made
    made.end()


def test_the_demo_shows_a_whole_healing_and_leaves_nothing_behind(demo: Demo, tmp_path: Path) -> None:
    report = tmp_path / "report.json"
    child = demo.start("--kill", "0", "--json", str(report))
    out, errors = child.communicate(timeout=150)
    assert child.returncode == 0, out + errors
    assert errors == ""
    assert_whole(json.loads(report.read_bytes()))
    assert all(len(line) <= 100 for line in out.splitlines())
    for word in ("SIGKILL to slot 0", *LOSS, *REFILL, "host memory", "replayed", "ok: slot 0 died, 16 of 16 requests"):
        assert word in out
    demo.assert_nothing_is_left()


def assert_whole(report: dict[str, Any]) -> None:
    healing = report["healing"]
    steps = {step["name"]: step for step in healing["steps"]}
    assert steps.keys() == {*LOSS, *REFILL}
    # a phase may lie within another, but none begins before the one that leads to it
    for earlier, later in (*itertools.pairwise(LOSS[:3]), ("park", "commit"), ("commit", "resume")):
        assert steps[earlier]["at_s"] <= steps[later]["at_s"]
    moments = [
        steps[name]["at_s"]
        for name in ("resume", "refill: boot", "refill: load", "refill: connect", "refill: park", "refill: commit")
    ]
    assert moments == sorted(moments)
    assert all(step["took_s"] >= 0 for step in steps.values())
    assert 0 < healing["detect_s"] < healing["coverage_s"] < healing["capacity_s"]
    assert [one["slot"] for one in report["survivors"]] == [1, 2, 3]
    for one in report["survivors"]:
        assert one["pause_s"] > 0
        assert one["captures"][0] == one["captures"][1] > 0
        assert one["address_changes"] == [0, 0]
    assert healing["cover"]["host"]["bytes"] > 0
    assert healing["refill"]["peer"]["bytes"] > 0
    assert report["in_flight"] > 0
    assert report["replayed"] > 0
    assert report["completed"] == report["requests"] == 16
    assert report["tokens_equal"]
    assert report["live_again"]
    assert report["problems"] == []


@pytest.mark.parametrize(("line", "signum"), [("model is made", signal.SIGTERM), ("has formed a group", signal.SIGINT)])
def test_an_interrupted_demo_leaves_nothing_behind(demo: Demo, line: str, signum: signal.Signals) -> None:
    child = demo.started_until(line)
    child.send_signal(signum)
    _, errors = child.communicate(timeout=60)
    assert child.returncode == 128 + signum
    assert "Traceback" not in errors
    assert "interrupted" in errors
    demo.assert_nothing_is_left()


def test_a_demo_that_fails_says_why_keeps_the_logs_and_ends_every_process(demo: Demo) -> None:
    child = demo.started_until("has formed a group")
    (daemon,) = demo.processes("healer.cli")
    daemon.kill()
    _, errors = child.communicate(timeout=60)
    assert child.returncode == 1
    assert errors.startswith("error: ")
    assert "Traceback" not in errors
    (kept,) = demo.folder.iterdir()
    assert str(kept) in errors
    assert (kept / "daemon.log").read_text()
    assert demo.processes() == []


@pytest.mark.parametrize(
    ("options", "word"),
    [
        (["--kill", "4"], "0 to 3"),
        (["--tokens", "0"], "1 to 200"),
        (["--json", "/nowhere/x.json"], "folder"),
        (["x"], "x"),
    ],
)
def test_wrong_options_are_refused_before_anything_starts(demo: Demo, options: list[str], word: str) -> None:
    child = demo.start(*options)
    _, errors = child.communicate(timeout=60)
    assert child.returncode == 2
    assert word in errors
    assert "Traceback" not in errors
    demo.assert_nothing_is_left()
