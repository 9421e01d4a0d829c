"""Robust mutexes that a thread of a rank holds for life: the kernel hands them on within microseconds of the thread's death.

On exit the kernel first walks a thread's list of robust mutexes (`exit_mm_release`), then frees its memory, and only then
closes its files; a GPU context is torn down later still. So a waiter learns of a SIGKILL before any teardown, whatever the
process holds, where a socket is closed after the memory is gone (measured on two cores, 240 MB resident: 0.1 to 2 ms
against 14 ms, and 35 ms with other ranks busy).

The kernel does this for each thread when that thread gets to its own exit. A thread in a driver's call, as the round loop
often is on a GPU, gets there when the call returns; so the holder is a thread of its own that does nothing but sleep in
`pause`, which a signal interrupts at once. It never returns, so its death is the death of the process.

A mutex has one holder and, when it dies, one waiter that is told; the next is told when that one lets go. A waiter may
itself be stopped, so each has a mutex of its own, its *seat*.

Works between processes of one host, one pid namespace and one C library; elsewhere the socket remains the witness.
"""

import ctypes
import errno
import mmap
import os
import threading
from collections.abc import Callable

from elastic.errors import ElasticError

_SIZE = mmap.PAGESIZE
_HEADER = 64
"""The page begins with the C library's version: the layout of a mutex is its business."""
_MUTEX = 64
"""Bytes kept for a `pthread_mutex_t`; glibc takes 40 on x86_64, 48 on aarch64."""
SEATS = (_SIZE - _HEADER) // _MUTEX
CONTROLLER_SEAT = 0
"""Of the controller; the rank in slot s takes seat s + 1."""

_PTHREAD_PROCESS_SHARED = 1
_PTHREAD_MUTEX_ROBUST = 1


def _libc() -> tuple[ctypes.CDLL, bytes]:
    libc = ctypes.CDLL(None, use_errno=True)
    try:
        version = libc.gnu_get_libc_version
    except AttributeError:
        raise ElasticError("lifeline: not glibc") from None
    version.restype = ctypes.c_char_p
    return libc, bytes(version())[: _HEADER - 1]


def _seat(page: mmap.mmap, seat: int) -> ctypes.c_void_p:
    return ctypes.c_void_p(ctypes.addressof(ctypes.c_char.from_buffer(page)) + _HEADER + seat * _MUTEX)


class Lifeline:
    """The rank's end; kept for the life of the process. Raises ElasticError where the system has no robust mutexes."""

    def __init__(self) -> None:
        libc, version = _libc()
        self._fd = os.memfd_create("lifeline")
        os.ftruncate(self._fd, _SIZE)
        self._page = mmap.mmap(self._fd, _SIZE)
        self._codes: list[int] = []
        held = threading.Event()
        threading.Thread(target=self._hold, args=(libc, held), name="lifeline", daemon=True).start()
        held.wait()
        if any(self._codes):
            raise ElasticError(f"lifeline: no robust mutex on this system (codes {sorted(set(self._codes))})")
        self._page[: len(version)] = version
        self.path = f"/proc/{os.getpid()}/fd/{self._fd}"
        """What `watch` needs."""

    def _hold(self, libc: ctypes.CDLL, held: threading.Event) -> None:
        attributes = ctypes.create_string_buffer(64)
        self._codes += (
            libc.pthread_mutexattr_init(attributes),
            libc.pthread_mutexattr_setpshared(attributes, _PTHREAD_PROCESS_SHARED),
            libc.pthread_mutexattr_setrobust(attributes, _PTHREAD_MUTEX_ROBUST),
        )
        for seat in range(SEATS):
            mutex = _seat(self._page, seat)
            self._codes += (libc.pthread_mutex_init(mutex, attributes), libc.pthread_mutex_lock(mutex))
        held.set()
        while True:
            # without the interpreter's lock, and never in it again but for a moment after a signal's handler
            libc.pause()


def watch(path: str, on_death: Callable[[], None], seat: int = CONTROLLER_SEAT) -> bool:
    """Call `on_death` once, from a thread of its own, when the holder dies. False where this host cannot watch it: another
    host, namespace or C library, no such seat, or the process is gone already; use another witness then."""
    try:
        libc, version = _libc()
        fd = os.open(path, os.O_RDWR)
    except (ElasticError, OSError):
        return False
    try:
        page = mmap.mmap(fd, _SIZE)
    except (OSError, ValueError):
        return False
    finally:
        os.close(fd)
    if page[:_HEADER].rstrip(b"\0") != version or not 0 <= seat < SEATS:
        return False
    mutex = _seat(page, seat)

    def wait() -> None:
        code = libc.pthread_mutex_lock(mutex)
        page.tell()  # keeps the mapping alive as long as the wait
        # the holder never lets go: whoever gets the mutex, of the dead or of a waiter before it, knows that it is dead
        if code == errno.EOWNERDEAD:
            libc.pthread_mutex_consistent(mutex)
        if code in (0, errno.EOWNERDEAD):
            libc.pthread_mutex_unlock(mutex)
            on_death()

    threading.Thread(target=wait, name=f"lifeline {path}", daemon=True).start()
    return True
