"""Invariants 6 and 7 by what the executors of all daemons said at the moment."""

from collections.abc import Iterator, Mapping

from chaos.invariants.violation import Violation
from chaos.records import DaemonEvent, PhaseEvent, ReportEvent
from chaos.report.source import RunData

ORDER: Mapping[str, tuple[str, ...]] = {
    "loss": ("begin", "park", "commit", "resume"),
    "join": ("begin", "vacate", "load", "connect", "park", "commit", "resume"),
    "form": ("begin", "load", "connect", "park", "commit", "resume"),
    "retire": ("begin", "handover", "vacate", "move", "park", "commit", "resume"),
}
"""From section 5 of the design; no state is entered twice."""

OPTIONAL = frozenset({"vacate"})


def check(data: RunData) -> Iterator[Violation]:
    running: PhaseEvent | None = None
    state = ""
    epoch = 0
    writer = 0
    given: dict[int, int] = {}
    """The newest epoch of each daemon's sequences: one that its predecessor told nobody of it may give again."""
    gone: set[int] = set()
    for line in data.sequences:
        where = f"daemon {line.daemon_pid}, at {line.at:.3f}"
        if isinstance(line, DaemonEvent):
            if line.what == "began":
                # what its predecessor was in the middle of is finished by its own next sequence
                gone |= {writer} - {line.daemon_pid, 0}
                running = None
            continue
        if line.daemon_pid in gone and line.daemon_pid != writer:
            yield Violation(7, where, "acted after a later daemon had acted")
        writer = line.daemon_pid
        if isinstance(line, PhaseEvent):
            # the state "begin" is not told of: a kind and an epoch are one sequence, and its first word follows its beginning
            if running is None or (line.kind, line.epoch) != (running.kind, running.epoch):
                if running is not None:
                    yield Violation(6, where, f"began {line.kind} while {running.kind} was running")
                if line.epoch <= max(given.get(line.daemon_pid, 0), epoch):
                    yield Violation(
                        7, where, f"began {line.kind} under epoch {line.epoch}, which had been given before"
                    )
                given[line.daemon_pid] = line.epoch
                running, state = line, "" if line.phase == "begin" else "begin"
            yield from _moved(where, line, state)
            state = line.phase
        elif isinstance(line, ReportEvent):
            report = line.report
            if report.outcome == "committed" and report.epoch < epoch:
                yield Violation(7, where, f"committed epoch {report.epoch} after epoch {epoch}")
            if report.outcome == "committed":
                epoch = max(epoch, report.epoch)
            running = None
    if running is not None and data.run.ended - running.at > 60:
        yield Violation(
            6, f"daemon {running.daemon_pid}, at {running.at:.3f}", f"{running.kind} had no end in a minute"
        )


def _moved(where: str, line: PhaseEvent, state: str) -> Iterator[Violation]:
    order = ORDER[line.kind]
    if line.phase not in order:
        yield Violation(6, where, f"{line.kind} has no state {line.phase}")
    elif state in order:
        skipped = order[order.index(state) + 1 : order.index(line.phase)]
        if order.index(line.phase) <= order.index(state) or set(skipped) - OPTIONAL:
            yield Violation(6, where, f"{line.kind} went from {state} to {line.phase}")
