"""Which kernels compute a step, by device: chosen once, when the rank's model is built.

A row's bits may not depend on its batch (see `layers`). On a CPU the library's products keep that for at least CPU_MIN_ROWS
rows. On a GPU cuBLAS does not, so there the products are Triton kernels of our own (`kernels`), and so is the rest of a
layer (`layer_kernels`), where torch would run several times as many kernels. Each is checked at start. Where triton is
missing or a check fails, torch does the rest of the layer; where it is the products, cuBLAS serves, and an answer that is
replayed may differ from the one that was interrupted.
"""

import functools
from typing import Protocol

import structlog
import torch
import torch.nn.functional as F  # noqa: N812

from elastic.config import CPU_MIN_ROWS
from elastic.rank import reference
from elastic.rank.architecture import Architecture
from elastic.rank.arithmetic_check import check_layers, check_products
from elastic.rank.device import Device
from elastic.rank.graphs import Nodes
from elastic.rank.reference import Rows, padded_experts

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

    def norm(self, x: torch.Tensor, delta: torch.Tensor | None, w: torch.Tensor, eps: float) -> torch.Tensor:
        """x += delta in place, if there is one; returns x / rms(x) * w. x, delta [rows, hidden], w [hidden]."""
        ...

    def attend(
        self, qkv: torch.Tensor, q_norm: torch.Tensor, k_norm: torch.Tensor, rows: Rows, cache: torch.Tensor, eps: float
    ) -> torch.Tensor:
        """Normalise and rotate queries and keys, store keys and values of all rows in `cache`, then attend from each row
        over its own sequence up to its position: rows of one sequence in one step see those before them.

        qkv [rows, (heads + 2 * kv_heads) * head_dim], q_norm and k_norm [head_dim], cache [2, sequences, kv_heads,
        max_model_len, head_dim] of this layer; returns [rows, heads * head_dim]. What is not finite is stored as 0.
        """
        ...

    def route(
        self, logits: torch.Tensor, table: torch.Tensor, routes: torch.Tensor, top_k: int, renormalise: bool
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Softmax of `logits` [rows, experts], the `top_k` most probable, each through `table[expert, routes[row]]`.

        table [experts, columns] int64, routes [rows] int64. Returns weights [rows, top_k] float32, which sum to 1 if
        `renormalise`, and physical slots [rows, top_k] int64. The experts of a row differ, whatever the logits.
        """
        ...


class _TorchLayers:
    """All but the products, by torch."""

    norm = staticmethod(reference.norm)
    attend = staticmethod(reference.attend)
    route = staticmethod(reference.route)


class CpuArithmetic(_TorchLayers):
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


class CublasArithmetic(_TorchLayers):
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


class TritonProducts(_TorchLayers):
    """The kernels of `kernels`; the rest by torch. Raises ImportError where triton is missing."""

    name = "triton-products"

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


class TritonArithmetic(TritonProducts):
    """The kernels of `kernels` and `layer_kernels`. Raises ImportError where triton is missing."""

    name = "triton"

    def __init__(self) -> None:
        super().__init__()
        from elastic.rank import layer_kernels

        self._layers = layer_kernels

    def norm(self, x: torch.Tensor, delta: torch.Tensor | None, w: torch.Tensor, eps: float) -> torch.Tensor:
        return self._layers.norm(x, delta, w, eps)

    def attend(
        self, qkv: torch.Tensor, q_norm: torch.Tensor, k_norm: torch.Tensor, rows: Rows, cache: torch.Tensor, eps: float
    ) -> torch.Tensor:
        q = self._layers.turn_and_store(qkv, q_norm, k_norm, rows, cache, eps)
        return self._layers.attention(q, rows, cache).view(len(q), -1)

    def route(
        self, logits: torch.Tensor, table: torch.Tensor, routes: torch.Tensor, top_k: int, renormalise: bool
    ) -> tuple[torch.Tensor, torch.Tensor]:
        return self._layers.route(logits, table, routes, top_k, renormalise)


@functools.cache
def open_arithmetic(device: Device, arch: Architecture) -> Arithmetic:
    """The best of the device; asked once for each model. On a GPU the kernels are compiled (once a machine, then cached)
    and checked on the model's sizes; logs why not where they cannot be used."""
    if not device.is_gpu:
        return CpuArithmetic()
    try:
        products = TritonProducts()
        problem = check_products(products, device, arch.hidden, arch.expert_intermediate)
    except Exception as error:  # triton raises what its compiler, the driver or a C compiler say
        problem = f"{type(error).__name__}: {error}"
    if problem:
        log.warning(
            "the Triton kernels are not used: products are cuBLAS's, and a row depends on its batch", why=problem
        )
        return CublasArithmetic()
    try:
        arithmetic = TritonArithmetic()
        problem = next((found.problem for found in check_layers(arithmetic, device, arch) if found.problem), "")
    except Exception as error:
        problem = f"{type(error).__name__}: {error}"
    if problem:
        log.warning("torch computes all but the products, with several times as many kernels in a step", why=problem)
        return products
    return arithmetic
