"""A bound on calls that keep Python's lock: while one runs nothing else of the process does, so no thread of it can give up.

NIXL EP's connect spins in such a call until its peers come (NIXL 2182, 2084: for ever, where an endpoint never connects).
What ends it is a thread without Python, from `faulthandler`: it writes all stacks to the log and ends the process, whose
death the kernel tells to everybody. A frozen rank serves nobody and holds up the round of all others, so this loses nothing.
"""

import contextlib
import faulthandler
from collections.abc import Iterator

STDERR = 2


@contextlib.contextmanager
def ends_within(seconds: float) -> Iterator[None]:
    """End the process, with exit code 1, if the block takes longer. One at a time in a process: the worker thread's."""
    faulthandler.dump_traceback_later(seconds, exit=True, file=STDERR)
    try:
        yield
    finally:
        faulthandler.cancel_dump_traceback_later()
