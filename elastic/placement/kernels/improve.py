"""Balance: the busiest rank is relieved by one step at a time, the one that brings most for the bytes it moves.

A step is a *copy* (another replica of one of its experts, in a hole or over a replica that can be given up; one move) or an
*exchange* of two experts with a lighter rank (two moves). What a step brings is the fall of the excess: the load of every
rank above the level that is good enough, plus a little for what is above the mean, which tells good steps from the best. Where no step is enough, a *chain* of exchanges may be: see `_chain`.
"""

import numpy as np

from elastic.placement.kernels.jit import compiled
from elastic.placement.kernels.state import Flags, Floats, Frame, Ints, Layer, heaviest, put, spread, take
from elastic.placement.kernels.steps import record

ABOVE_MEAN = 0.05
"""Weight of the load between mean and level."""
SATISFIED = 0.9
"""A step that takes this part of a rank's excess ends the search for a better one."""
LOOK = 6
"""Of so many of the lightest ranks the best step is taken, if they offer any."""
AGAIN = 0.5
"""What writing a slot that these steps have written already costs, in moves: once they are shortened, most such slots are
written once."""
FEW_SLOTS = 4
"""Slots per rank up to which a chain is looked for beside every step that is not enough; with more there is a step."""
FAR = 1.25
"""What a move between NVLink domains costs, in moves within one: breaks ties, and is no reason for more moves."""


@compiled
def excess(load: float, level: float, mean: float) -> float:
    return max(0.0, load - level) + ABOVE_MEAN * max(0.0, load - mean)


@compiled
def improve(
    frame: Frame,
    layer: Layer,
    cost: Floats,
    level: float,
    mean: float,
    worth: float,
    fault_cost: float,
    most_moves: int,
    hops: int,
    kind: int,
    number: int,
    steps: Ints,
    at: int,
) -> int:
    """Make steps until no rank is above `level`, the busiest cannot be relieved for what it is worth, or `most_moves` are
    made, and take the last ones back if they did not pay; returns the new end of `steps`.

    `cost` is what writing each slot costs, in moves; infinite for slots that must not be written. `worth` is the least
    fall of the excess, and in the end of the busiest rank's load, per move. `hops` is the most exchanges of one chain.
    """
    moves, begin = 0, at
    order = frame.live[np.argsort(layer.rank_load[frame.live], kind="mergesort")]
    overwritten = [0 for _ in range(0)]
    # of all states on the way the one is kept that paid best for its moves
    best_value, best_at = 0.0, at
    heaviest_before = heaviest(frame, layer)
    cheapest = cost.min() if len(cost) else 0.0
    width = (frame.first[1:] - frame.first[:-1]).max()
    room = (np.empty(width), np.empty(width, dtype=np.bool_), np.empty(width, dtype=np.bool_))
    total = _total_excess(frame, layer, level, mean)
    chain = np.empty((hops, 4), dtype=np.int32)
    while moves < most_moves:
        _sort_by_load(layer, order)
        busiest = order[-1]
        if layer.rank_load[busiest] <= level:
            break
        p, expert, q, other, score, whole = _best_step(
            frame, layer, order, cost, level, mean, worth, fault_cost, cheapest, room
        )
        if hops > 0 and not whole and (p < 0 or width <= FEW_SLOTS):
            length = _chain(frame, layer, busiest, cost, level, mean, score, chain)
            if length > 0 and moves + 2 * length <= most_moves:
                for i in range(length):
                    p, expert, q, other = chain[i]
                    given = int(layer.held[p])
                    _apply(frame, layer, p, expert, q, other)
                    at = record(steps, at, kind, number, p, expert, q, other)
                    overwritten.append(given)
                    moves += 2
                total = _total_excess(frame, layer, level, mean)
                value = heaviest_before - heaviest(frame, layer) - worth * moves
                if value > best_value:
                    best_value, best_at = value, at
                continue
        if p < 0 or (q >= 0 and moves + 2 > most_moves):
            break
        given = int(layer.held[p])
        _apply(frame, layer, p, expert, q, other)
        before, total = total, _total_excess(frame, layer, level, mean)
        if total >= before - 1e-9 * mean:
            # ranks that hold both experts are estimated separately, so a copy may turn out to be of no use
            _undo(frame, layer, p, given, q, expert)
            break
        at = record(steps, at, kind, number, p, expert, q, other)
        overwritten.append(given)
        cost[p] = min(cost[p], AGAIN)
        cheapest = min(cheapest, AGAIN)
        if q >= 0:
            cost[q] = min(cost[q], AGAIN)
        moves += 1 if q < 0 else 2
        value = heaviest_before - heaviest(frame, layer) - worth * moves
        if value > best_value:
            best_value, best_at = value, at
    while at > best_at:
        at -= 1
        _undo(frame, layer, steps[at, 2], overwritten[at - begin], steps[at, 4], steps[at, 3])
    return at


@compiled
def _apply(frame: Frame, layer: Layer, p: int, expert: int, q: int, other: int) -> None:
    if layer.held[p] >= 0:
        take(frame, layer, p)
    if q >= 0:
        take(frame, layer, q)
        put(frame, layer, q, other)
    put(frame, layer, p, expert)


@compiled
def _undo(frame: Frame, layer: Layer, p: int, given: int, q: int, expert: int) -> None:
    """Take back a step that put `expert` into `p` in place of `given`, and in an exchange `given` into `q`."""
    take(frame, layer, p)
    if q >= 0:
        take(frame, layer, q)
        put(frame, layer, q, expert)
    if given >= 0:
        put(frame, layer, p, given)


@compiled
def _sort_by_load(layer: Layer, order: Ints) -> None:
    """Ascending; by insertion, since a step changes few ranks."""
    for i in range(1, len(order)):
        rank = order[i]
        k = i
        while k > 0 and layer.rank_load[order[k - 1]] > layer.rank_load[rank]:
            order[k] = order[k - 1]
            k -= 1
        order[k] = rank


@compiled
def _total_excess(frame: Frame, layer: Layer, level: float, mean: float) -> float:
    total = 0.0
    for rank in frame.live:
        total += excess(layer.rank_load[rank], level, mean)
    return total


@compiled
def _best_step(
    frame: Frame,
    layer: Layer,
    order: Ints,
    cost: Floats,
    level: float,
    mean: float,
    worth: float,
    fault_cost: float,
    cheapest: float,
    room: tuple[Floats, Flags, Flags],
) -> tuple[int, int, int, int, float, bool]:
    """The step for the last rank of `order` (ascending by load) as (slot, expert, other slot, other expert), slot -1 if none
    is worth it; then what it brings per move, and whether that is all that the rank needs.

    Lighter ranks are tried first; none heavier can bring more than two ranks that meet halfway. `cheapest` is the least
    `cost`; `room` is for the shares of the experts of one rank, and which of them may move or be given up.
    """
    busiest = order[-1]
    heavy = layer.rank_load[busiest]
    here = excess(heavy, level, mean)
    span = frame.first[busiest + 1] - frame.first[busiest]
    relief = np.empty(span, dtype=np.float64)
    falls = np.empty(span, dtype=np.float64)
    shares = np.empty(span, dtype=np.float64)
    other_shares, may_move, may_give = room
    for i in range(span):
        a = layer.held[frame.first[busiest] + i]
        relief[i] = _relief_elsewhere(frame, layer, busiest, a, level, mean)
        shares[i] = layer.load[a] / layer.copies[a] if a >= 0 else 0.0
        falls[i] = shares[i] - layer.load[a] / (layer.copies[a] + 1) if a >= 0 else 0.0
    most_relief = max(0.0, relief.max()) if span else 0.0
    best_score, best_gain = worth, 0.0
    found_p, found_e, found_q, found_o = -1, -1, -1, -1
    looked = 0
    for light in order[:-1]:
        low = layer.rank_load[light]
        if low >= heavy:
            break
        there = excess(low, level, mean)
        bound = here + there - 2 * excess((heavy + low) / 2, level, mean) + most_relief
        if bound <= best_score * cheapest:
            break
        far = FAR if frame.domain[light] != frame.domain[busiest] else 1.0
        start = frame.first[light]
        others = frame.first[light + 1] - start
        of_use = False
        for j in range(others):
            b = layer.held[start + j]
            other_shares[j] = layer.load[b] / layer.copies[b] if b >= 0 else 0.0
            may_move[j] = b >= 0 and not layer.on[busiest, b] and np.isfinite(cost[start + j])
            may_give[j] = (b < 0 or layer.copies[b] > 1) and np.isfinite(cost[start + j])
            of_use = of_use or may_move[j] or may_give[j]
        for i in range(span):
            p = frame.first[busiest] + i
            a = layer.held[p]
            if a < 0 or layer.on[light, a] or not of_use:
                continue
            share, may_leave = shares[i], np.isfinite(cost[p])
            for j in range(others):
                share_b = other_shares[j]
                q, b = start + j, layer.held[start + j]
                # an exchange
                if may_leave and may_move[j] and share > share_b:
                    d = share - share_b
                    gain = here + there - excess(heavy - d, level, mean) - excess(low + d, level, mean)
                    price = far * (cost[p] + cost[q])
                    if gain > best_score * price:
                        price += fault_cost * _spread_lost(frame, layer, a, p, light, b, q, busiest)
                        if gain > best_score * price:
                            best_score, best_gain = gain / price, gain
                            found_p, found_e, found_q, found_o = q, a, p, b
                # a copy
                low_after = low + share - falls[i] - share_b
                if not may_give[j] or low_after >= heavy:
                    continue
                gain = relief[i] + here + there - excess(heavy - falls[i], level, mean) - excess(low_after, level, mean)
                price = far * cost[q]
                if gain > best_score * price:
                    if b >= 0:
                        gain -= _burden_elsewhere(frame, layer, b, q, level, mean, heavy)
                        if layer.copies[b] == 2 and layer.copies[a] > 1:
                            price += fault_cost
                    if gain > best_score * price:
                        best_score, best_gain = gain / price, gain
                        found_p, found_e, found_q, found_o = q, a, -1, -1
        looked += 1
        if best_gain >= SATISFIED * here or (found_p >= 0 and looked >= LOOK):
            break
    return found_p, found_e, found_q, found_o, best_score, best_gain >= SATISFIED * here


@compiled
def _chain(
    frame: Frame,
    layer: Layer,
    busiest: int,
    cost: Floats,
    level: float,
    mean: float,
    least_score: float,
    chain: Ints,
) -> int:
    """A chain of exchanges after which no rank that it concerns is above `level`; returns its length, 0 if there is none.

    An expert of the busiest rank wanders: each rank that it comes to gives a lighter expert to the one before, and it
    stays where it fits. Of the ranks with an expert that is light enough the one is next that then has most room.
    """
    visited = np.zeros(len(frame.first) - 1, dtype=np.bool_)
    longest = len(chain)
    best = longest + 1
    best_score = least_score
    trial = np.empty_like(chain)
    heavy = layer.rank_load[busiest]
    for p0 in range(frame.first[busiest], frame.first[busiest + 1]):
        x = layer.held[p0]
        if x < 0 or not np.isfinite(cost[p0]):
            continue
        share_x = layer.load[x] / layer.copies[x]
        p, rank = p0, busiest
        room = level - (heavy - share_x)
        if room <= 0:
            continue
        visited[:] = False
        visited[busiest] = True
        before, after, price = excess(heavy, level, mean), 0.0, 0.0
        for hop in range(min(longest, best)):
            found, found_rest, found_fits, found_share = -1, np.inf, False, 0.0
            for light in frame.live:
                if visited[light] or layer.on[light, x]:
                    continue
                for q in range(frame.first[light], frame.first[light + 1]):
                    y = layer.held[q]
                    if y < 0 or not np.isfinite(cost[q]):
                        continue
                    share_y = layer.load[y] / layer.copies[y]
                    if share_y > room or share_y >= share_x or layer.on[rank, y]:
                        continue
                    rest = layer.rank_load[light] - share_y
                    fits = rest + share_x <= level
                    if fits:
                        if not found_fits or share_y > found_share:
                            found, found_rest, found_fits, found_share = q, rest, True, share_y
                    elif not found_fits and rest < found_rest:
                        found, found_rest, found_share = q, rest, share_y
            if found < 0:
                break
            light = frame.owner[found]
            trial[hop, 0], trial[hop, 1], trial[hop, 2], trial[hop, 3] = found, x, p, layer.held[found]
            after += excess(level - room + found_share, level, mean)
            before += excess(layer.rank_load[light], level, mean)
            price += cost[found] + cost[p]
            if found_fits:
                after += excess(found_rest + share_x, level, mean)
                score = (before - after) / price
                if score > best_score:
                    best_score = score
                    best = hop + 1
                    chain[:best] = trial[:best]
                break
            visited[light] = True
            p, rank = found, light
            room = level - found_rest
    return best if best <= longest else 0


@compiled
def _relief_elsewhere(frame: Frame, layer: Layer, busiest: int, expert: int, level: float, mean: float) -> float:
    """The fall of the excess of all other ranks with `expert`, if it had one replica more."""
    if expert < 0:
        return 0.0
    count = layer.copies[expert]
    less = layer.load[expert] / count - layer.load[expert] / (count + 1)
    total = 0.0
    for k in range(count):
        rank = frame.owner[layer.holders[expert, k]]
        if rank != busiest:
            load = layer.rank_load[rank]
            total += excess(load, level, mean) - excess(load - less, level, mean)
    return total


@compiled
def _burden_elsewhere(frame: Frame, layer: Layer, expert: int, p: int, level: float, mean: float, most: float) -> float:
    """The rise of the excess of the other ranks with `expert`, if the replica in slot `p` were gone; infinite if one of
    them would reach `most`."""
    count = layer.copies[expert]
    more = layer.load[expert] / (count - 1) - layer.load[expert] / count
    total = 0.0
    for k in range(count):
        q = layer.holders[expert, k]
        if q != p:
            load = layer.rank_load[frame.owner[q]]
            if load + more >= most:
                return np.inf
            total += excess(load + more, level, mean) - excess(load, level, mean)
    return total


@compiled
def _spread_lost(frame: Frame, layer: Layer, a: int, p: int, to_a: int, b: int, q: int, to_b: int) -> int:
    """How many of two exchanged experts had copies on two hosts and would not have them any more."""
    lost = 0
    if layer.copies[a] > 1 and spread(frame, layer, a, -1, -1) and not spread(frame, layer, a, p, to_a):
        lost += 1
    if layer.copies[b] > 1 and spread(frame, layer, b, -1, -1) and not spread(frame, layer, b, q, to_b):
        lost += 1
    return lost
