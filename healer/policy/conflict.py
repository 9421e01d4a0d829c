"""The form in which relations between values of a policy are told."""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from healer.policy.schema import KeyPath


class Contradiction(NamedTuple):
    """Values that are each valid and do not fit each other."""

    path: KeyPath
    """The place to change."""
    other: KeyPath
    """What it does not fit; empty: itself."""
    text: str
    """What is wrong and what was expected."""
    at: int | None = None
    """The character of the value where it is wrong, from 1."""


class Doubt(NamedTuple):
    """A valid value that may not be meant."""

    path: KeyPath
    text: str


def repeated(names: Sequence[str], place: KeyPath) -> Iterator[Contradiction]:
    """Entries of a list that share a name."""
    seen: set[str] = set()
    for index, name in enumerate(names):
        if name in seen:
            yield Contradiction((*place, index, "name"), (), f"{name!r} is used twice, expected a name of its own")
        seen.add(name)
