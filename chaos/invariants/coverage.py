"""Invariants 1 and 2 by the maps: what each rank took over at a commit, held against what the ranks hold."""

from collections import defaultdict
from collections.abc import Iterator

from chaos import records
from chaos.invariants.violation import Violation
from chaos.report.source import RunData
from elastic.flight import Boot, StepLine, Stepped, Viewed

HOLE = -1


def check(data: RunData) -> Iterator[Violation]:
    views: dict[int, dict[int, Viewed]] = defaultdict(dict)
    slots_per_rank = 0
    served: set[tuple[int, int]] = set()
    for slot, path in records.step_files(data.path).items():
        for line in records.lines(path, StepLine):
            match line:
                case Boot():
                    slots_per_rank = line.slots_per_rank
                case Viewed():
                    # a commit may be given again under one epoch: the last one counts
                    views[line.epoch][slot] = line
                case Stepped() if line.committed:
                    served.add((line.epoch, slot))
    for epoch, by_slot in sorted(views.items()):
        acting = {slot: view for slot, view in by_slot.items() if (epoch, slot) in served}
        yield from _one_map(epoch, acting)
        for slot, view in acting.items():
            yield from _held(slot, view, slots_per_rank)
            yield from _covered(slot, view, acting, slots_per_rank)


def _one_map(epoch: int, views: dict[int, Viewed]) -> Iterator[Violation]:
    maps = {(view.placement_hash, view.live, view.rows) for view in views.values()}
    if len(maps) > 1:
        told = ", ".join(f"slot {slot} {view.placement_hash[:8]} over {view.live}" for slot, view in views.items())
        yield Violation(2, f"epoch {epoch}", f"ranks took over different views: {told}")


def _held(slot: int, view: Viewed, slots_per_rank: int) -> Iterator[Violation]:
    """The map says nothing of this rank that its buffers do not hold."""
    first = slot * slots_per_rank
    for layer, row in enumerate(view.rows):
        for index, expert in enumerate(row[first : first + slots_per_rank]):
            if expert not in (HOLE, view.contents[layer][index]):
                yield Violation(
                    1,
                    f"slot {slot}, epoch {view.epoch}, layer {layer}",
                    f"the map has expert {expert} in its buffer {index}, which holds {view.contents[layer][index]}",
                )
                return


def _covered(slot: int, view: Viewed, acting: dict[int, Viewed], slots_per_rank: int) -> Iterator[Violation]:
    """Every expert has a route, and each route ends at a live rank that holds the expert."""
    layers = len(view.rows)
    experts = len(view.routed) // layers if layers else 0
    for flat, slots in enumerate(view.routed):
        layer, expert = divmod(flat, experts)
        where = f"slot {slot}, epoch {view.epoch}, layer {layer}, expert {expert}"
        if not slots:
            yield Violation(1, where, "no route in the table")
            return
        for target in slots:
            if target not in view.live:
                yield Violation(1, where, f"its route leads to slot {target}, which is not live")
                return
            row = view.rows[layer][target * slots_per_rank : (target + 1) * slots_per_rank]
            if expert not in row:
                yield Violation(2, where, f"its route leads to slot {target}, where the map has no copy")
                return
            if target in acting and expert not in acting[target].contents[layer]:
                yield Violation(1, where, f"its route leads to slot {target}, whose buffers do not hold it")
                return
