"""The lease: at most one daemon acts on a deployment, on whatever host it runs.

A record in a store that all candidates reach names the holder and its *term*, a number that grows with every change of
holder. The ranks are the last line: they refuse a controller whose term is below the highest that they have seen, so a
holder that was frozen beyond its time and wakes cannot act even before it notices. Nothing here knows what a daemon does.
"""

from typing import Protocol

import msgspec


class Record(msgspec.Struct, frozen=True):
    """What the store holds."""

    holder: str
    """A name that no other process ever has; empty: given back."""
    term: int
    beat: int
    """Grows with every renewal; observers judge the holder's age by their own clock, from when this last changed."""
    ttl_s: float
    """The holder's; an observer waits at least as long."""


class Versioned(msgspec.Struct, frozen=True):
    record: Record
    version: str
    """Of the store; `replace` succeeds only against the newest."""


class LeaseStore(Protocol):
    """Where the record is kept. Called in a thread of its own, one call at a time; each call ends within its deadline."""

    def read(self, *, deadline_s: float) -> Versioned | None:
        """The record; None where there is none yet. Raises ElasticError naming the store."""
        ...

    def replace(self, record: Record, version: str | None, *, deadline_s: float) -> bool:
        """Write if nobody wrote since `version` was read (None: if there is no record). False: somebody did.

        Raises ElasticError where it is not known whether the write took place: the caller reads again.
        """
        ...
