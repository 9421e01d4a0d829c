"""Gives back the GPU memory of dead peers: closes what UCX has imported from them over CUDA IPC.

UCX keeps the imports of every peer of its host until this process exits, and memory that anybody still imports outlives its
owner. There is no call to end that, so the library's own table is edited, in files whose machine code was read (`RELEASES`).

Offsets in bytes, as in `uct_cuda_ipc_map_memhandle`, `_unmap_memhandle`, `_create_cache`, `_destroy_cache` and the destructor:

    uct_cuda_ipc_remote_cache  klib's khash (`_Table`, 40), then a reader-writer spinlock
    flags                      two bits a bucket, 16 buckets a word: 1 deleted, 2 empty, neither: full
    keys                       pid, pid namespace (inode number of /proc/PID/ns/pid), CUDA device: a word each
    values                     the peer's cache; at 136 the size of what it has imported

Lookups and the destructor pass over a deleted bucket. What refers to an import (an rkey, a copy that has ended, an entry of a
memory view) does so by key, and gives back nothing where nothing is found. But a closed peer must not be read from again: the
attempt leaves an empty cache under the old key, and UCX 1.23 crashes when an older reference is given back to that.
"""

import ctypes
import functools
import hashlib
import logging
import os
import time
from collections.abc import Callable, Collection
from pathlib import Path
from typing import NamedTuple

from elastic import process

log = logging.getLogger("vllm.healer.in_place")

RELEASES = {
    "ed9612eb87801cd50dc77e704ab4adffd724651015d41a2a700d2f312511b6f4": "nixl-cu13 1.5.1, x86-64",
    "e701321e0fcbe20381cd81d6561caee5bb5239b110df4048c1635c9df2fb7bfd": "nixl-cu13 1.4.1, x86-64",
}
"""By SHA-256 of libuct_cuda.so. Another one is added by who has read the functions above in it: UCX changes them often."""

PID_NAMESPACE = 3
"""UCS_SYS_NS_TYPE_PID, as the library itself asks `ucs_sys_get_ns`."""
CLOSE_HANDLES = 1
"""Second argument of `uct_cuda_ipc_destroy_cache` in 1.5.1 (0 would leave the imports open); 1.4.1 takes one argument."""
DELETED, NOT_FULL, SIZE_AT = 1, 3, 136
LOCK_FREE_S = 1.0
"""The lock is held while one import is opened or counted down: milliseconds at most."""


class Closed(NamedTuple):
    peers: int
    """Caches closed: one for each dead process and device of ours."""
    imported_bytes: int
    why_not: str
    """Why a library was left as it is; empty: nothing was in the way."""


class _Table(ctypes.Structure):
    _fields_ = (
        ("buckets", ctypes.c_uint32),
        ("size", ctypes.c_uint32),
        ("occupied", ctypes.c_uint32),
        ("upper_bound", ctypes.c_uint32),
        ("flags", ctypes.POINTER(ctypes.c_uint32)),
        ("keys", ctypes.POINTER(ctypes.c_uint32)),
        ("values", ctypes.POINTER(ctypes.c_void_p)),
        ("lock", ctypes.c_uint32),
    )


def loaded() -> tuple[str, ...]:
    """Paths of the libuct_cuda that this process has mapped: one or none, as a rule."""
    lines = Path("/proc/self/maps").read_text().splitlines()
    return tuple(dict.fromkeys(line.split(maxsplit=5)[5] for line in lines if "/libuct_cuda.so" in line))


def gone(pid: int) -> bool:
    """Has ended, reaped or not. In doubt it lives: closing an import of a live peer would break its next use."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    except PermissionError:
        return False
    found = process.stat(pid)
    return found is not None and found[0] in process.ENDED


def close_dead(find: Callable[[], Collection[str]] = loaded, gone: Callable[[int], bool] = gone) -> Closed:
    """Close what was imported from processes of our pid namespace that are gone. Raises nothing: no heal fails for that.

    The caller has seen to it that the device is idle, that the dead are disconnected (no kernel has an address of theirs), that
    the balancer's thread has ended, and that nothing of NIXL's is under way in this process: the library's lock can be waited
    for, but not taken, from here.
    """
    sizes, reasons = list[int](), list[str]()
    try:
        for path in find():
            if why := unknown(path):
                reasons.append(why)
            else:
                sizes += _close(ctypes.CDLL(path, mode=os.RTLD_NOLOAD | os.RTLD_LAZY), gone)
    except Exception as error:
        log.exception("[in-place] GPU memory of dead peers may stay taken")
        reasons.append(f"{type(error).__name__}: {error}")
    return Closed(len(sizes), sum(sizes), "; ".join(reasons))


@functools.cache
def unknown(path: str) -> str:
    """Why this library is left alone; empty: its layout is known. Read, and said, once a process."""
    try:
        digest = hashlib.sha256(Path(path).read_bytes()).hexdigest()
        why = "" if digest in RELEASES else f"{path} is of no known release (SHA-256 {digest})"
    except OSError as error:  # replaced since it was loaded
        why = f"{path} cannot be read: {error.strerror}"
    if why:
        log.warning("[in-place] GPU memory of dead peers stays taken while this rank lives: %s", why)
    return why


_unfinished: list[int] = []
"""Caches that are in the table no more, and not destroyed because the lock stayed held: the next call does it."""


def _close(library: ctypes.CDLL, gone: Callable[[int], bool]) -> list[int]:
    """Returns what each cache that was closed had imported. Raises TimeoutError."""
    table = _Table.in_dll(library, "uct_cuda_ipc_remote_cache")
    destroy = library.uct_cuda_ipc_destroy_cache
    destroy.argtypes, destroy.restype = (ctypes.c_void_p, ctypes.c_int), None
    get_namespace = library.ucs_sys_get_ns  # of libucs, which it is linked with
    get_namespace.restype = ctypes.c_uint32
    ours, dead = get_namespace(PID_NAMESPACE), list[int]()
    _wait_for_lock(table)
    for bucket in range(table.buckets):
        full = not table.flags[bucket // 16] >> bucket % 16 * 2 & NOT_FULL
        if full and table.keys[3 * bucket + 1] == ours and gone(table.keys[3 * bucket]):
            dead.append(bucket)
    for bucket in dead:
        table.flags[bucket // 16] |= DELETED << bucket % 16 * 2
        table.size -= 1
    _unfinished.extend(table.values[bucket] for bucket in dead)
    _wait_for_lock(table)  # who found one of them before it was marked is done with it then
    sizes = list[int]()
    while _unfinished:
        cache = _unfinished.pop()
        sizes.append(ctypes.c_uint64.from_address(cache + SIZE_AT).value)
        destroy(cache, CLOSE_HANDLES)
    return sizes


def _wait_for_lock(table: _Table) -> None:
    until = time.monotonic() + LOCK_FREE_S
    while table.lock:
        if time.monotonic() > until:
            raise TimeoutError(f"UCX has held its lock for {LOCK_FREE_S:g} s")
        time.sleep(0.001)
