"""Triton kernels for a step on a GPU: matrix products whose rows do not depend on their batch.

Every product is cut into the same tiles whatever the number of rows, and each tile sums over K in the same order, so a row
has the same bits wherever it stands and whatever shares its step; cuBLAS chooses another kernel for another number of rows.
Row counts are read on the device: a captured graph computes as many rows as came, and nothing is read on the host.

Rows are few in decoding (at most the dispatch limit of all ranks), so the products are bound by reading the weights: the
tiles are low (16 rows, the least that a tensor core takes) and wide. A program walks over the row tiles of its columns, so
that the grid does not grow with the padded room, and ends at once where no row came.

Importing this module needs triton; see `arithmetic` for the choice.
"""

import functools

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

TILE_ROWS, TILE_DEPTH = 16, 128
WALKERS = 4
"""Programs that share the row tiles of one group of columns."""
_TILES = {"TILE_ROWS": TILE_ROWS, "TILE_DEPTH": TILE_DEPTH, "WALKERS": WALKERS}
PROGRAMS = 132
"""Wanted at least, one for each multiprocessor of an H100 or H200: narrower tiles where there would be fewer."""


# Triton reads the source: an annotation that is no type of its own, even Any, does not compile
@triton.jit(do_not_specialize=["room"])  # type: ignore[untyped-decorator]
def _product(  # type: ignore[no-untyped-def]
    x,
    w,
    y,
    counts,
    room,
    width,
    depth,
    COUNTED: tl.constexpr,  # noqa: N803
    TILE_ROWS: tl.constexpr,  # noqa: N803
    TILE_WIDTH: tl.constexpr,  # noqa: N803
    TILE_DEPTH: tl.constexpr,  # noqa: N803
    WALKERS: tl.constexpr,  # noqa: N803
    PDL: tl.constexpr,  # noqa: N803
) -> None:
    """y[e, :count] = x[e, :count] @ w[e]^T for each e; x [E, room, depth], w [E, width, depth], y [E, room, width]. Without
    counts every row of the room counts."""
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    expert = tl.program_id(1).to(tl.int64)
    count = room
    if COUNTED:
        count = tl.load(counts + expert)
    x += expert * room * depth
    w += expert * width * depth
    y += expert * room * width
    columns = tl.program_id(0) * TILE_WIDTH + tl.arange(0, TILE_WIDTH)
    column_mask = columns < width
    steps = tl.arange(0, TILE_DEPTH)
    for first in range(tl.program_id(2) * TILE_ROWS, count, WALKERS * TILE_ROWS):
        row = first + tl.arange(0, TILE_ROWS)
        row_mask = row < count
        total = tl.zeros((TILE_ROWS, TILE_WIDTH), dtype=tl.float32)
        for k in range(0, depth, TILE_DEPTH):
            deep = k + steps < depth
            a = tl.load(
                x + row[:, None] * depth + (k + steps)[None, :], mask=row_mask[:, None] & deep[None, :], other=0.0
            )
            b = tl.load(
                w + columns[None, :] * depth + (k + steps)[:, None],
                mask=deep[:, None] & column_mask[None, :],
                other=0.0,
            )
            total = tl.dot(a, b, total)
        to = y + row[:, None] * width + columns[None, :]
        tl.store(to, total.to(y.dtype.element_ty), mask=row_mask[:, None] & column_mask[None, :])


@triton.jit(do_not_specialize=["room"])  # type: ignore[untyped-decorator]
def _gate_up(  # type: ignore[no-untyped-def]
    x,
    w13,
    h,
    counts,
    room,
    width,
    depth,
    TILE_ROWS: tl.constexpr,  # noqa: N803
    TILE_WIDTH: tl.constexpr,  # noqa: N803
    TILE_DEPTH: tl.constexpr,  # noqa: N803
    WALKERS: tl.constexpr,  # noqa: N803
    PDL: tl.constexpr,  # noqa: N803
) -> None:
    """h[e, :count] = silu(x @ gate^T) * (x @ up^T); x [E, room, depth], w13 [E, 2 * width, depth], h [E, room, width]."""
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    expert = tl.program_id(1).to(tl.int64)
    count = tl.load(counts + expert)
    x += expert * room * depth
    w13 += expert * 2 * width * depth
    h += expert * room * width
    columns = tl.program_id(0) * TILE_WIDTH + tl.arange(0, TILE_WIDTH)
    column_mask = columns < width
    steps = tl.arange(0, TILE_DEPTH)
    for first in range(tl.program_id(2) * TILE_ROWS, count, WALKERS * TILE_ROWS):
        row = first + tl.arange(0, TILE_ROWS)
        row_mask = row < count
        gate = tl.zeros((TILE_ROWS, TILE_WIDTH), dtype=tl.float32)
        up = tl.zeros((TILE_ROWS, TILE_WIDTH), dtype=tl.float32)
        for k in range(0, depth, TILE_DEPTH):
            deep = k + steps < depth
            a = tl.load(
                x + row[:, None] * depth + (k + steps)[None, :], mask=row_mask[:, None] & deep[None, :], other=0.0
            )
            places = w13 + columns[None, :] * depth + (k + steps)[:, None]
            mask = deep[:, None] & column_mask[None, :]
            gate = tl.dot(a, tl.load(places, mask=mask, other=0.0), gate)
            up = tl.dot(a, tl.load(places + width * depth, mask=mask, other=0.0), up)
        to = h + row[:, None] * width + columns[None, :]
        out = gate * tl.sigmoid(gate) * up
        tl.store(to, out.to(h.dtype.element_ty), mask=row_mask[:, None] & column_mask[None, :])


@functools.cache
def overlap() -> dict[str, bool]:
    """Programmatic dependent launch (CUDA programming guide, "Programmatic Dependent Launch and Synchronization"): on Hopper
    and later a kernel is brought to the multiprocessors while the one before it still runs, and waits there for its end."""
    if not torch.cuda.is_available() or torch.cuda.get_device_capability()[0] < 9:
        return {"PDL": False}
    return {"PDL": True, "launch_pdl": True}


def linear(x: torch.Tensor, w: torch.Tensor, out: torch.Tensor) -> None:
    """out [rows, width] = x [rows, depth] @ w^T, w [width, depth]; all contiguous, summed in float32."""
    (rows, depth), width = x.shape, w.shape[0]
    _launch_product(x, w, out, None, experts=1, room=rows, width=width, depth=depth)


def expert_mlps(x: torch.Tensor, counts: torch.Tensor, w13: torch.Tensor, w2: torch.Tensor, y: torch.Tensor) -> None:
    """SwiGLU of all local experts: y[e, :counts[e]] from x[e, :counts[e]]; rows beyond the counts are left alone.

    x, y [experts, room, hidden], counts [experts] int32, w13 [experts, 2 * width, hidden] gate over up, w2 [experts,
    hidden, width]; all contiguous.
    """
    (experts, room, hidden), width = x.shape, w2.shape[2]
    h = torch.empty(experts, room, width, dtype=x.dtype, device=x.device)
    tile = _tile_width(width, experts)
    _gate_up[(triton.cdiv(width, tile), experts, _walkers(room))](
        *(x, w13, h, counts, room, width, hidden),
        **_TILES,
        TILE_WIDTH=tile,
        num_warps=4,
        num_stages=3,
        **overlap(),
    )
    _launch_product(h, w2, y, counts, experts=experts, room=room, width=hidden, depth=width)


def _launch_product(
    x: torch.Tensor,
    w: torch.Tensor,
    y: torch.Tensor,
    counts: torch.Tensor | None,
    *,
    experts: int,
    room: int,
    width: int,
    depth: int,
) -> None:
    tile = _tile_width(width, experts)
    _product[(triton.cdiv(width, tile), experts, _walkers(room))](
        *(x, w, y, x if counts is None else counts, room, width, depth),
        **_TILES,
        COUNTED=counts is not None,
        TILE_WIDTH=tile,
        num_warps=4,
        num_stages=4,
        **overlap(),
    )


def _tile_width(width: int, experts: int) -> int:
    """By what does not change between steps: a tile that followed the rows would change their bits."""
    return 64 if experts * triton.cdiv(width, 64) >= PROGRAMS else 32


def _walkers(room: int) -> int:
    return min(WALKERS, -(-room // TILE_ROWS))
