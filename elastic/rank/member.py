"""What a rank does for a change of membership: prepare in the background, commit while parked.

Runs in the agent's worker thread, the only one that may block on NIXL. An order that a newer epoch has overtaken ends as
soon as it can, so that the next one does not wait behind it: a loss must be covered while a join hangs.
"""

import time
from collections.abc import Callable, Collection

from elastic.config import GroupConfig
from elastic.errors import ElasticError, NeedsReplan
from elastic.placement import HOLE
from elastic.protocol import Commit, Committed, Loaded, Peer, Prepare, Prepared, Source
from elastic.rank.comm.base import EpBackend, RoundBoard
from elastic.rank.engine import Engine
from elastic.rank.gate import Gate, Phase
from elastic.rank.runner import Runner
from elastic.rank.weights import Weights

CONNECT_SHARE = 1 / 6
"""Of the time for a prepare: who is not reached by then hangs, and is named while the others wait."""


class Membership:
    """Connections, masks, weights and maps of one rank."""

    def __init__(
        self,
        config: GroupConfig,
        slot: int,
        gate: Gate,
        engine: Engine,
        runner: Runner,
        ep: EpBackend,
        board: RoundBoard,
        weights: Weights,
    ) -> None:
        self.board = board
        self._config, self._slot, self._gate, self._engine = config, slot, gate, engine
        self._runner, self._ep, self._weights = runner, ep, weights
        self._connected: dict[int, int] = {}

    def prepare(self, order: Prepare) -> Prepared:
        """While the group serves. New peers stay masked; moves go to expert buffers that no map names."""
        began = time.monotonic()
        until, overtaken = began + self._config.prepare_deadline_s, self._overtaken(order.epoch)

        def left() -> float:
            return max(0.0, until - time.monotonic())

        self._connect(order.peers, self._config.prepare_deadline_s * CONNECT_SHARE, overtaken)
        connected = time.monotonic()
        loaded = self._weights.load_experts(order.moves, deadline_s=left(), give_up=overtaken)
        capture_s = 0.0
        if order.dense_from is not None:
            source = None if order.dense_from < 0 else order.dense_from
            dense = self._weights.load_dense(source, deadline_s=left(), give_up=overtaken)
            loaded = add(loaded, dense)
        if order.capture:
            capture_s = self._capture(left())
        return Prepared(
            id=order.id,
            loaded=loaded,
            contents=self._weights.contents(),
            connect_s=connected - began,
            capture_s=capture_s,
        )

    def commit(self, order: Commit) -> Committed:
        """While parked: afterwards masks, map and weights are exactly what the view says, or ElasticError is raised and
        the rank stays parked. Safe to repeat with another view."""
        deadline_s, overtaken = self._config.commit_deadline_s, self._overtaken(order.epoch)
        self._forget({p.slot: p.incarnation for p in order.peers})
        # half of what the controller waits for the answer: who cannot be reached is to be named, not to become silent too
        self._connect(order.peers, deadline_s / 2, overtaken)
        loaded = self._weights.load_experts(order.moves, deadline_s=deadline_s, give_up=overtaken)
        if overtaken():
            raise NeedsReplan(f"the commit of epoch {order.epoch} was overtaken")
        self._hold_exactly(order)
        self._ep.clean(order.base)
        for peer in order.peers:
            self._ep.set_mask(peer.slot, False)
        self._engine.take_view(order.view, order.epoch)
        self._gate.adopt(order.round)
        return Committed(
            id=order.id,
            placement_hash=self._engine.view.hash if self._engine.view else "",
            loaded=loaded,
            contents=self._weights.contents(),
        )

    def _overtaken(self, epoch: int) -> Callable[[], bool]:
        return lambda: self._gate.epoch > epoch

    def _connect(self, peers: Collection[Peer], deadline_s: float, overtaken: Callable[[], bool]) -> None:
        new = [p for p in peers if self._connected.get(p.slot) != p.incarnation]
        if new:
            self._weights.connect({p.slot: p.weights for p in new}, deadline_s=deadline_s, give_up=overtaken)
            self._ep.connect({p.slot: p.ep for p in new}, deadline_s=deadline_s, give_up=overtaken)
            self._connected |= {p.slot: p.incarnation for p in new}

    def _forget(self, keep: dict[int, int]) -> None:
        gone = [s for s, incarnation in self._connected.items() if keep.get(s) != incarnation]
        if gone:
            self._ep.disconnect(gone)
            self._weights.disconnect(gone)
            for slot in gone:
                del self._connected[slot]

    def _capture(self, deadline_s: float) -> float:
        """Warm up and capture on the loop's thread, all peers masked; a second capture is never made."""
        if self._gate.phase is not Phase.BOOTED:
            return 0.0
        began, errors = time.monotonic(), []

        def job() -> None:
            try:
                self._runner.capture()
                self._gate.phase = Phase.READY
            except Exception as error:
                errors.append(error)

        if not self._gate.run_on_loop(job, deadline_s):
            raise ElasticError(f"capture did not end within {deadline_s:g} s")
        if errors:
            raise ElasticError(f"capture failed: {errors[0]}") from errors[0]
        return time.monotonic() - began

    def _hold_exactly(self, order: Commit) -> None:
        wanted = order.view.placement.of_rank(self._slot)
        for layer, row in enumerate(self._weights.contents()):
            for index, held in enumerate(row):
                want = wanted[layer][index]
                if want == HOLE and held != HOLE:
                    self._weights.drop(layer, index)
                elif want != held:
                    raise ElasticError(
                        f"slot {self._slot} layer {layer} buffer {index} holds expert {held}, the view wants {want}"
                    )


def add(a: Loaded, b: Loaded) -> Loaded:
    """The sum of two loads."""

    def both(x: Source, y: Source) -> Source:
        return Source(x.tensors + y.tensors, x.bytes + y.bytes)

    return Loaded(both(a.peer, b.peer), both(a.host, b.host), both(a.disk, b.disk), a.seconds + b.seconds)
