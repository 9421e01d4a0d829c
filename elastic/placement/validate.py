"""Is this a map that a group can serve with? For maps of any origin; errors name the layer, the rank and the slot."""

from collections.abc import Collection, Sequence

import numpy as np
import numpy.typing as npt

from elastic.errors import ElasticError
from elastic.placement.maps import HOLE


def check_rows(
    rows: npt.ArrayLike,
    slots: Sequence[int],
    experts: int,
    *,
    layers: int | None = None,
    live: Collection[int] | None = None,
    duplicates_allowed: bool = False,
) -> npt.NDArray[np.int32]:
    """Return `rows` as int32 [layers, physical slots], checked against `slots` (per rank) and `experts`.

    With `live`, every expert of every layer must have a copy on one of these ranks.

    Raises ElasticError for a wrong shape or type, an expert outside 0..experts-1 that is not HOLE, two replicas of one
    expert on one rank (unless `duplicates_allowed`), and missing experts, whichever is met first.
    """
    given = np.asarray(rows)
    width = int(sum(slots))
    if given.ndim != 2 or given.shape[1] != width:
        raise ElasticError(f"placement map: shape {given.shape}, expected [layers, {width}] for {len(slots)} ranks")
    if layers is not None and len(given) != layers:
        raise ElasticError(f"placement map: {len(given)} layers, expected {layers} as in the load")
    if given.dtype.kind not in "iu":
        raise ElasticError(
            f"placement map: holds {given.dtype}, expected whole numbers (experts, or {HOLE} for a hole)"
        )
    wrong = np.argwhere((given < HOLE) | (given >= experts))
    if len(wrong):
        layer, p = (int(x) for x in wrong[0])
        raise ElasticError(
            f"placement map: {_at(layer, p, slots)}: expert {given[layer, p]} is outside 0..{experts - 1}; "
            f"{len(wrong)} such slots"
        )
    checked = np.ascontiguousarray(given, dtype=np.int32)
    if not duplicates_allowed:
        _no_duplicates(checked, slots, experts)
    if live is not None:
        _covered(checked, slots, experts, live)
    return checked


def duplicates(rows: npt.NDArray[np.int32], slots: Sequence[int], experts: int) -> npt.NDArray[np.bool_]:
    """Where a slot repeats an expert that an earlier slot of the same rank holds; [layers, physical slots]."""
    owner = np.repeat(np.arange(len(slots)), slots)
    # experts + 1 keys per rank, so that a hole of one rank is no expert of another
    keys = owner * (experts + 1) + rows + 1
    order = np.argsort(keys, axis=1, kind="stable")
    ordered = np.take_along_axis(keys, order, axis=1)
    same = np.zeros(rows.shape, dtype=bool)
    same[:, 1:] = ordered[:, 1:] == ordered[:, :-1]
    repeated = np.zeros(rows.shape, dtype=bool)
    np.put_along_axis(repeated, order, same, axis=1)
    return repeated & (rows != HOLE)


def _no_duplicates(rows: npt.NDArray[np.int32], slots: Sequence[int], experts: int) -> None:
    twice = np.argwhere(duplicates(rows, slots, experts))
    if len(twice):
        layer, p = (int(x) for x in twice[0])
        raise ElasticError(
            f"placement map: {_at(layer, p, slots)}: a second replica of expert {rows[layer, p]} on one rank; "
            f"{len(twice)} such slots"
        )


def _covered(rows: npt.NDArray[np.int32], slots: Sequence[int], experts: int, live: Collection[int]) -> None:
    alive = np.isin(np.repeat(np.arange(len(slots)), slots), list(live))
    for layer, row in enumerate(rows):
        held = np.zeros(experts, dtype=bool)
        held[row[alive & (row != HOLE)]] = True
        if not held.all():
            missing = np.flatnonzero(~held)
            shown = ", ".join(str(e) for e in missing[:8]) + (", ..." if len(missing) > 8 else "")
            raise ElasticError(
                f"placement map: layer {layer}: no copy of experts {shown} ({len(missing)} of {experts}) on the live ranks"
            )


def _at(layer: int, physical: int, slots: Sequence[int]) -> str:
    rank = 0
    while physical >= slots[rank]:
        physical -= slots[rank]
        rank += 1
    return f"layer {layer} rank {rank} slot {physical}"
