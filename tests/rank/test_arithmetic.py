"""The Triton products in Triton's interpreter, which computes on the host: tiles, masks and counts, not a GPU's rounding."""

import json
import subprocess
import sys
from collections.abc import Callable, Iterator

import pytest
import torch

from elastic.rank import arithmetic as arithmetic_module
from elastic.rank.architecture import Architecture
from elastic.rank.arithmetic import CpuArithmetic, CublasArithmetic, TritonArithmetic, TritonProducts, open_arithmetic
from elastic.rank.arithmetic_check import Found, check_products
from elastic.rank.device import CPU, Device
from elastic.rank.graphs import PlainNodes
from elastic.rank.reference import padded_experts

INTERPRETED = """
import json, os, sys
os.environ["TRITON_INTERPRET"] = "1"
import torch
from elastic.rank import kernels
from elastic.rank.arithmetic import TritonProducts
from elastic.rank.arithmetic_check import check_products
from elastic.rank.device import CPU
from elastic.rank.reference import padded_experts

torch.manual_seed(0)
found = {"check": check_products(TritonProducts(), CPU, 160, 48), "experts": [], "linear": [], "beyond": True}
for counts, room, hidden, width in json.loads(sys.argv[1]):
    experts = len(counts)
    x, w13 = torch.randn(experts, room, hidden), torch.randn(experts, 2 * width, hidden) / hidden**0.5
    w2 = torch.randn(experts, hidden, width) / width**0.5
    y, want = torch.full_like(x, 7.0), torch.empty_like(x)
    for e, count in enumerate(counts):
        x[e, count:] = float("nan")
    kernels.expert_mlps(x, torch.tensor(counts, dtype=torch.int32), w13, w2, y)
    padded_experts(x, w13, w2, want, room)
    for e, count in enumerate(counts):
        found["experts"].append(float((y[e, :count] - want[e, :count]).abs().max()) if count else 0.0)
        found["beyond"] &= bool((y[e, count:] == 7.0).all())
for rows in (1, 3, 16, 70):
    x, w, out = torch.randn(rows, 200), torch.randn(77, 200), torch.empty(rows, 77)
    kernels.linear(x, w, out)
    found["linear"].append(float((out - x @ w.t()).abs().max()))
print(json.dumps(found))
"""

CASES = [
    ([0, 1, 37], 40, 160, 48),
    ([64], 64, 128, 128),
    ([0, 0], 16, 32, 24),
    ([17, 96, 5, 80], 96, 136, 70),
]


@pytest.fixture(scope="module")
def interpreted() -> dict[str, object]:
    pytest.importorskip("triton")
    command = [sys.executable, "-c", INTERPRETED, json.dumps(CASES)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)  # type: ignore[no-any-return]


def test_rows_that_came_get_their_experts_result_whatever_the_counts(interpreted: dict[str, list[float]]) -> None:
    assert len(interpreted["experts"]) == 10
    assert max(interpreted["experts"]) < 1e-5
    assert max(interpreted["linear"]) < 1e-4


def test_rows_that_never_came_are_neither_read_nor_written(interpreted: dict[str, bool]) -> None:
    """They hold what an earlier step left, NaN at worst."""
    assert interpreted["beyond"]


def test_a_row_keeps_its_bits_in_every_place_and_company(interpreted: dict[str, str]) -> None:
    assert interpreted["check"] == ""


class Wrong(CpuArithmetic):
    """Products that are right but for one thing."""

    def __init__(self, fault: str) -> None:
        self.fault = fault

    def linear(self, x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        # one order of summing whatever the rows
        out = (x[:, None].double() * w.double()).sum(-1).float()
        return out * (1 + 1e-6 * len(x)) if self.fault == "rows" else out * (2 if self.fault == "product" else 1)

    def experts(self, x, counts, w13, w2, y, nodes):  # type: ignore[no-untyped-def]
        want = torch.empty_like(x)
        padded_experts(x, w13, w2, want, x.shape[1])
        for e, count in enumerate(counts.tolist()):
            beyond = count + 1 if self.fault == "beyond" else count
            y[e, :beyond] = want[e, :beyond] * (1.5 if self.fault == "expert" else 1)
        # the reference's own bits depend on the place
        y[2, x.shape[1] // 2 + 1] = y[1, 0] * (1 + 1e-6 if self.fault == "place" else 1)


@pytest.mark.parametrize(
    ("fault", "words"),
    [
        ("", "$"),
        ("beyond", "rows beyond"),
        ("expert", "results differ from the reference"),
        ("place", "depend on its place"),
        ("product", "a product differs"),
        ("rows", "depend on the number of rows"),
    ],
)
def test_a_kernel_that_is_wrong_on_this_machine_is_found_at_start(fault: str, words: str) -> None:
    problem = check_products(Wrong(fault), CPU, 64, 32)
    assert problem == "" if not fault else words in problem


class Gpu(Device):
    is_gpu = True


@pytest.fixture
def arch() -> Architecture:
    return Architecture(
        vocab=8, hidden=64, layers=1, heads=2, kv_heads=1, head_dim=16, dense_intermediate=0, expert_intermediate=32,
        experts=4, top_k=2, norm_topk_prob=True, moe_layers=(0,), rms_eps=1e-6, rope_theta=1e4, tied=False, eos_ids=(),
    )  # fmt: skip


@pytest.fixture
def gpu() -> Iterator[Device]:
    """A CPU that is taken for a GPU; what was chosen for it is forgotten before and after."""
    open_arithmetic.cache_clear()
    yield Gpu(CPU.place, torch.float32)
    open_arithmetic.cache_clear()


def broken(*_: object) -> str:
    raise RuntimeError("no C compiler")


def test_where_the_products_fail_the_library_serves_and_the_log_says_why(
    gpu: Device, arch: Architecture, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(arithmetic_module, "TritonProducts", broken)
    assert isinstance(open_arithmetic(gpu, arch), CublasArithmetic)
    assert "no C compiler" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("layers", "words"),
    [
        (broken, "no C compiler"),
        (lambda *_: iter([Found("norm", "", 0.0), Found("routing", "routing: other experts", 0.0)]), "other experts"),
    ],
)
def test_where_a_kernel_of_the_layer_fails_torch_does_its_part_and_the_products_stay(
    gpu: Device,
    arch: Architecture,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    layers: Callable[..., object],
    words: str,
) -> None:
    pytest.importorskip("triton")
    monkeypatch.setattr(arithmetic_module, "check_products", lambda *_: "")
    monkeypatch.setattr(arithmetic_module, "check_layers", layers)
    chosen = open_arithmetic(gpu, arch)
    assert isinstance(chosen, TritonProducts)
    assert not isinstance(chosen, TritonArithmetic)
    assert chosen.norm is CpuArithmetic.norm
    said = capsys.readouterr().out
    assert words in said
    assert len(said.splitlines()) == 1


def test_where_every_check_passes_the_kernels_serve_and_nothing_is_said(
    gpu: Device, arch: Architecture, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("triton")
    monkeypatch.setattr(arithmetic_module, "check_products", lambda *_: "")
    monkeypatch.setattr(arithmetic_module, "check_layers", lambda *_: iter([Found("norm", "", 0.0)]))
    assert isinstance(open_arithmetic(gpu, arch), TritonArithmetic)
    assert capsys.readouterr().out == ""


def test_the_fall_back_computes_what_the_cpu_computes() -> None:
    x, w13, w2 = torch.randn(2, 8, 32), torch.randn(2, 32, 32), torch.randn(2, 32, 16)
    counts = torch.tensor([3, 8], dtype=torch.int32)
    one, other = torch.zeros(2, 8, 32), torch.zeros(2, 8, 32)
    CpuArithmetic().experts(x, counts, w13, w2, one, PlainNodes())
    CublasArithmetic().experts(x, counts, w13, w2, other, PlainNodes())
    assert torch.equal(one[0, :3], other[0, :3])
    assert torch.equal(one[1], other[1])
