"""Triton kernels for what a decoder layer does beside its products: norms, rotation, KV cache, attention, routing.

A decode step is bound by how many kernels it runs, not by their arithmetic: in torch these parts are many small kernels a
layer, here they are five. As in `kernels`, a row's bits never depend on its batch: a program belongs to one row (and
head), its blocks have fixed sizes, and attention goes over the positions in ascending order up to the row's own. Memory is
read in place; sums and rotations are float32, rounded once.

Attention is the online softmax of FlashAttention (Dao et al., arXiv:2205.14135, algorithm 1) for one query position; the
query heads of one KV head share a program, so that each key and value is read once.

`reference` computes the same in torch. Importing this module needs triton; see `arithmetic` for the choice.
"""

import math

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from elastic.rank.kernels import overlap
from elastic.rank.reference import Rows

BLOCK_POSITIONS = 64
"""Of attention: fixed, since the order of a row's sums follows from it."""
LEAST_DOT = 16
"""The least size that a tensor core's product takes; fewer heads are padded."""
LARGEST = 3.0e38
"""Finite in float32: the router's scores are clamped to it, so that every row chooses as many different experts."""


# Triton reads the source: an annotation that is no type of its own, even Any, does not compile
@triton.jit  # type: ignore[untyped-decorator]
def _norm(  # type: ignore[no-untyped-def]
    x,
    delta,
    w,
    h,
    eps,
    ADDED: tl.constexpr,  # noqa: N803
    WIDTH: tl.constexpr,  # noqa: N803
    BLOCK: tl.constexpr,  # noqa: N803
    PDL: tl.constexpr,  # noqa: N803
) -> None:
    """One program a row: x += delta if ADDED, h = x / rms(x) * w. The sum is rounded before it is normalised, as the
    residual that the next layer reads."""
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    row = tl.program_id(0).to(tl.int64) * WIDTH
    at = tl.arange(0, BLOCK)
    inside = at < WIDTH
    value = tl.load(x + row + at, mask=inside, other=0.0)
    if ADDED:
        more = tl.load(delta + row + at, mask=inside, other=0.0)
        value = (value.to(tl.float32) + more.to(tl.float32)).to(x.dtype.element_ty)
        tl.store(x + row + at, value, mask=inside)
    value = value.to(tl.float32)
    scale = tl.rsqrt(tl.sum(value * value, 0) / WIDTH + eps)
    weight = tl.load(w + at, mask=inside, other=0.0).to(tl.float32)
    tl.store(h + row + at, (value * scale * weight).to(h.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["sequences", "length"])  # type: ignore[untyped-decorator]
def _turn_and_store(  # type: ignore[no-untyped-def]
    qkv,
    q_norm,
    k_norm,
    cos,
    sin,
    seqs,
    positions,
    q,
    cache,
    sequences,
    length,
    eps,
    HEADS: tl.constexpr,  # noqa: N803
    KV_HEADS: tl.constexpr,  # noqa: N803
    DIM: tl.constexpr,  # noqa: N803
    BLOCK: tl.constexpr,  # noqa: N803
    PDL: tl.constexpr,  # noqa: N803
) -> None:
    """One program for each head vector of each row: queries, keys, then values."""
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    at = tl.arange(0, BLOCK)
    inside = at < DIM
    source = qkv + (row * (HEADS + 2 * KV_HEADS) + head) * DIM
    position = tl.load(positions + row)
    value = tl.load(source + at, mask=inside, other=0.0).to(tl.float32)
    if head < HEADS + KV_HEADS:
        partner = (at + DIM // 2) % DIM
        swapped = tl.load(source + partner, mask=inside, other=0.0).to(tl.float32)
        query = head < HEADS
        weight = tl.where(
            query, tl.load(q_norm + at, mask=inside, other=0.0), tl.load(k_norm + at, mask=inside, other=0.0)
        )
        swapped_weight = tl.where(
            query, tl.load(q_norm + partner, mask=inside, other=0.0), tl.load(k_norm + partner, mask=inside, other=0.0)
        )
        c = tl.load(cos + position * DIM + at, mask=inside, other=0.0).to(tl.float32)
        s = tl.load(sin + position * DIM + at, mask=inside, other=0.0).to(tl.float32)
        scale = tl.rsqrt(tl.sum(value * value, 0) / DIM + eps)
        value = (value * scale * weight.to(tl.float32)) * c + (swapped * scale * swapped_weight.to(tl.float32)) * s
    out = value.to(q.dtype.element_ty)
    if head < HEADS:
        tl.store(q + (row * HEADS + head) * DIM + at, out, mask=inside)
    else:
        kind = (head - HEADS) // KV_HEADS
        kv_head = (head - HEADS) % KV_HEADS
        cell = ((tl.load(seqs + row) + kind * sequences) * KV_HEADS + kv_head) * length + position
        # as stored: what overflows in the cache's type is infinite too
        kept = out.to(tl.float32)
        kept = tl.where(tl.abs(kept) < float("inf"), kept, 0.0)
        tl.store(cache + cell * DIM + at, kept.to(cache.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["sequences", "length"])  # type: ignore[untyped-decorator]
def _attend(  # type: ignore[no-untyped-def]
    q,
    cache,
    seqs,
    positions,
    out,
    sequences,
    length,
    scale,
    KV_HEADS: tl.constexpr,  # noqa: N803
    GROUP: tl.constexpr,  # noqa: N803
    DIM: tl.constexpr,  # noqa: N803
    PADDED_GROUP: tl.constexpr,  # noqa: N803
    PADDED_DIM: tl.constexpr,  # noqa: N803
    BLOCK: tl.constexpr,  # noqa: N803
    PDL: tl.constexpr,  # noqa: N803
) -> None:
    """One program for each KV head of each row; `scale` is that of the scores, times log2(e)."""
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    last = tl.load(positions + row).to(tl.int32)
    seq = tl.load(seqs + row)
    keys = cache + (seq * KV_HEADS + head) * length * DIM
    values = cache + ((seq + sequences) * KV_HEADS + head) * length * DIM
    group = tl.arange(0, PADDED_GROUP)
    dims = tl.arange(0, PADDED_DIM)
    steps = tl.arange(0, BLOCK)
    heads = (row * KV_HEADS + head) * GROUP + group
    at = heads[:, None] * DIM + dims[None, :]
    inside = (group < GROUP)[:, None] & (dims < DIM)[None, :]
    asked = tl.load(q + at, mask=inside, other=0.0)
    best = tl.full((PADDED_GROUP,), float("-inf"), dtype=tl.float32)
    total = tl.zeros((PADDED_GROUP,), dtype=tl.float32)
    mixed = tl.zeros((PADDED_GROUP, PADDED_DIM), dtype=tl.float32)
    for first in range(0, last + 1, BLOCK):
        place = first + steps
        there = place <= last
        k = tl.load(keys + place[None, :] * DIM + dims[:, None], mask=there[None, :] & (dims < DIM)[:, None], other=0.0)
        v = tl.load(
            values + place[:, None] * DIM + dims[None, :], mask=there[:, None] & (dims < DIM)[None, :], other=0.0
        )
        score = tl.where(there[None, :], tl.dot(asked, k) * scale, float("-inf"))
        highest = tl.maximum(best, tl.max(score, 1))
        share = tl.exp2(score - highest[:, None])
        shrink = tl.exp2(best - highest)
        total = total * shrink + tl.sum(share, 1)
        mixed = mixed * shrink[:, None] + tl.dot(share.to(v.dtype), v)
        best = highest
    tl.store(out + at, (mixed / total[:, None]).to(out.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["columns"])  # type: ignore[untyped-decorator]
def _route(  # type: ignore[no-untyped-def]
    logits,
    table,
    routes,
    weights,
    physical,
    columns,
    EXPERTS: tl.constexpr,  # noqa: N803
    TOP_K: tl.constexpr,  # noqa: N803
    RENORMALISE: tl.constexpr,  # noqa: N803
    BLOCK: tl.constexpr,  # noqa: N803
    PADDED_TOP: tl.constexpr,  # noqa: N803
    LARGEST: tl.constexpr,  # noqa: N803
    PDL: tl.constexpr,  # noqa: N803
) -> None:
    """One program a row. Whatever the logits, NaN too, a row chooses TOP_K different experts: the exchange has no room
    for a row that comes to an expert twice."""
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    row = tl.program_id(0).to(tl.int64)
    expert = tl.arange(0, BLOCK)
    score = tl.load(logits + row * EXPERTS + expert, mask=expert < EXPERTS, other=0.0).to(tl.float32)
    # a comparison with NaN is false
    score = tl.minimum(tl.where(score > -LARGEST, score, -LARGEST), LARGEST)
    score = tl.where(expert < EXPERTS, score, float("-inf"))
    place = tl.arange(0, PADDED_TOP)
    chosen = tl.zeros((PADDED_TOP,), dtype=tl.int32)
    found = tl.full((PADDED_TOP,), float("-inf"), dtype=tl.float32)
    left = score
    for turn in range(TOP_K):
        highest, best = tl.max(left, 0, return_indices=True)
        chosen = tl.where(place == turn, best, chosen)
        found = tl.where(place == turn, highest, found)
        left = tl.where(expert == best, float("-inf"), left)
    top = tl.max(score, 0)
    share = tl.exp(found - top)
    share = share / tl.sum(share, 0) if RENORMALISE else share / tl.sum(tl.exp(score - top), 0)
    slot = tl.load(table + chosen.to(tl.int64) * columns + tl.load(routes + row))
    tl.store(weights + row * TOP_K + place, share, mask=place < TOP_K)
    tl.store(physical + row * TOP_K + place, slot, mask=place < TOP_K)


def norm(x: torch.Tensor, delta: torch.Tensor | None, w: torch.Tensor, eps: float) -> torch.Tensor:
    """See `Arithmetic.norm`; all contiguous."""
    (rows, width), h = x.shape, torch.empty_like(x)
    block = triton.next_power_of_2(width)
    _norm[(rows,)](
        *(x, x if delta is None else delta, w, h, eps),
        ADDED=delta is not None,
        WIDTH=width,
        BLOCK=block,
        num_warps=4 if block <= 2048 else 8,
        **overlap(),
    )
    return h


def turn_and_store(
    qkv: torch.Tensor, q_norm: torch.Tensor, k_norm: torch.Tensor, rows: Rows, cache: torch.Tensor, eps: float
) -> torch.Tensor:
    """Store keys and values of all rows in `cache`; returns the queries [rows, heads, head_dim], normalised and rotated.
    Arguments as of `Arithmetic.attend`."""
    (_, sequences, kv, length, dim), n = cache.shape, qkv.shape[0]
    heads = qkv.shape[1] // dim - 2 * kv
    q = qkv.new_empty(n, heads, dim)
    tables = rows.tables
    _turn_and_store[(n, heads + 2 * kv)](
        *(qkv, q_norm, k_norm, tables.cos, tables.sin, rows.seqs, rows.positions, q, cache, sequences, length, eps),
        HEADS=heads,
        KV_HEADS=kv,
        DIM=dim,
        BLOCK=triton.next_power_of_2(dim),
        num_warps=1,
        **overlap(),
    )
    return q


def attention(q: torch.Tensor, rows: Rows, cache: torch.Tensor) -> torch.Tensor:
    """Each row over its own sequence in `cache`, up to its position. q and the result [rows, heads, head_dim]."""
    (_, sequences, kv, length, dim), (n, heads, _) = cache.shape, q.shape
    out = torch.empty_like(q)
    _attend[(n, kv)](
        *(q, cache, rows.seqs, rows.positions, out, sequences, length, math.log2(math.e) / math.sqrt(dim)),
        KV_HEADS=kv,
        GROUP=heads // kv,
        DIM=dim,
        PADDED_GROUP=max(LEAST_DOT, triton.next_power_of_2(heads // kv)),
        PADDED_DIM=max(LEAST_DOT, triton.next_power_of_2(dim)),
        BLOCK=BLOCK_POSITIONS,
        num_warps=4,
        num_stages=2,
        **overlap(),
    )
    return out


def route(
    logits: torch.Tensor, table: torch.Tensor, routes: torch.Tensor, top_k: int, renormalise: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """See `Arithmetic.route`; equal scores are taken by the lower expert first."""
    rows, experts = logits.shape
    weights = logits.new_empty(rows, top_k, dtype=torch.float32)
    physical = table.new_empty(rows, top_k)
    _route[(rows,)](
        *(logits, table, routes, weights, physical, table.shape[1]),
        EXPERTS=experts,
        TOP_K=top_k,
        RENORMALISE=renormalise,
        BLOCK=triton.next_power_of_2(experts),
        PADDED_TOP=triton.next_power_of_2(top_k),
        LARGEST=LARGEST,
        num_warps=1,
        **overlap(),
    )
    return weights, physical
