"""Whether this daemon may act, asked at the last moment before each act.

Without a lease it always may: a file lock keeps others away. With one it may until the lease lapses, and then never again in
this process, even if its keeper should win the lease anew: everything here was begun under the old term.
"""

from collections.abc import Callable

from elastic.errors import Superseded

ALWAYS: Callable[[], bool] = lambda: True  # noqa: E731 (a name for a default)


class Authority:
    """Owned by the supervisor's loop."""

    def __init__(self, term: int = 0, armed: Callable[[], bool] = ALWAYS) -> None:
        """`term`: of the lease; 0: none. `armed`: whether it is held at this very moment, under this term."""
        self.term = term
        self.over = ""
        """Why this daemon may not act any more; empty: it may."""
        self._armed = armed

    def armed(self) -> bool:
        if not self.over and not self._armed():
            self.end(f"the lease of term {self.term} is over")
        return not self.over

    def end(self, why: str) -> None:
        self.over = self.over or why

    def check(self) -> None:
        """Raises Superseded where this daemon may not act."""
        if not self.armed():
            raise Superseded(self.over)
