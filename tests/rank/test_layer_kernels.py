"""The kernels of a layer: in Triton's interpreter, which computes on the host in float32 (blocks, masks and places, not a
GPU's rounding), and compiled for an H200; and the check that looks at them at start."""

import json
import math
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from elastic.rank import reference
from elastic.rank.architecture import Architecture, read_architecture
from elastic.rank.arithmetic import CpuArithmetic, TritonArithmetic, open_arithmetic
from elastic.rank.arithmetic_check import check_layers
from elastic.rank.device import CPU, Device
from elastic.rank.reference import Rows
from elastic.tools.make_checkpoint import Options, make_checkpoint

MODEL = Options(layers=3, experts=8, hidden=32, heads=4, kv_heads=2, head_dim=8, expert_intermediate=16, dense_layers=1)
KERNELS = ("norm", "storing", "attention", "routing")


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("model") / "checkpoint", MODEL)


@pytest.fixture(scope="module")
def arch(checkpoint: Path) -> Architecture:
    return read_architecture(checkpoint)


# --- interpreted -------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def interpreted(checkpoint: Path) -> dict[str, Any]:
    pytest.importorskip("triton")
    command = [sys.executable, "-m", "tests.rank.layer_kernels_interpreted", str(checkpoint)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)  # type: ignore[no-any-return]


def test_each_kernel_computes_what_torch_does_for_heads_experts_and_widths_of_any_size(
    interpreted: dict[str, Any],
) -> None:
    found = interpreted["found"]
    assert [name for name, _, _ in found] == [*KERNELS] * 4
    assert not [problem for _, problem, _ in found if problem]
    assert max(error for _, _, error in found) < 1e-6


def test_a_model_on_the_kernels_gives_the_tokens_and_logits_of_the_cpu(interpreted: dict[str, Any]) -> None:
    assert interpreted["tokens"]
    assert interpreted["logits"] < 1e-4


def test_a_request_on_the_kernels_gets_the_same_bits_alone_and_in_company(interpreted: dict[str, Any]) -> None:
    """The company discards every second step, too."""
    assert interpreted["same bits"]


# --- compiled ----------------------------------------------------------------------------------------------------------

COMPILE = """
import json, sys
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from elastic.rank import layer_kernels

name, types, constants, options = json.loads(sys.argv[1])
kernel = getattr(layer_kernels, name)
signature = dict(zip(kernel.arg_names, types)) | dict.fromkeys(constants, "constexpr")
places = {(kernel.arg_names.index(key),): value for key, value in constants.items()}
compiled = triton.compile(ASTSource(kernel, signature, places), target=GPUTarget("cuda", 90, 32), options=options)
ptx = compiled.asm["ptx"]
waits = "griddepcontrol.wait" in ptx and "griddepcontrol.launch_dependents" in ptx
print(json.dumps({"shared": compiled.metadata.shared, "mma": "mma" in ptx, "waits": waits}))
"""

COMPILED = {
    "norm, hidden 8192": (
        "_norm", ["*bf16"] * 4 + ["fp32"], {"ADDED": True, "WIDTH": 8192, "BLOCK": 8192}, {"num_warps": 8},
    ),
    "storing, 128 wide": (
        "_turn_and_store", ["*bf16"] * 5 + ["*i64"] * 2 + ["*bf16"] * 2 + ["i32", "i32", "fp32"],
        {"HEADS": 64, "KV_HEADS": 4, "DIM": 128, "BLOCK": 128}, {"num_warps": 1},
    ),
    "attention, 128 wide": (
        "_attend", ["*bf16"] * 2 + ["*i64"] * 2 + ["*bf16", "i32", "i32", "fp32"],
        {"KV_HEADS": 4, "GROUP": 16, "DIM": 128, "PADDED_GROUP": 16, "PADDED_DIM": 128, "BLOCK": 64},
        {"num_warps": 4, "num_stages": 2},
    ),
    "routing, 512 experts": (
        "_route", ["*bf16", "*i64", "*i64", "*fp32", "*i64", "i32"],
        {"EXPERTS": 512, "TOP_K": 16, "RENORMALISE": True, "BLOCK": 512, "PADDED_TOP": 16, "LARGEST": 3e38},
        {"num_warps": 1},
    ),
}  # fmt: skip


@pytest.mark.parametrize("overlapped", [False, True], ids=["in turn", "overlapped"])
@pytest.mark.parametrize("case", COMPILED.values(), ids=COMPILED)
def test_the_kernels_compile_for_an_h200_within_its_shared_memory(case: tuple[Any, ...], overlapped: bool) -> None:
    pytest.importorskip("triton")
    name, types, constants, options = case
    case = name, types, constants | {"PDL": overlapped}, options | ({"launch_pdl": True} if overlapped else {})
    done = subprocess.run(
        [sys.executable, "-c", COMPILE, json.dumps(case)], capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert report["shared"] <= 99 << 10
    assert report["mma"] or case[0] != "_attend"
    assert report["waits"] == overlapped, "a kernel that starts early waits for what it reads"


# --- the check at start ------------------------------------------------------------------------------------------------


class Right(CpuArithmetic):
    """Row by row, so that no bit depends on the batch."""

    def attend(  # type: ignore[override]
        self, qkv: torch.Tensor, q_norm: torch.Tensor, k_norm: torch.Tensor, rows: Rows, cache: torch.Tensor, eps: float
    ) -> torch.Tensor:
        by_position = sorted(range(len(qkv)), key=lambda i: int(rows.positions[i]))
        out = {}
        for i in by_position:
            one = Rows(rows.seqs[i : i + 1], rows.positions[i : i + 1], rows.tables)
            out[i] = reference.attend(qkv[i : i + 1], q_norm, k_norm, one, cache, eps)
        return torch.cat([out[i] for i in range(len(qkv))])


def wrong_norm(change: Callable[[torch.Tensor, torch.Tensor | None, torch.Tensor], torch.Tensor]) -> type[Right]:
    class Wrong(Right):
        def norm(self, x, delta, w, eps):  # type: ignore[no-untyped-def,override]
            return change(x, delta, reference.norm(x, delta, w, eps))

    return Wrong


def wrong_attend(change: Callable[[torch.Tensor, torch.Tensor, Rows], torch.Tensor]) -> type[Right]:
    class Wrong(Right):
        def attend(self, qkv, q_norm, k_norm, rows, cache, eps):  # type: ignore[no-untyped-def]
            return change(super().attend(qkv, q_norm, k_norm, rows, cache, eps), cache, rows)

    return Wrong


def wrong_route(change: Callable[[torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor]]) -> type[Right]:
    class Wrong(Right):
        def route(self, logits, table, routes, top_k, renormalise):  # type: ignore[no-untyped-def,override]
            return change(*reference.route(logits, table, routes, top_k, renormalise))

    return Wrong


def spoil(cache: torch.Tensor, value: float) -> None:
    cache[0, 1, 0, 7, 0] = value


FAULTS = {
    "the result of a norm": (wrong_norm(lambda x, delta, h: h * 1.1), "norm: results differ"),
    "not a number in a norm": (wrong_norm(lambda x, delta, h: h * math.nan), "norm: "),
    "a norm that forgets the residual": (wrong_norm(lambda x, delta, h: (x.mul_(1.1), h)[1]), "norm: "),
    "a norm by the batch": (wrong_norm(lambda x, delta, h: h * (1 + 1e-6 * len(h))), "norm: a row's bits"),
    "a stranger's cell": (wrong_attend(lambda out, cache, rows: (spoil(cache, 0.5), out)[1]), "storing: a cell"),
    "infinity in the cache": (
        wrong_attend(lambda out, cache, rows: (cache[0, 1, 0, 130].fill_(math.inf), out)[1]), "storing: what is not finite",
    ),
    "the result of attention": (wrong_attend(lambda out, cache, rows: out * 1.1), "attention: results differ"),
    "attention by the batch": (
        wrong_attend(lambda out, cache, rows: out * (1 + 1e-6 * len(out))), "attention: a row's bits",
    ),
    "the weights": (wrong_route(lambda w, p: (w * 1.01, p)), "routing: results differ"),
    "another expert": (wrong_route(lambda w, p: (w, p.flip(-1))), "routing: other experts"),
    "an expert twice": (wrong_route(lambda w, p: (w, p[:, :1].expand_as(p))), "routing: a row of garbage"),
    "routing by the batch": (wrong_route(lambda w, p: (w * (1 + 1e-6 * len(w)), p)), "routing: a row's bits"),
}  # fmt: skip


@pytest.mark.parametrize(("arithmetic", "words"), FAULTS.values(), ids=FAULTS)
def test_a_kernel_of_a_layer_that_is_wrong_on_this_machine_is_found_at_start(
    arch: Architecture, arithmetic: type[Right], words: str
) -> None:
    problems = [found.problem for found in check_layers(arithmetic(), CPU, arch) if found.problem]
    assert any(problem.startswith(words) for problem in problems), problems


def test_the_check_finds_nothing_wrong_with_what_is_right(arch: Architecture) -> None:
    found = list(check_layers(Right(), CPU, replace(arch, norm_topk_prob=False)))
    assert [(each.name, each.problem) for each in found] == [(name, "") for name in KERNELS]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_on_a_gpu_every_kernel_passes_and_is_chosen(arch: Architecture) -> None:
    device = Device(torch.device("cuda", 0), torch.bfloat16)
    wide = replace(arch, hidden=2048, heads=32, kv_heads=4, head_dim=128, experts=128, top_k=8)
    assert not [found.problem for found in check_layers(TritonArithmetic(), device, wide) if found.problem]
    assert open_arithmetic(device, wide).name == "triton"
