import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from healer.systemd import Notifier


@pytest.fixture
def manager(tmp_path: Path) -> Iterator[socket.socket]:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sock:
        sock.bind(str(tmp_path / "notify"))
        sock.settimeout(5)
        yield sock


def heard(manager: socket.socket) -> list[str]:
    manager.setblocking(False)
    found = []
    while True:
        try:
            found.append(manager.recv(4096).decode())
        except BlockingIOError:
            return found


def environment(tmp_path: Path, **more: str) -> dict[str, str]:
    return {"NOTIFY_SOCKET": str(tmp_path / "notify")} | more


def test_the_service_manager_hears_when_the_daemon_is_ready_and_when_it_ends(
    manager: socket.socket, tmp_path: Path
) -> None:
    notifier = Notifier(environment(tmp_path), pid=7)
    notifier.ready("adopted the running group\nof 4 ranks")
    notifier.status("all 4 ranks are healthy")
    notifier.status("all 4 ranks are healthy")
    notifier.stopping()
    notifier.close()
    assert heard(manager) == [
        "READY=1\nSTATUS=adopted the running group of 4 ranks",
        "STATUS=all 4 ranks are healthy",
        "STOPPING=1",
    ]


def test_a_loop_that_stands_still_lets_the_watchdog_run_out(manager: socket.socket, tmp_path: Path) -> None:
    notifier = Notifier(environment(tmp_path, WATCHDOG_USEC="10000000", WATCHDOG_PID="7"), pid=7)
    assert notifier.watchdog_s == 5.0
    for now in (100.0, 100.1, 104.9, 105.0, 105.1):
        notifier.alive(now)
    assert heard(manager) == ["WATCHDOG=1"] * 2
    notifier.close()


def test_a_watchdog_for_another_process_is_not_fed(manager: socket.socket, tmp_path: Path) -> None:
    notifier = Notifier(environment(tmp_path, WATCHDOG_USEC="10000000", WATCHDOG_PID="8"), pid=7)
    notifier.alive(100.0)
    assert heard(manager) == []
    notifier.close()


def test_without_a_service_manager_nothing_happens(tmp_path: Path) -> None:
    for env in ({}, {"NOTIFY_SOCKET": str(tmp_path / "gone")}, environment(tmp_path, WATCHDOG_USEC="soon")):
        notifier = Notifier(env)
        notifier.ready("x")
        notifier.alive(1.0)
        notifier.close()
