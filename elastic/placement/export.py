"""A placement as an object that can be stored, sent and compared: JSON with a stable hash.

The same map on the same machines has the same hash in every process and version of numpy or Python.
"""

import hashlib
from collections.abc import Collection

import msgspec
import numpy as np

from elastic.errors import ElasticError
from elastic.placement.maps import Placement
from elastic.placement.problem import Ints, System
from elastic.placement.validate import check_rows

FORMAT = 1


class PlacementObject(msgspec.Struct, frozen=True):
    """A map with all that is needed to read it."""

    experts: int
    slots: tuple[int, ...]
    hosts: tuple[int, ...]
    domains: tuple[int, ...]
    live: tuple[int, ...]
    rows: tuple[tuple[int, ...], ...]
    """[layers][physical slot]: expert, or -1 for a hole."""
    hash: str = ""
    """Of everything above."""
    format: int = FORMAT

    def digest(self) -> str:
        """What `hash` has to be; 16 hexadecimal digits."""
        content = msgspec.json.encode(msgspec.structs.replace(self, hash=""))
        return hashlib.blake2b(content, digest_size=8).hexdigest()


def export(system: System, experts: int, rows: Ints, live: Collection[int]) -> PlacementObject:
    """The object of a map. Raises ElasticError, as `check_rows`, where the map could not serve."""
    checked = check_rows(rows, system.slots, experts, live=live)
    made = PlacementObject(
        experts=experts,
        slots=system.slots,
        hosts=system.hosts,
        domains=system.domains,
        live=tuple(sorted(set(live))),
        rows=tuple(tuple(row) for row in checked.tolist()),
    )
    return msgspec.structs.replace(made, hash=made.digest())


def write(placed: PlacementObject) -> bytes:
    """JSON, one line."""
    return msgspec.json.encode(placed)


def read(data: bytes | str) -> PlacementObject:
    """The object of JSON from anywhere, checked as `check_rows` does and against its hash.

    Raises ElasticError with the field, the layer and rank, or both hashes.
    """
    try:
        placed = msgspec.json.decode(data, type=PlacementObject)
    except (msgspec.DecodeError, msgspec.ValidationError) as error:
        raise ElasticError(f"placement object: {error}") from error
    if placed.format != FORMAT:
        raise ElasticError(f"placement object: format {placed.format}, this version reads {FORMAT}")
    if placed.hash != placed.digest():
        raise ElasticError(
            f"placement object: hash {placed.hash or 'missing'} does not fit the content, {placed.digest()}"
        )
    system = System(placed.slots, placed.hosts, placed.domains)
    outside = [r for r in placed.live if not 0 <= r < system.ranks]
    if outside:
        raise ElasticError(f"placement object: live ranks {outside} are outside the {system.ranks} ranks")
    check_rows(rows_of(placed), placed.slots, placed.experts, live=placed.live)
    return placed


def rows_of(placed: PlacementObject) -> Ints:
    """The map as an array; [layers, physical slots]. Raises ElasticError for rows of different lengths."""
    if len({len(row) for row in placed.rows}) > 1:
        raise ElasticError("placement object: rows of different lengths")
    return np.array(placed.rows, dtype=np.int32).reshape(len(placed.rows), -1)


def to_placement(system: System, experts: int, rows: Ints) -> Placement:
    """The executor's record of a map. Raises ElasticError where ranks have different numbers of slots."""
    if len(set(system.slots)) > 1:
        raise ElasticError(f"placement: the executor needs equal ranks, these have {sorted(set(system.slots))} slots")
    placed = Placement(experts, system.ranks, system.slots[0], tuple(tuple(row) for row in rows.tolist()))
    placed.check()
    return placed


def from_placement(placed: Placement) -> Ints:
    """The rows of the executor's record; [layers, physical slots]."""
    return np.array(placed.rows, dtype=np.int32).reshape(len(placed.rows), -1)
