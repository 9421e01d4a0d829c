"""Opens a rank's EP backend and round board by the name in the group's configuration."""

from elastic.config import EpBackendName
from elastic.rank.comm.base import EpBackend, RoundBoard
from elastic.rank.comm.board import Board
from elastic.rank.comm.cpu import CpuEpBackend
from elastic.rank.comm.links import FaultyTransport, Links
from elastic.rank.comm.shm import ShmTransport
from elastic.rank.comm.transport import Layout, Transport
from elastic.rank.device import CPU, Device


def open_backend(
    name: EpBackendName,
    *,
    rank: int,
    capacity: int,
    experts_per_rank: int,
    max_tokens: int,
    hidden: int,
    top_k: int,
    timeout_s: float,
    group: str,
    device: Device = CPU,
    early_release: bool = True,
    links: Links | None = None,
) -> tuple[EpBackend, RoundBoard]:
    """Called once in a rank's process. The two share one inbox, so the backend's `connect`, `disconnect`, `clean` and
    `close` hold for the board too. `links`: faults to be put in between, on a CPU only. Raises ElasticError where this
    machine cannot run the backend."""
    layout = Layout(capacity, experts_per_rank, max_tokens, hidden, top_k)
    transport: Transport
    if name == "nixl-ep":
        from elastic.rank.comm.nixl_ep import NixlEpBackend

        # the board alone: its records are never used
        transport = ShmTransport(rank, Layout(capacity, 1, 1, 16, 1), group)
        backend = NixlEpBackend(
            device,
            transport,
            rank=rank,
            capacity=capacity,
            experts_per_rank=experts_per_rank,
            max_tokens=max_tokens,
            hidden=hidden,
            top_k=top_k,
            timeout_s=timeout_s,
        )
        backend.self_test()
        backend.releases_early &= early_release
        return backend, Board(transport)
    if name == "nixl":
        # Only here: a group over shared memory starts without the 0.5 s that NIXL takes.
        from elastic.rank.comm.nixl import NixlTransport

        transport = NixlTransport(rank, layout, group)
    else:
        transport = ShmTransport(rank, layout, group)
    if links is not None:
        transport = FaultyTransport(transport, links)
    return CpuEpBackend(transport, timeout_s=timeout_s), Board(transport)
