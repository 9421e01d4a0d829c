"""Slots, ranks and columns: where a rank stands that may have lost its neighbours.

A *slot* is vLLM's `data_parallel_rank`; it never changes. A *rank* is an expert-parallel rank, `slot * tensor_parallel + t`; it
never changes either. Only process groups are *dense*: the member of lowest rank is number 0 there, and so on. A *column* is a
physical expert, `rank * experts_per_rank + row`, as in vLLM's maps. Pure index arithmetic.
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class Slots:
    """Who is there, of the ranks that the group has room for."""

    size: int
    """Slots that the group was configured with, live or not: vLLM's `data_parallel_size`."""
    live: tuple[int, ...]
    """Ascending."""
    tensor_parallel: int = 1

    def __post_init__(self) -> None:
        if tuple(sorted(set(self.live))) != self.live or not self.live:
            raise ValueError(f"live slots {self.live}: expected at least one, ascending, each once")
        if self.live[0] < 0 or self.live[-1] >= self.size:
            raise ValueError(f"live slots {self.live}: the group has slots 0 to {self.size - 1}")
        if self.tensor_parallel < 1:
            raise ValueError(f"tensor-parallel size {self.tensor_parallel}: expected at least 1")

    @classmethod
    def full(cls, size: int, tensor_parallel: int = 1) -> "Slots":
        return cls(size, tuple(range(size)), tensor_parallel)

    def with_live(self, live: tuple[int, ...] | list[int]) -> "Slots":
        return Slots(self.size, tuple(sorted(live)), self.tensor_parallel)

    @property
    def empty(self) -> tuple[int, ...]:
        return tuple(slot for slot in range(self.size) if slot not in self.live)

    @property
    def whole(self) -> bool:
        return len(self.live) == self.size

    def dense(self, slot: int) -> int:
        """Number of a live slot in a group over the live ones. Raises ValueError for an empty slot."""
        return self.live.index(slot)

    def ranks_of(self, slots: tuple[int, ...]) -> tuple[int, ...]:
        return tuple(slot * self.tensor_parallel + t for slot in slots for t in range(self.tensor_parallel))

    @property
    def live_ranks(self) -> tuple[int, ...]:
        return self.ranks_of(self.live)

    @property
    def empty_ranks(self) -> tuple[int, ...]:
        return self.ranks_of(self.empty)

    def slot_of_rank(self, rank: int) -> int:
        return rank // self.tensor_parallel

    def only_live(self, ranks: list[int]) -> list[int]:
        """Of a list of ranks those that are live, in the same order: a group of vLLM's without its dead members."""
        there = set(self.live_ranks)
        return [rank for rank in ranks if rank in there]

    def stand_ins(self) -> tuple[tuple[int, int], ...]:
        """(empty slot, a live slot that speaks for it) where each slot has a column in a table that all ranks sum up."""
        return tuple((slot, self.live[0]) for slot in self.empty)


def senders(live: tuple[int, ...], joiners: tuple[int, ...], source: int) -> dict[int, int]:
    """Which live slot sends its non-expert weights to which joiner: the source first, then the others in turn.

    Every live slot holds the same weights. Raises ValueError where the source is not live or a joiner is.
    """
    if source not in live:
        raise ValueError(f"source slot {source} is not live: {live}")
    if both := sorted(set(live) & set(joiners)):
        raise ValueError(f"slots {both} are live and cannot join")
    at = live.index(source)
    turn = live[at:] + live[:at]
    return {joiner: turn[number % len(turn)] for number, joiner in enumerate(sorted(joiners))}
