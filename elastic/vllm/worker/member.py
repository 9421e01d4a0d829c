"""The worker's part of healing in place: one object in every worker, whose `healer_…` methods are found on vLLM's worker.

Threads: vLLM's RPC loop calls the methods, one at a time; a listener frees waiting kernels while the loop stands in a step
(`release`); a refill is prepared in a thread of its own (`refill`).
"""

# mypy: disable-error-code="import-not-found, import-untyped"
import faulthandler
import logging
import os
import threading
import time
from pathlib import Path
from typing import Any

import torch

from elastic.errors import ElasticError
from elastic.vllm import groups
from elastic.vllm.worker import dp_sync, meeting, requests
from elastic.vllm.worker.exchange import Exchange
from elastic.vllm.worker.experts import Experts, reducing
from elastic.vllm.worker.interface import RefillOrder, Vote, order_of
from elastic.vllm.worker.maps import assemble, cover
from elastic.vllm.worker.meeting import Meeting, forming
from elastic.vllm.worker.refill import Refill
from elastic.vllm.worker.release import Listener
from elastic.vllm.worker.slots import Slots

log = logging.getLogger("vllm.healer.in_place")

COPY_VARIABLE = "HEALER_EXPERT_COPY"
"""Path of the host copy of experts, in /dev/shm; whoever sets it removes the file when the deployment ends. Unset: no copy."""
REDUCING_S = 0.03
"""A step in which the balancer reduces loads over all ranks is given so long to come to that, freed of all else, before it is aborted."""
ABORT_AFTER_S = 0.35
"""Any other step, after its first word: longer than an engine waits before it has its workers released from everyone."""
STUCK_S = 2.5
"""Where a step has not ended so long after its release, the log says in which call each thread stands."""
POLL_S = 0.0005
LOOK_S = 0.005
GIVEN_UP_S = 0.2
"""For the threads of a refill that was given up: milliseconds where nobody is waited for."""
ALONE_AFTER_S = 0.05
"""A step that has not ended so long after the order is taken to wait for a live peer that left it; every engine is parked or
about to be, so nothing is lost by ending it that would not be discarded anyway."""


class Member:
    """See `interface.InPlaceWorker`."""

    def __init__(self, worker: Any, exchange: Exchange, joining: RefillOrder | None = None) -> None:
        """`worker`: vLLM's, before its groups are formed."""
        self.worker, self.exchange, self.joining = worker, exchange, joining
        config = worker.vllm_config.parallel_config
        self.slots = Slots.full(config.data_parallel_size, config.tensor_parallel_size)
        self.slot: int = config.data_parallel_rank
        if joining is not None:
            self.slots = self.slots.with_live(joining.members)
            forming.always(self.meeting_of(joining), self.slots)
        self.tensor_rank = worker.rank % config.tensor_parallel_size
        self.rank = self.slot * config.tensor_parallel_size + self.tensor_rank
        self.epoch = joining.epoch if joining is not None else 0
        self._epoch_lock = threading.Lock()
        self.refill: Refill | None = None
        self._given_up = list[Refill]()
        self._ended = threading.Event()
        """The step that was released has, as far as this worker knows."""
        self._looking: threading.Thread | None = None
        self.sources = "no source of lost experts"
        self._stock_load, worker.load_model = worker.load_model, self._load_model
        self._experts: Experts | None = None
        dp_sync.table.set(self.slots)
        dp_sync.table.on_fault = self._leave_sync
        alone = config.distributed_executor_backend != "uni"
        self._listener = Listener(os.getppid() if alone else os.getpid(), worker.local_rank, self._on_dead)

    # --- what it is made of ------------------------------------------------------------------------------------------------

    @property
    def experts(self) -> Experts:
        if self._experts is None:
            self._experts = Experts(self.worker.model_runner, self.rank)
        return self._experts

    @property
    def sync_timeout(self) -> Any:
        return self.worker.parallel_config.cpu_distributed_timeout

    def coordinators(self) -> dict[str, Any]:
        """vLLM's groups that a rank's death tears, by name."""
        from vllm.distributed import parallel_state

        return {
            "dp": parallel_state._DP,
            "ep": parallel_state._EP,
            "eplb": parallel_state._EPLB,
            "world": parallel_state._WORLD,
        }

    def meeting_of(self, order: RefillOrder) -> Meeting:
        return Meeting(order.store_host, order.store_port, f"refill/{order.epoch}/worker", order.timeout_s)

    # --- start -------------------------------------------------------------------------------------------------------------

    def _load_model(self, *args: Any, **options: Any) -> Any:
        """In place of the worker's: rows are taken when they are as the kernels use them, and before anything moves them."""
        found = self._stock_load(*args, **options)
        if self.joining is None:
            try:
                kept = self.keep_copy()
            except Exception as error:  # a shrink that needs a source will say so
                log.exception("[in-place] slot %d keeps no host copy of its experts", self.slot)
                kept = f"no host copy of experts: {error}"
            try:
                stored = self._try_checkpoint()
            except Exception as error:
                log.exception("[in-place] slot %d cannot take experts from the checkpoint", self.slot)
                stored = f"no experts from the checkpoint: {error}"
            self.sources = f"{kept}; {stored}"
            log.info("[in-place] slot %d: %s", self.slot, self.sources)
        return found

    def healer_probe(self) -> tuple[str, str]:
        try:
            found = self.experts
        except Exception as error:  # the engine must hear of it, and goes on without
            log.exception("[in-place] slot %d", self.slot)
            return ("stock", f"{type(error).__name__}: {error}")
        return ("ready", f"{found.rows} rows a layer; {self.sources}")

    def _try_checkpoint(self) -> str:
        folder = Path(self.worker.model_config.model)
        if not folder.is_dir() or self.worker.vllm_config.load_config.load_format == "dummy":
            return "no checkpoint here"
        return self.experts.try_checkpoint(folder)

    def keep_copy(self) -> str:
        """Open the host copy, and write this rank's part of it. Raises ElasticError."""
        from vllm import envs

        experts, path = self.experts, os.environ.get(COPY_VARIABLE)
        if not path:
            return "no host copy of experts"
        began = time.monotonic()
        model = str(self.worker.model_config.compute_hash())
        # A joiner's rows hold dummies until it has its map: of a refill, and of vLLM's own scaling, which does not name an order.
        joins = self.joining is not None or envs.VLLM_ELASTIC_EP_SCALE_UP_LAUNCH
        written = experts.keep_copy(Path(path), model, layout_only=joins)
        return f"host copy: {written / 2**20:.1f} MiB written in {time.monotonic() - began:.2f} s"

    # --- a death -----------------------------------------------------------------------------------------------------------

    def _on_dead(self, epoch: int, dead: list[int]) -> None:
        """In the listener's thread, while the main thread may stand in a step."""
        gone = [slot for slot in dead if slot in self.slots.live and slot != self.slot]
        if not gone:
            return
        with self._epoch_lock:
            self._release(epoch, gone)

    def _release(self, epoch: int, gone: list[int]) -> None:
        if epoch <= self.epoch:
            return
        if torch.cuda.is_available():
            torch.cuda.set_device(self.worker.device)
        self.exchange.release(self.slots.ranks_of(tuple(gone)))
        self._ended.clear()
        if self._looking is None or not self._looking.is_alive():
            self._looking = threading.Thread(target=self._look_after_the_step, name="healer step", daemon=True)
            self._looking.start()

    def _look_after_the_step(self) -> None:
        """Abort communicators if words alone do not end the step. Not beside the words: an abort frees memory, and CUDA lets no
        other work begin until all that was there before has ended, later words included."""
        self.exchange.words_first()
        began, aborted = time.monotonic(), False
        while not self._ended.wait(LOOK_S):
            took = time.monotonic() - began
            if not aborted and (took > ABORT_AFTER_S or (took > REDUCING_S and reducing.pending)):
                aborted = True
                self._abort()
            if took > STUCK_S:
                log.warning(
                    "[in-place] a step has not ended %.1f s after its release, or no order has come since", took
                )
                faulthandler.dump_traceback(file=2, all_threads=True)
                return

    def _abort(self) -> None:
        meeting.abort_device_groups(*self.coordinators().values())

    def _leave_sync(self) -> None:
        meeting.leave(self.coordinators()["dp"])

    def healer_leave(self, epoch: int) -> None:
        del epoch
        dp_sync.table.left = True
        found = self.coordinators()
        meeting.leave(found["dp"], found["ep"], found["eplb"])
        if self._experts is not None and found["eplb"] is not None:
            self._experts.leave_balancing(found["eplb"].cpu_group)

    def healer_shrink(
        self, epoch: int, survivors: list[int], store_host: str, store_port: int, timeout_s: float
    ) -> tuple[bool, str]:
        if epoch < self.epoch:
            return Vote(False, f"order {epoch} is stale, {self.epoch} was the last")
        try:
            at = Meeting(store_host, store_port, f"shrink/{epoch}/worker", timeout_s)
            return self._shrink(epoch, tuple(sorted(survivors)), at)
        except Exception as error:
            log.exception("[in-place] shrink %d on slot %d", epoch, self.slot)
            return Vote(False, f"{type(error).__name__}: {error}")

    def _shrink(self, epoch: int, survivors: tuple[int, ...], at: Meeting) -> Vote:
        began = time.monotonic()
        deadline, marks = began + at.timeout_s, list[str]()

        def mark(name: str) -> None:
            marks.append(f"{name} {1e3 * (time.monotonic() - began):.0f} ms")

        with self._epoch_lock:  # from here on this worker releases by itself
            self.epoch = epoch
        self._after_scaling()
        slots = self.slots.with_live(survivors)
        gone = tuple(slot for slot in self.slots.live if slot not in survivors)
        self.healer_leave(epoch)
        self.exchange.release(self.slots.ranks_of(gone))
        if self.refill is not None:
            self.healer_refill_abort()
        self._wait_for_steps(deadline)
        self._ended.set()
        self.exchange.settled()
        self._abort()
        mark("steps ended")

        members = slots.ranks_of(survivors)
        groups.gather(at.store(), f"{at.prefix}/settled", self.rank, members, deadline, lambda: False)
        lanes = tuple(rank for rank in members if rank % slots.tensor_parallel == self.tensor_rank)
        sync = at.gloo(f"sync/{self.tensor_rank}", self.rank, lanes, deadline)
        mark("met")
        self.exchange.drop(self.slots.ranks_of(gone))
        experts = self.experts
        balanced = experts.stop_balancing()
        if gone and balanced:
            experts.forget_communicator()
            self.close_dead()
            mark("memory of the dead given back")
        # everyone has cleaned its buffers when all columns are here, and no step begins before
        own = experts.begin()
        columns = _exchange_columns(at, self.rank, members, own, deadline)
        covered = cover(assemble(columns, experts.columns), experts.experts, members, experts.rows)
        mark("mapped")
        copied = experts.load(covered.loads)
        experts.commit(covered.map)
        mark("loaded")
        requests.forget(self.worker)
        self._take(slots, sync)
        detail = (
            f"slots {list(survivors)}: {', '.join(marks)}; {len(covered.loads)} experts reloaded, {copied} bytes here"
        )
        if not balanced:
            detail += "; the balancer's thread has not ended"
        log.info("[in-place] %s", detail)
        return Vote(True, detail)

    def close_dead(self) -> None:
        """Give back the GPU memory of the dead, at a step boundary with the balancer stopped. Not while a refill that was given up
        still makes or cuts links, nor while the balancer's thread may read from the dead: then a later change sees to it."""
        until = time.monotonic() + GIVEN_UP_S
        for one in self._given_up:
            one.wait(until - time.monotonic())
        self._given_up = [one for one in self._given_up if one.runs]
        if self._given_up or not self.experts.may_balance:
            log.info("[in-place] the memory of dead peers is not given back now: links are still in use")
            return
        closed = self.exchange.close_dead()
        if closed.peers:
            log.info("[in-place] %d MiB of %d dead peers given back", closed.imported_bytes >> 20, closed.peers)

    def _after_scaling(self) -> None:
        """A stock scaling has changed the size: every slot of the new one is there."""
        size = self.worker.vllm_config.parallel_config.data_parallel_size
        if size != self.slots.size:
            self.slots = Slots.full(size, self.slots.tensor_parallel)

    def _take(self, slots: Slots, sync: Any) -> None:
        """Serve with these slots: whatever comes next uses the new group."""
        self.slots = slots
        coordinator = self.coordinators()["dp"]
        groups.settle(sync, self.sync_timeout)
        coordinator.cpu_group = sync
        if coordinator.device_communicator is not None:
            coordinator.device_communicator.cpu_group = sync
        dp_sync.table.set(slots)

    def _wait_for_steps(self, deadline: float) -> None:
        """All work of this process on the device has ended. Raises what the device raises (a sticky error), and TimeoutError."""
        if not torch.cuda.is_available():
            return
        # a synchronize could not be given up; when these have ended it has little to wait for
        streams = (torch.cuda.current_stream(), torch.cuda.default_stream())
        began = time.monotonic()
        alone, freed, aborted = began + ALONE_AFTER_S, False, False
        while not all(stream.query() for stream in streams):
            now = time.monotonic()
            if now > deadline:
                raise TimeoutError("a step of this worker has not ended: a kernel still waits")
            if now > began + ABORT_AFTER_S and not aborted:
                self._abort()
                aborted = True
            if now > alone and not freed:
                # a live peer that failed before it launched this step never will: the step is lost with all of them
                self.exchange.release(self.slots.live_ranks)
                freed = True
            time.sleep(POLL_S)
        for one in self._given_up:
            one.abort_kernels()
        torch.cuda.synchronize()

    # --- refill ------------------------------------------------------------------------------------------------------------

    def healer_refill_prepare(self, order: dict[str, Any], request: Any) -> str:
        if self.refill is not None and self.refill.blocks:
            raise ElasticError("an earlier preparation has not ended yet; order the refill again")
        self.refill = Refill(self, order_of(order), request)
        return self.refill.start()

    def healer_refill_prepared(self) -> None:
        if self.refill is None:
            raise ElasticError("no refill is being prepared")
        self.refill.result()

    def healer_refill_commit(self) -> None:
        if self.refill is None:
            raise ElasticError("no refill is prepared")
        self.refill.commit()
        self.refill = None

    def healer_refill_abort(self) -> None:
        if self.refill is not None:
            self.refill.abort()
            if self.refill not in self._given_up:
                self._given_up.append(self.refill)

    def healer_join(self, order: dict[str, Any], phase: str) -> None:
        if self.refill is None:
            self.refill = Refill(self, order_of(order), None)
        self.refill.join(phase)
        if phase == "commit":
            self.refill = None


def _exchange_columns(at: Meeting, rank: int, members: tuple[int, ...], own: Any, deadline: float) -> dict[int, Any]:
    """Everyone's own columns through the store: all ranks of all slots, whatever group they are in."""
    import numpy as np

    store = at.store()
    keys = {member: f"{at.prefix}/columns/{member}" for member in members}
    store.set(keys[rank], own.astype(np.int64).tobytes())
    while not store.check(list(keys.values())):
        if time.monotonic() > deadline:
            missing = [member for member, key in keys.items() if not store.check([key])]
            raise groups.NotMet(f"ranks {missing} did not say what they hold")
        time.sleep(POLL_S)
    return {member: np.frombuffer(store.get(key), dtype=np.int64).reshape(len(own), -1) for member, key in keys.items()}
