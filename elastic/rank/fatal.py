"""Errors after which a rank is worth nothing, and its end.

An error of CUDA is sticky: after an illegal address every later call of the process fails with it, whatever it was for. A
rank that lived on would answer, beat and hold its peers in the exchange. So whoever meets such an error, in whatever thread,
ends the process at once: the kernel tells the controller and the peers, and the rank is lost like any other. The same goes for
an exchange whose library failed half-way through a change of its connections.
"""

import os
import sys
import traceback
from collections.abc import Callable, Iterator

import torch

from elastic.errors import ElasticError

DEVICE_ERROR_EXIT = 71
"""Exit code of a rank that ended itself for a device error: EX_OSERR of sysexits(3)."""
THREAD_ERROR_EXIT = 70
"""... because a thread that it cannot do without had ended: EX_SOFTWARE."""

EXCHANGE_EXIT = 69
"""... because nobody knows what its exchange is connected to: EX_UNAVAILABLE."""

_WORDS = ("CUDA error", "CUDA driver error", "CUBLAS_STATUS")


class ExchangeLost(ElasticError):
    """The exchange failed half-way through a change of its connections: its kernels may reach into memory that is not theirs."""


def device_error(error: BaseException) -> BaseException | None:
    """The error of the device in `error` or among its causes, or None. Lack of memory is none: the device goes on."""
    for each in _chain(error):
        if isinstance(each, torch.OutOfMemoryError):
            continue
        if isinstance(each, torch.AcceleratorError):
            return each
        if isinstance(each, RuntimeError) and any(word in str(each) for word in _WORDS):
            return each
    return None


def end_if_fatal(error: BaseException, doing: str) -> None:
    """Do not return where `error` is, or was caused by, an error of the device or `ExchangeLost`. Any thread."""
    if (found := device_error(error)) is not None:
        _end(error, f"{doing}: {first_line(found)}; the device is lost to this process", DEVICE_ERROR_EXIT)
    if any(isinstance(each, ExchangeLost) for each in _chain(error)):
        _end(error, f"{doing}: {first_line(error)}", EXCHANGE_EXIT)


def essential(name: str, body: Callable[[], None]) -> Callable[[], None]:
    """The body of a thread that the rank cannot do without: an exception that would end the thread ends the process."""

    def run() -> None:
        try:
            body()
        except BaseException as error:
            end_if_fatal(error, name)
            _end(error, f"{name}: {type(error).__name__}: {first_line(error)}", THREAD_ERROR_EXIT)

    return run


def _end(error: BaseException, words: str, code: int) -> None:
    # in one write each, and without the locks of the streams, which another thread may hold
    os.write(sys.__stderr__.fileno() if sys.__stderr__ else 2, "".join(traceback.format_exception(error)).encode())
    os.write(2, f"error: {words}\n".encode())
    os._exit(code)


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    seen: set[int] = set()
    waiting = [error]
    while waiting:
        each = waiting.pop()
        if each is None or id(each) in seen:
            continue
        seen.add(id(each))
        yield each
        waiting += [each.__cause__, each.__context__]
        if isinstance(each, BaseExceptionGroup):
            waiting += each.exceptions


def first_line(error: BaseException) -> str:
    return next(iter(str(error).strip().splitlines()), type(error).__name__)
