"""Peers on their way out: killed, while the kernel still takes down what they held, a GPU's context among it.

Until that is over the driver is busy with it, and what a survivor asks of it, such as to give back the mappings of the dead
peer's memory, takes twice as long, with Python's lock held.
"""

import os
import re
import select

from elastic.errors import ElasticError


def pid_of(lifeline: str) -> int:
    """Of the process whose lifeline is at this path. Raises ElasticError for a path that is none."""
    if (found := re.fullmatch(r"/proc/(\d+)/fd/\d+", lifeline)) is None:
        raise ElasticError(f"{lifeline!r} is no path of a lifeline, expected /proc/PID/fd/NUMBER")
    return int(found[1])


def has_ended(pid: int) -> bool:
    """Whether nothing is left of a process but, at most, its entry in the table: its memory and files are gone."""
    try:
        fd = os.pidfd_open(pid)
    except OSError:
        return True
    try:
        waiter = select.poll()
        waiter.register(fd, select.POLLIN)
        return bool(waiter.poll(0))
    finally:
        os.close(fd)
