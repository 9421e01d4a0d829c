"""What a rank writes of its own steps, where its group allows fault injection: records that others can check it by.

One file for each slot, ``steps/slot-N.jsonl`` in the run directory, one JSON object a line, incarnations one after the other.
Times are seconds of the host's monotonic clock. Hashes are hexadecimal blake2b digests of 8 bytes.
"""

import msgspec

from elastic.placement.maps import Row


class Boot(msgspec.Struct, frozen=True, kw_only=True, tag_field="line", tag="boot"):
    """A rank begins; first line of each incarnation."""

    slot: int
    incarnation: int
    pid: int
    at: float
    capacity: int
    """Slots of the group."""
    slots_per_rank: int


class Viewed(msgspec.Struct, frozen=True, kw_only=True, tag_field="line", tag="view"):
    """The rank took a view over: what the commit brought, and what the rank's own memory then said."""

    at: float
    incarnation: int
    epoch: int
    """Of the view, as the commit carried it."""
    live: tuple[int, ...]
    placement_hash: str
    """Of the map as the commit carried it: `elastic.placement.Placement.hash`."""
    rows: tuple[Row, ...]
    """The map itself, [MoE layer][physical slot] the expert or -1, where a physical slot is slot * slots_per_rank + index."""
    contents: tuple[Row, ...]
    """What the rank's expert buffers hold by its own book, [MoE layer][index]."""
    routed: tuple[tuple[int, ...], ...]
    """Read from the route table in the rank's memory: for each MoE layer and expert, flat (layer * experts + expert), the
    slots that rows are sent to; an empty one is an expert without a route."""
    table_hash: str
    """Of the route table's bytes; comparable between steps of one rank, not between ranks."""
    next_round: int
    base: int
    """The next dispatch is numbered from here; grows with each commit of a group."""


class Stepped(msgspec.Struct, frozen=True, kw_only=True, tag_field="line", tag="step"):
    """One step that the rank ran, committed or not."""

    at: float
    """When its result was there, before it was committed or discarded."""
    began: float
    incarnation: int
    round: int
    """Of the group. A discarded round is run again under the same number."""
    epoch: int
    """Of the view under which it ran."""
    placement_hash: str
    """Of that view."""
    table_hash: str
    """Of the route table's bytes when the step had run; empty: not read (on a GPU)."""
    captures: int
    """Step graphs captured in the life of this process."""
    address_hash: str
    """Of the addresses and names of all graph-facing tensors, as they are now."""
    committed: bool
    masked: tuple[int, ...]
    """Slots of the view that were masked when the step had run. A committed step has none."""
    halted: bool
    """An order to stop had come."""
    rows: int
    """Of requests; 0: padding alone, for the peers."""


class Emission(msgspec.Struct, frozen=True, kw_only=True, tag_field="line", tag="emit"):
    """Tokens handed to the gateway. Follows the committed step that made them; there is at most one for a step."""

    at: float
    incarnation: int
    round: int
    """The round whose step was run last: that of the line before."""
    tokens: tuple[tuple[str, int, int, tuple[int, ...]], ...]
    """Of each request: its id, the attempt, the index of the first token in the answer, the tokens."""


StepLine = Boot | Viewed | Stepped | Emission
