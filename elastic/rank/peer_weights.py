"""Weights of other ranks, read from their memory through NIXL.

A plan may be stale, and a source may die, stop or be overwritten while it is read. So a copy of an expert counts only if all
its bytes arrived in staging, and the source's published word for that buffer (see `published`) named the wanted expert, with
the same version, before the copy and after it.
"""

import time
from collections import deque
from collections.abc import Callable, Collection, Generator, Mapping, Sequence
from typing import NamedTuple

import msgspec
import structlog
import torch

from elastic.errors import ElasticError, NeedsReplan, Unreachable
from elastic.placement.maps import Move
from elastic.rank.architecture import Arena, ExpertBuffers
from elastic.rank.comm.base import PeerFault, never
from elastic.rank.copies import Copier, Piece, piece
from elastic.rank.nixl_agent import HOST, Copy, Memory, NixlAgent, PeerError, Transfer
from elastic.rank.published import WORD_BYTES, Published, expert_of, word_index
from elastic.rank.staging import Stage, Staging

STAGE_BYTES = 8 << 20
GRACE_S = 1.0
RATE_BYTES_PER_S = 50e6

Reader = Generator[Transfer, None, None]
"""Yields the transfers from one peer, one after the other; resumed when the last one is done, closed when it failed."""

log = structlog.get_logger("elastic.weights")


class _Layout(msgspec.Struct, frozen=True, array_like=True):
    """Bytes; must be equal on both sides."""

    dense: int
    layers: int
    width: int
    """Expert buffers a layer."""
    w13: int
    w2: int


class _Endpoint(msgspec.Struct, frozen=True, array_like=True):
    """How to read a rank's weights: its agent, and addresses in its process."""

    agent: bytes
    layout: _Layout
    table: int
    dense: int
    w13: int
    w2: int
    device: int
    """GPU index in its process; -1: host memory."""


class _Peer(NamedTuple):
    name: str
    raw: bytes
    at: _Endpoint


class PeerWeights:
    """Used by one thread; `endpoint` and `faults` may be read by any.

    What waits asks `give_up` meanwhile and raises NeedsReplan when it says so: whole experts that were read stay.
    """

    def __init__(self, agent: NixlAgent, slot: int, arena: Arena, experts: ExpertBuffers, published: Published) -> None:
        """Registers the buffers with `agent`, which nobody else uses from now on."""
        self._slot, self._arena, self._experts, self._published = slot, arena, experts, published
        self._agent = agent
        for tensor in (published.table, arena.flat, experts.w13, experts.w2):
            self._agent.register(tensor)
        layers, width = experts.w13.shape[:2]
        self._layout = _Layout(
            dense=_bytes(arena.flat),
            layers=layers,
            width=width,
            w13=_bytes(experts.w13[0, 0]),
            w2=_bytes(experts.w2[0, 0]),
        )
        self._here = Memory.of(arena.flat)
        self._item = arena.flat.element_size()
        self._expert_bytes = self._layout.w13 + self._layout.w2
        self._batch = max(1, STAGE_BYTES // self._expert_bytes)
        self._staging = Staging(
            self._agent, like=arena.flat, numbers=self._batch * self._expert_bytes // self._item, words=self._batch
        )
        # of their own: what is greeted may never answer, and its stage then stays set aside
        self._greetings = Staging(self._agent, like=arena.flat, numbers=1, words=1)
        self.endpoint = msgspec.msgpack.encode(
            _Endpoint(
                agent=self._agent.metadata(),
                layout=self._layout,
                table=published.table.data_ptr(),
                dense=arena.flat.data_ptr(),
                w13=experts.w13.data_ptr(),
                w2=experts.w2.data_ptr(),
                device=self._here.device if self._here.kind == "VRAM" else -1,
            )
        )
        """What a peer needs for `connect`; fixed for the life of the process."""
        self.faults: deque[PeerFault] = deque()
        self._peers: dict[int, _Peer] = {}
        self._copier = Copier(arena.flat.device)

    def connect(self, peers: Mapping[int, bytes], *, deadline_s: float, give_up: Callable[[], bool] = never) -> None:
        """Know peers by slot, and prove that each answers. A known endpoint does nothing, a changed one replaces the old.

        Raises Unreachable naming the slots that did not answer (the others are connected), ElasticError for a malformed
        endpoint or a peer of other sizes.
        """
        known = {slot for slot, raw in peers.items() if slot in self._peers and self._peers[slot].raw == raw}
        new = [slot for slot in peers if slot != self._slot and slot not in known]
        endpoints = {slot: self._decode(slot, peers[slot]) for slot in new}
        self.disconnect(new)
        for slot, at in endpoints.items():
            self._peers[slot] = _Peer(self._agent.add_peer(at.agent), peers[slot], at)
        try:
            silent = self._run({slot: self._greet(slot) for slot in new}, time.monotonic() + deadline_s, give_up)
        except NeedsReplan:
            self.disconnect(new)
            raise
        if silent:
            self.disconnect(silent)
            raise Unreachable(
                f"weights of slots {sorted(silent)}: no answer within {deadline_s:g} s; connect again or leave them out",
                silent,
            )

    def disconnect(self, slots: Collection[int]) -> None:
        """Forget peers, dead or alive; unknown slots are ignored."""
        for slot in slots:
            if (peer := self._peers.pop(slot, None)) is not None:
                self._agent.remove_peer(peer.name)

    def probe(self, slots: Collection[int]) -> None:
        """Send each connected peer a few bytes; one that is known to be gone becomes a fault."""
        for slot in slots:
            if (peer := self._peers.get(slot)) is not None:
                try:
                    self._agent.ping(peer.name)
                except PeerError as error:
                    self._report(slot, error)

    def load_experts(
        self, moves: Sequence[Move], *, deadline_s: float, give_up: Callable[[], bool] = never
    ) -> list[Move]:
        """Do the moves whose source is a connected peer; returns those done. The others need another source: their peer
        is unknown, has failed (then `faults` says so), or does not hold that expert any more."""
        queues: dict[int, list[Move]] = {}
        for move in moves:
            if move.source_slot in self._peers and 0 <= move.source_index < self._layout.width:
                queues.setdefault(move.source_slot, []).append(move)
        end = time.monotonic() + allowance_s(sum(map(len, queues.values())) * self._expert_bytes, deadline_s)
        done: list[Move] = []
        self._run({slot: self._read_experts(slot, queue, done) for slot, queue in queues.items()}, end, give_up)
        return done

    def load_dense(self, slot: int, *, deadline_s: float, give_up: Callable[[], bool] = never) -> bool:
        """Copy a peer's dense weights into the arena. False: the peer is unknown, failed or has none; the arena may then
        hold a part of them."""
        if slot not in self._peers:
            return False
        whole: list[bool] = []
        end = time.monotonic() + allowance_s(self._layout.dense, deadline_s)
        self._run({slot: self._read_dense(slot, whole)}, end, give_up)
        return bool(whole)

    def close(self) -> None:
        self._agent.close()

    def _decode(self, slot: int, raw: bytes) -> _Endpoint:
        try:
            at = msgspec.msgpack.decode(raw, type=_Endpoint)
        except msgspec.MsgspecError as error:
            raise ElasticError(f"weights of slot {slot}: its endpoint is malformed: {error}") from error
        if at.layout != self._layout:
            raise ElasticError(
                f"weights of slot {slot}: its buffers ({at.layout}) are not like ours ({self._layout}); "
                "all ranks of a group need the same checkpoint and configuration"
            )
        return at

    def _greet(self, slot: int) -> Reader:
        with self._greetings.lend() as stage:
            yield self._start(slot, stage, [self._dense_word(slot, stage)])

    def _read_experts(self, slot: int, moves: list[Move], done: list[Move]) -> Reader:
        with self._staging.lend() as stage:
            for at in range(0, len(moves), self._batch):
                batch = moves[at : at + self._batch]
                yield self._start(slot, stage, self._words(slot, batch, stage.before))
                yield self._start(slot, stage, self._weights(slot, batch, stage), weights=True)
                yield self._start(slot, stage, self._words(slot, batch, stage.after))
                done += self._take(slot, stage, batch)

    def _read_dense(self, slot: int, whole: list[bool]) -> Reader:
        flat = self._arena.flat
        with self._staging.lend() as stage:
            yield self._start(slot, stage, [self._dense_word(slot, stage)])
            if int(stage.before[0]) != 1:
                log.info("a peer has no dense weights yet", peer=slot)
                return
            for at in range(0, flat.numel(), stage.numbers.numel()):
                part = flat[at : at + stage.numbers.numel()]
                copy = Copy(stage.numbers.data_ptr(), self._peers[slot].at.dense + self._item * at, _bytes(part))
                yield self._start(slot, stage, [copy], weights=True)
                self._copier.run([piece(part, stage.numbers[: part.numel()])])
        whole.append(True)

    def _run(self, readers: Mapping[int, Reader], end: float, give_up: Callable[[], bool]) -> set[int]:
        """Run all readers to their ends or the end of time, each at its own pace, so that a silent peer costs the others
        nothing. Returns the slots that failed, reported."""
        running: dict[int, Transfer] = {}
        failed: set[int] = set()

        def resume(slot: int) -> None:
            running.pop(slot, None)
            try:
                running[slot] = next(readers[slot])
            except StopIteration:
                return
            except ElasticError as error:
                fail(slot, error)

        def fail(slot: int, error: ElasticError) -> None:
            running.pop(slot, None)
            readers[slot].close()
            failed.add(slot)
            self._report(slot, error)

        for slot in readers:
            resume(slot)
        while running:
            transfers = list(running.values())
            left = max(0.0, end - time.monotonic())
            errors = self._agent.wait(transfers, deadline_s=left, first=True, give_up=give_up)
            if give_up():
                for slot in running:
                    readers[slot].close()
                raise NeedsReplan(f"reading from slots {sorted(running)} was given up")
            if not any(transfer.ended for transfer in transfers):
                silent = {error.peer: error for error in errors}
                for slot, transfer in list(running.items()):
                    fail(slot, silent[transfer.peer])
            for slot, transfer in list(running.items()):
                if transfer.error is not None:
                    fail(slot, transfer.error)
                elif transfer.done:
                    resume(slot)
        return failed

    def _start(self, slot: int, stage: Stage, copies: list[Copy], *, weights: bool = False) -> Transfer:
        device = self._peers[slot].at.device
        there = Memory("VRAM", device) if weights and device >= 0 else HOST
        here = self._here if weights else HOST
        transfer = self._agent.start("READ", self._peers[slot].name, copies, here=here, there=there)
        stage.watch(transfer)
        return transfer

    def _report(self, slot: int, error: ElasticError) -> None:
        log.warning("a peer's weights cannot be read", peer=slot, why=str(error))
        if isinstance(error, PeerError):
            self.faults.append(PeerFault(slot, error.what))

    def _take(self, slot: int, stage: Stage, batch: list[Move]) -> list[Move]:
        """Copy what is trustworthy from the stage to the expert buffers."""
        taken: list[Move] = []
        pieces: list[Piece] = []
        layout, at = self._layout, stage.numbers.data_ptr()
        to13, to2 = self._experts.w13.data_ptr(), self._experts.w2.data_ptr()
        words = zip(stage.before.tolist(), stage.after.tolist(), strict=True)
        for k, (move, (before, after)) in enumerate(zip(batch, words, strict=False)):
            if before != after or expert_of(before) != move.expert:
                held = expert_of(after)
                log.warning("a peer holds another expert than planned", peer=slot, move=str(move), held=held)
                continue
            source, buffer = at + k * self._expert_bytes, move.layer * layout.width + move.index
            pieces.append((to13 + layout.w13 * buffer, source, layout.w13))
            pieces.append((to2 + layout.w2 * buffer, source + layout.w13, layout.w2))
            taken.append(move)
        self._published.clear([(move.layer, move.index) for move in taken])
        # whole before anybody is told, and before the stage is written to again
        self._copier.run(pieces)
        self._published.fill(taken)
        return taken

    def _dense_word(self, slot: int, stage: Stage) -> Copy:
        return Copy(stage.before.data_ptr(), self._peers[slot].at.table, WORD_BYTES)

    def _words(self, slot: int, batch: list[Move], into: torch.Tensor) -> list[Copy]:
        to, table, width = into.data_ptr(), self._peers[slot].at.table, self._layout.width
        return [
            Copy(to + WORD_BYTES * k, table + WORD_BYTES * word_index(width, m.layer, m.source_index), WORD_BYTES)
            for k, m in enumerate(batch)
        ]

    def _weights(self, slot: int, batch: list[Move], stage: Stage) -> list[Copy]:
        at, layout, copies = self._peers[slot].at, self._layout, []
        for k, move in enumerate(batch):
            to, row = stage.numbers.data_ptr() + k * self._expert_bytes, move.layer * layout.width + move.source_index
            copies.append(Copy(to, at.w13 + row * layout.w13, layout.w13))
            copies.append(Copy(to + layout.w13, at.w2 + row * layout.w2, layout.w2))
        return copies


def allowance_s(size: int, deadline_s: float) -> float:
    """How long peers may take for `size` bytes: half of the time at most, so that the next source has the other half;
    and no longer than a slow link needs, so that a stopped peer costs about GRACE_S and not the whole deadline."""
    return min(deadline_s / 2, GRACE_S + size / RATE_BYTES_PER_S)


def _bytes(tensor: torch.Tensor) -> int:
    return tensor.numel() * tensor.element_size()
