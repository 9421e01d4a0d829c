"""A doorbell in shared memory: sleepers wait on a 32-bit word in the kernel, ringing costs one system call.

The word is incremented by the kernel (FUTEX_WAKE_OP), so rings of several processes never lose one another, and a sleeper
that took its ticket before it looked at its conditions cannot miss a ring: the kernel compares the word with the ticket.
"""

import ctypes
import errno
import platform
from ctypes import c_int, c_long, c_uint32

import numpy as np
import numpy.typing as npt

from elastic.errors import ElasticError

_SYS_FUTEX = {"x86_64": 202, "aarch64": 98}.get(platform.machine())
_WAIT, _WAKE_OP = 0, 5
_EVERYONE = 0x7FFFFFFF
_ADD_ONE = (1 << 28) | (1 << 12)
"""FUTEX_OP(ADD, 1, CMP_EQ, 0): the operation that FUTEX_WAKE_OP applies to the word before it wakes."""


class _Timespec(ctypes.Structure):
    _fields_ = (("sec", c_long), ("nsec", c_long))


# CDLL, not PyDLL: the GIL is released while the thread is in the kernel.
_libc = ctypes.CDLL(None, use_errno=True)
_libc.syscall.restype = c_long


class Bell:
    """`word` is a uint32 array of one element; the bell keeps its memory alive."""

    def __init__(self, word: npt.NDArray[np.uint32]) -> None:
        if _SYS_FUTEX is None:
            raise ElasticError(f"no futex call is known for {platform.machine()}: run on x86_64 or aarch64 Linux")
        self._word = word
        self._address = ctypes.c_void_p(word.ctypes.data)
        self._value = word.data

    def ticket(self) -> int:
        """The present value: take it before looking at the conditions that `wait` is to wait for."""
        return self._value[0]

    def ring(self) -> None:
        """Wake every sleeper, of whatever process. Callable from any thread."""
        # arguments: word, operation, sleepers to wake, sleepers to wake on the second word, the second word, its change
        _libc.syscall(
            c_long(_SYS_FUTEX or 0), self._address, c_int(_WAKE_OP), c_int(_EVERYONE), c_long(0), self._address, c_int(_ADD_ONE)
        )  # fmt: skip

    def wait(self, ticket: int, timeout_s: float) -> None:
        """Sleep until the value differs from `ticket`, at most `timeout_s`. May return early."""
        if timeout_s <= 0:
            return
        whole = int(timeout_s)
        limit = _Timespec(whole, int((timeout_s - whole) * 1e9))
        failed = _libc.syscall(
            c_long(_SYS_FUTEX or 0), self._address, c_int(_WAIT), c_uint32(ticket), ctypes.byref(limit), None, c_int(0)
        )
        if failed and (code := ctypes.get_errno()) not in (errno.EAGAIN, errno.EINTR, errno.ETIMEDOUT):
            raise OSError(code, "futex wait")
