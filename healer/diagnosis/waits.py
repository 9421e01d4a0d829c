"""The wait graph of ranks that are heard: who is cut off from most others, and who waits for each other. Pure.

A rank that is waited for and waits itself is a link of a chain, and not to blame; what nobody can be blamed for is a cycle.
The shortest is an edge that goes both ways, a *mutual wait*. Which of its two ends is broken, if any, the two cannot say: it
takes a majority. The ranks to blame for all waiting are the smallest set without which nobody waits, a minimum vertex cover;
it is looked for only where it must be the one such set, with less than half of all ranks. Then no search is needed: a rank
with more mutual waits than such a set has members is in each such set (the kernel of vertex cover: J. F. Buss and J. Goldsmith,
"Nondeterminism within P", SIAM J. Comput. 22, 1993).
"""

from collections.abc import Collection, Mapping

from healer.evidence import RankRef

Waits = Mapping[RankRef, Collection[RankRef]]
"""Reporter -> the ranks that it waits for now. Only ranks that are heard report."""


def mutual(waits: Waits) -> dict[RankRef, frozenset[RankRef]]:
    """Each rank that waits for one that waits for it, and those that do."""
    found = {
        rank: frozenset(peer for peer in row if peer != rank and rank in waits.get(peer, ()))
        for rank, row in waits.items()
    }
    return {rank: peers for rank, peers in found.items() if peers}


def cut_off(waits: Waits, count: int) -> frozenset[RankRef]:
    """The ranks that more than half of all `count` wait for and that wait for these too, where they are less than half of all
    and nobody else waits for anybody; else none. So one side of a partition is named by the side with the majority, and two
    equal sides, a link, and a wait that the partition does not explain name nobody."""
    named = frozenset(rank for rank, peers in mutual(waits).items() if 2 * len(peers) > count)
    if not named or 2 * len(named) >= count:
        return frozenset()
    left = any(peer not in named for rank, row in waits.items() if rank not in named for peer in row)
    return frozenset() if left else named
