"""What a check found."""

import msgspec


class Violation(msgspec.Struct, frozen=True):
    invariant: int
    """Of section 3 of the design, 1 to 10; the table is in `chaos.invariants`."""
    where: str
    """Rank, request or sequence, and the moment or line."""
    what: str

    def __str__(self) -> str:
        return f"invariant {self.invariant}: {self.where}: {self.what}"
