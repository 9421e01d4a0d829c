"""What a rank does for a change of membership: prepare in the background, commit while parked.

Runs in the agent's worker thread, the only one that may block on NIXL. An order that a newer epoch has overtaken ends as
soon as it can, so that the next one does not wait behind it: a loss must be covered while a join hangs.
"""

import time
from collections.abc import Callable, Collection

from elastic.config import GroupConfig
from elastic.errors import ElasticError, NeedsReplan
from elastic.lifeline import watch
from elastic.placement import HOLE
from elastic.protocol import Commit, Committed, Link, Peer, Prepare, Prepared
from elastic.rank.address import Address
from elastic.rank.comm.base import EpBackend, RoundBoard
from elastic.rank.engine import Engine
from elastic.rank.gate import Gate, Phase
from elastic.rank.runner import Runner
from elastic.rank.weights import Weights

CONNECT_SHARE = 1 / 6
"""Of the time for a prepare: who is not reached by then hangs, and is named while the others wait."""

LINK_JOINING_S, LINK_SERVING_S, LINK_PEER_S = 3.0, 6.0, 0.2
"""For the exchange to be connected, and more for each peer: NIXL EP took 7 to 35 ms for one on an H200."""


class Laps:
    """How long each part of something took, for one line of the log."""

    def __init__(self) -> None:
        self._last, self._laps = time.monotonic(), list[tuple[str, float]]()

    def __call__(self, name: str) -> None:
        now = time.monotonic()
        self._laps.append((name, now - self._last))
        self._last = now

    def __str__(self) -> str:
        return ", ".join(f"{name} {1e3 * seconds:.2f} ms" for name, seconds in self._laps)


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
        self._reached: dict[int, int] = {}
        """Incarnations whose weights can be read, by slot."""
        self._linked: dict[int, int] = {}
        """Incarnations that the EP back end is connected to."""
        self._watched: set[tuple[int, int]] = set()
        """(slot, incarnation) of peers whose deaths are seen here; each costs a thread that sleeps until then."""

    def prepare(self, order: Prepare) -> Prepared:
        """While the group serves. New peers stay masked; moves go to expert buffers that no map names."""
        began = time.monotonic()
        until, overtaken = began + self._config.prepare_deadline_s, self._overtaken(order.epoch)

        def left() -> float:
            return max(0.0, until - time.monotonic())

        self._reach(order.peers, self._config.prepare_deadline_s * CONNECT_SHARE, overtaken)
        connected = time.monotonic()
        loaded = self._weights.load_experts(order.moves, deadline_s=left(), give_up=overtaken)
        capture_s = 0.0
        if order.dense_from is not None:
            source = None if order.dense_from < 0 else order.dense_from
            dense = self._weights.load_dense(source, deadline_s=left(), give_up=overtaken)
            loaded = loaded + dense
        if order.capture:
            capture_s = self._capture(left())
        return Prepared(
            id=order.id,
            loaded=loaded,
            contents=self._weights.contents(),
            connect_s=connected - began,
            capture_s=capture_s,
        )

    def link(self, order: Link) -> None:
        """While the group serves; the new peers stay masked.

        A back end that meets its peers may freeze this process until they come (`frozen`). The joiner gives up first: its
        end sets free those who wait for it, and only a rank that stays frozen after that ends too."""
        patience_s = LINK_JOINING_S if self._engine.view is None else LINK_SERVING_S
        deadline_s = min(self._config.prepare_deadline_s * CONNECT_SHARE, patience_s + LINK_PEER_S * len(order.peers))
        self._link(order.peers, deadline_s, self._overtaken(order.epoch))

    def commit(self, order: Commit) -> Committed:
        """While parked: afterwards masks, map and weights are exactly what the view says, or ElasticError is raised and
        the rank stays parked. Safe to repeat with another view."""
        deadline_s, overtaken = self._config.commit_deadline_s, self._overtaken(order.epoch)
        lap = Laps()
        # half of what the controller waits for the answer: who cannot be reached is to be named, not to become silent too
        self._reach(order.peers, deadline_s / 2, overtaken)
        self._link(order.peers, deadline_s / 2, overtaken)
        lap("connect")
        loaded = self._weights.load_experts(order.moves, deadline_s=deadline_s, give_up=overtaken)
        if overtaken():
            raise NeedsReplan(f"the commit of epoch {order.epoch} was overtaken")
        self._hold_exactly(order)
        lap("weights")
        self._ep.clean(order.base)
        lap("signals")
        live = {peer.slot for peer in order.peers}
        for slot in range(self._config.max_ranks):
            if slot != self._slot:
                self._ep.set_mask(slot, slot not in live)
        lap("masks")
        self._engine.take_view(order.view, order.epoch)
        self._gate.adopt(order.round)
        lap("map")
        print(f"commit of epoch {order.epoch}: {lap}", flush=True)
        return Committed(
            id=order.id,
            placement_hash=self._engine.view.hash if self._engine.view else "",
            loaded=loaded,
            contents=self._weights.contents(),
        )

    def tidy(self) -> None:
        """After the first step of a view: disconnect who is not in the view any more. Masked, they cost nothing meanwhile, and taking them
        down takes longer than all the rest of a commit (15 ms for each on an H200)."""
        view = self._engine.view
        if view is not None:
            live = set(view.live)
            self._forget([s for s in {*self._linked, *self._reached} if s not in live])

    def _overtaken(self, epoch: int) -> Callable[[], bool]:
        return lambda: self._gate.epoch > epoch

    def _reach(self, peers: Collection[Peer], deadline_s: float, overtaken: Callable[[], bool]) -> None:
        new = [p for p in peers if self._reached.get(p.slot) != p.incarnation]
        if new:
            self._forget([p.slot for p in new])
            self._weights.connect({p.slot: p.weights for p in new}, deadline_s=deadline_s, give_up=overtaken)
            self._reached |= {p.slot: p.incarnation for p in new}

    def _link(self, peers: Collection[Peer], deadline_s: float, overtaken: Callable[[], bool]) -> None:
        new = [p for p in peers if self._linked.get(p.slot) != p.incarnation]
        if new:
            addresses = {p.slot: Address.decode(p.ep, p.slot) for p in new}
            exchange = {slot: address.exchange for slot, address in addresses.items()}
            self._ep.connect(exchange, deadline_s=deadline_s, give_up=overtaken)
            self._linked |= {p.slot: p.incarnation for p in new}
            for peer in new:
                self._watch(peer.slot, peer.incarnation, addresses[peer.slot].lifeline)

    def _watch(self, slot: int, incarnation: int, lifeline: str) -> None:
        """A peer that dies is released here at once, before the controller says so: the step in flight comes back, is
        discarded since a mask changed, and the rank stands where the controller's order would have brought it. Where a
        peer cannot be watched, that order does it alone."""

        def died() -> None:
            if self._linked.get(slot) == incarnation:
                self._ep.release([slot])

        if lifeline and (slot, incarnation) not in self._watched and watch(lifeline, died, seat=self._slot + 1):
            self._watched.add((slot, incarnation))

    def _forget(self, slots: Collection[int]) -> None:
        if gone := [s for s in slots if s in self._linked]:
            self._ep.disconnect(gone)
        if gone := [s for s in slots if s in self._reached]:
            self._weights.disconnect(gone)
        for slot in slots:
            self._linked.pop(slot, None)
            self._reached.pop(slot, None)

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
