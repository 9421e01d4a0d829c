"""The agent's socket: what a controller may rely on as soon as it sees the file."""

import os
import socket
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from elastic.config import GroupConfig
from elastic.protocol import Counters
from elastic.rank import agent as agent_module
from elastic.rank.agent import Agent
from elastic.rank.gate import Gate


def make_agent(address: Path, clock: Callable[[], float] = time.monotonic) -> Agent:
    config = GroupConfig(name="g", run_dir="r", checkpoint="c", ranks=1, max_ranks=1, slots_per_rank=1)
    quiet: Any = SimpleNamespace(
        poll_faults=list, waiting=0, running=0, counters=Counters(), waiting_on=tuple, view=None
    )
    return Agent(config, 0, 1, str(address), "", Gate(lambda: None), quiet, quiet, quiet, quiet, clock=clock)


def test_a_socket_that_can_be_seen_can_be_connected_to(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A connection that is refused at start would count as a failed boot of a healthy rank."""
    address, connected = tmp_path / "rank-0.1.sock", []
    link = os.link

    def checked(source: str, target: str) -> None:
        assert not address.exists()
        with socket.socket(socket.AF_UNIX) as client:
            client.connect(source)
            connected.append(source)
        link(source, target)

    monkeypatch.setattr(agent_module.os, "link", checked)
    make_agent(address).start()
    assert connected
    with socket.socket(socket.AF_UNIX) as client:
        client.connect(str(address))
    assert [path.name for path in tmp_path.iterdir()] == [address.name]


def test_an_agent_that_was_closed_can_be_started_again(tmp_path: Path) -> None:
    address = tmp_path / "rank-0.1.sock"
    agent = make_agent(address)
    for _ in range(2):
        agent.start()
        with socket.socket(socket.AF_UNIX) as client:
            client.connect(str(address))
        agent.close()
        assert not address.exists()
