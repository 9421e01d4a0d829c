"""A dead peer is disconnected when its process is gone, and not while the driver is busy taking it down."""

import os
import signal
import subprocess
import sys
from typing import Any

import pytest

from elastic.errors import ElasticError
from elastic.rank import member
from elastic.rank.dying import has_ended, pid_of
from elastic.view import View
from tests.rank.test_barriers import PLACEMENT, Exchange, membership


def test_a_process_has_ended_when_its_memory_is_gone_and_not_before() -> None:
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    try:
        assert not has_ended(child.pid)
        child.send_signal(signal.SIGKILL)
        os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
        assert has_ended(child.pid), "a zombie"
    finally:
        child.kill()
        child.wait()
    assert has_ended(child.pid), "nobody"


def test_a_lifeline_names_its_process() -> None:
    assert pid_of("/proc/123/fd/4") == 123
    with pytest.raises(ElasticError, match="expected /proc/PID/fd/NUMBER"):
        pid_of("/tmp/rank-0.sock")


def linked(peers: dict[int, int], dead: dict[int, int]) -> tuple[Any, Exchange]:
    ep = Exchange()
    one, _, engine = membership(ep, in_view=True)
    engine.view = View(epoch=2, live=(0,), placement=PLACEMENT)
    one._linked.update(peers)
    one._dead.update(dead)
    return one, ep


def test_who_left_alive_is_disconnected_at_once_and_who_died_when_it_is_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    gone: set[int] = set()
    monkeypatch.setattr(member, "has_ended", lambda pid: pid in gone)
    one, ep = linked({1: 1, 2: 1}, {2: 77})
    left = one.tidy()
    assert (left, ep.calls) == ({2: 1}, ["disconnect [1]"])
    assert one.part(left) == {2: 1}
    gone.add(77)
    assert one.part(left) == {}
    assert ep.calls == ["disconnect [1]", "disconnect [2]"]


def test_a_process_that_never_ends_is_disconnected_in_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(member, "has_ended", lambda pid: False)
    one, ep = linked({2: 1}, {2: 77})
    assert one.part(one.tidy(), wait=False) == {}
    assert ep.calls == ["disconnect [2]"]


def test_the_successor_of_a_dead_peer_is_never_disconnected_in_its_place(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(member, "has_ended", lambda pid: False)
    one, ep = linked({2: 1}, {2: 77})
    left = one.tidy()
    # its replacement was connected meanwhile
    one._linked[2] = 2
    assert one.part(left, wait=False) == {}
    assert ep.calls == []
