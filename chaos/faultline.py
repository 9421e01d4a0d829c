"""The faults of one run: each is injected when its trigger says so, and taken back when it is over.

Triggers by time and by request run in the loop and inject in a thread; those by state run in the hook's thread, while the daemon
stands at that state. `Faultline` is the only one that injects.
"""

import asyncio
import threading
import time
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass, field
from random import Random

from chaos.hook import Hook, Point, Reached
from chaos.injectors.base import Done, Injector, Place
from chaos.records import Fault, SequenceState
from elastic.errors import ElasticError

NO_STATE = SequenceState(sequence="", step="", epoch=0)


@dataclass
class _Due:
    id: str
    injector: Injector
    done: Done | None = None
    refused: str = ""
    state: SequenceState = NO_STATE
    undone_at: float = 0.0
    whole_at: float = 0.0
    reached: int = 0
    """How often the state was come to."""
    undoing: threading.Lock = field(default_factory=threading.Lock)

    @property
    def settled(self) -> bool:
        return self.done is not None or bool(self.refused)


class Faultline:
    """One use. `place.draw` is drawn from in the order of the scenario's list, so that one seed gives one run."""

    def __init__(self, faults: Sequence[Injector], place: Place, hook: Hook | None, draw: Random) -> None:
        self._place, self._hook = place, hook
        self._lock = threading.Lock()
        self._due: list[_Due] = []
        for number, injector in enumerate(faults, 1):
            times = injector.repeat.times if injector.repeat else 1
            for turn in range(times):
                due = _Due(f"f{number}" if times == 1 else f"f{number}.{turn + 1}", injector)
                if draw.random() >= injector.probability:
                    due.refused = f"drawn not to happen, probability {injector.probability:g}"
                self._due.append(due)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._timers: set[threading.Timer] = set()
        self.state: Callable[[], SequenceState] = lambda: NO_STATE
        """What the executor is at, as it last said."""
        self.log: Callable[[str], None] = lambda _: None

    def begin(self) -> None:
        """The load has begun. Called in the loop."""
        self._loop = asyncio.get_running_loop()
        if self._hook is not None:
            self._hook.on_point = self._at_point
            self._hook.arm(tuple(self._points()))
        for due in self._due:
            if due.injector.when is None and due.injector.at_request is None and not due.refused:
                self._start(self._later(due, (due.injector.at_s or 0.0) + self._turn_s(due)))

    def request(self, n: int) -> None:
        """Request `n` has been sent. Called in the loop."""
        for due in self._due:
            if due.injector.at_request == n and not due.settled:
                self._start(self._later(due, self._turn_s(due)))

    @property
    def waiting(self) -> tuple[str, ...]:
        """What is still to come, in words."""
        return tuple(f"{due.id} {due.injector.kind} {due.injector.trigger}" for due in self._due if not due.settled)

    @property
    def waits_for_states_only(self) -> bool:
        return all(due.injector.when is not None for due in self._due if not due.settled)

    @property
    def standing(self) -> bool:
        """Something is in force that will be taken back by itself."""
        return any(
            due.done and due.done.take_back and due.injector.duration_s and not due.undone_at for due in self._due
        )

    @property
    def last_at(self) -> float:
        """Of the newest injection, or of its end; 0: there was none."""
        return max((max(due.done.at, due.undone_at) for due in self._due if due.done), default=0.0)

    def give_up(self, why: str) -> None:
        """What has not come by now does not come any more."""
        if self._hook is not None:
            self._hook.arm(())
        with self._lock:
            for due in self._due:
                if not due.settled:
                    due.refused = why

    async def end(self) -> None:
        """Take back whatever still stands, newest first. Raises the first ElasticError after all have been tried."""
        self.give_up("the run is over")
        for timer in self._timers:
            timer.cancel()
        for task in self._tasks:
            task.cancel()
        if self._tasks:
            await asyncio.wait(self._tasks)
        errors = []
        for due in reversed(self._due):
            try:
                await asyncio.to_thread(self._undo, due)
            except (ElasticError, OSError) as error:
                errors.append(error)
        if errors:
            raise ElasticError(f"a fault could not be taken back: {errors[0]}")

    def whole(self, at: float) -> None:
        """Everything that was injected before now has been healed."""
        for due in self._due:
            if due.done is not None and not due.whole_at:
                due.whole_at = at

    def hurt(self) -> tuple[Done, ...]:
        return tuple(due.done for due in self._due if due.done is not None)

    def records(self) -> list[Fault]:
        """In the order of injection."""
        ordered = sorted(self._due, key=lambda due: due.done.at if due.done else float("inf"))
        return [_record(due) for due in ordered]

    # --- triggers -----------------------------------------------------------------------------------------------------

    def _turn_s(self, due: _Due) -> float:
        repeat = due.injector.repeat
        return (int(due.id.partition(".")[2] or 1) - 1) * repeat.every_s if repeat else 0.0

    async def _later(self, due: _Due, delay_s: float) -> None:
        await asyncio.sleep(delay_s)
        state = self.state()
        await asyncio.to_thread(self._inject, due, state, ())

    def _points(self) -> list[Point]:
        return [due.injector.when.point for due in self._due if due.injector.when is not None and not due.settled]

    def _at_point(self, reached: Reached) -> None:
        """In the hook's thread; the daemon stands."""
        state = SequenceState(sequence=reached.point.sequence, step=reached.point.step, epoch=reached.epoch)
        for due in self._due:
            when = due.injector.when
            if when is None or due.settled or not when.point.fits(reached.point):
                continue
            due.reached += 1
            if due.reached != when.nth:
                continue
            if when.after_s:
                timer = threading.Timer(when.after_s, self._inject, (due, state, reached.slots))
                timer.daemon = True
                self._timers.add(timer)
                timer.start()
            else:
                self._inject(due, state, reached.slots)
        if self._hook is not None:
            self._hook.arm(tuple(self._points()))

    def _inject(self, due: _Due, state: SequenceState, slots: tuple[int, ...]) -> None:
        with self._lock:
            if due.settled:
                return
            self._place.sequence_slots = slots
            due.state = state
            try:
                due.injector.checked(self._place)
                due.done = due.injector.inject(self._place)
            except (ElasticError, OSError, ValueError) as error:
                due.refused = str(error)
        what = f"{due.id} {due.injector.kind} {due.done.parameters if due.done else due.refused}"
        self.log(f"{what} {f'[{state.sequence}: {state.step}]' if state.step else ''}")
        if (
            due.done is not None
            and due.done.take_back is not None
            and due.injector.duration_s
            and self._loop is not None
        ):
            left_s = max(0.0, due.done.at + due.injector.duration_s - time.monotonic())
            self._loop.call_soon_threadsafe(lambda: self._start(self._undo_later(due, left_s)))

    async def _undo_later(self, due: _Due, delay_s: float) -> None:
        await asyncio.sleep(delay_s)
        await asyncio.to_thread(self._undo, due)

    def _undo(self, due: _Due) -> None:
        # not under the lock of injections: one that waits for a stopped rank must not keep it from being continued
        with due.undoing:
            if due.done is None or due.done.take_back is None or due.undone_at:
                return
            due.undone_at = time.monotonic()
            due.done.take_back()

    def _start(self, work: Coroutine[None, None, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)


def _record(due: _Due) -> Fault:
    done, injector = due.done, due.injector
    return Fault(
        id=due.id,
        kind=injector.kind,
        family=injector.family,
        parameters=injector.parameters | (done.parameters if done else {}),
        trigger=injector.trigger,
        state=due.state,
        members=done.members if done else (),
        daemon_pid=done.daemon_pid if done else 0,
        at=done.at if done else 0.0,
        done_at=done.done_at if done else 0.0,
        undo=done.undo if done else "",
        undone_at=due.undone_at,
        must_be_replaced=bool(done and done.must_be_replaced),
        whole_at=due.whole_at,
        refused=due.refused,
    )
