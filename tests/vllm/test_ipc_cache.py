"""Imports of dead peers are closed, and nothing else is touched: on a stand-in for UCX's library, with real processes."""

import ctypes
import hashlib
import logging
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from elastic.vllm.worker import ipc_cache
from elastic.vllm.worker.ipc_cache import Closed, close_dead, loaded, unknown

SOURCES = Path(__file__).with_name("fake_uct")
OURS, OTHERS = 4026531836, 4026532999
MIB = 1 << 20


class Stand:
    """One library, compiled and loaded for one test."""

    def __init__(self, folder: Path) -> None:
        compiler = shutil.which("cc")
        if compiler is None:
            pytest.skip("no C compiler")
        self.path = folder / "libuct_cuda.so.0.0.0"
        below = folder / "libucs.so.0"
        flags = (compiler, "-shared", "-fPIC", "-O1", "-Wall", "-Werror")
        subprocess.run([*flags, "-o", str(below), str(SOURCES / "fake_ucs.c")], check=True)
        subprocess.run(
            [*flags, "-o", str(self.path), str(SOURCES / "fake_uct.c"), "-Wl,--no-as-needed", str(below)], check=True
        )
        self.library = ctypes.CDLL(str(self.path))
        self.insert = self.library.fake_insert
        self.insert.argtypes = (ctypes.c_uint32, ctypes.c_uint32, ctypes.c_uint32, ctypes.c_uint64)

    def close_dead(self) -> Closed:
        return close_dead(find=lambda: [str(self.path)])

    def has(self, pid: int, namespace: int = OURS, device: int = 0) -> bool:
        return bool(self.library.fake_has(pid, namespace, device))


@pytest.fixture
def stand(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Stand:
    made = Stand(tmp_path)
    monkeypatch.setitem(ipc_cache.RELEASES, hashlib.sha256(made.path.read_bytes()).hexdigest(), "the stand-in")
    return made


@pytest.fixture
def processes() -> Iterator[list[subprocess.Popen[bytes]]]:
    made = [subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"]) for _ in range(4)]
    yield made
    for each in made:
        each.kill()
        each.wait()


def kill(process: subprocess.Popen[bytes]) -> None:
    """It stays a zombie: nobody has waited for it."""
    process.send_signal(signal.SIGKILL)
    os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)


def test_only_what_a_dead_peer_exported_is_closed(stand: Stand, processes: list[subprocess.Popen[bytes]]) -> None:
    pids = [each.pid for each in processes]
    for pid in pids:
        stand.insert(pid, OURS, 0, 888 * MIB)
    stand.insert(pids[1], OURS, 1, 100 * MIB)
    assert stand.close_dead() == Closed(0, 0, "")

    kill(processes[1])
    assert stand.close_dead() == Closed(2, 988 * MIB, "")
    assert [stand.has(pid) for pid in pids] == [True, False, True, True]
    assert not stand.has(pids[1], device=1)
    assert (stand.library.fake_destroyed(), stand.library.fake_handles_closed()) == (2, 2)
    assert stand.library.fake_size() == 3


def test_a_zombie_counts_as_dead_and_so_does_a_reaped_one(
    stand: Stand, processes: list[subprocess.Popen[bytes]]
) -> None:
    for each in processes:
        stand.insert(each.pid, OURS, 0, MIB)
    kill(processes[0])
    processes[2].kill()
    processes[2].wait()
    assert stand.close_dead().peers == 2
    assert [stand.has(each.pid) for each in processes] == [False, True, False, True]


def test_a_second_call_closes_nothing_twice(stand: Stand, processes: list[subprocess.Popen[bytes]]) -> None:
    stand.insert(processes[0].pid, OURS, 0, MIB)
    kill(processes[0])
    assert [stand.close_dead().peers for _ in range(3)] == [1, 0, 0]
    assert stand.library.fake_destroyed() == 1


def test_a_pid_of_another_namespace_says_nothing_about_ours(
    stand: Stand, processes: list[subprocess.Popen[bytes]]
) -> None:
    kill(processes[0])
    stand.insert(processes[0].pid, OTHERS, 0, MIB)
    assert stand.close_dead() == Closed(0, 0, "")
    assert stand.has(processes[0].pid, OTHERS)


def test_buckets_of_closed_peers_are_taken_again(stand: Stand, processes: list[subprocess.Popen[bytes]]) -> None:
    """A refill on the same host, many times: the table neither fills up nor loses the peers that live."""
    live, dead = processes[3].pid, processes[0].pid
    kill(processes[0])
    stand.insert(dead, OURS, 0, MIB)
    stand.insert(live, OURS, 0, MIB)
    for _ in range(100):
        assert stand.close_dead().peers == 1
        assert stand.has(live)
        assert not stand.has(dead)
        stand.insert(dead, OURS, 0, MIB)
    assert stand.library.fake_size() == 2


def test_a_library_that_is_not_known_is_left_alone_and_named_once(
    tmp_path: Path, processes: list[subprocess.Popen[bytes]], caplog: pytest.LogCaptureFixture
) -> None:
    stand = Stand(tmp_path)
    stand.insert(processes[0].pid, OURS, 0, MIB)
    kill(processes[0])
    with caplog.at_level(logging.WARNING):
        found = [stand.close_dead() for _ in range(3)]
    assert {(each.peers, each.imported_bytes) for each in found} == {(0, 0)}
    assert all("no known release" in each.why_not and str(stand.path) in each.why_not for each in found)
    assert len(caplog.records) == 1
    assert stand.library.fake_destroyed() == 0


def test_a_library_that_was_replaced_on_disk_is_left_alone(stand: Stand) -> None:
    gone = f"{stand.path} (deleted)"
    assert "cannot be read" in close_dead(find=lambda: [gone]).why_not


def test_without_the_library_there_is_nothing_to_do() -> None:
    code = "from elastic.vllm.worker.ipc_cache import close_dead; print(close_dead())"
    asked = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert asked.stdout.strip() == str(Closed(0, 0, ""))
    assert asked.stderr == ""


def test_the_library_that_is_mapped_is_found(stand: Stand) -> None:
    assert str(stand.path) in loaded()


def test_a_library_is_never_loaded_by_looking_for_it(
    tmp_path: Path, stand: Stand, caplog: pytest.LogCaptureFixture
) -> None:
    copy = tmp_path / "elsewhere" / stand.path.name
    copy.parent.mkdir()
    shutil.copy(stand.path, copy)
    assert "OSError" in close_dead(find=lambda: [str(copy)]).why_not
    assert str(copy) not in loaded()
    assert "may stay taken" in caplog.text


def test_nothing_is_closed_while_ucx_holds_its_lock(
    stand: Stand,
    processes: list[subprocess.Popen[bytes]],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(ipc_cache, "LOCK_FREE_S", 0.05)
    stand.insert(processes[0].pid, OURS, 0, MIB)
    kill(processes[0])
    stand.library.fake_lock(2)
    assert "lock" in stand.close_dead().why_not
    assert stand.has(processes[0].pid)
    stand.library.fake_lock(0)
    assert stand.close_dead() == Closed(1, MIB, "")


def test_a_peer_that_is_in_doubt_lives() -> None:
    assert not ipc_cache.gone(1)
    assert not ipc_cache.gone(os.getpid())


def test_an_error_of_ours_is_logged_and_fails_no_heal(caplog: pytest.LogCaptureFixture) -> None:
    def broken() -> list[str]:
        raise ValueError("a bug")

    assert close_dead(find=broken).why_not == "ValueError: a bug"
    assert "Traceback" in caplog.text


@pytest.fixture(autouse=True)
def _forget() -> Iterator[None]:
    unknown.cache_clear()
    yield
    unknown.cache_clear()
