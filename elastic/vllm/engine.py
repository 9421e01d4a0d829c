"""What healing in place knows and does in one engine core. One object for each engine, made when the sentinel first needs it.

Threads: the engine's loop (parks in `parked`), the input thread (`command`), one thread for each shrink (`shrink.Shrink`).
A shrink touches scheduler and groups only while the loop is parked. Slots are frozen: rank, size, ports and engine index never
change; groups are dense over the live slots, and whoever needs a size asks the group.
"""

# mypy: disable-error-code="import-not-found, import-untyped"
import logging
import threading
from typing import Any

import msgspec

from elastic.vllm import groups
from elastic.vllm.held import Lost, lost_steps
from elastic.vllm.records import EngineInfo, Phase, Refusal, ShrinkOrder, ShrinkResult
from elastic.vllm.shrink import Answer, Shrink
from elastic.vllm.worker.interface import read_order

log = logging.getLogger("vllm.healer.in_place")

ABORT_S = 20.0


class InPlace:
    def __init__(self, engine: Any, sentinel: Any) -> None:
        self.engine, self.sentinel = engine, sentinel
        config = engine.vllm_config.parallel_config
        self.slot: int = config.data_parallel_rank
        joined = read_order(config)
        self.live: tuple[int, ...] = joined.members if joined is not None else tuple(range(config.data_parallel_size))
        self.epoch = joined.epoch if joined is not None else 0
        self.changed = joined is not None
        """An order has rebuilt groups here: stock `retry` would build others."""
        self.parked = threading.Event()
        self.lost = Lost()
        """Steps in flight when the loop parked."""
        self.refill_error = ""
        self.pausing = False
        """The scheduler is paused by a refill's commit, not by a user."""
        self.last: ShrinkResult | None = None
        self._orders: dict[int, Any] = {}
        """By epoch, the last one only: what was ordered, to tell a repetition from a conflict."""
        self._running: Shrink | None = None
        self._lock = threading.Lock()

        if joined is not None:
            # what vLLM calls dp_rank only says who reports waves: the first of the live
            engine.dp_rank = self.live.index(self.slot)

    @property
    def size(self) -> int:
        return int(self.engine.vllm_config.parallel_config.data_parallel_size)

    @property
    def empty(self) -> tuple[int, ...]:
        return tuple(slot for slot in range(self.size) if slot not in self.live)

    # --- called by the loop ---------------------------------------------------------------------------------------------

    def on_fault(self, error: Exception) -> None:
        """The loop has raised and is about to wait: leave the group, so that peers fail too instead of waiting for this engine."""
        self.lost = lost_steps(self.engine, error)
        groups.forget(error)
        self.leave()

    def leave(self) -> None:
        groups.leave(self.engine, "dp_group")
        scaling = self.engine.eep_scaling_state
        if scaling is not None:
            groups.leave(scaling, "old_dp_group")

    # --- called by the input thread --------------------------------------------------------------------------------------

    def command(self, name: str, params: dict[str, Any], answer: Answer) -> None:
        """Answers at once, or from the thread of the order. Never raises."""
        try:
            if name == "healer_info":
                answer(True, msgspec.json.encode(self.info()).decode())
            else:
                self._shrink(msgspec.convert(params, ShrinkOrder, strict=False), answer)
        except Exception as error:  # the input thread must live
            log.exception("[in-place] %s", name)
            answer(False, f"{type(error).__name__}: {error}")

    def info(self) -> EngineInfo:
        from vllm.v1.engine import EngineStatusType

        engine, sentinel, running = self.engine, self.sentinel, self._running
        scaling = engine.eep_scaling_state
        config = engine.vllm_config.parallel_config
        healthy = sentinel.status_type == EngineStatusType.HEALTHY
        return EngineInfo(
            slot=self.slot,
            size=self.size,
            live=self.live,
            epoch=self.epoch,
            status=sentinel.status_type.name.lower(),
            fault="" if healthy else sentinel.fault_info or "",
            phase=running.phase if running is not None and running.runs else None,
            refill=scaling.state.name.lower() if scaling is not None else "",
            refill_error=self.refill_error,
            wave=engine.current_wave,
            running=len(engine.scheduler.running),
            waiting=len(engine.scheduler.waiting) + len(engine.scheduler.kv_holding_waiting),
            max_size=config.elastic_ep_max_dp_size or self.size,
            redundant_experts=config.eplb_config.num_redundant_experts,
            last=self.last,
        )

    def refuse_retry(self) -> str:
        """Why stock `retry` is refused; empty: it may go on."""
        if self.empty:
            return f"slots {list(self.empty)} are empty: retry would wait for them; order a shrink over the live slots"
        if self.changed:
            return (
                "an in-place order has rebuilt the groups: retry would build others; order a shrink over all live slots"
            )
        return ""

    def _shrink(self, order: ShrinkOrder, answer: Answer) -> None:
        with self._lock:
            known, running = self._orders.get(order.epoch), self._running
            refused = self.refuse(order.epoch, order, order.survivors)
            if refused is not None:
                why, detail = refused
                result = ShrinkResult(order.epoch, self.slot, False, Phase.PARK, detail, why)
                answer(False, msgspec.json.encode(result).decode())
                return
            if known is not None and running is not None and running.order == order:
                running.also(answer)  # a repetition: the same answer
                return
            if running is not None:
                running.cancel()
            self.take(order.epoch, order)
            self._running = Shrink(self, order, running, answer)
        self._running.start()

    def refuse(self, epoch: int, order: object, members: tuple[int, ...]) -> tuple[Refusal, str] | None:
        """Why an order is not begun, for shrinks and refills alike. Raises ValueError for members that no group can have."""
        from vllm.v1.engine import EngineStatusType

        if not members or len(set(members)) != len(members) or not set(members) <= set(range(self.size)):
            raise ValueError(f"slots {list(members)}: expected different ones of 0..{self.size - 1}")
        known = self._orders.get(epoch)
        if epoch < self.epoch:
            return Refusal.STALE, f"epoch {epoch} is over, {self.epoch} was seen"
        if known is None and epoch == self.epoch and epoch:
            return Refusal.STALE, f"epoch {epoch} is over"
        if known is not None and known != order:
            return Refusal.CONFLICT, f"another order of epoch {epoch} was seen"
        if self.slot not in members:
            return Refusal.NOT_MEMBER, f"slot {self.slot} is not one of {list(members)}"
        if self.sentinel.status_type == EngineStatusType.DEAD:
            return Refusal.DEAD, "a worker of this engine has ended"
        return None

    def take(self, epoch: int, order: object) -> None:
        self.epoch, self._orders = epoch, {epoch: order}

    # --- of a shrink's thread, while the loop is parked -------------------------------------------------------------------

    def drop_refill(self) -> None:
        """A shrink ends whatever was prepared: its groups are over members that may be gone."""
        state, self.engine.eep_scaling_state = self.engine.eep_scaling_state, None
        if state is None:
            return
        state._prepare_executor.shutdown(wait=False, cancel_futures=True)
        self.engine.process_input_queue_block = True
        committed = getattr(state, "committed", None)
        if committed is not None and not committed.done():
            committed.set_exception(RuntimeError("a shrink has ended the refill"))
        self.engine.model_executor.collective_rpc("healer_refill_abort", timeout=ABORT_S)
        self.refill_error = "a shrink has ended it"

    def end_pauses(self) -> None:
        """Whoever waits for the pause of a commit is told that it has failed; a user's pause goes on."""
        if not self.pausing:
            return
        waiting, self.engine._idle_state_callbacks = self.engine._idle_state_callbacks, []
        for callback in waiting:
            callback.keywords["future"].set_exception(RuntimeError("a shrink came before the pause"))
