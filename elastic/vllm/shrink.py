"""One shrink on one engine: from a loop that may stand in a dead group to a loop that serves in a new one, or not at all.

In a thread of its own: the input thread goes on taking requests and newer orders meanwhile. Every wait has the order's deadline.
Nobody serves before all survivors, engines and workers, have voted yes in the new group; whoever cannot say so stays
unhealthy, and the controller decides again with a higher epoch.
"""

# mypy: disable-error-code="import-not-found, import-untyped"
import contextlib
import json
import logging
import os
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any

import msgspec

from elastic.vllm import groups
from elastic.vllm.held import hold
from elastic.vllm.records import HeldCounts, Phase, Refusal, ShrinkOrder, ShrinkResult
from elastic.vllm.worker.interface import send_release

if TYPE_CHECKING:
    from elastic.vllm.engine import InPlace

log = logging.getLogger("vllm.healer.in_place")

POLL_S = 0.002
LATE_S = 0.5
"""So long after its deadline an order that has not ended is answered for."""
LEAST_RPC_S = 0.2
ALONE_AFTER_S = 0.25
"""A step whose wait for the dead has been ended is over after 0.04 s on three H200 ranks; one that is not waits for somebody else."""
LONG_STEP_S = 2.0
EARLY = 0.9
WORKERS_SHARE = 0.8
"""Of the time that is left when the workers are called: the rest is for the vote that their failure makes a no."""

Answer = Callable[[bool, str], None]
"""Success, and JSON or a reason."""


class OneAnswer:
    """Of an order that several may wait for, and that is answered for when it is late."""

    def __init__(self, first: Answer) -> None:
        self._waiting: list[Answer] = [first]
        self._given: tuple[bool, str] | None = None
        self._lock = threading.Lock()

    def also(self, answer: Answer) -> None:
        with self._lock:
            if self._given is None:
                self._waiting.append(answer)
                return
        answer(*self._given)

    def give(self, success: bool, text: str) -> None:
        """The first word is for those that wait, the last one for those that come."""
        with self._lock:
            waiting, self._waiting = self._waiting, []
            self._given = (success, text)
        for answer in waiting:
            answer(success, text)


class Failed(Exception):
    """This engine cannot serve in the group of this order."""


class Shrink:
    def __init__(self, place: "InPlace", order: ShrinkOrder, before: "Shrink | None", answer: Answer) -> None:
        """`before`: the order that this one replaces; it has been cancelled."""
        self.order, self.phase = order, Phase.PARK
        self._place, self._before = place, before
        self._answer = OneAnswer(answer)
        self._cancelled = threading.Event()
        self._began = time.monotonic()
        self._deadline = self._began + order.timeout_s
        self._phases: dict[str, float] = {}
        self._held = HeldCounts()
        self._store: Any = None
        self._culprit = False
        """The first whose workers failed, and not by waiting."""
        self._wave = 0
        self._thread = threading.Thread(target=self._run, name=f"healer shrink {order.epoch}", daemon=True)
        self._late = threading.Timer(order.timeout_s + LATE_S, self._give_late)
        self._late.daemon = True

    def start(self) -> None:
        self._thread.start()
        self._late.start()

    def cancel(self) -> None:
        self._cancelled.set()

    def also(self, answer: Answer) -> None:
        self._answer.also(answer)

    @property
    def runs(self) -> bool:
        return self._thread.is_alive()

    def _result(self, serves: bool, detail: str, refused: Refusal | None = None) -> ShrinkResult:
        took = round(time.monotonic() - self._began, 4)
        phases = {phase: round(seconds, 4) for phase, seconds in self._phases.items()}
        return ShrinkResult(
            self.order.epoch, self._place.slot, serves, self.phase, detail, refused, self._held, took, phases
        )

    def _give(self, result: ShrinkResult) -> None:
        self._place.last = result
        self._answer.give(result.serves, msgspec.json.encode(result).decode())

    def _give_late(self) -> None:
        if self.runs:
            self._give(self._result(False, f"not done {LATE_S} s after the deadline", Refusal.STUCK))

    def _run(self) -> None:
        try:
            self._wait_for_the_one_before()
            self._do()
            result = self._result(True, "")
        except (Failed, groups.NotMet) as error:
            result = self._result(False, str(error))
        except Exception as error:
            log.exception("[in-place] shrink, epoch %d", self.order.epoch)
            result = self._result(False, f"{type(error).__name__}: {error}")
        self._late.cancel()
        log.info("[in-place] slot %d: %s", self._place.slot, msgspec.json.encode(result).decode())
        self._give(result)

    def _wait_for_the_one_before(self) -> None:
        before, self._before = self._before, None
        if before is not None:
            before._thread.join(max(0.0, self._deadline - time.monotonic()))
            if before.runs:
                raise Failed(f"the order of epoch {before.order.epoch} still stands in {before.phase}")

    def _enter(self, phase: Phase) -> None:
        self._check()
        self.phase = phase
        self._since = time.monotonic()

    def _left(self) -> None:
        self._phases[self.phase] = time.monotonic() - self._since

    def _check(self) -> None:
        if self._cancelled.is_set():
            raise Failed("a newer order has come")
        if time.monotonic() > self._deadline:
            raise Failed(f"no time is left after {self.phase}")

    def _do(self) -> None:
        place, order = self._place, self.order
        sentinel = place.sentinel
        self._release(slot for slot in range(place.size) if slot not in order.survivors)
        with self._released_from_all():
            self._step(Phase.PARK, self._park)
            self._step(Phase.DRAIN, sentinel._drain_batch_queue)
        self._step(Phase.HOLD, self._hold)
        self._step(Phase.LEAVE, lambda: self._rpc("healer_leave", order.epoch))
        self._step(Phase.MEET, self._meet)
        try:
            why = self._work()
            self._step(Phase.VOTE, lambda: self._vote(why))
        except Exception:
            place.leave()  # who serves already, because its vote came in time, must not wait for this engine
            raise
        self._step(Phase.SERVE, self._serve)

    def _release(self, slots: Iterable[int]) -> None:
        """End the waits of this engine's workers for the ranks of these slots."""
        size = self._place.engine.vllm_config.parallel_config.world_size
        send_release(os.getpid(), size, self.order.epoch, list(slots))

    @contextlib.contextmanager
    def _released_from_all(self) -> Iterator[None]:
        """A survivor that met the fault before it began a step never will begin it, and who waits in it for that one would wait for
        the exchange's own timeout. With a dead rank the step is lost anyway. Where all live it may only be long: it is given more
        time, and computed again if it takes still longer."""
        others = [slot for slot in range(self._place.size) if slot != self._place.slot]
        somebody_died = bool(set(self._place.live) - set(self.order.survivors))
        late = threading.Timer(ALONE_AFTER_S if somebody_died else LONG_STEP_S, self._release, (others,))
        late.daemon = True
        late.start()
        try:
            yield
        finally:
            late.cancel()
            # a word that comes after the new group is made would release its ranks
            late.join()

    def _step(self, phase: Phase, work: Callable[[], object]) -> None:
        self._enter(phase)
        work()
        self._left()

    def _park(self) -> None:
        from vllm.v1.engine import EngineCoreRequestType, EngineStatusType

        place, sentinel = self._place, self._place.sentinel
        if sentinel.status_type == EngineStatusType.HEALTHY:
            place.engine.input_queue.put_nowait((EngineCoreRequestType.EXECUTOR_FAILED, b""))
        while not place.parked.wait(POLL_S):
            self._check()
        if sentinel.status_type == EngineStatusType.DEAD:
            raise Failed("a worker of this engine has ended")

    def _hold(self) -> None:
        place = self._place
        place.drop_refill()
        self._held = hold(place.engine, self.order.requests, place.lost)

    def _rpc(self, method: str, *args: object) -> list[Any]:
        left = max(LEAST_RPC_S, self._deadline - time.monotonic())
        try:
            found: list[Any] = self._place.engine.model_executor.collective_rpc(method, timeout=left, args=args)
        except Exception as error:
            raise Failed(f"{method}: {error}") from error
        return found

    def _meet(self) -> None:
        place, order = self._place, self.order
        place.leave()
        store = groups.connect(order.store_host, order.store_port)
        prefix = f"shrink/{order.epoch}/engine"
        groups.gather(store, prefix, place.slot, order.survivors, self._deadline, self._cancelled.is_set)
        place.engine.dp_group = groups.form(store, prefix, place.slot, order.survivors, self._deadline)
        place.engine.dp_store = self._store = store

    def _work(self) -> str:
        """Why the workers cannot serve; empty: they can. The others must hear it: they would wait for this vote."""
        order, began = self.order, time.monotonic()
        share = max(LEAST_RPC_S, WORKERS_SHARE * (self._deadline - began))
        try:
            self._step(Phase.WORKERS, lambda: self._workers(share))
        except Failed as error:
            # Workers that wait for the one that fails fail after it, and not before their own deadline.
            early = time.monotonic() - began < EARLY * share
            self._culprit = early and self._store.add(f"shrink/{order.epoch}/no", 1) == 1
            return str(error)
        return ""

    def _workers(self, share: float) -> None:
        order = self.order
        votes = self._rpc(
            "healer_shrink", order.epoch, list(order.survivors), order.store_host, order.store_port, share
        )
        if bad := [f"worker {rank}: {detail}" for rank, (ready, detail) in enumerate(votes) if not ready]:
            raise Failed("; ".join(bad))

    def _vote(self, own: str) -> None:
        """All yes (empty) or nobody, and the highest wave that any of them knows. In the store: there it has a deadline."""
        place, order = self._place, self.order
        word = json.dumps({"no": own, "wave": place.engine.current_wave})
        said = groups.exchange(
            self._store,
            f"shrink/{order.epoch}/vote",
            place.slot,
            order.survivors,
            word,
            self._deadline,
            self._cancelled.is_set,
        )
        votes = {slot: json.loads(vote) for slot, vote in said.items()}
        if against := [f"slot {slot}: {vote['no']}" for slot, vote in votes.items() if vote["no"]]:
            self.phase = Phase.WORKERS if self._culprit else Phase.VOTE
            raise Failed(f"voted no: {'; '.join(against)}")
        self._wave = max(int(vote["wave"]) for vote in votes.values())

    def _serve(self) -> None:
        from vllm.v1.core.sched.interface import PauseState
        from vllm.v1.engine import EngineStatusType

        place, order = self._place, self.order
        engine, sentinel = place.engine, place.sentinel
        groups.settle(engine.dp_group, engine.vllm_config.parallel_config.cpu_distributed_timeout)
        # All run, so that all finish a wave together and report one number. It is above what the coordinator has seen: one
        # below is ignored there, and then the next start of an equal one as well, and all would wait for ever.
        engine.current_wave, engine.step_counter, engine.engines_running = self._wave + 1, 0, True
        engine.dp_rank = sorted(order.survivors).index(place.slot)  # who reports waves: the first of the live
        engine.ignore_start_dp_wave = engine.pending_pause = False
        place.end_pauses()
        if place.pausing:
            place.pausing = False
            engine.scheduler.set_pause_state(PauseState.UNPAUSED)
        elif engine.scheduler.pause_state != PauseState.UNPAUSED:
            engine.pending_pause = True  # a user's pause: all agree on it again
        place.live, place.changed = tuple(sorted(order.survivors)), True
        _drop_interrupts(engine)
        place.parked.clear()
        sentinel.status_type, sentinel.fault_info = EngineStatusType.HEALTHY, None
        sentinel.resumed.set()
        sentinel._push_status()


def _drop_interrupts(engine: Any) -> None:
    """The loop may have met the fault before it took our interrupt, which would park it again."""
    from vllm.v1.engine import EngineCoreRequestType

    waiting = engine.input_queue
    if engine.model_executor.is_failed:
        return
    with waiting.mutex:
        kept = [item for item in waiting.queue if item[0] != EngineCoreRequestType.EXECUTOR_FAILED]
        waiting.queue.clear()
        waiting.queue.extend(kept)
