"""A controller that was stopped between its last check and a launch, and wakes when another one acts."""

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from elastic import process
from elastic.controller.guard import GuardedLauncher
from elastic.errors import Superseded
from elastic.launch.base import Launched
from elastic.paths import socket_path


class Late:
    """A launcher over one real process. While it starts it, the lease ends."""

    def __init__(self, root: Path) -> None:
        self.why, self.child = "", subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
        launcher = SimpleNamespace(launch=self._launch, end=lambda started: self.child.kill())
        self.guarded = GuardedLauncher(launcher, lambda: self.why, root)  # type: ignore[arg-type]

    def _launch(self, slot: int, incarnation: int) -> Launched:
        self.why = "the lease of term 5 is over"
        return Launched(self.child.pid, process.start_time(self.child.pid))


@pytest.fixture
def late(tmp_path: Path) -> Iterator[Late]:
    found = Late(tmp_path)
    yield found
    found.child.kill()
    found.child.communicate()


def test_a_process_that_was_started_too_late_is_ended_since_nobody_waits_for_it(late: Late) -> None:
    with pytest.raises(Superseded, match="term 5"):
        late.guarded.launch(1, 8)
    assert late.child.wait(20) < 0


def test_a_process_that_the_next_controller_may_have_met_is_left_to_it(late: Late, tmp_path: Path) -> None:
    Path(socket_path(tmp_path, 1, 8)).touch()
    with pytest.raises(Superseded, match="term 5"):
        late.guarded.launch(1, 8)
    assert late.child.poll() is None


def test_whoever_may_not_act_starts_nothing(late: Late) -> None:
    late.why = "a standby"
    with pytest.raises(Superseded, match="a standby"):
        late.guarded.launch(1, 8)
    assert late.why == "a standby", "the launcher was not asked"
