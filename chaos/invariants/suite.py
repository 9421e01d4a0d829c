"""All checks over one run record."""

from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path

from chaos.invariants import coverage, journal, removals, sequences, steps, tokens
from chaos.invariants.violation import Violation
from chaos.report import source

CHECKS: tuple[Callable[[source.RunData], Iterator[Violation]], ...] = (
    coverage.check,
    steps.check,
    tokens.check,
    sequences.check,
    removals.check,
    journal.check,
)
PER_CHECK = 20
"""More violations of one kind of record say nothing new."""


def check(run: Path) -> list[Violation]:
    """Of a run's directory. Raises ElasticError where a record is damaged."""
    data = source.read(run).runs[0]
    return [violation for one in CHECKS for violation in islice(one(data), PER_CHECK)]
