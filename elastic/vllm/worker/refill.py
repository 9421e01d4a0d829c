"""A refill on one worker: groups over all members, weights and map for the joiner, and the switch at a step boundary.

Survivors: `start` (thread; steps go on), `result`, then `commit` or `abort`. Joiner: `join` with the phases of the interface.
What both sides do in the same order, since it is collective: groups world, dp, ep, eplb; NIXL; the balancer's communicator;
weights; warm-up of the groups; FlashInfer's tuning.
"""

# mypy: disable-error-code="import-not-found, import-untyped"
import contextlib
import json
import logging
import threading
import time
from typing import TYPE_CHECKING, Any

import numpy as np

from elastic.errors import ElasticError
from elastic.vllm import groups
from elastic.vllm.worker import meeting
from elastic.vllm.worker.interface import RefillOrder
from elastic.vllm.worker.maps import Map, fill, own_columns
from elastic.vllm.worker.meeting import Formation, forming
from elastic.vllm.worker.slots import senders

if TYPE_CHECKING:
    from elastic.vllm.worker.member import Member

log = logging.getLogger("vllm.healer.in_place")

POLL_S = 0.005
COMMIT_S = 30.0
"""For the barriers of a commit: every member is at a step boundary already."""


class Refill:
    def __init__(self, member: "Member", order: RefillOrder, request: Any) -> None:
        self.member, self.order, self.request = member, order, request
        self.slots = member.slots.with_live(order.members)
        self.meeting = member.meeting_of(order)
        self._key = f"{self.meeting.prefix}/prepared/{member.rank}"
        self._cancelled = threading.Event()
        self._aborted = threading.Event()
        self._lock = threading.Lock()
        self._through = False
        """The preparation has ended, well or not."""
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None
        self._formation = Formation(self.meeting, self.slots, self._cancelled.is_set, [])
        self._groups: dict[str, Any] = {}
        self._until = time.monotonic() + order.timeout_s
        self._columns: dict[int, Map] = {}
        """Of the joiners, by rank."""
        self._communicator: Any = None

    @property
    def runs(self) -> bool:
        return self._thread is not None and self._thread.is_alive()

    def wait(self, timeout_s: float) -> None:
        if self._thread is not None:
            self._thread.join(max(0.0, timeout_s))

    @property
    def blocks(self) -> bool:
        """Whether another refill must wait. One that was given up and still hangs after its deadline (NCCL waits for a dead
        joiner for ever) is left behind: what it made is its own."""
        return self.runs and not (self._cancelled.is_set() and time.monotonic() > self._until)

    @property
    def joining_ranks(self) -> tuple[int, ...]:
        return self.slots.ranks_of(self.order.joiners)

    @property
    def executor(self) -> Any:
        return self.member.worker.elastic_ep_executor

    # --- survivors ---------------------------------------------------------------------------------------------------------

    def start(self) -> str:
        self._thread = threading.Thread(target=self._run, name=f"healer refill {self.order.epoch}", daemon=True)
        self._thread.start()
        return self._key

    def _run(self) -> None:
        try:
            self._prepare()
        except BaseException as error:
            log.exception("[in-place] preparing refill %d", self.order.epoch)
            groups.forget(error)  # its frames hold groups and links
            self._error = error
        with self._lock:
            self._through = True
        if self._cancelled.is_set():
            self._drop()
            return  # nobody waits for the key, and the store may be gone
        with contextlib.suppress(Exception):
            self.meeting.store().set(self._key, b"1")

    def _prepare(self) -> None:
        from vllm.config import set_current_vllm_config
        from vllm.distributed.elastic_ep import standby_state
        from vllm.model_executor.layers.fused_moe.all2all_utils import get_ep_all2all_manager
        from vllm.platforms import current_platform

        member, order = self.member, self.order
        worker, config = member.worker, member.worker.vllm_config.parallel_config
        current_platform.set_device(worker.device)
        if order.source == member.slot and member.tensor_rank == 0:
            self._publish_map()
        with (
            set_current_vllm_config(worker.vllm_config),
            forming.here(self._formation),
        ):
            standby_state.create_standby_groups(
                new_dp_size=self.slots.size,
                new_world_size_across_dp=config.world_size * self.slots.size,
                master_ip=order.store_host,
                coord_store_port=order.store_port,
                use_all2all=config.use_all2all,
                enable_eplb=config.enable_eplb,
            )
            # no longer vLLM's to find: a stock scaling must not take them for its own
            found = self._groups = standby_state.pop_standby_groups()
            self._check()
            dp, ep = found["dp"], found["ep"]
            manager = get_ep_all2all_manager(ep)
            manager.healer_cancelled = self._cancelled.is_set
            manager.healer_timeout_s = order.timeout_s
            manager.stage_ep_size()
            self._check()
            experts = member.experts
            self._communicator = experts.state.create_communicator(worker.model_runner.model_config, found["eplb"])
            self._check()
            for joiner, sender in senders(order.live, order.joiners, order.source).items():
                if sender == member.slot:
                    self._transfer(dp, joiner, sending=True)
            self.executor._warm_target_groups(dp, ep)
            self._tune(found["world"])
            self._columns = self._await_columns()

    def _check(self) -> None:
        if self._cancelled.is_set():
            raise ElasticError(f"refill {self.order.epoch} was given up")

    def result(self) -> None:
        """Raises what the preparation raised."""
        if self.runs:
            raise ElasticError(f"refill {self.order.epoch} is still being prepared")
        if self._error is not None:
            raise self._error

    def commit(self) -> None:
        """At a step boundary on all members."""
        from vllm.config import set_current_vllm_config
        from vllm.distributed import parallel_state

        self.result()
        member = self.member
        with set_current_vllm_config(member.worker.vllm_config):
            retired = parallel_state._replace_active_groups(**self._groups)
            found = member.experts.map
            for rank, columns in self._columns.items():
                found[:, own_columns(rank, member.experts.rows)] = columns
            self._switch(found)
        if self.request is not None:
            _take_addresses(member.worker.vllm_config.parallel_config, self.request)
        meeting.retire(retired)

    def _switch(self, found: Map) -> None:
        """Both sides: barrier, unmask and map, barrier."""
        from vllm.model_executor.layers.fused_moe.all2all_utils import get_ep_all2all_manager

        member = self.member
        coordinator = member.coordinators()["dp"]
        sync, deadline = coordinator.cpu_group, time.monotonic() + COMMIT_S
        self._meet("before", deadline)
        get_ep_all2all_manager().commit_ep_size()
        member.experts.commit(found)
        if self._communicator is not None:
            member.experts.state.update_communicator(member.worker.model_runner.model_config, self._communicator)
        member.close_dead()
        may_balance = self._meet("after", deadline, member.experts.may_balance)
        member._take(self.slots, sync)
        if self.slots.whole and may_balance:
            member.experts.resume_balancing()

    def _meet(self, name: str, deadline: float, vote: bool = True) -> bool:
        """A barrier of all members in the store; returns whether all voted yes."""
        store, prefix, member = self.meeting.store(), f"{self.meeting.prefix}/commit/{name}", self.member
        store.set(f"{prefix}/vote/{member.rank}", b"1" if vote else b"0")
        groups.gather(store, prefix, member.rank, self.slots.live_ranks, deadline, lambda: False)
        return all(store.get(f"{prefix}/vote/{rank}") == b"1" for rank in self.slots.live_ranks)

    def abort(self) -> None:
        """Waits for nobody: a preparation that runs drops what it made when it notices."""
        with self._lock:
            again = self._cancelled.is_set()
            self._cancelled.set()
            ours = self._through and not again
        if not again and not ours:
            threading.Thread(target=self._abort_late, name="healer refill abort", daemon=True).start()
        if ours:
            self._thread = threading.Thread(target=self._drop, name="healer refill drop", daemon=True)
            self._thread.start()

    def _abort_late(self) -> None:
        """Not beside a step that waits for a dead rank: an abort frees memory, and CUDA would let no word begin that frees the step."""
        self.member.exchange.steps_end(lambda: not self._aborted.is_set())
        self.abort_kernels()

    def abort_kernels(self) -> None:
        """End those that wait for a joiner: a shrink waits for the device. All steps have ended."""
        self._aborted.set()
        meeting.abort_device_groups(*self._formation.made)

    def _drop(self) -> None:
        try:
            self.member.exchange.disconnect(self.joining_ranks)
        finally:
            meeting.retire(tuple(self._formation.made))
            self._formation.made.clear()
            self._groups, self._communicator = {}, None

    # --- joiner ------------------------------------------------------------------------------------------------------------

    def join(self, phase: str) -> None:
        from vllm.config import set_current_vllm_config

        steps = {"receive": self._receive, "warm": self._warm, "commit": self._join}
        if phase not in steps:
            raise ElasticError(f"refill: no phase {phase!r}; expected one of {', '.join(steps)}")
        with set_current_vllm_config(self.member.worker.vllm_config):
            steps[phase]()

    def _receive(self) -> None:
        member, order = self.member, self.order
        found = member.coordinators()
        sender = senders(order.live, order.joiners, order.source)[member.slot]
        self._transfer(found["dp"], sender, sending=False)
        self.executor._warm_target_groups(found["dp"], found["ep"])
        self._tune(found["world"])
        self._load_rows()
        forming.done()

    def _load_rows(self) -> None:
        """Fill own rows from the host copy by the source's map; without a copy they stay empty for the balancer."""
        member, experts, place = self.member, self.member.experts, None
        found, demand = self._await_map()
        if experts.copy is None:
            try:
                member.sources = member.keep_copy()
            except (ElasticError, OSError) as error:
                log.exception("[in-place] slot %d has no host copy of experts", member.slot)
                member.sources = f"no host copy of experts: {error}"
        for rank in self.joining_ranks:
            filled = fill(found, experts.experts, rank, experts.rows, demand)
            if rank == member.rank:
                experts.held = np.full((len(found), experts.rows), -1, dtype=np.int64)
                if experts.copy is not None and not experts.missing(filled.loads):
                    experts.load(filled.loads)
                else:
                    log.warning("[in-place] slot %d joins without experts: the host copy is not whole", member.slot)
                place = experts.held.copy()
            found = filled.map
        assert place is not None
        self.meeting.store().set(f"{self.meeting.prefix}/joined/{member.rank}", place.tobytes())
        self._columns = {member.rank: place}

    def _warm(self) -> None:
        self.executor.warmup_new_worker()

    def _join(self) -> None:
        member, experts = self.member, self.member.experts
        found, demand = self._await_map()
        for rank, columns in self._await_columns().items():
            found[:, own_columns(rank, experts.rows)] = columns
        buffer = experts.model_state.physical_to_logical_map_buffer
        buffer.fill_(-1)
        experts.model_state.last_expert_load.copy_(_as_tensor(demand))
        # a balancer that is not resumed on all ranks must not run on this one
        member.worker.model_runner.eep_eplb_suppressed = True
        self._switch(found)

    # --- both --------------------------------------------------------------------------------------------------------------

    def _transfer(self, dp: Any, peer_slot: int, *, sending: bool) -> None:
        """Non-expert weights, from this rank to the peer's rank of the same tensor-parallel number, or from it."""
        import torch
        from vllm.distributed.elastic_ep.elastic_execute import batch_transfer_weights
        from vllm.utils import is_moe_layer

        model = self.member.worker.model_runner.get_model()
        weights = (
            model.expert_weights
            if sending
            else [module.get_expert_weights() for module in model.modules() if is_moe_layer(module)]
        )
        batch_transfer_weights(model, sending, self.slots.dense(peer_slot), dp, weights)
        torch.accelerator.synchronize()

    def _tune(self, world: Any) -> None:
        """vLLM's exchange of FlashInfer's tuning, whose source is the first rank: here the first rank of the order's source."""
        from vllm.model_executor.warmup.flashinfer_autotune_cache import sync_flashinfer_autotune_cache

        source = self.slots.ranks_of((self.order.source,))[0]
        dense = self.slots.live_ranks.index(source)

        class FromSource:
            rank_in_group = 0 if self.member.rank == source else 1

            @staticmethod
            def broadcast_object(value: Any) -> Any:
                return world.tcp_store_group.broadcast_obj(value, dense)

        sync_flashinfer_autotune_cache(self.member.worker.model_runner, FromSource())

    def _publish_map(self) -> None:
        experts, store = self.member.experts, self.meeting.store()
        demand = experts.model_state.last_expert_load.cpu().numpy().astype(np.float64)
        store.set(f"{self.meeting.prefix}/demand", demand.tobytes())
        found = experts.map
        store.set(f"{self.meeting.prefix}/shape", json.dumps(list(found.shape)).encode())
        store.set(f"{self.meeting.prefix}/map", found.tobytes())

    def _await_map(self) -> tuple[Map, Any]:
        values = self._await({name: f"{self.meeting.prefix}/{name}" for name in ("shape", "demand", "map")})
        found = np.frombuffer(values["map"], dtype=np.int64).reshape(json.loads(values["shape"])).copy()
        return found, np.frombuffer(values["demand"], dtype=np.float64).reshape(len(found), -1)

    def _await_columns(self) -> dict[int, Map]:
        values = self._await({rank: f"{self.meeting.prefix}/joined/{rank}" for rank in self.joining_ranks})
        rows = self.member.experts.rows
        return {int(rank): np.frombuffer(raw, dtype=np.int64).reshape(-1, rows) for rank, raw in values.items()}

    def _await(self, keys: dict[Any, str]) -> dict[Any, bytes]:
        """Values that others publish. Raises ElasticError when they do not come in time or the refill is given up."""
        store, deadline = self.meeting.store(), time.monotonic() + self.order.timeout_s
        while not store.check(list(keys.values())):
            self._check()
            if time.monotonic() > deadline:
                missing = [key for key in keys.values() if not store.check([key])]
                raise ElasticError(f"refill {self.order.epoch}: {missing} did not come in time")
            time.sleep(POLL_S)
        return {name: store.get(key) for name, key in keys.items()}


def _take_addresses(config: Any, request: Any) -> None:
    """As vLLM's `switch_and_prepare` does for the worker's configuration; slots and sizes stay."""
    config.data_parallel_master_ip = request.new_data_parallel_master_ip
    config.data_parallel_master_port = request.new_data_parallel_master_port


def _as_tensor(found: Any) -> Any:
    import torch

    return torch.from_numpy(np.array(found))
