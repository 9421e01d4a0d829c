"""The error classes of the executor, each with a fixed place in the ladder of responses.

Every message is written for the engineer on call: what happened, where, and what to do next.
"""


class ElasticError(Exception):
    """Base class; also the class of errors that only a human can act on (bad input, missing file, refused target)."""


class Retryable(ElasticError):
    """The same command may be sent again, unchanged: a deadline passed, a connection closed."""


class NeedsReplan(ElasticError):
    """The world changed under a sequence (a rank was lost, an epoch is stale): plan again from what is observed."""


class Infeasible(ElasticError):
    """The requested view cannot hold every expert, or is outside the capacity; nothing was changed."""
