"""Weight transfers that fail on purpose, between real NIXL agents: what the reader is told."""

import time
from collections.abc import Iterator

import pytest
import torch

from elastic.rank.comm.links import FaultyNixlAgent, Links
from elastic.rank.nixl_agent import Copy, PeerError
from tests.rank.weight_ranks import WAIT_S, Remote, remotes, serve_memory

SIZE = 1 << 16


@pytest.fixture(scope="module")
def source() -> Iterator[tuple[bytes, int]]:
    with remotes((serve_memory, "source", SIZE, 7)) as (remote,):
        found: Remote = remote
        yield found.answer()


@pytest.fixture
def links() -> Links:
    return Links()


@pytest.fixture
def reader(links: Links) -> Iterator[FaultyNixlAgent]:
    agent = FaultyNixlAgent(f"reader-{time.monotonic_ns()}", links)
    yield agent
    agent.close()


def _read(reader: FaultyNixlAgent, source: tuple[bytes, int], deadline_s: float) -> torch.Tensor:
    memory = torch.zeros(SIZE, dtype=torch.uint8)
    reader.register(memory)
    peer = reader.add_peer(source[0])
    reader.read(peer, [Copy(memory.data_ptr(), source[1], SIZE)], deadline_s=deadline_s)
    return memory


def test_a_completion_that_is_never_seen_ends_in_a_timeout(
    reader: FaultyNixlAgent, source: tuple[bytes, int], links: Links
) -> None:
    assert bool((_read(reader, source, WAIT_S) == 7).all())
    links.transfer_dropped = True
    with pytest.raises(PeerError, match="did not answer in time"):
        _read(reader, source, 0.2)
    links.restore()
    assert bool((_read(reader, source, WAIT_S) == 7).all())


def test_just_as_many_transfers_are_killed_as_were_ordered(
    reader: FaultyNixlAgent, source: tuple[bytes, int], links: Links
) -> None:
    links.transfer_killed = 1
    with pytest.raises(PeerError, match="is gone"):
        _read(reader, source, WAIT_S)
    assert bool((_read(reader, source, WAIT_S) == 7).all())


def test_a_late_completion_is_seen_late(reader: FaultyNixlAgent, source: tuple[bytes, int], links: Links) -> None:
    links.transfer_late_s = 0.2
    began = time.monotonic()
    assert bool((_read(reader, source, WAIT_S) == 7).all())
    assert time.monotonic() - began >= 0.2
