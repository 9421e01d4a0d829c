"""The loading ladder with real ranks: peer, host tier, checkpoint; and what happens to it when a source fails."""

import signal
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from elastic.errors import ElasticError, NeedsReplan, Unreachable
from elastic.placement.maps import HOLE, Move
from elastic.protocol import Loaded
from elastic.rank.architecture import ExpertBuffers, read_architecture
from elastic.rank.comm.base import PeerFault
from elastic.rank.published import Published, expert_of, word_index
from elastic.rank.tier import build
from elastic.tools.make_checkpoint import Options, make_checkpoint
from tests.rank.weight_ranks import WAIT_S, WIDTH, Rank, Remote, remotes, serve_rank, until

SMALL = Options(layers=2, experts=16, hidden=64, expert_intermediate=32)
LARGE = Options(layers=1, experts=WIDTH, hidden=512, expert_intermediate=1024, vocab=256)
SOURCE = 3


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("small") / "model", SMALL)


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("large") / "model", LARGE)


@pytest.fixture(scope="module")
def tier(small: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tier") / "tier"
    build(small, path)
    return path


@pytest.fixture
def tcp(monkeypatch: pytest.MonkeyPatch) -> None:
    """As between hosts: the source takes part in every transfer."""
    monkeypatch.setenv("UCX_TLS", "tcp")


Start = Callable[..., Rank]


@pytest.fixture
def start() -> Iterator[Start]:
    """A rank in this process: the one that loads."""
    ranks: list[Rank] = []

    def start(checkpoint: Path, tier: Path | None = None) -> Rank:
        ranks.append(Rank(checkpoint, slot=0, tier=tier))
        return ranks[-1]

    yield start
    for rank in ranks:
        rank.weights.close()


def _moves(layers: int) -> list[Move]:
    """Everything that the source holds, into the same buffers here."""
    return [Move(layer, index + 4, 0, index, SOURCE, index) for layer in range(layers) for index in range(WIDTH)]


def _filled(source: Remote, layers: int, offset: int = 4) -> bytes:
    endpoint: bytes = source.answer()
    source.ask("fill", [(layer, index, index + offset) for layer in range(layers) for index in range(WIDTH)])
    return endpoint


def _assert_whole(rank: Rank) -> None:
    """Every expert that a buffer is said to hold is there, byte for byte."""
    for layer, row in enumerate(rank.weights.contents()):
        for index, expert in enumerate(row):
            if expert != HOLE:
                w13, w2 = torch.zeros_like(rank.experts.w13[0, 0]), torch.zeros_like(rank.experts.w2[0, 0])
                rank.checkpoint.load_expert(layer, expert, w13, w2)
                assert torch.equal(rank.experts.w13[layer, index], w13), (layer, index, expert)
                assert torch.equal(rank.experts.w2[layer, index], w2), (layer, index, expert)


def _probed(rank: Rank) -> list[PeerFault]:
    rank.weights.probe([SOURCE])
    return rank.weights.poll_faults()


def _counts(loaded: Loaded) -> tuple[int, int, int]:
    return loaded.peer.tensors, loaded.host.tensors, loaded.disk.tensors


@pytest.mark.parametrize("transport", ["default", "tcp"])
def test_a_peer_gives_all_its_weights_byte_for_byte(
    small: Path, start: Start, transport: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if transport == "tcp":
        monkeypatch.setenv("UCX_TLS", "tcp")
    with remotes((serve_rank, small, SOURCE, 1, True)) as (source,):
        rank = start(small)
        endpoint = _filled(source, 2)
        for _ in range(2):
            rank.weights.connect({SOURCE: endpoint, 0: rank.weights.endpoint()}, deadline_s=WAIT_S)
        loaded = rank.weights.load_experts(_moves(2), deadline_s=WAIT_S)
        assert loaded.peer.tensors == 2 * WIDTH
        assert loaded.peer.bytes == 2 * WIDTH * rank.arch.expert_weights * 4
        assert _counts(rank.weights.load_experts(_moves(2), deadline_s=WAIT_S)) == (0, 0, 0), "nothing is left to do"
        dense = rank.weights.load_dense(SOURCE, deadline_s=WAIT_S)
        assert (dense.peer.tensors, dense.peer.bytes) == (len(rank.arena.views), 4 * rank.arena.flat.numel())
        assert dense.disk.tensors == dense.host.tensors == 0
        assert rank.weights.poll_faults() == []
        assert rank.weights.contents() == tuple(tuple(range(4, 4 + WIDTH)) for _ in range(2))
        _assert_whole(rank)
        here = rank.arena.flat.clone()
        rank.checkpoint.load_dense(rank.arena)
        assert torch.equal(here, rank.arena.flat)


def test_without_a_peer_the_tier_is_taken_and_without_a_tier_the_disk(small: Path, tier: Path, start: Start) -> None:
    moves = [Move(0, 5, 0, 1), Move(1, 6, 0, 2, source_slot=SOURCE, source_index=0)]
    for path, expected in ((tier, (0, 2, 0)), (None, (0, 0, 2))):
        rank = start(small, path)
        assert _counts(rank.weights.load_experts(moves, deadline_s=WAIT_S)) == expected
        dense = rank.weights.load_dense(None, deadline_s=WAIT_S)
        assert (dense.host.bytes > 0, dense.disk.bytes > 0) == (path is not None, path is None)
        assert rank.weights.load_dense(None, deadline_s=WAIT_S) == Loaded()
        assert rank.weights.contents()[0][:3] == (HOLE, 5, HOLE)
        assert rank.weights.poll_faults() == []
        _assert_whole(rank)
        rank.weights.drop(0, 1)
        assert rank.weights.contents()[0][1] == HOLE


@pytest.mark.usefixtures("tcp")
def test_a_source_killed_in_mid_read_costs_no_expert(large: Path, tmp_path: Path, start: Start) -> None:
    build(large, tmp_path / "tier")
    with remotes((serve_rank, large, SOURCE)) as (source,):
        rank = start(large, tmp_path / "tier")
        rank.weights.connect({SOURCE: _filled(source, 1, offset=0)}, deadline_s=WAIT_S)
        moves = [Move(0, index, 0, index, SOURCE, index) for index in range(WIDTH)]
        loads: list[Loaded] = []
        loader = threading.Thread(target=lambda: loads.append(rank.weights.load_experts(moves, deadline_s=WAIT_S)))
        loader.start()
        until(lambda: rank.weights.contents()[0][0] != HOLE, "the first expert has come")
        source.signal(signal.SIGKILL)
        loader.join(WAIT_S)
        peer, host, disk = _counts(loads[0])
        assert (peer + host, disk) == (WIDTH, 0)
        assert peer >= 1
        assert host >= 1
        assert rank.weights.poll_faults() == [PeerFault(SOURCE, "disconnect")]
        assert HOLE not in rank.weights.contents()[0]
        _assert_whole(rank)


def test_a_dead_source_without_a_tier_falls_to_the_disk_and_the_probe_sees_it(small: Path, start: Start) -> None:
    with remotes((serve_rank, small, SOURCE, 1, True)) as (source,):
        rank = start(small)
        rank.weights.connect({SOURCE: _filled(source, 2)}, deadline_s=WAIT_S)
        rank.weights.probe([SOURCE, 5])
        assert rank.weights.poll_faults() == []
        source.signal(signal.SIGKILL)
        until(lambda: _probed(rank) == [PeerFault(SOURCE, "disconnect")], "the probe reports the death")
        assert _counts(rank.weights.load_experts(_moves(2), deadline_s=WAIT_S)) == (0, 0, 2 * WIDTH)
        assert rank.weights.load_dense(SOURCE, deadline_s=WAIT_S).disk.tensors > 0
        assert set(rank.weights.poll_faults()) == {PeerFault(SOURCE, "disconnect")}
        _assert_whole(rank)


@pytest.mark.usefixtures("tcp")
def test_a_stopped_source_is_given_up_and_its_late_bytes_spoil_nothing(large: Path, start: Start) -> None:
    with remotes((serve_rank, large, SOURCE), (serve_rank, large, 5)) as (source, healthy):
        rank = start(large)
        endpoints = {SOURCE: _filled(source, 1, offset=0), 5: _filled(healthy, 1, offset=0)}
        rank.weights.connect(endpoints, deadline_s=WAIT_S)
        source.signal(signal.SIGSTOP)
        moves = [Move(0, 0, 0, 0, SOURCE, 0), Move(0, 1, 0, 1, 5, 1)]
        assert _counts(rank.weights.load_experts(moves, deadline_s=2.0)) == (1, 0, 1), "one slow peer fails alone"
        assert rank.weights.poll_faults() == [PeerFault(SOURCE, "timeout")]
        # the buffer that the late bytes were meant for gets another expert before the source goes on
        rank.weights.drop(0, 0)
        rank.fill(0, 0, 7)
        source.signal(signal.SIGCONT)
        rank.weights.load_experts([Move(0, 2, 0, 2, SOURCE, 2)], deadline_s=WAIT_S)
        assert rank.weights.contents()[0][:3] == (7, 1, 2)
        _assert_whole(rank)


@pytest.mark.usefixtures("tcp")
def test_bytes_that_come_after_the_deadline_land_beside_the_experts_in_use(large: Path, start: Start) -> None:
    with remotes((serve_rank, large, SOURCE)) as (source,):
        rank = start(large)
        rank.weights.connect({SOURCE: _filled(source, 1, offset=0)}, deadline_s=WAIT_S)
        moves = [Move(0, index, 0, index, SOURCE, index) for index in range(WIDTH)]

        def stop_in_mid_read() -> None:
            until(lambda: rank.weights.contents()[0][0] != HOLE, "the first expert has come")
            source.signal(signal.SIGSTOP)

        stopper = threading.Thread(target=stop_in_mid_read)
        stopper.start()
        rank.weights.load_experts(moves, deadline_s=1.0)
        stopper.join(WAIT_S)
        for index in range(WIDTH):
            rank.weights.drop(0, index)
            rank.fill(0, index, WIDTH - 1 - index)
        source.signal(signal.SIGCONT)
        rank.weights.load_experts([Move(0, 0, 0, 0, SOURCE, 0)], deadline_s=WAIT_S)
        _assert_whole(rank)


def test_a_new_incarnation_in_the_slot_is_the_one_that_is_read(small: Path, start: Start) -> None:
    with remotes((serve_rank, small, SOURCE, 1), (serve_rank, small, SOURCE, 2)) as (old, new):
        rank = start(small)
        rank.weights.connect({SOURCE: _filled(old, 2)}, deadline_s=WAIT_S)
        old.signal(signal.SIGKILL)
        rank.weights.connect({SOURCE: _filled(new, 2, offset=1)}, deadline_s=WAIT_S)
        moves = [Move(0, 1, 0, 0, SOURCE, 0), Move(1, 8, 0, 7, SOURCE, 7)]
        assert _counts(rank.weights.load_experts(moves, deadline_s=WAIT_S)) == (2, 0, 0)
        assert rank.weights.poll_faults() == []
        _assert_whole(rank)
        rank.weights.disconnect([SOURCE, 6])
        assert _counts(rank.weights.load_experts([Move(0, 2, 0, 1, SOURCE, 1)], deadline_s=WAIT_S)) == (0, 0, 1)


def test_a_stale_plan_never_loads_a_wrong_expert(small: Path, start: Start) -> None:
    with remotes((serve_rank, small, SOURCE)) as (source,):
        rank = start(small)
        rank.weights.connect({SOURCE: _filled(source, 2)}, deadline_s=WAIT_S)
        source.ask("drop", 0, 1)
        moves = [
            Move(0, 4, 0, 0, SOURCE, 0),
            Move(0, 5, 0, 1, SOURCE, 1),  # a hole by now
            Move(0, 9, 0, 2, SOURCE, 2),  # holds expert 6
            Move(0, 7, 0, 3, SOURCE, 99),  # no such buffer
        ]
        assert _counts(rank.weights.load_experts(moves, deadline_s=WAIT_S)) == (1, 0, 3)
        assert rank.weights.poll_faults() == [], "a stale plan is not the peer's fault"
        assert rank.weights.load_dense(SOURCE, deadline_s=WAIT_S).disk.tensors > 0, "the peer has no dense weights yet"
        assert rank.weights.contents()[0][:4] == (4, 5, 9, 7)
        _assert_whole(rank)


def test_a_source_that_is_overwritten_while_it_is_read_never_gives_a_torn_expert(large: Path, start: Start) -> None:
    with remotes((serve_rank, large, SOURCE)) as (source,):
        rank = start(large)
        rank.weights.connect({SOURCE: source.answer()}, deadline_s=WAIT_S)
        source.ask("alternate", 0, 0, [2, 3])
        sources = [0, 0, 0]
        for attempt in range(60):
            rank.weights.drop(0, 0)
            loaded = rank.weights.load_experts([Move(0, 2 + attempt % 2, 0, 0, SOURCE, 0)], deadline_s=WAIT_S)
            sources = [a + b for a, b in zip(sources, _counts(loaded), strict=True)]
            assert rank.weights.contents()[0][0] == 2 + attempt % 2
            _assert_whole(rank)
        assert sources[1] == 0
        assert sum(sources) == 60
        assert sources[2] > 0, "the source was never seen in a change"


def test_a_buffer_that_was_rewritten_with_the_same_expert_shows_that_it_was(small: Path) -> None:
    experts = ExpertBuffers(read_architecture(small), WIDTH)
    published = Published(experts)
    seen: set[int] = set()
    at = word_index(WIDTH, 1, WIDTH - 1)
    assert at == published.table.numel() - 1
    for _ in range(3):
        for expert in (HOLE, 5):
            if expert == HOLE:
                published.clear([(1, WIDTH - 1)])
            else:
                published.fill([Move(1, expert, 0, WIDTH - 1)])
            word = int(published.table[at])
            assert expert_of(word) == experts.contents[1][WIDTH - 1]
            assert word not in seen
            seen.add(word)


def test_a_silent_or_unlike_peer_is_named_at_connect(small: Path, large: Path, start: Start) -> None:
    with remotes((serve_rank, small, SOURCE), (serve_rank, large, 5)) as (source, other):
        rank = start(small)
        endpoint, unlike = source.answer(), other.answer()
        with pytest.raises(ElasticError, match=r"slot 5.*not like ours"):
            rank.weights.connect({5: unlike}, deadline_s=WAIT_S)
        with pytest.raises(ElasticError, match=r"slot 6.*malformed"):
            rank.weights.connect({6: b"rubbish"}, deadline_s=WAIT_S)
        source.signal(signal.SIGSTOP)
        with pytest.raises(Unreachable, match=r"slots \[3\].*no answer") as raised:
            rank.weights.connect({SOURCE: endpoint}, deadline_s=0.2)
        assert raised.value.slots == (SOURCE,)
        source.signal(signal.SIGCONT)
        rank.weights.connect({SOURCE: endpoint}, deadline_s=WAIT_S)


def test_an_order_that_was_overtaken_does_not_wait_for_a_hung_peer_and_keeps_what_is_whole(
    small: Path, start: Start, tcp: None
) -> None:
    with remotes((serve_rank, small, SOURCE)) as (source,):
        rank = start(small)
        endpoint = _filled(source, 2)
        rank.weights.connect({SOURCE: endpoint}, deadline_s=WAIT_S)
        source.signal(signal.SIGSTOP)
        asked = 0

        def soon() -> bool:
            nonlocal asked
            asked += 1
            return asked > 20

        with pytest.raises(NeedsReplan, match=r"slots \[3\] was given up"):
            rank.weights.load_experts(_moves(2), deadline_s=WAIT_S, give_up=soon)
        assert rank.weights.poll_faults() == [], "nobody has shown that the peer is at fault"
        rank.weights.disconnect([SOURCE])
        with pytest.raises(NeedsReplan):
            rank.weights.connect({SOURCE: endpoint}, deadline_s=WAIT_S, give_up=lambda: True)
        # without the peer, from disk: two experts, then no more
        asked = 18
        with pytest.raises(NeedsReplan, match="given up"):
            rank.weights.load_experts(_moves(1), deadline_s=WAIT_S, give_up=soon)
        assert rank.weights.contents()[0] == (4, 5, *(HOLE,) * (WIDTH - 2))
        _assert_whole(rank)


def test_a_tier_of_another_checkpoint_is_not_used(small: Path, tmp_path: Path, start: Start) -> None:
    other = make_checkpoint(tmp_path / "other", replace(SMALL, seed=1))
    build(other, tmp_path / "tier")
    rank = start(small, tmp_path / "tier")
    assert _counts(rank.weights.load_experts([Move(0, 5, 0, 1)], deadline_s=WAIT_S)) == (0, 0, 1)
    _assert_whole(rank)


def test_when_even_the_disk_fails_the_buffer_is_a_hole_and_the_tensor_is_named(tmp_path: Path, start: Start) -> None:
    folder = make_checkpoint(tmp_path / "model", SMALL)
    rank = start(folder)
    rank.fill(0, 0, 3)
    # a disk that goes bad after the check at open
    rank.checkpoint._shards = dict.fromkeys(rank.checkpoint._shards, _BadDisk())
    with pytest.raises(ElasticError, match=r"experts\.4\.gate_proj.*cannot be read.*I/O error"):
        rank.weights.load_experts([Move(0, 4, 0, 0)], deadline_s=WAIT_S)
    assert rank.weights.contents()[0][0] == HOLE


class _BadDisk:
    def get_tensor(self, name: str) -> torch.Tensor:
        raise OSError(5, "I/O error")
