"""The weights of one rank and where they come from: a live peer, else the host-memory tier, else the checkpoint on disk.

A source that fails costs time, never correctness: the next one is taken, and only when the checkpoint fails too is there an
error. What was loaded is counted by source.
"""

import time
from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence

import structlog
import torch

from elastic.config import GroupConfig
from elastic.errors import NeedsReplan
from elastic.placement.maps import Move, Row
from elastic.protocol import Loaded, Source
from elastic.rank.architecture import Architecture, Arena, ExpertBuffers
from elastic.rank.checkpoint import Checkpoint
from elastic.rank.comm.base import PeerFault, never
from elastic.rank.copies import Copier, Piece, Queued, piece
from elastic.rank.device import Device
from elastic.rank.nixl_agent import NixlAgent
from elastic.rank.peer_weights import PeerWeights
from elastic.rank.published import Published
from elastic.rank.tier import HostTier

BATCH_BYTES = 64 << 20
"""Copied from memory before an order is asked whether it still holds, two of them under way at once: about 1 ms each at the
speed of a GPU's bus."""

log = structlog.get_logger("elastic.weights")


class Weights:
    """Owns what the expert buffers and the arena hold; nobody else writes to them.

    One thread calls the methods. `endpoint`, `contents` and `poll_faults` may be called from any thread. Buffers that a map
    in use names are the caller's care: `load_experts` and `drop` overwrite what they are told to.

    What may take long asks `give_up` now and then, and raises NeedsReplan when it says so: what is whole by then stays.
    """

    def __init__(
        self,
        config: GroupConfig,
        arch: Architecture,
        arena: Arena,
        experts: ExpertBuffers,
        slot: int,
        incarnation: int,
        tier: HostTier | None,
        checkpoint: Checkpoint,
        agent: NixlAgent | None = None,
    ) -> None:
        """Starts a NIXL agent (0.4 s) unless one is handed in, and registers all buffers, which must not move any more. Raises ElasticError where
        NIXL is missing."""
        if tier is not None and tier.fingerprint != checkpoint.fingerprint:
            log.warning("the host tier is of another checkpoint and not used", path=str(tier.path))
            tier = None
        if tier is not None:
            tier.pin(Device(arena.flat.device, arena.flat.dtype))
        self._arch, self._arena, self._experts = arch, arena, experts
        self._tier, self._checkpoint = tier, checkpoint
        self._copier = Copier(arena.flat.device)
        self._published = Published(experts)
        name = f"{config.name}/weights/{slot}.{incarnation}"
        self._peers = PeerWeights(agent or NixlAgent(name), slot, arena, experts, self._published)

    def endpoint(self) -> bytes:
        """What peers need for `connect`; opaque, the same for the life of the process."""
        return self._peers.endpoint

    def connect(self, peers: Mapping[int, bytes], *, deadline_s: float, give_up: Callable[[], bool] = never) -> None:
        """Connect to peers by slot and prove that each answers. Idempotent; a changed endpoint (a new incarnation)
        replaces the old one. Raises Unreachable naming the slots that did not answer, ElasticError for a peer whose
        buffers differ from ours."""
        self._peers.connect(peers, deadline_s=deadline_s, give_up=give_up)

    def disconnect(self, slots: Collection[int]) -> None:
        """Forget peers, dead or alive."""
        self._peers.disconnect(slots)

    def load_experts(self, moves: Sequence[Move], *, deadline_s: float, give_up: Callable[[], bool] = never) -> Loaded:
        """Fill the expert buffers that the moves name; a buffer that holds its expert already is left alone.

        A buffer reads as a hole while it is written. Peers get at most half of `deadline_s`; memory and disk are not
        interrupted. Raises ElasticError when even the checkpoint fails; the remaining buffers keep what they held, the one
        at work is a hole.
        """
        began = time.monotonic()
        moves = [m for m in moves if self._experts.contents[m.layer][m.index] != m.expert]
        done = set(self._peers.load_experts(moves, deadline_s=deadline_s, give_up=give_up))
        rest = [m for m in moves if m not in done] if done else moves
        size = self._arch.expert_weights * self._experts.w13.element_size()
        if self._tier is not None:
            self._load_from_tier(self._tier, rest, max(1, BATCH_BYTES // size), give_up)
        else:
            self._load_from_disk(rest, give_up)
        local = Source(len(rest), len(rest) * size)
        return self._loaded(Source(len(done), len(done) * size), local, began)

    def load_dense(self, source_slot: int | None, *, deadline_s: float, give_up: Callable[[], bool] = never) -> Loaded:
        """Fill the arena, once in the life of the process, from the peer in `source_slot`, else as above. Tensors are
        counted, not files. Raises ElasticError when even the checkpoint fails."""
        began, arena = time.monotonic(), self._arena
        if self._published.dense:
            return Loaded()
        whole = Source(len(arena.views), arena.flat.numel() * arena.flat.element_size())
        from_peer = source_slot is not None and self._peers.load_dense(
            source_slot, deadline_s=deadline_s, give_up=give_up
        )
        if not from_peer:
            if self._tier is not None:
                copying = time.monotonic()
                self._copier.run([piece(arena.flat, self._tier.dense())])
                self._tell_rate("dense weights", arena.flat.numel(), time.monotonic() - copying)
            else:
                self._checkpoint.load_dense(arena)
        self._published.fill_dense()
        return self._loaded(whole if from_peer else Source(), Source() if from_peer else whole, began)

    def drop(self, layer: int, index: int) -> None:
        """Make a hole: nobody reads this buffer from now on."""
        self._published.clear([(layer, index)])

    def contents(self) -> tuple[Row, ...]:
        """`[layer][index]`: the expert that is whole in each buffer, or HOLE."""
        return tuple(tuple(row) for row in self._experts.contents)

    def probe(self, slots: Collection[int]) -> None:
        """Send each connected peer a few bytes; a dead one becomes a fault. A stopped one does not show here."""
        self._peers.probe(slots)

    def poll_faults(self) -> list[PeerFault]:
        """Failures of peers seen since the last call: "disconnect" or "timeout"."""
        faults: list[PeerFault] = []
        while self._peers.faults:
            faults.append(self._peers.faults.popleft())
        return faults

    def close(self) -> None:
        """Disconnect from all peers. Nothing may be called after it."""
        self._peers.close()

    def _load_from_tier(self, tier: HostTier, moves: Sequence[Move], batch: int, give_up: Callable[[], bool]) -> None:
        """`batch` experts at a time; the bus is at work on some while the next are looked up."""
        began, source = time.monotonic(), tier.experts()
        under_way: deque[tuple[Sequence[Move], Queued]] = deque()

        def finish_one() -> None:
            part, queued = under_way.popleft()
            self._copier.wait(queued)
            self._published.fill(part)

        given_up = False
        for at in range(0, len(moves), batch):
            if given_up := give_up():
                break
            part = moves[at : at + batch]
            self._published.clear([(move.layer, move.index) for move in part])
            under_way.append((part, self._copier.queue(pieces_of(source, self._experts, part))))
            if len(under_way) > 1:
                finish_one()
        while under_way:
            finish_one()
        if given_up:
            raise NeedsReplan("loading experts was given up")
        if moves:
            self._tell_rate("experts", len(moves) * self._arch.expert_weights, time.monotonic() - began)

    def _load_from_disk(self, moves: Sequence[Move], give_up: Callable[[], bool]) -> None:
        for move in moves:
            if give_up():
                raise NeedsReplan("loading experts was given up")
            self._published.clear([(move.layer, move.index)])
            to = (self._experts.w13[move.layer, move.index], self._experts.w2[move.layer, move.index])
            self._checkpoint.load_expert(move.layer, move.expert, *to)
            self._published.fill([move])

    def _tell_rate(self, what: str, numbers: int, seconds: float) -> None:
        size = numbers * self._arena.flat.element_size()
        pinned = self._tier is not None and self._tier.pinned
        log.info(f"{what} from host memory", bytes=size, seconds=seconds, gb_per_s=size / seconds / 1e9, pinned=pinned)

    def _loaded(self, peer: Source, local: Source, began: float) -> Loaded:
        from_tier = self._tier is not None
        host, disk = (local, Source()) if from_tier else (Source(), local)
        return Loaded(peer=peer, host=host, disk=disk, seconds=time.monotonic() - began)


def pieces_of(source: torch.Tensor, experts: ExpertBuffers, moves: Sequence[Move]) -> list[Piece]:
    """The copies of these moves from `HostTier.experts`."""
    to13, to2, first = experts.w13.data_ptr(), experts.w2.data_ptr(), source.data_ptr()
    width, item = experts.w13.shape[1], experts.w13.element_size()
    bytes13, bytes2 = item * experts.w13[0, 0].numel(), item * experts.w2[0, 0].numel()
    layer_bytes, expert_bytes = item * source.stride(0), item * source.stride(1)
    pieces: list[Piece] = []
    for move in moves:
        at = first + layer_bytes * move.layer + expert_bytes * move.expert
        buffer = move.layer * width + move.index
        pieces.append((to13 + bytes13 * buffer, at, bytes13))
        pieces.append((to2 + bytes2 * buffer, at + bytes13, bytes2))
    return pieces
