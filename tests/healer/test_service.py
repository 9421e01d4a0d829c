"""The daemon under a service manager, and the letters that it sends: real sockets, a real process."""

import os
import signal
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.healer.support import POLICY
from tests.healer.test_daemon import SPEC, Daemon, wait
from tests.healer.test_notify import Hook, hook

__all__ = ["hook"]


class Manager:
    """systemd's end of `NOTIFY_SOCKET`."""

    def __init__(self, path: Path) -> None:
        self.socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self.socket.bind(str(path))
        self.socket.setblocking(False)
        self.heard: list[str] = []

    def all(self) -> list[str]:
        while True:
            try:
                self.heard.append(self.socket.recv(4096).decode())
            except BlockingIOError:
                return self.heard


@pytest.fixture
def manager(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Manager]:
    found = Manager(tmp_path / "notify")
    monkeypatch.setenv("NOTIFY_SOCKET", str(tmp_path / "notify"))
    monkeypatch.setenv("WATCHDOG_USEC", "400000")
    yield found
    found.socket.close()


@pytest.fixture
def daemon(tmp_path: Path) -> Iterator[Daemon]:
    found = Daemon(tmp_path)
    try:
        yield found
    finally:
        found.end()


def test_the_service_manager_hears_ready_then_life_then_the_end(manager: Manager, daemon: Daemon) -> None:
    daemon.spawn()
    wait(lambda: any(m.startswith("READY=1") for m in manager.all()), "ready")
    assert daemon.get("/status").json()["started"], "not before the target has started"
    ready = next(m for m in manager.heard if m.startswith("READY=1"))
    assert ready == "READY=1\nSTATUS=formed a group of 4 ranks"
    fed = manager.all().count("WATCHDOG=1")
    wait(lambda: manager.all().count("WATCHDOG=1") > fed + 3, "the watchdog is fed")
    wait(lambda: "STATUS=all 4 ranks are healthy" in manager.all(), "the sentence of systemctl status")
    ranks = [daemon.pid(slot) for slot in range(4)]
    assert daemon.process is not None
    manager.all()  # the kernel keeps ten unread messages and drops the next
    daemon.process.send_signal(signal.SIGTERM)
    assert daemon.process.wait(20) == 0
    assert "STOPPING=1" in manager.all()
    assert all(Path(f"/proc/{pid}").exists() for pid in ranks), "serving goes on"


def test_a_standby_is_ready_too_and_says_whom_it_waits_for(manager: Manager, daemon: Daemon) -> None:
    (daemon.folder / "lease").write_text("no folder: nobody can hold it")
    daemon.policy.write_text(POLICY + SPEC + "  lease: {store: folder, folder: lease}\n")
    daemon.spawn()
    wait(lambda: any(m.startswith("READY=1\nSTATUS=nobody holds the lease") for m in manager.all()), "ready")
    wait(lambda: manager.all().count("WATCHDOG=1") > 2, "the watchdog is fed")


def test_a_loop_that_stands_lets_the_watchdog_run_out(manager: Manager, daemon: Daemon) -> None:
    daemon.start()
    assert daemon.process is not None
    os.kill(daemon.process.pid, signal.SIGSTOP)
    manager.all()
    manager.heard.clear()
    time.sleep(1.0)  # two and a half times what systemd would wait
    assert "WATCHDOG=1" not in manager.all()
    os.kill(daemon.process.pid, signal.SIGCONT)
    wait(lambda: "WATCHDOG=1" in manager.all(), "it lives again")


def letters(url: str, **more: Any) -> str:
    about = [
        "incident-opened",
        "incident-closed",
        "human-needed",
        "acted",
        "quarantined",
        "breaker-opened",
        "policy-rejected",
    ]
    entry = {"name": "on-call", "url": url, "about": about} | more
    return f"  notifications: [{entry}]\n"


def subjects(hook: Hook) -> list[str]:
    return [body["about"] for body, _ in hook.got]


def test_the_on_call_engineer_hears_of_a_fault_what_was_done_and_the_end(daemon: Daemon, hook: Hook) -> None:
    daemon.policy.write_text(POLICY + SPEC + letters(hook.url, template="[$deployment] $sentence"))
    daemon.start()
    daemon.kill_and_heal(1)
    wait(lambda: "incident-closed" in subjects(hook), "the last letter")
    assert subjects(hook) == ["incident-opened", "acted", "incident-closed"]
    opened, acted, closed = (body for body, _ in hook.got)
    assert (opened["incident"], opened["cause"], opened["slots"]) == ("inc-1", "process-death", [1])
    assert acted["text"].startswith("[test] replaces slot 1")
    assert (closed["resolved"], closed["sentence"]) == (True, "incident inc-1 is over: healed")
    assert daemon.post("/quarantine", json={"slot": 5, "reason": "recabled"}).status_code == 202
    wait(lambda: "quarantined" in subjects(hook), "told of the quarantine")
    assert hook.got[-1][0]["sentence"] == "slot 5 is quarantined: recabled"
    daemon.policy.write_text("nonsense: true\n")
    assert daemon.process is not None
    daemon.process.send_signal(signal.SIGHUP)
    wait(lambda: "policy-rejected" in subjects(hook), "told of the bad policy")
    assert 'healer_notifications_total{receiver="on-call",result="sent"} 5.0' in daemon.get("/metrics").text


def test_what_needs_a_human_is_told_once(daemon: Daemon, hook: Hook) -> None:
    rules = "  healing: {rules: [{name: all, actions: [human]}]}\n"
    daemon.policy.write_text(POLICY + SPEC + rules + letters(hook.url, about=["human-needed"]))
    daemon.start()
    os.kill(daemon.pid(3), signal.SIGKILL)
    wait(lambda: subjects(hook), "told")
    spent = daemon.get("/status").json()["uptime_s"]
    wait(lambda: daemon.get("/status").json()["uptime_s"] > spent + 2.0, "many rounds later")
    assert subjects(hook) == ["human-needed"]
    assert "needs a human" in hook.got[0][0]["sentence"]


def test_a_receiver_that_is_away_holds_no_healing_up_and_gets_its_letters_later(daemon: Daemon, hook: Hook) -> None:
    hook.codes += [503, 503]
    daemon.policy.write_text(POLICY + SPEC + letters(hook.url))
    daemon.start()
    daemon.kill_and_heal(2)
    wait(lambda: "incident-closed" in subjects(hook), "all letters, in their order", 60.0)
    assert subjects(hook) == ["incident-opened", "acted", "incident-closed"]
    assert 'result="retried"} 2.0' in daemon.get("/metrics").text
