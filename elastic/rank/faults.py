"""Faults from within a rank, for chaos tests: only in a group whose configuration says `fault_injection`.

SIGUSR2 asks for one; its name is read from the file at `paths.fault_path`. A thread of its own waits for the signal, so that
a rank that is busy or stuck can be asked too. The GPU faults launch a kernel that does what a wrong kernel of a library
would do; they end the CUDA context of this process and leave the GPU as it was.
"""

import contextlib
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path

import torch

ASK = signal.SIGUSR2
STUCK = signal.SIGRTMIN + 1
UNMAPPED = 0x1000
"""An address in the first pages, which no allocation is given."""


def arm(path: Path, place: Callable[[], torch.device]) -> None:
    """Wait for orders from now on. To be called by the main thread before any other thread exists: they inherit its mask.

    `place` gives the rank's device once it is open.
    """
    signal.pthread_sigmask(signal.SIG_BLOCK, {ASK})
    signal.signal(STUCK, lambda *_: time.sleep(float(threading.TIMEOUT_MAX)))
    threading.Thread(target=_wait, args=(path, place), name="faults", daemon=True).start()


def _wait(path: Path, place: Callable[[], torch.device]) -> None:
    while True:
        signal.sigwait({ASK})
        with contextlib.suppress(OSError):
            name = path.read_text().strip()
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
