"""Whether a GPU's kernels are right on this machine: looked at once, at start, on the model's sizes.

Two things are wanted of each: results beside those of torch (of `reference`, in float32 on the host, for what is not a
product), and a row whose bits are the same in every place and company.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F  # noqa: N812

from elastic.placement.maps import HOLE
from elastic.rank import reference
from elastic.rank.architecture import Architecture
from elastic.rank.device import CPU, Device
from elastic.rank.graphs import PlainNodes
from elastic.rank.reference import Rows, Tables, padded_experts

if TYPE_CHECKING:
    from elastic.rank.arithmetic import Arithmetic

TOLERANCE = 0.02
"""As a share of the largest result: bfloat16 rounds by up to 0.004, three times in a row."""
WEIGHT_TOLERANCE = 1e-4
"""Of routing weights, which are float32 on every device."""
SEQUENCES, LENGTH = 4, 200
"""Of the check of attention: a few of its blocks of positions."""
PLACES = ((1, 130), (0, 0), (1, 131), (2, 63), (0, 1), (2, 64), (3, LENGTH - 1))
"""(sequence, position) of its rows; the third row needs what the first one stores."""
TARGET = 2
COMPANY = (5, 3, 0, 2, 6, 1)
"""Rows that share a step with the target, which is the fourth of them."""


@dataclass(frozen=True)
class Found:
    """About one kernel."""

    name: str
    problem: str
    """Empty where nothing is wrong."""
    error: float
    """The largest difference from the reference, as a share of the largest result."""


def check_products(arithmetic: "Arithmetic", device: Device, hidden: int, width: int, room: int = 64) -> str:
    """What is wrong with the products on this device, or nothing: results beside the reference, rows beyond a count left
    alone, and a row's bits the same in every place and company."""
    draw = _Draw(device)
    experts, row = 3, draw(1, hidden)
    w13, w2 = draw(experts, 2 * width, hidden, share=hidden), draw(experts, hidden, width, share=width)
    x = draw(experts * room, hidden).view(experts, room, hidden)
    places = ((1, 0), (2, room // 2 + 1))
    w13[2], w2[2] = w13[1], w2[1]
    for place in places:
        x[place] = row[0]
    counts = device.to(torch.tensor([0, 1, room - 3], dtype=torch.int32))
    y, want = torch.full_like(x, 7.0), torch.empty_like(x)
    arithmetic.experts(x, counts, w13, w2, y, PlainNodes())
    padded_experts(x, w13, w2, want, room)
    for expert, count in enumerate(counts.tolist()):
        if not bool((y[expert, count:] == 7.0).all()):
            return f"expert {expert}: rows beyond the {count} that count were written"
        if count and not (wrong := _difference(y[expert, :count], want[expert, :count])) <= TOLERANCE:
            return f"expert {expert}: results differ from the reference by {wrong:.3g} of the largest"
    if not torch.equal(y[places[0]], y[places[1]]):
        return "a row's bits depend on its place"
    w = w13[1]
    alone = arithmetic.linear(row, w)
    if not (wrong := _difference(alone, F.linear(row, w))) <= TOLERANCE:
        return f"a product differs from the reference by {wrong:.3g} of the largest"
    if any(not torch.equal(alone[0], arithmetic.linear(x[2, :rows], w)[places[1][1]]) for rows in (room - 20, room)):
        return "a row's bits depend on the number of rows"
    return ""


def check_layers(arithmetic: "Arithmetic", device: Device, arch: Architecture) -> Iterator[Found]:
    """The norm, rotation and storing, attention and routing, one after the other."""
    yield _norm(arithmetic, device, arch)
    yield from _attention(arithmetic, device, arch)
    yield _route(arithmetic, device, arch)


def _norm(arithmetic: "Arithmetic", device: Device, arch: Architecture) -> Found:
    draw, rows, at = _Draw(device), 5, 3
    x, delta, w = draw(rows, arch.hidden), draw(rows, arch.hidden), draw(arch.hidden)
    summed, left = x.clone(), x.clone()
    found = arithmetic.norm(summed, delta, w, arch.rms_eps)
    first = arithmetic.norm(left, None, w, arch.rms_eps)
    lone = x[at : at + 1].clone()
    alone = arithmetic.norm(lone, delta[at : at + 1], w, arch.rms_eps)
    wanted = _host(x)
    want = reference.norm(wanted, _host(delta), _host(w), arch.rms_eps)
    error = max(
        _difference(found, want),
        _difference(summed, wanted),
        _difference(first, reference.norm(_host(x), None, _host(w), arch.rms_eps)),
    )
    problem = ""
    if not torch.equal(left, x):
        problem = "norm: its input was written without anything to add"
    elif not (torch.equal(alone[0], found[at]) and torch.equal(lone[0], summed[at])):
        problem = "norm: a row's bits depend on its place"
    return _found("norm", problem, error)


def _attention(arithmetic: "Arithmetic", device: Device, arch: Architecture) -> Iterator[Found]:
    draw, (kv, d) = _Draw(device), (arch.kv_heads, arch.head_dim)
    history = draw(2 * SEQUENCES * kv * LENGTH, d).view(2, SEQUENCES, kv, LENGTH, d)
    qkv, q_norm, k_norm = draw(len(PLACES), (arch.heads + 2 * kv) * d), draw(d), draw(d)
    # rows of a step that is discarded; as a replay they are stored again, right
    lost = qkv[:1].clone()
    lost[0, arch.heads * d] = float("inf")
    lost[0, -d:] = float("nan")
    tables, wanted_tables = (Tables.of(arch, SEQUENCES, LENGTH, place) for place in (device, CPU))

    def step(cache: torch.Tensor, *which: int, of: torch.Tensor = qkv) -> torch.Tensor:
        seqs, positions = (device.to(torch.tensor([PLACES[i][part] for i in which])) for part in (0, 1))
        rows = Rows(seqs, positions, tables)
        return arithmetic.attend(of[list(which)], q_norm, k_norm, rows, cache, arch.rms_eps)

    def want(cache: torch.Tensor, of: torch.Tensor, places: tuple[tuple[int, int], ...]) -> torch.Tensor:
        seqs, positions = torch.tensor(places).t().contiguous()
        rows = Rows(seqs, positions, wanted_tables)
        return reference.attend(_host(of), _host(q_norm), _host(k_norm), rows, cache, arch.rms_eps)

    together, wanted = history.clone(), _host(history)
    everyone = tuple(range(len(PLACES)))
    mixed, wanted_mixed = step(together, *everyone), want(wanted, qkv, PLACES)
    untouched = torch.ones(SEQUENCES, LENGTH, dtype=torch.bool)
    untouched[tuple(torch.tensor(PLACES).t())] = False
    kept = untouched[None, :, None, :, None].expand(2, SEQUENCES, kv, LENGTH, d)

    apart = history.clone()
    step(apart, 0)
    alone = step(apart, TARGET)
    company = step(history.clone(), *COMPANY)
    stale, wanted_stale = history.clone(), _host(history)
    step(stale, 0, of=lost)
    want(wanted_stale, lost, PLACES[:1])

    problem = ""
    if not torch.equal(_host(together)[kept], _host(history)[kept]):
        problem = "storing: a cell that is nobody's was written"
    elif not bool(stale.isfinite().all()):
        problem = "storing: what is not finite was stored"
    elif not all(torch.equal(together[:, s, :, p], apart[:, s, :, p]) for s, p in (PLACES[0], PLACES[TARGET])):
        problem = "storing: a row's bits depend on its place"
    error = max(_difference(together, wanted), _difference(stale, wanted_stale))
    yield _found("storing", problem, error)
    same = torch.equal(alone[0], mixed[TARGET]) and torch.equal(alone[0], company[COMPANY.index(TARGET)])
    problem = "" if same else "attention: a row's bits depend on its place"
    yield _found("attention", problem, _difference(mixed, wanted_mixed))


def _route(arithmetic: "Arithmetic", device: Device, arch: Architecture) -> Found:
    rows, columns, at, experts, k = 6, 7, 4, arch.experts, arch.top_k
    draw = torch.Generator().manual_seed(0)
    # all different, and numbers that bfloat16 holds: no choice depends on rounding up to 512 experts
    orders = torch.stack([torch.randperm(experts, generator=draw) for _ in range(rows)])
    host = (orders - experts // 2).float() / 32
    host[1] = float("nan")
    host[2, ::2] = float("inf")
    logits = device.to(host.to(device.dtype))
    held = torch.arange(experts * columns).view(experts, columns)
    held[:, -1] = HOLE
    routes = torch.tensor([0, 1, 2, 3, 4, columns - 1])
    table, theirs = device.to(held), device.to(routes)
    weights, physical = arithmetic.route(logits, table, theirs, k, arch.norm_topk_prob)
    want, wanted = reference.route(_host(logits), held, routes, k, arch.norm_topk_prob)
    one, other = arithmetic.route(logits[at : at + 1], table, theirs[at : at + 1], k, arch.norm_topk_prob)
    problem = ""
    if any(len(set(physical[row].tolist()) & set(held[:, row].tolist())) != k for row in (1, 2)):
        problem = "routing: a row of garbage does not choose as many different experts"
    elif not torch.equal(physical[3:].cpu(), wanted[3:]):
        problem = "routing: other experts than the reference"
    elif not (torch.equal(one[0], weights[at]) and torch.equal(other[0], physical[at])):
        problem = "routing: a row's bits depend on its place"
    return _found("routing", problem, _difference(weights[3:], want[3:]), WEIGHT_TOLERANCE)


class _Draw:
    """Random tensors of the device's type, the same each time."""

    def __init__(self, device: Device) -> None:
        self._device, self._draw = device, torch.Generator(device.place).manual_seed(0)

    def __call__(self, *shape: int, share: int = 1) -> torch.Tensor:
        """Of deviation 1 / sqrt(share)."""
        made = torch.randn(*shape, generator=self._draw, device=self._device.place, dtype=torch.float32)
        return made.div_(share**0.5).to(self._device.dtype)


def _host(tensor: torch.Tensor) -> torch.Tensor:
    """A copy in float32 on the host."""
    return tensor.to("cpu", torch.float32, copy=True)


def _found(name: str, problem: str, error: float, tolerance: float = TOLERANCE) -> Found:
    if not problem and not error <= tolerance:  # NaN too
        problem = f"{name}: results differ from the reference by {error:.3g} of the largest"
    return Found(name, problem, error)


def _difference(found: torch.Tensor, want: torch.Tensor) -> float:
    found, want = (tensor.float().to(want.device) for tensor in (found, want))
    return float((found - want).abs().max() / want.abs().max())
