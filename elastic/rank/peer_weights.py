"""Weights of other ranks, read from their memory through NIXL; and what this rank publishes so that others can read.

A plan may be stale, and a source may die or be overwritten while it is read. So a copy counts only if

* it went to *staging*, memory of its own: bytes of a read that timed out may land when the peer goes on, much later, and
  must not meet an expert in use; a staging buffer is used again only when no transfer can touch it any more;
* the source's published *word* for that buffer named the wanted expert before and after the copy, with the same version:
  the owner changes the word before the first byte and after the last byte that it writes there.
"""

import time
from collections import deque
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import NamedTuple

import msgspec
import structlog
import torch

from elastic.errors import ElasticError, Retryable
from elastic.placement.maps import HOLE, Move
from elastic.rank.architecture import Arena, ExpertBuffers
from elastic.rank.comm.base import PeerFault
from elastic.rank.nixl_agent import Copy, NixlAgent, PeerError, Transfer

STAGE_BYTES = 8 << 20
GRACE_S = 0.5
RATE_BYTES_PER_S = 50e6
"""Peers that are slower than this, after GRACE_S for wake-up and connection, are given up for the next source."""

log = structlog.get_logger("elastic.weights")


class Published:
    """What this rank's buffers hold, readable by peers: int64 words, [dense, then layer by layer, index by index].

    The dense word is 1 when the dense weights are whole. Another word is `version << 32 | expert + 1`, with 0 for a hole; the
    version grows with every change. An aligned word is always seen whole.
    """

    def __init__(self, experts: ExpertBuffers) -> None:
        self._contents = experts.contents
        self._width = len(experts.contents[0]) if experts.contents else 0
        self.table = torch.zeros(1 + len(experts.contents) * self._width, dtype=torch.int64)
        self._words = self.table.numpy()

    def word_index(self, layer: int, index: int) -> int:
        return 1 + layer * self._width + index

    def set_expert(self, layer: int, index: int, expert: int) -> None:
        """Say what a buffer holds from now on; HOLE before the first byte is changed."""
        at = self.word_index(layer, index)
        self._contents[layer][index] = expert
        self._words[at] = ((int(self._words[at]) >> 32) + 1) << 32 | (expert + 1)

    def set_dense(self) -> None:
        self._words[0] = 1


def published_expert(word: int) -> int:
    return (word & 0xFFFFFFFF) - 1


class _Layout(msgspec.Struct, frozen=True, array_like=True):
    """Must be equal on both sides."""

    dense: int
    layers: int
    slots_per_rank: int
    w13: int
    w2: int


class _Endpoint(msgspec.Struct, frozen=True, array_like=True):
    agent: bytes
    layout: _Layout
    table: int
    dense: int
    w13: int
    w2: int


class _Peer(NamedTuple):
    name: str
    raw: bytes
    at: _Endpoint


class _Stage:
    """One staging buffer: floats for weights, and words of the source before and after."""

    def __init__(self, agent: NixlAgent, floats: int, words: int) -> None:
        self.floats = torch.empty(floats, dtype=torch.float32)
        self.before = torch.empty(words, dtype=torch.int64)
        self.after = torch.empty(words, dtype=torch.int64)
        self.pending: list[Transfer] = []
        for tensor in (self.floats, self.before, self.after):
            agent.register(tensor)

    @property
    def free(self) -> bool:
        return all(transfer.settled for transfer in self.pending)


class PeerWeights:
    """Used by one thread, except `faults`, which any thread may drain."""

    def __init__(self, name: str, slot: int, arena: Arena, experts: ExpertBuffers, published: Published) -> None:
        """Register all memory. Raises ElasticError where NIXL is missing."""
        self._slot, self._arena, self._experts = slot, arena, experts
        self._expert_floats = experts.w13[0, 0].numel() + experts.w2[0, 0].numel()
        self._published = published
        self._agent = NixlAgent(name)
        for tensor in (published.table, arena.flat, experts.w13, experts.w2):
            self._agent.register(tensor)
        layers, slots_per_rank = experts.w13.shape[:2]
        self._layout = _Layout(
            dense=arena.flat.numel(),
            layers=layers,
            slots_per_rank=slots_per_rank,
            w13=experts.w13[0, 0].numel(),
            w2=experts.w2[0, 0].numel(),
        )
        self.endpoint = msgspec.msgpack.encode(
            _Endpoint(
                agent=self._agent.metadata(),
                layout=self._layout,
                table=published.table.data_ptr(),
                dense=arena.flat.data_ptr(),
                w13=experts.w13.data_ptr(),
                w2=experts.w2.data_ptr(),
            )
        )
        """What a peer needs for `connect`; fixed for the life of the process."""
        self._peers: dict[int, _Peer] = {}
        self._stages: list[_Stage] = []
        self.faults: deque[PeerFault] = deque()

    def connect(self, peers: Mapping[int, bytes], *, deadline_s: float) -> None:
        """Know peers by slot and prove that each answers. The same endpoint again does nothing, another one replaces
        the old. Raises Retryable naming the slots that did not answer; ElasticError for a peer with other sizes."""
        new = {
            slot: raw
            for slot, raw in peers.items()
            if slot != self._slot and not (slot in self._peers and self._peers[slot].raw == raw)
        }
        self.disconnect(new)
        for slot, raw in new.items():
            try:
                at = msgspec.msgpack.decode(raw, type=_Endpoint)
            except msgspec.MsgspecError as error:
                raise ElasticError(f"weights of slot {slot}: its endpoint is malformed: {error}") from error
            if at.layout != self._layout:
                raise ElasticError(
                    f"weights of slot {slot}: its buffers {at.layout} are not like ours {self._layout}; "
                    "all ranks of a group need the same checkpoint and configuration"
                )
            self._peers[slot] = _Peer(self._agent.add_peer(at.agent), raw, at)
        stages = {slot: self._stage() for slot in new}
        hello = {s: [Copy(stage.before.data_ptr(), self._peers[s].at.table, 8)] for s, stage in stages.items()}
        failed = self._fetch(stages, hello, time.monotonic() + deadline_s)
        if failed:
            self.disconnect(failed)
            raise Retryable(
                f"weights of slots {sorted(failed)}: no answer within {deadline_s:g} s; connect again or leave them out"
            )

    def disconnect(self, slots: Collection[int]) -> None:
        """Forget peers, dead or alive; unknown slots are ignored."""
        for slot in slots:
            if (peer := self._peers.pop(slot, None)) is not None:
                self._agent.remove_peer(peer.name)

    def probe(self, slots: Collection[int]) -> None:
        """Send each peer a few bytes. A dead one becomes a fault, at the first or second probe after its death."""
        for slot in slots:
            if (peer := self._peers.get(slot)) is not None:
                try:
                    self._agent.ping(peer.name)
                except PeerError as error:
                    self._fault(slot, error)

    def load_experts(self, moves: Sequence[Move], *, deadline_s: float) -> list[Move]:
        """Copy experts from the peers that the moves name; returns the moves done. The others need another source: their
        peer is unknown, failed (then it is among `faults`), or does not hold that expert any more."""
        queues: dict[int, deque[Move]] = {}
        for move in moves:
            if move.source_slot in self._peers:
                queues.setdefault(move.source_slot, deque()).append(move)
        size = sum(len(queue) for queue in queues.values()) * self._expert_floats * 4
        end, done = time.monotonic() + allowance_s(size, deadline_s), []
        while queues:
            stages = {slot: self._stage() for slot in queues}
            batches = {slot: self._batch(queue, stages[slot]) for slot, queue in queues.items()}
            failed = self._read_batches(stages, batches, end)
            for slot in batches.keys() - failed:
                done += self._take(stages[slot], batches[slot])
            queues = {slot: queue for slot, queue in queues.items() if queue and slot not in failed}
        return done

    def load_dense(self, slot: int, *, deadline_s: float) -> bool:
        """Copy a peer's dense weights into the arena. False: the peer is unknown, failed or has none yet; the arena may
        then hold a part."""
        peer = self._peers.get(slot)
        if peer is None:
            return False
        flat, end = self._arena.flat, time.monotonic() + allowance_s(self._arena.flat.numel() * 4, deadline_s)
        stage = self._stage()
        hello = {slot: [Copy(stage.before.data_ptr(), peer.at.table, 8)]}
        if self._fetch({slot: stage}, hello, end):
            return False
        if int(stage.before[0]) != 1:
            log.info("a peer has no dense weights yet", peer=slot)
            return False
        for at in range(0, flat.numel(), stage.floats.numel()):
            part = flat[at : at + stage.floats.numel()]
            copy = Copy(stage.floats.data_ptr(), peer.at.dense + 4 * at, 4 * part.numel())
            if self._fetch({slot: stage}, {slot: [copy]}, end):
                return False
            part.copy_(stage.floats[: part.numel()])
        return True

    def close(self) -> None:
        self._agent.close()

    def _stage(self) -> _Stage:
        for stage in self._stages:
            if stage.free:
                stage.pending.clear()
                self._stages.remove(stage)
                self._stages.append(stage)
                return stage
        floats = max(self._expert_floats, STAGE_BYTES // 4)
        self._stages.append(_Stage(self._agent, floats, floats // self._expert_floats))
        return self._stages[-1]

    def _batch(self, queue: deque[Move], stage: _Stage) -> list[Move]:
        return [queue.popleft() for _ in range(min(len(queue), stage.before.numel()))]

    def _read_batches(self, stages: dict[int, _Stage], batches: dict[int, list[Move]], end: float) -> set[int]:
        """Words, weights, words again, from all peers at once; returns the slots that failed."""
        failed: set[int] = set()
        for step in (self._word_copies("before"), self._weight_copies, self._word_copies("after")):
            copies = {s: list(step(s, stages[s], batch)) for s, batch in batches.items() if s not in failed}
            failed |= self._fetch(stages, copies, end)
        return failed
