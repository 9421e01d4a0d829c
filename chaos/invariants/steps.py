"""Invariants 2, 3, 4 and 7 by the ranks' own steps."""

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field

from chaos import records
from chaos.invariants.violation import Violation
from chaos.records import PhaseEvent
from chaos.report.source import RunData
from elastic.flight import Boot, Emission, StepLine, Stepped, Viewed


@dataclass
class Stretch:
    """Committed steps of one incarnation under one epoch, all in a row. Times as in the records."""

    slot: int
    incarnation: int
    epoch: int
    first_round: int
    last_round: int
    began: float
    ended: float


def _by_epoch() -> dict[int, dict[int, float]]:
    return defaultdict(dict)


@dataclass
class _Group:
    """What the ranks say together. Moments by epoch and slot."""

    stretches: list[Stretch] = field(default_factory=list)
    viewed: dict[int, dict[int, float]] = field(default_factory=_by_epoch)
    """When the rank had taken the view over; of a commit that was given again, the last."""
    began: dict[int, dict[int, float]] = field(default_factory=_by_epoch)
    """When it began its first step under the epoch, whether or not that step counted."""


def check(data: RunData) -> Iterator[Violation]:
    group = _Group()
    for slot, path in records.step_files(data.path).items():
        yield from _rank(slot, records.lines(path, StepLine), group)
    yield from _together(group.stretches)
    yield from _barrier(data, group)


def _rank(slot: int, lines: Iterator[StepLine], group: _Group) -> Iterator[Violation]:
    """One rank by itself; adds what it says to `group`."""
    view: Viewed | None = None
    first: Stepped | None = None
    step: Stepped | None = None
    base = incarnation = 0
    previous: StepLine | None = None
    for line in lines:
        where = f"slot {slot}.{line.incarnation}, at {line.at:.3f}"
        if line.incarnation < incarnation:
            yield Violation(7, where, f"ran on after incarnation {incarnation} had begun in its slot")
            continue
        match line:
            case Boot():
                view = first = step = None
                base, incarnation = 0, line.incarnation
            case Viewed():
                if view is not None and line.epoch < view.epoch:
                    yield Violation(7, where, f"went back from epoch {view.epoch} to {line.epoch}")
                if line.base <= base:
                    yield Violation(7, where, f"numbers dispatches from {line.base} again, it was at {base}")
                view, base = line, line.base
                group.viewed[line.epoch][slot] = line.at
                # a rank on a GPU hands out what it committed behind the next launch, which may be that of another view
                continue
            case Stepped():
                group.began[line.epoch].setdefault(slot, line.began)
                if not line.committed:
                    previous = line
                    continue
                yield from _committed(where, line, view, first)
                if step is not None and line.round <= step.round and line.epoch == step.epoch:
                    yield Violation(4, where, f"committed round {line.round} after round {step.round}")
                first, step = first or line, line
                _extend(group.stretches, slot, line)
            case Emission():
                if not (isinstance(previous, Stepped) and previous.committed and previous.round == line.round):
                    yield Violation(4, where, f"emitted tokens of round {line.round} that did not follow its commit")
        previous = line


def _committed(where: str, step: Stepped, view: Viewed | None, first: Stepped | None) -> Iterator[Violation]:
    if step.masked:
        yield Violation(4, where, f"committed round {step.round} while slots {step.masked} were masked")
    if view is None or step.epoch != view.epoch:
        known = view.epoch if view else "none"
        yield Violation(2, where, f"committed a step of epoch {step.epoch}, the view that it took over is {known}")
    elif step.placement_hash != view.placement_hash:
        yield Violation(2, where, f"stepped by map {step.placement_hash[:8]}, took over {view.placement_hash[:8]}")
    elif step.table_hash and step.table_hash != view.table_hash:
        yield Violation(2, where, f"the route table changed between commits: round {step.round}")
    if first is not None and step.captures != first.captures:
        yield Violation(3, where, f"captured graphs while it served: {first.captures}, then {step.captures}")
    if first is not None and step.address_hash != first.address_hash:
        yield Violation(3, where, "the address of a graph-facing tensor changed while it served")


def _extend(stretches: list[Stretch], slot: int, step: Stepped) -> None:
    last = stretches[-1] if stretches else None
    same = last and (last.slot, last.incarnation, last.epoch) == (slot, step.incarnation, step.epoch)
    if last and same:
        last.last_round, last.ended = step.round, step.at
    else:
        stretches.append(Stretch(slot, step.incarnation, step.epoch, step.round, step.round, step.began, step.at))


def _together(stretches: list[Stretch]) -> Iterator[Violation]:
    """No round is committed under an epoch that one of its ranks has committed already, or a later one, under an earlier epoch.
    Rounds, not moments: ranks take a view over before the same round, each when it comes to it. What a rank committed that is
    not of the later epoch does not count: it may have died with a round that the others discarded."""
    by_epoch: dict[int, list[Stretch]] = defaultdict(list)
    for stretch in stretches:
        by_epoch[stretch.epoch].append(stretch)
    before: dict[tuple[int, int], Stretch] = {}
    for _, group in sorted(by_epoch.items()):
        known = [before[key] for one in group if (key := (one.slot, one.incarnation)) in before]
        newest = max(known, key=lambda one: one.last_round, default=None)
        for late in group:
            if newest is not None and late.first_round <= newest.last_round:
                yield Violation(
                    2,
                    f"slots {newest.slot} and {late.slot}",
                    f"slot {late.slot} committed round {late.first_round} under epoch {late.epoch}, slot {newest.slot} round "
                    f"{newest.last_round} under epoch {newest.epoch}",
                )
        before |= {(one.slot, one.incarnation): one for one in group}


def _barrier(data: RunData, group: _Group) -> Iterator[Violation]:
    """After a loss no rank steps before all have taken the view over, and the daemon, who waits for that, lets them go. (A planned
    change is taken over by each rank when it comes to the round, so there it may.)"""
    phases = [line for line in data.sequences if isinstance(line, PhaseEvent) and line.kind == "loss"]
    let_go = {line.epoch: line.at for line in phases if line.phase == "resume"}
    for epoch in sorted({line.epoch for line in phases} & group.viewed.keys() & group.began.keys()):
        first, began = min(group.began[epoch].items(), key=lambda found: found[1])
        waited_for = {f"slot {slot} had taken the view over": at for slot, at in group.viewed[epoch].items()}
        if epoch in let_go:
            waited_for["the daemon let the ranks go"] = let_go[epoch]
        last, at = max(waited_for.items(), key=lambda found: found[1])
        if began < at:
            told = f"slot {first} began to step {1e3 * (at - began):.1f} ms before {last}"
            yield Violation(2, f"epoch {epoch}", told)
