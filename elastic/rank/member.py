"""What a rank does for a change of membership: prepare and stage in the background, commit while parked.

Runs in the agent's worker thread, the only one that may block on NIXL. An order that a newer epoch has overtaken ends as
soon as it can, so that the next one does not wait behind it: a loss must be covered while a join hangs.
"""

import time
from collections.abc import Callable, Collection, Mapping

from elastic.config import GroupConfig
from elastic.errors import ElasticError, NeedsReplan
from elastic.lifeline import watch
from elastic.placement import HOLE
from elastic.placement.maps import Row
from elastic.protocol import Commit, Committed, Link, Loaded, Peer, Prepare, Prepared, Stage, Staged, Switch
from elastic.rank.address import Address
from elastic.rank.comm.base import EpBackend, RoundBoard
from elastic.rank.dying import has_ended, pid_of
from elastic.rank.engine import Engine
from elastic.rank.gate import Gate, Phase
from elastic.rank.runner import Runner
from elastic.rank.steplog import WorkLog
from elastic.rank.weights import Weights
from elastic.view import View

CONNECT_SHARE = 1 / 6
"""Of the time for a prepare: who is not reached by then hangs, and is named while the others wait."""


class Laps:
    """How long each part of something took, for one line of the log and the log of works."""

    def __init__(self, what: str, works: WorkLog) -> None:
        self._what, self._works = what, works
        self._last, self._laps = time.monotonic(), list[tuple[str, float]]()

    def __call__(self, name: str) -> None:
        now = time.monotonic()
        self._laps.append((name, now - self._last))
        self._works.add(f"{self._what}: {name}", self._last, now)
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
        self._link_failure: tuple[int, ElasticError | None] = -1, None
        """Of the last order to link that failed, with its epoch."""
        self._dead: dict[int, int] = {}
        """Processes of connected peers that were seen to die, by slot."""
        self._watched: set[tuple[int, int]] = set()
        """(slot, incarnation) of peers whose deaths are seen here; each costs a thread that sleeps until then."""

    def prepare(self, order: Prepare) -> Prepared:
        """While the group serves. New peers stay masked; moves go to expert buffers that no map names."""
        began = time.monotonic()
        until, overtaken = began + self._config.prepare_deadline_s, self._overtaken(order.epoch)

        def left() -> float:
            return max(0.0, until - time.monotonic())

        if order.members is not None:
            self._leave_all_but(order.members)
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

        A back end that meets its peers may freeze this process until they come (`frozen`). The joiner gives up first, and is
        ended: that sets free those who wait for it, and only a rank that stays frozen after that ends too."""
        epoch, failure = self._link_failure
        if failure is not None and epoch == order.epoch:
            # the order comes twice, and nobody would meet this rank a second time
            raise failure
        deadline_s = self._config.link_deadline_s(joins=self._engine.view is None)
        try:
            self._link(order.peers, deadline_s, self._overtaken(order.epoch))
        except ElasticError as error:
            self._link_failure = order.epoch, error
            raise

    def commit(self, order: Commit) -> Committed:
        """While parked: afterwards masks, map and weights are exactly what the view says, or ElasticError is raised and
        the rank stays parked. Safe to repeat with another view."""
        deadline_s, overtaken = self._config.commit_deadline_s, self._overtaken(order.epoch)
        lap = Laps("commit", self._engine.works)
        # half of what the controller waits for the answer: who cannot be reached is to be named, not to become silent too
        sources = {move.source_slot for move in order.moves}
        self._reach([p for p in order.peers if p.slot in sources], deadline_s / 2, overtaken)
        self._link(order.peers, deadline_s / 2, overtaken)
        lap("connect")
        loaded = self._weights.load_experts(order.moves, deadline_s=deadline_s, give_up=overtaken)
        if overtaken():
            raise NeedsReplan(f"the commit of epoch {order.epoch} was overtaken")
        self._check_held(order.view)
        self._drop_others(order.view)
        lap("weights")
        self._ep.clean(order.base)
        lap("signals")
        generation = self._ep.take_over(order.view.live, order.base)
        lap("masks")
        self._engine.take_view(order.view, order.epoch, generation)
        self._gate.adopt(order.round)
        if self._engine.recorder is not None:
            self._engine.recorder.committing(order.view, order.round, order.base)
        lap("map")
        print(f"commit of epoch {order.epoch}: {lap}", flush=True)
        return Committed(
            id=order.id,
            placement_hash=self._engine.view.hash if self._engine.view else "",
            loaded=loaded,
            contents=self._weights.contents(),
        )

    def stage(self, order: Stage) -> Staged:
        """While the group serves, or before this rank does: everything that a switch to the view needs is brought in place, and
        nothing that is in use changes. Raises ElasticError where this rank cannot take the view over."""
        missing = [p.slot for p in order.peers if self._linked.get(p.slot) != p.incarnation]
        if missing:
            raise ElasticError(
                f"slot {self._slot} is not connected to slots {missing} of the view of epoch {order.epoch}"
            )
        self._check_held(order.view)
        if self._engine.view is None:
            # nobody sends to a rank that no view names: what its warm-up has left goes
            self._ep.clean(order.base)
        with self._engine.works.note("stage"):
            self._engine.stage(order.view, order.epoch, order.base)
        return Staged(id=order.id, placement_hash=order.view.hash)

    def settle(self, order: Switch) -> Committed:
        """Behind a switch, while the loop runs on: what the view does not name any more is a hole from now on."""
        view = self._engine.view
        if view is None or view.epoch != order.epoch:
            raise NeedsReplan(f"the switch of epoch {order.epoch} was overtaken")
        with self._engine.works.note("settle"):
            self._drop_others(view)
        return Committed(id=order.id, placement_hash=view.hash, loaded=Loaded(), contents=self._weights.contents())

    def tidy(self) -> dict[int, int]:
        """Behind the first step of a view: disconnect who is not in it any more. Masked, they cost nothing meanwhile, and taking
        them down holds the loop up for longer than all the rest of a commit (15 ms for each on an H200). Returns those that
        are left for `part`."""
        view = self._engine.view
        if view is None:
            return {}
        self._leave_weights([slot for slot in self._reached if slot not in view.live])
        return self.part({slot: incarnation for slot, incarnation in self._linked.items() if slot not in view.live})

    def _leave_all_but(self, members: Mapping[int, int]) -> None:
        """Let go of whoever was connected for a view that never came, before anybody connects for the next one.

        A join that was cut off may leave a joiner connected to ranks that are not connected to it any more, or to the dead. As
        NIXL EP meets its peers, both ends have to begin anew: the other one would wait for ever for a rank that has nothing to
        do. So it is the controller who says, to both, which pairs stay."""
        self.part({s: i for s, i in self._linked.items() if members.get(s) != i}, wait=bool(members))

    def part(self, peers: Mapping[int, int], *, wait: bool = True) -> dict[int, int]:
        """Disconnect the exchange from these incarnations, by slot. With `wait`, returns those that were left because their
        process is still on its way out."""
        mine = {slot: incarnation for slot, incarnation in peers.items() if self._linked.get(slot) == incarnation}
        dying = {s: i for s, i in mine.items() if wait and s in self._dead and not has_ended(self._dead[s])}
        self._leave_exchange(mine.keys() - dying.keys())
        return dying

    def _overtaken(self, epoch: int) -> Callable[[], bool]:
        return lambda: self._gate.epoch > epoch

    def _reach(self, peers: Collection[Peer], deadline_s: float, overtaken: Callable[[], bool]) -> None:
        new = [p for p in peers if self._reached.get(p.slot) != p.incarnation]
        if new:
            self._leave_weights([p.slot for p in new])
            with self._engine.works.note("reach weights"):
                self._weights.connect({p.slot: p.weights for p in new}, deadline_s=deadline_s, give_up=overtaken)
            self._reached |= {p.slot: p.incarnation for p in new}

    def _link(self, peers: Collection[Peer], deadline_s: float, overtaken: Callable[[], bool]) -> None:
        new = [p for p in peers if self._linked.get(p.slot) != p.incarnation]
        if new:
            addresses = {p.slot: Address.decode(p.ep, p.slot) for p in new}
            exchange = {slot: address.exchange for slot, address in addresses.items()}
            with self._engine.works.note("connect exchange"):
                self._ep.connect(exchange, deadline_s=deadline_s, give_up=overtaken)
            self._linked |= {p.slot: p.incarnation for p in new}
            for peer in new:
                self._dead.pop(peer.slot, None)
                self._watch(peer.slot, peer.incarnation, addresses[peer.slot].lifeline)

    def _watch(self, slot: int, incarnation: int, lifeline: str) -> None:
        """A peer that dies is released here at once, before the controller says so: the step in flight comes back, is
        discarded since a mask changed, and the rank stands where the controller's order would have brought it. Where a
        peer cannot be watched, that order does it alone."""

        def died() -> None:
            if self._linked.get(slot) == incarnation:
                self._ep.release([slot])
                self._dead[slot] = pid_of(lifeline)

        if lifeline and (slot, incarnation) not in self._watched and watch(lifeline, died, seat=self._slot + 1):
            self._watched.add((slot, incarnation))

    def _leave_exchange(self, slots: Collection[int]) -> None:
        if gone := [s for s in slots if s in self._linked]:
            with self._engine.works.note("disconnect exchange"):
                self._ep.disconnect(gone)
        for slot in slots:
            self._linked.pop(slot, None)

    def _leave_weights(self, slots: Collection[int]) -> None:
        if gone := [s for s in slots if s in self._reached]:
            with self._engine.works.note("leave weights"):
                self._weights.disconnect(gone)
        for slot in slots:
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

    def _check_held(self, view: View) -> None:
        """Raises ElasticError where this rank lacks what the view says of it."""
        for layer, (held, wanted) in enumerate(zip(self._weights.contents(), self._wanted(view), strict=True)):
            if held == wanted:
                continue
            for index, (has, want) in enumerate(zip(held, wanted, strict=True)):
                if want not in (HOLE, has):
                    raise ElasticError(
                        f"slot {self._slot} layer {layer} buffer {index} holds expert {has}, the view wants {want}"
                    )

    def _drop_others(self, view: View) -> None:
        for layer, (held, wanted) in enumerate(zip(self._weights.contents(), self._wanted(view), strict=True)):
            if held == wanted:
                continue
            for index, (has, want) in enumerate(zip(held, wanted, strict=True)):
                if want == HOLE and has != HOLE:
                    self._weights.drop(layer, index)

    def _wanted(self, view: View) -> tuple[Row, ...]:
        return view.placement.of_rank(self._slot)
