"""Which matrix products a step uses, by device: chosen once, when the rank's model is built.

A row's bits may not depend on its batch (see `layers`). On a CPU the library's products keep that for at least CPU_MIN_ROWS
rows. On a GPU cuBLAS does not, so there the products are Triton kernels of our own (`kernels`), unless triton is missing or
fails the check at start; then cuBLAS serves, and an answer that is replayed may differ from the one that was interrupted.
"""

import functools
from typing import Protocol

import structlog
import torch
import torch.nn.functional as F  # noqa: N812

from elastic.config import CPU_MIN_ROWS
from elastic.rank.device import Device
from elastic.rank.graphs import Nodes, PlainNodes

TOLERANCE = 0.02
"""Of the check, as a share of the largest result: bfloat16 rounds by up to 0.004, three times in a row."""

log = structlog.get_logger("elastic.arithmetic")


class Arithmetic(Protocol):
    """Called by the step only; everything may be captured. Weights are read in place."""

    name: str

    def linear(self, x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        """x [rows, depth] @ w^T, w [width, depth]."""
        ...

    def logits(self, x: torch.Tensor, w: torch.Tensor, out: torch.Tensor) -> None:
        """out [rows, vocab] float32 = x @ w^T, w [vocab, hidden], not rounded before: in bfloat16 the best token would
        often be one of several."""
        ...

    def experts(
        self,
        x: torch.Tensor,
        counts: torch.Tensor,
        w13: torch.Tensor,
        w2: torch.Tensor,
        y: torch.Tensor,
        nodes: Nodes,
    ) -> None:
        """SwiGLU of all local experts: y[e, :counts[e]] from x[e, :counts[e]], both [experts, room, hidden]; w13 [experts,
        2 * width, hidden] gate over up, w2 [experts, hidden, width]. Rows of y beyond the counts are worth nothing."""
        ...


class CpuArithmetic:
    """float32, on the host's matrix library."""

    name = "cpu"

    def linear(self, x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return F.linear(x, w)

    def logits(self, x: torch.Tensor, w: torch.Tensor, out: torch.Tensor) -> None:
        torch.mm(x, w.t(), out=out)

    def experts(
        self, x: torch.Tensor, counts: torch.Tensor, w13: torch.Tensor, w2: torch.Tensor, y: torch.Tensor, nodes: Nodes
    ) -> None:
        rows = min(-(-max(nodes.largest(counts), 1) // CPU_MIN_ROWS) * CPU_MIN_ROWS, x.shape[1])
        padded_experts(x, w13, w2, y, rows)


class CublasArithmetic:
    """The fall-back on a GPU: right, slower where rows are few, and a row's bits depend on its batch."""

    name = "cublas"

    def linear(self, x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return F.linear(x, w)

    def logits(self, x: torch.Tensor, w: torch.Tensor, out: torch.Tensor) -> None:
        out.copy_(torch.mm(x, w.t(), out_dtype=torch.float32))

    def experts(
        self, x: torch.Tensor, counts: torch.Tensor, w13: torch.Tensor, w2: torch.Tensor, y: torch.Tensor, nodes: Nodes
    ) -> None:
        padded_experts(x, w13, w2, y, x.shape[1])


class TritonArithmetic:
    """The kernels of `kernels`. Raises ImportError where triton is missing."""

    name = "triton"

    def __init__(self) -> None:
        from elastic.rank import kernels

        self._kernels = kernels

    def linear(self, x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        out = x.new_empty(x.shape[0], w.shape[0])
        self._kernels.linear(x.contiguous(), w, out)
        return out

    def logits(self, x: torch.Tensor, w: torch.Tensor, out: torch.Tensor) -> None:
        self._kernels.linear(x.contiguous(), w, out)

    def experts(
        self, x: torch.Tensor, counts: torch.Tensor, w13: torch.Tensor, w2: torch.Tensor, y: torch.Tensor, nodes: Nodes
    ) -> None:
        self._kernels.expert_mlps(x, counts, w13, w2, y)


@functools.cache
def open_arithmetic(device: Device, hidden: int, width: int) -> Arithmetic:
    """The best of the device; asked once for each model. On a GPU the kernels are compiled (once a machine, then cached) and checked on experts of the
    model's sizes; logs why not where they cannot be used."""
    if not device.is_gpu:
        return CpuArithmetic()
    try:
        arithmetic = TritonArithmetic()
        problem = check(arithmetic, device, hidden, width)
    except Exception as error:  # triton raises what its compiler, the driver or a C compiler say
        problem = f"{type(error).__name__}: {error}"
    if not problem:
        return arithmetic
    log.warning("the Triton kernels are not used: products are cuBLAS's, and a row depends on its batch", why=problem)
    return CublasArithmetic()


def padded_experts(x: torch.Tensor, w13: torch.Tensor, w2: torch.Tensor, y: torch.Tensor, rows: int) -> None:
    """SwiGLU of all local experts at once: y[:, :rows] from x[:, :rows]; the reference for the kernels.

    Rows beyond an expert's count are computed too and ignored: one product of a fixed kind is cheaper, for small
    experts, than one for each expert, and a row's result is the same wherever it stands.
    """
    gate, up = torch.bmm(x[:, :rows], w13.transpose(1, 2)).chunk(2, -1)
    y[:, :rows] = torch.bmm(F.silu(gate).mul_(up), w2.transpose(1, 2))


def check(arithmetic: Arithmetic, device: Device, hidden: int, width: int, room: int = 64) -> str:
    """What is wrong with `arithmetic` on this device, or nothing: results beside the reference, rows beyond a count left
    alone, and a row's bits the same in every place and company."""
    draw = torch.Generator(device.place).manual_seed(0)

    def random(*shape: int) -> torch.Tensor:
        made = torch.randn(*shape, generator=draw, device=device.place, dtype=torch.float32)
        return made.div_(shape[-1] ** 0.5 if len(shape) == 3 else 1.0).to(device.dtype)

    experts, row = 3, random(1, hidden)
    w13, w2 = random(experts, 2 * width, hidden), random(experts, hidden, width)
    x = random(experts * room, hidden).view(experts, room, hidden)
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
        if count and (wrong := _difference(y[expert, :count], want[expert, :count])) > TOLERANCE:
            return f"expert {expert}: results differ from the reference by {wrong:.3g} of the largest"
    if not torch.equal(y[places[0]], y[places[1]]):
        return "a row's bits depend on its place"
    w = w13[1]
    alone = arithmetic.linear(row, w)
    if (wrong := _difference(alone, F.linear(row, w))) > TOLERANCE:
        return f"a product differs from the reference by {wrong:.3g} of the largest"
    if any(not torch.equal(alone[0], arithmetic.linear(x[2, :rows], w)[places[1][1]]) for rows in (room - 20, room)):
        return "a row's bits depend on the number of rows"
    return ""


def _difference(found: torch.Tensor, want: torch.Tensor) -> float:
    return float((found.float() - want.float()).abs().max() / want.float().abs().max())
