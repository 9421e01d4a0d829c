"""What vLLM lacks on a CPU for a real Mixture-of-Experts with elastic groups and EPLB; imported in vLLM's interpreter only.

The exchange is vLLM's own all-gather and reduce-scatter manager over gloo; the groups are the product's; the maps, rows and
buffers are vLLM's EPLB state.
"""

# mypy: disable-error-code="import-not-found, import-untyped"
import os
import signal
import time
from typing import Any

import torch
import torch.distributed as dist
from vllm.distributed.device_communicators.base_device_communicator import DeviceCommunicatorBase


class Communicator(DeviceCommunicatorBase):  # type: ignore[misc]
    """Over the ranks that are live; lists of sizes have an entry for every slot."""

    def __init__(self, *, tcp_store_group: Any, use_all2all: bool = False, **given: Any) -> None:
        super().__init__(**given, use_all2all=use_all2all)
        if self.use_all2all:
            from vllm.distributed.device_communicators.all2all import AgRsAll2AllManager

            self.all2all_manager = AgRsAll2AllManager(self.cpu_group, tcp_store_group)

    def dispatch(self, *given: Any, **options: Any) -> Any:
        return self.all2all_manager.dispatch(*given, **options)

    def combine(self, *given: Any, **options: Any) -> Any:
        return self.all2all_manager.combine(*given, **options)

    def sizes(self, given: list[int] | None, own: int) -> list[int]:
        return [given[rank] for rank in self.ranks] if given is not None else [own] * len(self.ranks)

    def _gather(self, part: torch.Tensor, sizes: list[int]) -> torch.Tensor:
        part = part.contiguous()
        if part.shape[0] < max(sizes):
            part = torch.cat([part, part.new_zeros((max(sizes) - part.shape[0], *part.shape[1:]))])
        found = [torch.empty_like(part) for _ in sizes]
        dist.all_gather(found, part, group=self.device_group)
        return torch.cat([each[:size] for each, size in zip(found, sizes, strict=True)], dim=0)

    def all_gatherv(self, parts: Any, dim: int = 0, sizes: list[int] | None = None) -> Any:
        if isinstance(parts, torch.Tensor):
            return self._gather(parts, self.sizes(sizes, parts.shape[0]))
        return [self._gather(part, self.sizes(sizes, part.shape[0])) for part in parts]

    def batch_isend_irecv(self, p2p_ops: list[Any]) -> None:
        """Weights for a joiner."""
        under_way = []
        for number, each in enumerate(p2p_ops):
            move = self.device_group.send if each.op is dist.isend else self.device_group.recv
            under_way.append(move([each.tensor], each.group_peer, number))
        for work in under_way:
            work.wait()

    def reduce_scatterv(self, given: torch.Tensor, dim: int = -1, sizes: list[int] | None = None) -> torch.Tensor:
        total = given.contiguous().float()
        dist.all_reduce(total, group=self.device_group)
        parts = self.sizes(sizes, total.shape[0] // len(self.ranks))
        at = self.device_group.rank()
        start = sum(parts[:at])
        return total[start : start + parts[at]].to(given.dtype)


class Mover:
    """vLLM's interface of a balancer's communicator, over the balancer's own gloo group. An armed one ends its process when
    it is to move the second layer's rows."""

    needs_profile_buffer_reservation = False
    layers_left = 0
    """Of an armed one; 0: not armed."""

    def __init__(self, coordinator: Any) -> None:
        self._group = coordinator.device_group
        self._ops: list[tuple[bool, torch.Tensor, int]] = []

    def set_stream(self, stream: Any) -> None:
        pass

    def set_transfer_context(self, *given: Any, **named: Any) -> None:
        pass

    def add_send(self, tensors: list[torch.Tensor], dst_rank: int, expert_id: int) -> None:
        self._ops += [(True, tensor, dst_rank) for tensor in tensors]

    def add_recv(self, tensors: list[torch.Tensor], src_rank: int, expert_id: int) -> None:
        self._ops += [(False, tensor, src_rank) for tensor in tensors]

    def execute(self) -> None:
        if Mover.layers_left:
            Mover.layers_left -= 1
            if not Mover.layers_left:
                os.kill(os.getpid(), signal.SIGKILL)
        number: dict[tuple[bool, int], int] = {}
        under_way = []
        for sends, tensor, peer in self._ops:
            tag = number[sends, peer] = number.get((sends, peer), 0) + 1
            under_way.append((self._group.send if sends else self._group.recv)([tensor.contiguous()], peer, tag))
        self._ops.clear()
        for work in under_way:
            work.wait()


class Exchange:
    """Of the product's interface: the exchange's group is formed anew over those who are left."""

    epoch = 0
    """Of the order that is being carried out."""

    def release(self, ranks: Any) -> None:
        pass

    def words_first(self) -> None:
        pass

    def settled(self) -> None:
        pass

    def disconnect(self, ranks: Any) -> None:
        pass

    def steps_end(self, wanted: Any) -> None:
        pass

    def close_dead(self) -> Any:
        from elastic.vllm.worker.ipc_cache import Closed

        return Closed(0, 0, "")

    def drop(self, ranks: Any) -> None:
        from vllm.distributed import parallel_state

        from elastic.vllm.worker.meeting import Meeting

        dp = parallel_state._DP
        live = [rank for rank in dp.device_communicator.ranks if rank not in set(ranks)]
        at = Meeting("127.0.0.1", int(os.environ["TEST_STORE"]), f"exchange/{Exchange.epoch}/{live}", 20.0)
        group = at.gloo("device", dp.rank, tuple(live), time.monotonic() + 20.0)
        dp.device_group = dp.device_communicator.device_group = group
        dp.device_communicator.ranks = live


def register() -> None:
    """A general plugin of vLLM."""
    import vllm.config.parallel as parallel
    from vllm.distributed.elastic_ep.elastic_execute import ElasticEPScalingExecutor
    from vllm.distributed.eplb import eplb_state
    from vllm.model_executor.layers.fused_moe.experts import cpu_moe
    from vllm.model_executor.layers.fused_moe.router import base_router
    from vllm.platforms.cpu import CpuPlatform
    from vllm.v1.worker.cpu_model_runner import CPUModelRunner

    real = parallel.current_platform

    class CudaAlike:
        def __getattr__(self, name: str) -> Any:
            return getattr(real, name)

        def is_cuda_alike(self) -> bool:
            return True

    parallel.current_platform = CudaAlike()
    CpuPlatform.get_device_communicator_cls = classmethod(lambda cls: f"{__name__}.Communicator")

    torch.accelerator.synchronize = lambda *_: None
    ElasticEPScalingExecutor._warm_target_groups = lambda *_: None  # with streams of a GPU
    eplb_state.create_eplb_communicator = lambda group_coordinator, *_, **__: Mover(group_coordinator)

    class Event:
        """All work is done when it is given."""

        def __init__(self, **_: Any) -> None:
            self._at = 0.0

        def record(self, *_: Any) -> None:
            self._at = time.monotonic()

        def query(self) -> bool:
            return True

        def wait(self, *_: Any) -> None:
            pass

        def synchronize(self) -> None:
            pass

        def elapsed_time(self, end: "Event") -> float:
            return 1e3 * (end._at - self._at)

    torch.__dict__["Event"] = Event

    def to_physical(topk_ids: Any, logical_to_physical_map: Any, logical_replica_count: Any, **_: Any) -> Any:
        """As vLLM's kernel: the replica is chosen by a hash of the place."""
        flat = topk_ids.reshape(-1).long()
        count = logical_replica_count[flat].clamp(min=1)
        place = torch.arange(flat.numel()) // topk_ids.shape[-1]
        chosen = logical_to_physical_map[flat, (place * 2654435761 % 2**32) % count]
        return chosen.reshape(topk_ids.shape).to(topk_ids.dtype)

    base_router.eplb_map_to_physical_and_record = to_physical

    kernel = cpu_moe.CPUUnquantizedExperts.apply

    def apply(self: Any, **given: Any) -> Any:
        if given["expert_map"] is not None:
            own = given["expert_map"].to(torch.long)[given["topk_ids"].to(torch.long)]
            given["topk_ids"] = own.clamp(min=0).to(given["topk_ids"].dtype).contiguous()
            given["topk_weights"] = given["topk_weights"].masked_fill(own < 0, 0.0).contiguous()
        return kernel(self, **given)

    cpu_moe.CPUUnquantizedExperts.apply = apply
    load = CPUModelRunner.load_model

    def load_model(self: Any, load_dummy_weights: bool = False) -> None:
        load(self, load_dummy_weights)
        if self.parallel_config.enable_eplb:
            self.eplb_state = eplb_state.EplbState(self.parallel_config, self.device)
            self._moe_model = self.model
            self.eplb_state.add_model(self.model, self.model_config)

    CPUModelRunner.load_model = load_model
