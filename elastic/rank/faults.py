"""Faults from within a rank, for chaos tests: only in a group whose configuration says `fault_injection`.

The name of one, and its values, are written to the file at `paths.fault_path`. A thread of its own looks for it, so that a rank
that is busy or stuck can be asked too (a signal would end the process where a library's thread takes it). The GPU faults launch
a kernel that does what a wrong kernel of a library would do; they end the CUDA context of this process and leave the GPU as it
was. Those of the exchange change the rules of `elastic.rank.comm.links`; `restore` takes them all back.
"""

import ctypes
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import torch

from elastic.errors import ElasticError
from elastic.rank.comm.base import EpBackend
from elastic.rank.comm.links import Links
from elastic.rank.fatal import end_if_fatal

LOOK_S = 0.005
STUCK = signal.SIGRTMIN + 1
HOST_BYTES = 128 << 20
MOST_HOLDERS = 64
"""Of a context, in one process."""
UNMAPPED = 0x1000
"""An address in the first pages, which no allocation is given."""


class Place(NamedTuple):
    """Where the faults of this rank happen."""

    device: Callable[[], torch.device]
    """Its device, once it is open."""
    ep: Callable[[], EpBackend]
    links: Links | None


def arm(path: Path, place: Place) -> None:
    """Look for orders from now on. Called by the main thread."""
    signal.signal(STUCK, _stand_still)
    threading.Thread(target=_look, args=(path, place), name="faults", daemon=True).start()


def _stand_still(*_: object) -> None:
    while True:
        time.sleep(3600)


def _look(path: Path, place: Place) -> None:
    while True:
        time.sleep(LOOK_S)
        try:
            text = path.read_text().strip()
            path.unlink()
        except OSError:
            continue
        print(f"fault injection: {text}", flush=True)
        name, *values = text.split()
        try:
            commit(place, name, [float(value) for value in values])
        except Exception as error:
            print(f"fault injection: {text} raised {type(error).__name__}: {error}", flush=True)
            # an idle rank would meet what it did to its device in the next step only
            end_if_fatal(error, f"fault injection: {text}")


def commit(place: Place, name: str, values: list[float]) -> None:
    """Raises ElasticError for an unknown name, or values that do not fit it."""
    if name in OF_DEVICE and not values:
        OF_DEVICE[name](place.device())
    elif name == "mask" and len(values) == 1:
        place.ep().release([int(values[0])])
    elif name in OF_LINKS and len(values) == OF_LINKS[name][0]:
        if place.links is None:
            raise ElasticError(f"{name}: this rank's links cannot be made to fail")
        OF_LINKS[name][1](place.links, values)
    else:
        raise ElasticError(
            f"{name} {values}: unknown, or with other values; {', '.join([*OF_DEVICE, 'mask', *OF_LINKS])}"
        )


def _store(address: int) -> None:
    from elastic.rank.fault_kernels import store

    store[(1,)](address)
    torch.cuda.synchronize()


def illegal_address(place: torch.device) -> None:
    torch.cuda.set_device(place)
    _store(UNMAPPED)


def misaligned_address(place: torch.device) -> None:
    torch.cuda.set_device(place)
    _store(torch.zeros(4, dtype=torch.int64, device=place).data_ptr() + 1)


def device_assert(place: torch.device) -> None:
    torch.cuda.set_device(place)
    torch.zeros(4, device=place)[torch.tensor([1 << 20], device=place)].sum()
    torch.cuda.synchronize()


def gpu_memory(place: torch.device) -> None:
    """Take all memory that is left and keep it."""
    torch.cuda.set_device(place)
    size, kept = torch.cuda.mem_get_info(place)[0], []
    while size >= 1 << 20:
        try:
            kept.append(torch.empty(size, dtype=torch.uint8, device=place))
        except torch.OutOfMemoryError:
            size //= 2
    _kept.extend(kept)


def context_freed(place: torch.device) -> None:
    """Give this process's CUDA context back once too often, as after a double free: what else uses it has none any more."""
    cuda, handle = ctypes.CDLL("libcuda.so.1"), ctypes.c_int()
    if cuda.cuDeviceGet(ctypes.byref(handle), place.index or 0):
        raise ElasticError("context-freed: the driver knows no such device")
    for _ in range(MOST_HOLDERS):
        if cuda.cuDevicePrimaryCtxRelease_v2(handle):
            break
    torch.cuda.synchronize(place)


def host_memory(_: torch.device) -> None:
    """Take HOST_BYTES of host memory and keep them: more than the control group leaves that an injector has put around this rank."""
    for _number in range(16):
        part = bytearray(HOST_BYTES // 16)
        part[::4096] = b"x" * len(part[::4096])
        _host_kept.append(part)


def stuck(_: torch.device) -> None:
    """The round loop stops for ever between two instructions, while the rank's other threads live."""
    signal.pthread_kill(threading.main_thread().ident or 0, STUCK)


_kept: list[torch.Tensor] = []
_host_kept: list[bytearray] = []

OF_DEVICE: dict[str, Callable[[torch.device], None]] = {
    "illegal-address": illegal_address,
    "misaligned-address": misaligned_address,
    "device-assert": device_assert,
    "gpu-memory": gpu_memory,
    "context-freed": context_freed,
    "host-memory": host_memory,
    "stuck": stuck,
}


def _lose(links: Links, values: list[float]) -> None:
    links.lost = links.lost | {int(values[0])}


def _delay(links: Links, values: list[float]) -> None:
    links.delay_s = links.delay_s | {int(values[0]): values[1]}


def _drop(links: Links, values: list[float]) -> None:
    links.dropped = links.dropped | {int(values[0]): int(values[1])}


def _late(links: Links, values: list[float]) -> None:
    links.late_s = links.late_s | {int(values[0]): values[1]}


def _slow(links: Links, values: list[float]) -> None:
    links.slow_s = values[0]


def _transfer_late(links: Links, values: list[float]) -> None:
    links.transfer_late_s = values[0]


def _transfer_drop(links: Links, _: list[float]) -> None:
    links.transfer_dropped = True


def _transfer_kill(links: Links, values: list[float]) -> None:
    links.transfer_killed = int(values[0])


OF_LINKS: dict[str, tuple[int, Callable[[Links, list[float]], None]]] = {
    "link-lost": (1, _lose),
    "link-delay": (2, _delay),
    "completion-drop": (2, _drop),
    "completion-late": (2, _late),
    "slow": (1, _slow),
    "transfer-late": (1, _transfer_late),
    "transfer-drop": (0, _transfer_drop),
    "transfer-kill": (1, _transfer_kill),
    "restore": (0, lambda links, _: links.restore()),
}
"""By name: how many values it takes. The first is the peer's slot for those of a link; then seconds, or a number."""
