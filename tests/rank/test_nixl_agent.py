"""The NIXL wrapper with real processes; the transport is TCP, as between hosts, unless a test says otherwise."""

import importlib
import signal
from collections.abc import Iterator

import pytest
import torch

from elastic.errors import ElasticError, Retryable
from elastic.rank.nixl_agent import Copy, NixlAgent, PeerError
from elastic.rank.staging import Staging
from tests.rank.weight_ranks import WAIT_S, Remote, remotes, serve_memory, until

SIZE = 64 << 20


@pytest.fixture(autouse=True)
def _tcp(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("UCX_TLS", "tcp")


@pytest.fixture
def agent() -> Iterator[NixlAgent]:
    agent = NixlAgent("reader")
    yield agent
    agent.close()


@pytest.fixture
def source() -> Iterator[Remote]:
    with remotes((serve_memory, "source", SIZE, 7)) as (source,):
        yield source


def _zeros(agent: NixlAgent, size: int = SIZE) -> torch.Tensor:
    memory = torch.zeros(size, dtype=torch.uint8)
    agent.register(memory)
    return memory


def _eight_bytes(memory: torch.Tensor, address: int) -> list[Copy]:
    return [Copy(memory.data_ptr(), address, 8)]


def test_bytes_read_are_the_peers_bytes_and_a_write_arrives_before_its_notification(
    agent: NixlAgent, source: Remote
) -> None:
    memory = _zeros(agent)
    metadata, address = source.answer()
    peer = agent.add_peer(metadata)
    agent.read(peer, [Copy(memory.data_ptr(), address, SIZE)], deadline_s=WAIT_S)
    assert bool((memory == 7).all())
    memory.fill_(9)
    agent.write(peer, [Copy(memory.data_ptr(), address, SIZE)], b"written", deadline_s=WAIT_S)
    assert source.answer() == (("reader", b"written"), 9, 9)
    agent.ping(peer)
    assert source.ask("what else?") == []


def test_many_small_pieces_land_where_they_belong(agent: NixlAgent, source: Remote) -> None:
    memory = _zeros(agent, 1000)
    metadata, address = source.answer()
    peer = agent.add_peer(metadata)
    agent.read(peer, [Copy(memory.data_ptr() + k, address + k, 1) for k in range(0, 1000, 2)], deadline_s=WAIT_S)
    assert memory.tolist() == [7, 0] * 500


def test_a_peer_killed_in_the_middle_of_a_read_is_a_disconnect(agent: NixlAgent, source: Remote) -> None:
    memory = _zeros(agent)
    metadata, address = source.answer()
    peer = agent.add_peer(metadata)
    agent.read(peer, _eight_bytes(memory, address), deadline_s=WAIT_S)
    source.signal(signal.SIGSTOP)
    transfer = agent.start("READ", peer, [Copy(memory.data_ptr(), address, SIZE)])
    source.signal(signal.SIGKILL)
    (error,) = agent.wait([transfer], deadline_s=WAIT_S)
    assert error.what == "disconnect"
    assert transfer.settled
    assert not transfer.done
    assert isinstance(error, Retryable)
    for attempt in (
        lambda: agent.notify(peer, b"hello"),
        lambda: agent.start("READ", peer, _eight_bytes(memory, address)),
    ):
        with pytest.raises(PeerError, match=r"source.*gone"):
            attempt()


def test_a_stopped_peer_is_a_timeout_and_its_late_bytes_are_announced(agent: NixlAgent, source: Remote) -> None:
    memory = _zeros(agent)
    metadata, address = source.answer()
    peer = agent.add_peer(metadata)
    agent.read(peer, _eight_bytes(memory, address), deadline_s=WAIT_S)
    source.signal(signal.SIGSTOP)
    transfer = agent.start("READ", peer, [Copy(memory.data_ptr(), address, SIZE)])
    (error,) = agent.wait([transfer], deadline_s=0.2)
    assert error.what == "timeout"
    assert not transfer.settled
    source.signal(signal.SIGCONT)
    until(lambda: transfer.settled, "the late bytes have landed")
    assert transfer.done
    assert bool((memory == 7).all())


def test_memory_of_a_read_that_timed_out_is_lent_again_only_after_its_bytes_have_landed(
    agent: NixlAgent, source: Remote
) -> None:
    staging = Staging(agent, like=torch.empty(0), numbers=SIZE // 4, words=1)
    metadata, address = source.answer()
    peer = agent.add_peer(metadata)
    with staging.lend() as first:
        agent.read(peer, _eight_bytes(first.numbers, address), deadline_s=WAIT_S)
        source.signal(signal.SIGSTOP)
        transfer = agent.start("READ", peer, [Copy(first.numbers.data_ptr(), address, SIZE)])
        first.watch(transfer)
    with staging.lend() as second:
        assert second is not first
    source.signal(signal.SIGCONT)
    until(lambda: transfer.settled, "the late bytes have landed")
    with staging.lend() as one, staging.lend() as other:
        assert {id(one), id(other)} == {id(first), id(second)}


def test_a_removed_peer_never_counts_as_settled(agent: NixlAgent, source: Remote) -> None:
    memory = _zeros(agent)
    metadata, address = source.answer()
    peer = agent.add_peer(metadata)
    agent.read(peer, _eight_bytes(memory, address), deadline_s=WAIT_S)
    source.signal(signal.SIGSTOP)
    transfer = agent.start("READ", peer, [Copy(memory.data_ptr(), address, SIZE)])
    agent.remove_peer(peer)
    source.signal(signal.SIGCONT)
    assert [e.what for e in agent.wait([transfer], deadline_s=0.2)] == ["disconnect"]
    assert not transfer.settled
    with pytest.raises(PeerError):
        agent.read(peer, _eight_bytes(memory, address), deadline_s=WAIT_S)


def test_a_new_incarnation_under_the_same_name_is_the_one_that_is_read(agent: NixlAgent) -> None:
    memory = _zeros(agent, 4096)
    with remotes((serve_memory, "same", 4096, 1), (serve_memory, "same", 4096, 2)) as (old, new):
        for process, value in ((old, 1), (new, 2)):
            metadata, address = process.answer()
            assert agent.add_peer(metadata) == agent.add_peer(metadata) == "same"
            agent.read("same", [Copy(memory.data_ptr(), address, 4096)], deadline_s=WAIT_S)
            assert bool((memory == value).all())
            process.signal(signal.SIGKILL)


def test_within_one_host_the_default_transport_gives_the_same(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("UCX_TLS")
    agent = NixlAgent("reader")
    try:
        memory = _zeros(agent)
        with remotes((serve_memory, "source", SIZE, 7)) as (source,):
            metadata, address = source.answer()
            peer = agent.add_peer(metadata)
            agent.read(peer, [Copy(memory.data_ptr(), address, SIZE)], deadline_s=WAIT_S)
            assert bool((memory == 7).all())
            source.signal(signal.SIGKILL)
            with pytest.raises(PeerError, match="gone"):
                agent.read(peer, [Copy(memory.data_ptr(), address, SIZE)], deadline_s=WAIT_S)
    finally:
        agent.close()


def test_memory_that_nobody_registered_is_refused(agent: NixlAgent, source: Remote) -> None:
    memory = _zeros(agent, 8)
    metadata, address = source.answer()
    peer = agent.add_peer(metadata)
    with pytest.raises(ElasticError, match="registered") as caught:
        agent.read(peer, [Copy(memory.data_ptr(), address + SIZE, 8)], deadline_s=WAIT_S)
    assert not isinstance(caught.value, PeerError)
    with pytest.raises(ElasticError, match="malformed"):
        agent.add_peer(b"rubbish")


def test_a_machine_without_nixl_is_told_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    real = importlib.import_module

    def without_nixl(name: str, package: str | None = None) -> object:
        if name.startswith("nixl"):
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
        return real(name, package)

    monkeypatch.setattr(importlib, "import_module", without_nixl)
    with pytest.raises(ElasticError, match=r"pip install 'healer\[embedded\]'"):
        NixlAgent("nobody")


def test_nothing_is_printed_when_a_peer_dies(
    agent: NixlAgent, source: Remote, capfd: pytest.CaptureFixture[str]
) -> None:
    memory = _zeros(agent, 8)
    metadata, address = source.answer()
    peer = agent.add_peer(metadata)
    agent.read(peer, _eight_bytes(memory, address), deadline_s=WAIT_S)
    source.signal(signal.SIGKILL)
    with pytest.raises(PeerError):
        agent.read(peer, _eight_bytes(memory, address), deadline_s=WAIT_S)
    agent.close()
    assert capfd.readouterr() == ("", "")
