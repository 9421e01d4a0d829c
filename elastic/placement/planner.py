"""Which expert goes where: pure functions from what the buffers hold and who is live to a plan of moves.

Coverage comes first, then an even share of replicas for every rank, then few moves. Every layer is planned for itself;
ties go to the rank that has least to load so far, so that the loading ranks finish together.

What makes a plan safe to run: only a replica whose expert keeps another copy on a live rank is ever overwritten. So the
present map still covers without the overwritten buffers, and a buffer that a move reads is never written by another.
"""

import heapq
from collections.abc import Collection, Sequence

import msgspec

from elastic.errors import ElasticError, Infeasible
from elastic.placement.maps import HOLE, Move, Placement, Plan, Row


def initial(
    *, experts: int, layers: int, capacity: int, slots_per_rank: int, live: Collection[int], redundant: int
) -> Placement:
    """The first map of a group: every expert once, in contiguous runs over the live slots in order, then `redundant` more
    replicas per layer while there is room, placed so that the loss of any one rank orphans few experts.

    Raises Infeasible where the live ranks cannot hold every expert, or a live slot is outside the capacity.
    """
    empty = Placement(
        experts=experts,
        capacity=capacity,
        slots_per_rank=slots_per_rank,
        rows=((HOLE,) * (capacity * slots_per_rank),) * layers,
    )
    slots = _feasible(empty, live, redundant)
    once = msgspec.structs.replace(empty, rows=tuple(_contiguous(empty, slots, layer) for layer in range(layers)))
    return replan(once, present=slots, live=slots, redundant=redundant).target


def replan(
    contents: Placement,
    *,
    present: Collection[int],
    live: Collection[int],
    redundant: int,
    restore_redundancy: bool = True,
) -> Plan:
    """Plan the way from `contents` to a map in which every expert has a copy on a live slot.

    `contents` is what the expert buffers hold now and must be well-formed (`Placement.check`). `present` are the slots
    that serve now and survive: they alone can be sources, the rows of all others are ignored (a lost rank's, or those of
    an earlier incarnation of a joining one). `live` are the slots of the next view: those in `live` but not in `present`
    join with empty buffers, those in `present` but not in `live` leave and are still sources.

    With `restore_redundancy` the target holds exactly `experts + redundant` replicas per layer, or as many as there is
    room for, and no rank holds two more than another; excess replicas are dropped, which moves no bytes. Without it (an
    unplanned loss, where every byte lengthens the pause) only experts without a copy on a live slot are placed, in holes
    if there are any, else over replicas; whatever else is held stays.

    Raises Infeasible, with the numbers, where the live ranks cannot hold every expert or a slot is outside the capacity.
    """
    slots = _feasible(contents, live, redundant)
    serving = _within_capacity(contents, present)
    planner = _Planner(contents, serving, slots, redundant if restore_redundancy else None)
    targets: list[Row] = []
    vacated: list[Row] = []
    fills: list[Move] = []
    overwrites: list[Move] = []
    for layer in range(len(contents.rows)):
        work = planner.plan(layer)
        present_row = list(work.now)
        for physical, move in planner.moves(layer, work):
            if work.now[physical] == HOLE:
                fills.append(move)
            else:
                overwrites.append(move)
                present_row[physical] = HOLE
        targets.append(tuple(work.row))
        vacated.append(tuple(present_row))
    return Plan(
        target=msgspec.structs.replace(contents, rows=tuple(targets)),
        vacated=msgspec.structs.replace(contents, rows=tuple(vacated)),
        fills=tuple(fills),
        overwrites=tuple(overwrites),
    )


def losses_survivable(*, experts: int, slots_per_rank: int, live: int) -> int:
    """How many of `live` ranks, whichever they are, can be lost with a physical slot left for every expert."""
    if live < 1 or slots_per_rank < 1:
        return 0
    ranks_needed = max(1, -(-experts // slots_per_rank))
    return max(0, live - ranks_needed)


def _within_capacity(placement: Placement, slots: Collection[int]) -> list[int]:
    outside = sorted(slot for slot in slots if not 0 <= slot < placement.capacity)
    if outside:
        raise Infeasible(f"placement: slots {outside} are outside the capacity of {placement.capacity} slots")
    return sorted(set(slots))


def _feasible(placement: Placement, live: Collection[int], redundant: int) -> list[int]:
    """The live slots, ascending, if they can hold every expert."""
    if redundant < 0:
        raise ElasticError(f"placement: {redundant} redundant experts is negative")
    slots = _within_capacity(placement, live)
    if len(slots) * placement.slots_per_rank < placement.experts or not slots:
        raise Infeasible(
            f"placement: {len(slots)} live ranks x {placement.slots_per_rank} slots hold fewer than "
            f"{placement.experts} experts; keep at least {-(-placement.experts // placement.slots_per_rank)} ranks"
        )
    return slots


def _contiguous(placement: Placement, slots: Sequence[int], layer: int) -> Row:
    """Every expert once; the ranks with one expert more than the others change from layer to layer."""
    row = [HOLE] * (placement.capacity * placement.slots_per_rank)
    share, longer = divmod(placement.experts, len(slots))
    expert = 0
    for i, slot in enumerate(slots):
        count = share + ((i - layer) % len(slots) < longer)
        start = slot * placement.slots_per_rank
        row[start : start + count] = range(expert, expert + count)
        expert += count
    return tuple(row)


class _Layer:
    """One layer while it is planned."""

    def __init__(self, now: list[int], row: list[int], copies: list[list[int]], load: dict[int, int]) -> None:
        self.now = now
        """What the present slots hold, by physical slot; all others are holes."""
        self.row = row
        """The target."""
        self.copies = copies
        """Physical slots in the target, by expert."""
        self.load = load
        """Experts in the target, by live slot."""
        self.placed: list[int] = []
        """Physical slots of the target that have to be loaded."""

    def drop(self, physical: int, slot: int) -> None:
        self.copies[self.row[physical]].remove(physical)
        self.row[physical] = HOLE
        self.load[slot] -= 1

    def keep(self, physical: int, slot: int, expert: int) -> None:
        self.row[physical] = expert
        self.copies[expert].append(physical)
        self.load[slot] += 1


class _Planner:
    """Plans layer after layer, and remembers what each rank has to load and to send so far."""

    def __init__(self, contents: Placement, present: list[int], live: list[int], redundant: int | None) -> None:
        self._experts = contents.experts
        self._rows = contents.rows
        self._width = contents.slots_per_rank
        self._live = live
        # a rank holds an expert once at most, however many slots it has
        self._room = min(contents.slots_per_rank, contents.experts)
        most = self._room * len(live)
        self._total = None if redundant is None else min(contents.experts + redundant, most)
        self._spans = {slot: contents.physical(slot) for slot in range(contents.capacity)}
        self._owner = [slot for slot in range(contents.capacity) for _ in range(contents.slots_per_rank)]
        staying = set(present) & set(live)
        self._kept = [(slot, self._spans[slot]) for slot in live if slot in staying]
        self._sources = [p for slot in present for p in self._spans[slot]]
        self._to_load = dict.fromkeys(live, 0)
        self._to_send = dict.fromkeys(present, 0)

    def plan(self, layer: int) -> _Layer:
        work = self._retained(layer)
        quota = self._quota(work)
        self._shed_overload(work, quota)
        missing = [e for e, copies in enumerate(work.copies) if not copies]
        open_slots = sum(quota.values()) - sum(work.load.values())
        if len(missing) > open_slots:
            self._shed_replicas(work, len(missing) - open_slots)
        missing = self._restore(work, quota, missing)
        extras = 0 if self._total is None else self._total - sum(work.load.values()) - len(missing)
        if missing or extras:
            self._place(work, quota, missing, extras, layer)
        return work

    def moves(self, layer: int, work: _Layer) -> list[tuple[int, Move]]:
        """The moves that fill the placed slots, each with its physical destination; sources are spread over the ranks."""
        if not work.placed:
            return []
        written = set(work.placed)
        sources: dict[int, list[int]] = {work.row[p]: [] for p in work.placed}
        for p in self._sources:
            expert = work.now[p]
            if expert in sources and p not in written:
                sources[expert].append(p)
        planned: list[tuple[int, Move]] = []
        for p in work.placed:
            expert, slot = work.row[p], self._owner[p]
            from_slot = from_index = HOLE
            if held := sources[expert]:
                source = min(held, key=lambda q: self._to_send[self._owner[q]])
                from_slot, from_index = divmod(source, self._width)
                self._to_send[from_slot] += 1
            planned.append((p, Move(layer, expert, slot, p - slot * self._width, from_slot, from_index)))
        return planned

    def _retained(self, layer: int) -> _Layer:
        """The layer with every copy that a staying rank holds."""
        row = self._rows[layer]
        now, target = [HOLE] * len(row), [HOLE] * len(row)
        for p in self._sources:
            now[p] = row[p]
        copies: list[list[int]] = [[] for _ in range(self._experts)]
        load = dict.fromkeys(self._live, 0)
        for slot, span in self._kept:
            for p in span:
                expert = row[p]
                if expert != HOLE:
                    target[p] = expert
                    copies[expert].append(p)
                    load[slot] += 1
        return _Layer(now, target, copies, load)

    def _quota(self, work: _Layer) -> dict[int, int]:
        """How many experts each live rank may hold: all that fit, or an even share of the total."""
        if self._total is None:
            return dict.fromkeys(self._live, self._room)
        share, longer = divmod(self._total, len(self._live))
        quota = dict.fromkeys(self._live, share)
        # the larger shares go where most is held already: nothing has to move for them
        for slot in sorted(self._live, key=lambda s: (-work.load[s], self._to_load[s], s))[:longer]:
            quota[slot] += 1
        return quota

    def _shed_overload(self, work: _Layer, quota: dict[int, int]) -> None:
        """Drop what is beyond a rank's quota: replicas first, and of those the ones that no other such rank could drop."""
        over = {slot for slot in self._live if work.load[slot] > quota[slot]}
        for slot in sorted(over):

            def worth(p: int) -> tuple[int, int, int]:
                copies = work.copies[work.row[p]]
                return len(copies), -sum(self._owner[q] in over for q in copies), p

            held = [p for p in self._spans[slot] if work.row[p] != HOLE]
            for p in heapq.nlargest(work.load[slot] - quota[slot], held, key=worth):
                work.drop(p, slot)

    def _shed_replicas(self, work: _Layer, count: int) -> None:
        """Drop `count` replicas of experts that keep a copy; from the ranks that have least to load."""
        spare: dict[int, list[int]] = {}
        for copies in work.copies:
            if len(copies) > 1:
                for p in copies:
                    spare.setdefault(self._owner[p], []).append(p)
        freed = dict.fromkeys(spare, 0)
        while count:
            slot = min(spare, key=lambda s: (self._to_load[s] + freed[s], s))
            held = [p for p in spare[slot] if len(work.copies[work.row[p]]) > 1]
            if not held:
                del spare[slot]
                continue
            p = max(held, key=lambda p: len(work.copies[work.row[p]]))
            work.drop(p, slot)
            held.remove(p)
            spare[slot] = held
            freed[slot] += 1
            count -= 1

    def _restore(self, work: _Layer, quota: dict[int, int], missing: list[int]) -> list[int]:
        """Keep what was dropped too eagerly: a rank below its quota that still has a missing expert in its buffers."""
        wanted = set(missing)
        for slot, span in self._kept:
            for p in span:
                if work.load[slot] >= quota[slot]:
                    break
                if work.now[p] in wanted:
                    work.keep(p, slot, work.now[p])
                    wanted.discard(work.now[p])
        return [e for e in missing if e in wanted]

    def _place(self, work: _Layer, quota: dict[int, int], missing: list[int], extras: int, layer: int) -> None:
        """Give the missing experts, then `extras` more replicas, to the ranks that are furthest below their quota."""
        open_ranks = [(work.load[s] - quota[s], self._to_load[s], s) for s in self._live if work.load[s] < quota[s]]
        heapq.heapify(open_ranks)
        # decided before anything is placed: a copy still to be loaded makes no replica safe to overwrite
        free = {slot: self._writable(work, slot) for _, _, slot in open_ranks}
        sole: dict[int, list[int]] | None = None
        for i in range(len(missing) + extras):
            below, to_load, slot = heapq.heappop(open_ranks)
            if i < len(missing):
                expert = missing[i]
            else:
                if sole is None:
                    sole = self._sole(work)
                expert = self._replicate(work, sole, slot, layer)
            p = free[slot].pop()
            work.keep(p, slot, expert)
            work.placed.append(p)
            self._to_load[slot] += 1
            if below + 1 < 0:
                heapq.heappush(open_ranks, (below + 1, to_load + 1, slot))

    def _writable(self, work: _Layer, slot: int) -> list[int]:
        """The buffers of a rank that may be written, best last: holes, before them replicas that the target drops."""
        unused = [p for p in reversed(self._spans[slot]) if work.row[p] == HOLE]
        holes = [p for p in unused if work.now[p] == HOLE]
        return [p for p in unused if work.now[p] != HOLE and work.copies[work.now[p]]] + holes

    def _sole(self, work: _Layer) -> dict[int, list[int]]:
        """The experts with one copy, by the rank that holds it."""
        sole: dict[int, list[int]] = {slot: [] for slot in self._live}
        for expert, copies in enumerate(work.copies):
            if len(copies) == 1:
                sole[self._owner[copies[0]]].append(expert)
        return sole

    def _replicate(self, work: _Layer, sole: dict[int, list[int]], slot: int, layer: int) -> int:
        """Choose the expert of which `slot` gets a replica: a sole one of the rank whose loss would orphan most."""
        size = len(self._live)
        at = self._live.index(slot)
        donor = max(
            (i for i in range(size) if i != at),
            # a rank's replicas are spread over its peers, differently in every layer
            key=lambda i: (len(sole[self._live[i]]), -((i - at - layer) % size)),
            default=at,
        )
        if donor != at and sole[self._live[donor]]:
            return sole[self._live[donor]].pop()
        span = self._spans[slot]
        elsewhere = [e for e, copies in enumerate(work.copies) if not any(p in span for p in copies)]
        return min(elsewhere, key=lambda e: len(work.copies[e]))
