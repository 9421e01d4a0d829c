"""The Triton kernels of a step: right on this GPU, batch-invariant, and how long each takes beside torch."""

import time
from collections.abc import Callable, Iterator
from typing import Any

import torch

from chaos.gpu_check import Bench, Line, timed_us
from elastic.rank import reference
from elastic.rank.architecture import Architecture
from elastic.rank.arithmetic import Arithmetic, CublasArithmetic, TritonArithmetic, TritonProducts
from elastic.rank.arithmetic_check import check_layers, check_products
from elastic.rank.device import Device
from elastic.rank.graphs import PlainNodes
from elastic.rank.reference import Rows, Tables

SHAPES = ((2048, 128, 8), (2048, 768, 16), (7168, 2048, 8))
"""Hidden, width of an expert, experts of a rank."""
LAYERS = ((2048, 16, 4, 64, 8, 2), (2048, 32, 4, 128, 128, 8), (4096, 64, 4, 128, 128, 8), (7168, 64, 8, 128, 256, 8))
"""Hidden, heads, KV heads, head dimension, experts, top-k: the narrow model of the benchmarks, Qwen3-30B-A3B and
Qwen3-235B-A22B by their config.json, and the width of DeepSeek-V3."""
ROWS, LENGTH = 8, 2048
POSITIONS = (63, LENGTH - 1)


def products(bench: Bench) -> Iterator[Line]:
    """The matrix products, beside the library's."""
    device, nodes = bench.device, PlainNodes()
    for hidden, width, experts in SHAPES:
        began = time.monotonic()
        chosen = TritonProducts()
        problem = check_products(chosen, device, hidden, width)
        text = f"hidden {hidden} width {width}: ready in {time.monotonic() - began:.2f} s"
        if problem:
            yield Line("products", False, f"{text}; {problem}")
            continue
        room = 2 * bench.config.max_tokens
        x, y = device.zeros(experts, room, hidden).normal_(), device.zeros(experts, room, hidden)
        w13 = device.zeros(experts, 2 * width, hidden).normal_()
        w2 = device.zeros(experts, hidden, width).normal_()
        size = (w13.numel() + w2.numel()) * w13.element_size()

        def us(arithmetic: Arithmetic, rows: int) -> float:
            counts = torch.full((experts,), rows, dtype=torch.int32, device=device.place)  # noqa: B023
            return timed_us(lambda: arithmetic.experts(x, counts, w13, w2, y, nodes))  # noqa: B023

        padded = us(CublasArithmetic(), room)
        took = {rows: us(chosen, rows) for rows in (0, 1, 8, room)}
        shown = ", ".join(f"{rows} rows each {value:.1f} us" for rows, value in took.items())
        rate = size / took[8] / 1e3
        text += f"; {experts} experts: {shown} ({rate:.0f} GB/s of weights at 8), padded product {padded:.1f} us"
        yield Line("products", True, text)


def layers(bench: Bench) -> Iterator[Line]:
    """The kernels of a layer beside its products."""
    for shape in LAYERS:
        arch = _architecture(*shape)
        began = time.monotonic()
        found = list(check_layers(TritonArithmetic(), bench.device, arch))
        ready = time.monotonic() - began
        sizes = "hidden {} heads {}/{} of {}, {} of experts {}".format(*shape[:4], shape[5], shape[4])
        yield Line("layer", not any(each.problem for each in found), f"{sizes}: ready in {ready:.2f} s")
        took = _timed(bench.device, arch)
        for each in found:
            text = f"error {each.error:.2g} of the largest; {ROWS} rows {took[each.name]}"
            yield Line(each.name, not each.problem, each.problem or text)


def _timed(device: Device, arch: Architecture) -> dict[str, str]:
    from elastic.rank import layer_kernels as kernels

    kv, d, eps = arch.kv_heads, arch.head_dim, arch.rms_eps
    x, delta, w = (
        device.zeros(*shape).normal_() for shape in ((ROWS, arch.hidden), (ROWS, arch.hidden), (arch.hidden,))
    )
    qkv, q_norm = device.zeros(ROWS, (arch.heads + 2 * kv) * d).normal_(), device.zeros(d).normal_()
    cache = device.zeros(2, ROWS, kv, LENGTH, d).normal_()
    logits = device.zeros(ROWS, arch.experts).normal_()
    table, routes = device.zeros(arch.experts, 33, dtype=torch.int64), device.zeros(ROWS, dtype=torch.int64)
    tables = Tables.of(arch, ROWS, LENGTH, device)
    seqs = device.to(torch.arange(ROWS))

    def shown(kernel: Callable[[], Any], torch_: Callable[[], Any]) -> str:
        return f"{timed_us(kernel):.1f} us (torch {timed_us(torch_):.1f})"

    attention = []
    for position in POSITIONS:
        rows = Rows(seqs, torch.full_like(seqs, position), tables)
        q = kernels.turn_and_store(qkv, q_norm, q_norm, rows, cache, eps)
        us = timed_us(lambda: kernels.attention(q, rows, cache))  # noqa: B023
        attention.append(f"{us:.1f} us at position {position}")
    whole = timed_us(lambda: reference.attend(qkv, q_norm, q_norm, rows, cache, eps))
    return {
        "norm": shown(lambda: kernels.norm(x, delta, w, eps), lambda: reference.norm(x, delta, w, eps)),
        "storing": f"{timed_us(lambda: kernels.turn_and_store(qkv, q_norm, q_norm, rows, cache, eps)):.1f} us",
        "attention": f"{', '.join(attention)} of {LENGTH} (torch, with storing, {whole:.1f})",
        "routing": shown(
            lambda: kernels.route(logits, table, routes, arch.top_k, True),
            lambda: reference.route(logits, table, routes, arch.top_k, True),
        ),
    }


def _architecture(hidden: int, heads: int, kv_heads: int, head_dim: int, experts: int, top_k: int) -> Architecture:
    return Architecture(
        vocab=1024,
        hidden=hidden,
        layers=1,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        dense_intermediate=0,
        expert_intermediate=128,
        experts=experts,
        top_k=top_k,
        norm_topk_prob=True,
        moe_layers=(0,),
        rms_eps=1e-6,
        rope_theta=1e6,
        tied=False,
        eos_ids=(),
    )
