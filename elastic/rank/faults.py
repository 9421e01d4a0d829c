"""Faults from within a rank, for chaos tests: only in a group whose configuration says `fault_injection`.

The name of one is written to the file at `paths.fault_path`. A thread of its own looks for it, so that a rank that is busy
or stuck can be asked too (a signal would end the process where a library's thread takes it). The GPU faults launch a kernel
that does what a wrong kernel of a library would do; they end the CUDA context of this process and leave the GPU as it was.
"""

import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path

import torch

LOOK_S = 0.02
STUCK = signal.SIGRTMIN + 1
UNMAPPED = 0x1000
"""An address in the first pages, which no allocation is given."""


def arm(path: Path, place: Callable[[], torch.device]) -> None:
    """Look for orders from now on. Called by the main thread. `place` gives the rank's device once it is open."""
    signal.signal(STUCK, _stand_still)
    threading.Thread(target=_look, args=(path, place), name="faults", daemon=True).start()


def _stand_still(*_: object) -> None:
    while True:
        time.sleep(3600)


def _look(path: Path, place: Callable[[], torch.device]) -> None:
    while True:
        time.sleep(LOOK_S)
        try:
            name = path.read_text().strip()
            path.unlink()
        except OSError:
            continue
        print(f"fault injection: {name}", flush=True)
        fault = FAULTS.get(name)
        if fault is None:
            print(f"fault injection: unknown, expected one of {', '.join(FAULTS)}", flush=True)
            continue
        try:
            fault(place())
        except Exception as error:
            print(f"fault injection: {name} raised {type(error).__name__}: {error}", flush=True)


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


def stuck(_: torch.device) -> None:
    """The round loop stops for ever between two instructions, while the rank's other threads live."""
    signal.pthread_kill(threading.main_thread().ident or 0, STUCK)


_kept: list[torch.Tensor] = []

FAULTS: dict[str, Callable[[torch.device], None]] = {
    "illegal-address": illegal_address,
    "misaligned-address": misaligned_address,
    "device-assert": device_assert,
    "gpu-memory": gpu_memory,
    "stuck": stuck,
}
