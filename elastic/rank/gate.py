"""Where the round loop and the agent meet: who may run which round, and how the loop is brought to a stop.

One condition variable, owned here. The agent's threads give orders; the loop (the main thread) asks at each round boundary.
The loop is in one of four phases: BOOTED (no weights), READY (captured, in no view), SERVING, PARKED (stopped between two
rounds). `epoch` is the fence: the highest epoch seen in any command. The epoch of the view may be lower.
"""

import threading
from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from typing import Any


class Phase(StrEnum):
    BOOTED = "booted"
    READY = "ready"
    SERVING = "serving"
    PARKED = "parked"


class Order(StrEnum):
    """What the loop does next."""

    RUN = "run"
    IDLE = "idle"
    """Run only if there is work, here or elsewhere; else sleep."""
    EXIT = "exit"


@dataclass(frozen=True)
class Takeover:
    """What the loop does at the boundary before `round`, instead of standing there."""

    round: int
    apply: Callable[[int], bool]
    """Called with the round, by the loop, between two steps. False: nothing was changed, and the loop stands."""
    done: Callable[[bool], None]
    """Called once, by any thread, with the outcome: whether it was applied. Must return at once."""


class Gate:
    """A method that waits has a deadline and says who wakes it."""

    def __init__(self, wake_loop: Callable[[], None]) -> None:
        self._changed = threading.Condition()
        self._wake_loop = wake_loop
        self._jobs: list[tuple[Callable[[], Any], threading.Event]] = []
        self._stop_at: int | None = None
        self._halt = False
        self._exit = False
        self._stopped = False  # parked by stop_at, with nothing discarded: may simply run on
        self._takeover: Takeover | None = None
        self._when_parked: list[Callable[[], None]] = []
        self.before_standing: Callable[[], None] = lambda: None
        """Called by the loop whenever it comes to a stand, before those who wait for that hear of it. Must return at once."""
        self.in_round = False
        self.idle = False
        self.phase = Phase.BOOTED
        self.epoch = 0
        self.round = 0

    # --- the agent's side -----------------------------------------------------------------------------------------

    def fence(self, epoch: int) -> bool:
        """Take over a command's epoch; False when it is older than the fence, and the command must be refused."""
        with self._changed:
            if epoch < self.epoch:
                return False
            self.epoch = epoch
            return True

    def stop_at(self, round_: int) -> int | None:
        """Ask the loop to park before `round_`. Returns None, or the round that has already begun."""
        with self._changed:
            if self.round > round_ or (self.round == round_ and self.in_round):
                return self.round
            self._stop_at = round_
            if self._stopped and self.round < round_:
                self._stopped, self.phase = False, Phase.SERVING
            self._changed.notify_all()
        self._wake_loop()
        return None

    def take_over(self, order: Takeover) -> bool:
        """Have the loop carry out `order` at its boundary and run on; a loop that has stopped there, or a READY one, which
        is at every boundary, does so at once. False, with nothing done: the loop cannot come to that boundary any more."""
        with self._changed:
            before = self.round < order.round or (self.round == order.round and not self.in_round)
            runs = before and (self.phase is Phase.SERVING or self._stopped)
            if self._halt or not (runs or self.phase is Phase.READY):
                return False
            replaced, self._takeover = self._takeover, order
            self._changed.notify_all()
        if replaced is not None:
            replaced.done(False)
        self._wake_loop()
        return True

    def halt(self) -> None:
        """Park at once; the step in flight is not committed."""
        with self._changed:
            self._halt, self._stopped = True, False
            self._stop_at = None
            takeover, self._takeover = self._takeover, None
            self._changed.notify_all()
        if takeover is not None:
            takeover.done(False)
        self._wake_loop()

    def when_parked(self, call: Callable[[], None]) -> None:
        """Call once, from the loop's thread, when the loop stands; at once where it does. READY counts as parked: nothing
        runs there. `call` must return at once."""
        with self._changed:
            if not self._stands():
                self._when_parked.append(call)
                return
        call()

    def adopt(self, round_: int) -> None:
        """Inside a commit: the loop stands; the next round is `round_`."""
        with self._changed:
            self.round, self.phase, self._halt, self._stop_at = round_, Phase.PARKED, False, None
            self.idle = self._stopped = False

    def resume(self) -> None:
        """Run, after a commit; or run on, where a stop was ordered and is not wanted any more."""
        with self._changed:
            self._halt, self._stop_at, self._stopped, self.phase = False, None, False, Phase.SERVING
            self._changed.notify_all()
        self._wake_loop()

    def run_on_loop(self, job: Callable[[], Any], deadline_s: float) -> bool:
        """Have the loop run `job` while it stands (BOOTED, READY or PARKED) and wait for its end."""
        done = threading.Event()
        with self._changed:
            self._jobs.append((job, done))
            self._changed.notify_all()
        self._wake_loop()
        return done.wait(deadline_s)

    def leave(self) -> None:
        with self._changed:
            self._exit = True
            self._changed.notify_all()
        self._wake_loop()

    # --- the loop's side ------------------------------------------------------------------------------------------

    def next(self) -> Order:
        """At a round boundary: park while told to, run jobs meanwhile, then say how to go on."""
        while True:
            with self._changed:
                self.in_round = False
                if self._exit:
                    return Order.EXIT
                takeover = self._due()
                if takeover is None and self.phase is Phase.SERVING and (self._halt or self._stop_at == self.round):
                    self._stopped = not self._halt
                    self._stop_at = None
                    self._park()
                if takeover is not None:
                    self._takeover = None
                elif self._jobs and self.phase is not Phase.SERVING:
                    job, done = self._jobs.pop(0)
                elif self.phase is Phase.SERVING:
                    # a stop ahead of us is reached by running, work or not
                    return Order.IDLE if self._stop_at is None else Order.RUN
                else:
                    self._changed.wait(1.0)
                    continue
            if takeover is not None:
                self._carry_out(takeover)
                continue
            try:
                job()
            finally:
                done.set()

    def enter(self) -> bool:
        """Begin the round, unless an order came since `next`."""
        with self._changed:
            if self._halt or self._exit or self._stop_at == self.round:
                return False
            self.in_round, self.idle = True, False
            return True

    def wanted(self) -> bool:
        """Whether an idle loop must come back to `next`."""
        with self._changed:
            return self._halt or self._exit or self._stop_at is not None or self._takeover is not None

    def committed(self) -> None:
        """The round's step was committed here."""
        with self._changed:
            self.round += 1
            self.in_round = False

    def park_self(self) -> None:
        """A step had to be discarded without an order: stand until the controller aborts and commits."""
        with self._changed:
            self.in_round = False
            self._park()

    @property
    def halted(self) -> bool:
        with self._changed:
            return self._halt

    # --- with the lock held ---------------------------------------------------------------------------------------

    def _stands(self) -> bool:
        return self.phase in (Phase.PARKED, Phase.READY)

    def _due(self) -> Takeover | None:
        takeover = self._takeover
        if takeover is None or self._halt:
            return None
        there = takeover.round == self.round and (self.phase is Phase.SERVING or self._stopped)
        return takeover if there or self.phase is Phase.READY else None

    def _park(self) -> None:
        self.phase = Phase.PARKED
        self.before_standing()
        calls, self._when_parked = self._when_parked, []
        for call in calls:
            call()
        self._changed.notify_all()

    # --- without it -----------------------------------------------------------------------------------------------

    def _carry_out(self, takeover: Takeover) -> None:
        applied = False
        try:
            applied = takeover.apply(takeover.round)
        finally:
            with self._changed:
                if applied:
                    # a halt that came meanwhile is found by the next look
                    self.round, self.phase, self._stop_at = takeover.round, Phase.SERVING, None
                    self.idle = self._stopped = False
                elif self.phase is Phase.SERVING:
                    self._park()
            takeover.done(applied)
