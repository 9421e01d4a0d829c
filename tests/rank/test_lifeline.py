"""Who learns of a death, and what is not one: real processes and signals."""

import os
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator

import pytest

from elastic.lifeline import SEATS, watch

WAIT_S = 20.0

HOLDER = """
import signal, sys, threading, time
from elastic.lifeline import Lifeline
signal.signal(signal.SIGUSR1, lambda *_: None)
made = []
maker = threading.Thread(target=lambda: made.append(Lifeline()))
maker.start()
maker.join()
print(made[0].path, flush=True)
{work}
"""
SLEEP = "while True: time.sleep(1)"

WATCHER = """
import sys, time
from elastic.lifeline import watch
print(watch(sys.argv[1], lambda: print("dead", flush=True), seat=int(sys.argv[2])), flush=True)
time.sleep(600)
"""


class Process:
    def __init__(self, program: str, *arguments: str) -> None:
        self.child = subprocess.Popen([sys.executable, "-c", program, *arguments], stdout=subprocess.PIPE, text=True)

    def line(self, wait_s: float = WAIT_S) -> str:
        assert self.child.stdout is not None
        ready, _, _ = select.select([self.child.stdout], [], [], wait_s)
        assert ready, "not a word in time"
        return self.child.stdout.readline().strip()

    def end(self) -> None:
        self.child.kill()
        self.child.wait(WAIT_S)
        assert self.child.stdout is not None
        self.child.stdout.close()


@pytest.fixture
def start() -> Iterator[type[Process]]:
    started: list[Process] = []

    class Started(Process):
        def __init__(self, program: str, *arguments: str) -> None:
            super().__init__(program, *arguments)
            started.append(self)

    yield Started
    for process in started:
        process.end()


def watched(path: str, seat: int = 0) -> threading.Event:
    died = threading.Event()
    assert watch(path, died.set, seat)
    return died


def test_a_kill_is_seen_though_the_interpreter_of_the_dead_was_busy(start: type[Process]) -> None:
    """Its round loop holds Python's lock for good, as NIXL EP's connect does."""
    holder = start(HOLDER.format(work="import ctypes; ctypes.PyDLL(None).sleep(600)"))
    died = watched(holder.line())
    assert not died.wait(0.2)
    holder.child.kill()
    assert died.wait(WAIT_S)


def test_the_thread_that_made_it_may_end_and_signals_may_come(start: type[Process]) -> None:
    holder = start(HOLDER.format(work=SLEEP))
    died = watched(holder.line())
    tasks = os.listdir(f"/proc/{holder.child.pid}/task")
    for _ in range(20):
        for task in tasks:
            os.kill(int(task), signal.SIGUSR1)
    assert not died.wait(0.3)


def test_a_stopped_process_is_not_dead_until_it_is_killed(start: type[Process]) -> None:
    holder = start(HOLDER.format(work=SLEEP))
    died = watched(holder.line())
    holder.child.send_signal(signal.SIGSTOP)
    assert not died.wait(0.3)
    holder.child.kill()
    assert died.wait(WAIT_S)


@pytest.mark.parametrize("work", ["import os; os._exit(71)", "import os; os.abort()", "import os; os.kill(0, 11)"])
def test_every_other_end_is_seen_too(start: type[Process], work: str) -> None:
    lead = "import resource, os; os.setsid(); resource.setrlimit(resource.RLIMIT_CORE, (0, 0)); sys.stdin.read(1)\n"
    program = HOLDER.format(work=lead + work)
    child = subprocess.Popen(
        [sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
    )
    assert child.stdin is not None
    assert child.stdout is not None
    died = watched(child.stdout.readline().decode().strip())
    assert not died.wait(0.1)
    child.stdin.close()
    assert died.wait(WAIT_S)
    child.wait(WAIT_S)
    child.stdout.close()


def test_a_stopped_witness_keeps_the_news_from_nobody(start: type[Process]) -> None:
    holder = start(HOLDER.format(work=SLEEP))
    path = holder.line()
    first, second = start(WATCHER, path, "1"), start(WATCHER, path, "2")
    assert (first.line(), second.line()) == ("True", "True")
    died = watched(path)
    first.child.send_signal(signal.SIGSTOP)
    holder.child.kill()
    assert died.wait(WAIT_S)
    assert second.line() == "dead"
    first.child.send_signal(signal.SIGCONT)
    assert first.line() == "dead"


def test_two_witnesses_in_one_seat_are_both_told(start: type[Process]) -> None:
    """A controller that adopts a group while the old one is still there."""
    holder = start(HOLDER.format(work=SLEEP))
    path = holder.line()
    both = [watched(path), watched(path)]
    time.sleep(0.05)
    holder.child.kill()
    assert all(died.wait(WAIT_S) for died in both)


def test_what_cannot_be_watched_is_said_so(start: type[Process], tmp_path: os.PathLike[str]) -> None:
    holder = start(HOLDER.format(work=SLEEP))
    path = holder.line()
    assert not watch(path, lambda: None, seat=SEATS)
    assert not watch(f"{tmp_path}/nothing", lambda: None)
    holder.child.kill()
    holder.child.wait(WAIT_S)
    assert not watch(path, lambda: None)
