"""What takes the place of functions of vLLM's NIXL EP manager: sets of ranks instead of counts (`exchange`)."""

# mypy: disable-error-code="import-not-found, import-untyped"
import contextlib
import time
from collections.abc import Callable, Iterator
from typing import Any

from elastic.vllm.worker.exchange import exchange


def ranks_of(manager: Any) -> tuple[int, ...]:
    """The ranks of a manager's group: those of the change that it was made for, else all."""
    found: tuple[int, ...] = getattr(manager, "healer_ranks", None) or tuple(range(manager.world_size))
    return found


def replace_manager(manager_class: Any) -> None:
    """Replace the functions of vLLM's manager that count. The guard has compared them. While every rank is there, they do what
    vLLM's do."""
    make_buffer, clean = manager_class._init_buffer, manager_class.clean_buffers

    def init_buffer(
        self: Any, max_num_tokens_per_dp_rank: int, token_hidden_size: int, num_experts_per_rank: int
    ) -> None:
        """vLLM's own, which connects `range(world_size)`: a joiner may have holes below it."""

        def made(buffer: Any) -> None:
            size = (num_experts_per_rank, max_num_tokens_per_dp_rank, token_hidden_size)
            exchange.made(buffer, self.rank, capacity_of(self), *size)

        with _connecting_only(ranks_of(self), made):
            make_buffer(self, max_num_tokens_per_dp_rank, token_hidden_size, num_experts_per_rank)
        exchange.started(self.rank, ranks_of(self))

    def stage_ep_size(self: Any) -> None:
        with manager_class._lock:
            deadline = time.monotonic() + _connect_s(self)
            cancelled = getattr(self, "healer_cancelled", None) or (lambda: False)
            exchange.connect(ranks_of(self), self.tcp_store_group.store, deadline, active=False, cancelled=cancelled)

    def commit_ep_size(self: Any) -> None:
        with manager_class._lock:
            wanted = set(ranks_of(self))
            if self.tcp_store_group is not None:
                exchange._state.buffer.set_tcp_store_group(self.tcp_store_group.store)
            if leaving := exchange.connected - wanted - {self.rank}:
                exchange.deactivate(leaving)
            missing = wanted - exchange.connected - {self.rank}
            if missing:
                deadline = time.monotonic() + _connect_s(self)
                store = self.tcp_store_group.store
                exchange.connect(missing, store, deadline, active=True, cancelled=lambda: False)
            exchange.activate(wanted)

    @contextlib.contextmanager
    def mask_remote_ranks(self: Any) -> Iterator[None]:
        import torch

        buffer, peers = exchange._state.buffer, [rank for rank in ranks_of(self) if rank != self.rank]
        for rank in peers:
            buffer.update_mask_buffer(rank, mask=True)
        torch.accelerator.synchronize()
        try:
            yield
        finally:
            for rank in peers:
                buffer.update_mask_buffer(rank, mask=False)
            torch.accelerator.synchronize()

    def clean_buffers(self: Any) -> None:
        """vLLM's own, for a retry with every rank: all have settled."""
        exchange.settled()
        clean(self)
        exchange.forget_release()

    def query_fault(self: Any) -> Any:
        """Of ranks that are active: one that connects for a refill changes the mask, too. Waits for nothing."""
        import torch

        current = self.query_active_mask()
        last = manager_class._last_mask
        if last is None or last.shape != current.shape:
            last = manager_class._last_mask = torch.zeros_like(current)
        return ((current != last) & exchange.interest(current.shape[0])).any() | exchange.released

    manager_class._init_buffer = init_buffer
    manager_class.stage_ep_size = stage_ep_size
    manager_class.commit_ep_size = commit_ep_size
    manager_class.mask_remote_ranks = mask_remote_ranks
    manager_class.clean_buffers = clean_buffers
    manager_class.query_fault = query_fault


def _connect_s(manager: Any) -> float:
    return float(getattr(manager, "healer_timeout_s", 300.0))


def capacity_of(manager: Any) -> int:
    """Ranks that the buffer has room for, as vLLM's `_init_buffer` counts them."""
    from vllm.config import get_current_vllm_config

    config = get_current_vllm_config().parallel_config
    if not config.enable_elastic_ep:
        return int(manager.world_size)
    return int(manager.world_size * config.elastic_ep_max_dp_size // config.data_parallel_size)


@contextlib.contextmanager
def _connecting_only(ranks: tuple[int, ...], made: Callable[[Any], None]) -> Iterator[None]:
    import nixl_ep

    original = nixl_ep.Buffer.connect_ranks

    def connect(self: Any, remote_ranks: list[int], activate: bool = True) -> Any:
        made(self)
        return original(self, [rank for rank in remote_ranks if rank in ranks], activate)

    nixl_ep.Buffer.connect_ranks = connect
    try:
        yield
    finally:
        nixl_ep.Buffer.connect_ranks = original
