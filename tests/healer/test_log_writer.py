"""What becomes of the log, and of the daemon, where stderr is read slowly, or by nobody: real pipes, a real process."""

import fcntl
import json
import os
import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from healer.log_writer import Writer
from tests.healer.test_daemon import REPOSITORY, Daemon, wait


class Pipe:
    """A small one. `fill` makes it full, as a reader leaves it who has stopped to read."""

    def __init__(self) -> None:
        self.reader, self.writer = os.pipe()
        fcntl.fcntl(self.writer, fcntl.F_SETPIPE_SZ, 4096)

    def fill(self) -> int:
        os.set_blocking(self.writer, False)
        filled = 0
        try:
            while True:
                filled += os.write(self.writer, b"." * 4096)
        except BlockingIOError:
            os.set_blocking(self.writer, True)
            return filled

    def read(self, until: bytes) -> bytes:
        """All up to these bytes."""
        found = b""
        while until not in found:
            part = os.read(self.reader, 65536)
            assert part, f"the end of the pipe, without {until!r}"
            found += part
        return found

    def close(self) -> None:
        for fd in (self.reader, self.writer):
            os.close(fd)


@pytest.fixture
def pipe() -> Iterator[Pipe]:
    found = Pipe()
    yield found
    found.close()


@pytest.fixture
def daemon(tmp_path: Path) -> Iterator[Daemon]:
    found = Daemon(tmp_path)
    try:
        yield found
    finally:
        found.end()


def test_lines_come_out_whole_and_in_order(pipe: Pipe) -> None:
    writer = Writer(pipe.writer, 1 << 20)
    lines = [f"line {n} {'x' * (n % 700)}\n".encode() for n in range(500)]
    for line in lines:
        assert writer.put(line)
    assert pipe.read(b"line 499 ").startswith(b"".join(lines[:499]))
    assert writer.drain(10)
    assert (writer.dropped, writer.waiting) == (0, 0)


def test_a_pipe_that_nobody_reads_takes_a_bounded_queue_and_the_rest_is_counted(pipe: Pipe) -> None:
    pipe.fill()
    writer = Writer(pipe.writer, max_bytes=1000)
    kept = sum(writer.put(b"x" * 99 + b"\n") for _ in range(25))
    assert (kept, writer.dropped) == (10, 15)
    assert writer.waiting == 1000
    assert not writer.drain(0.05), "it does not wait for ever"
    assert pipe.read(b"x" * 99 + b"\n")
    assert writer.drain(10)
    assert writer.put(b"last\n")
    assert pipe.read(b"last\n").endswith(b"last\n")
    assert writer.dropped == 15


def test_a_reader_that_is_gone_costs_lines_and_nothing_else() -> None:
    reader, fd = os.pipe()
    os.close(reader)
    writer = Writer(fd, 1 << 20)
    writer.put(b"one\ntwo\n")
    assert writer.drain(10)
    assert writer.dropped == 2
    os.close(fd)


def test_the_log_says_where_lines_are_missing(pipe: Pipe) -> None:
    """In a process of its own, whose stderr is the pipe."""
    text = (
        "import logging, sys; from healer import log_writer, logs; log_writer.MAX_BYTES = 3000; "
        "logs.configure('json', 'info'); log = logging.getLogger('healer')\n"
        "for n in range(100): log.info('event %d', n)\n"
        "print(logs.dropped(), flush=True)\n"
        "sys.stdin.readline(); logs._writers[0].drain(60); log.warning('after')\n"
    )
    pipe.fill()
    command = [sys.executable, "-c", text]
    with subprocess.Popen(
        command, cwd=REPOSITORY, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=pipe.writer, text=True
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        dropped = int(process.stdout.readline())
        assert 0 < dropped < 100
        found: list[bytes] = []
        reading = threading.Thread(target=lambda: found.append(pipe.read(b'"after"')))
        reading.start()
        process.stdin.write("\n")
        process.stdin.close()
        reading.join(30)
    events = [json.loads(line)["event"] for line in found[0].lstrip(b".").decode().splitlines() if line[-1:] == "}"]
    kept = 100 - dropped
    assert events[:kept] == [f"event {n}" for n in range(kept)]
    assert events[kept:] in (
        [f"log.dropped: {dropped} lines that stderr did not take in time", "after"],
        [f"log.dropped: {dropped} lines that stderr did not take in time"],
    )


def test_a_daemon_whose_stderr_nobody_reads_starts_heals_answers_and_ends(
    daemon: Daemon, pipe: Pipe, monkeypatch: pytest.MonkeyPatch
) -> None:
    pipe.fill()
    monkeypatch.setenv("LOG_BYTES", "2000")
    daemon.spawn("--log-format", "json", stderr=pipe.writer)
    wait(daemon.is_ok, "the daemon is ok")
    for slot in range(4):
        daemon.kill_and_heal(slot)
    dropped = daemon.get("/status").json()["log_dropped"]
    assert dropped > 0
    assert re.search(r"healer_log_lines_dropped_total [1-9]", daemon.get("/metrics").text)
    assert daemon.process is not None
    daemon.process.terminate()
    assert daemon.process.wait(20) == 0, "it waits for no reader"


def test_a_start_that_fails_says_so_at_once_and_ends_where_nobody_reads_it(daemon: Daemon, pipe: Pipe) -> None:
    (daemon.folder / "run").write_text("no folder")
    daemon.spawn(stderr=pipe.writer)
    assert b"the run directory cannot be used" in pipe.read(b"cannot be used")
    pipe.fill()
    assert daemon.spawn(stderr=pipe.writer).wait(20) == 1
