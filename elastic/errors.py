"""The error classes of the executor, each with a fixed place in the ladder of responses.

Every message is written for the engineer on call: what happened, where, and what to do next.
"""

from collections.abc import Iterable


class ElasticError(Exception):
    """Base class; also the class of errors that only a human can act on (bad input, missing file, refused target)."""


class Retryable(ElasticError):
    """The same command may be sent again, unchanged: a deadline passed, a connection closed."""


class Unreachable(Retryable):
    """Other ranks gave a rank no answer, or connecting to them failed: the fault is taken for theirs, or of the way to them, not of
    the rank that says so."""

    def __init__(self, message: str, slots: Iterable[int]) -> None:
        super().__init__(message)
        self.slots = tuple(sorted(slots))


class NeedsReplan(ElasticError):
    """The world changed under a sequence (a rank was lost, an epoch is stale): plan again from what is observed."""


class Superseded(ElasticError):
    """Another controller, of a higher term, has taken the group, or this one's time is over: it must not act any more."""


class Infeasible(ElasticError):
    """The requested view cannot hold every expert, or is outside the capacity; nothing was changed."""
