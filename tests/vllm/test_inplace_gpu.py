"""`python -m chaos.inplace_gpu`: what of it needs neither a GPU nor vLLM, and a dry run over vLLM's own servers on a CPU."""

import asyncio
import importlib.metadata
import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import msgspec
import pytest

from chaos.inplace_gpu import __main__ as benchmark
from chaos.inplace_gpu import growth, kills, overhead, rank_log
from chaos.inplace_gpu.profile import distribution, of
from chaos.inplace_gpu.records import Case, Compared, Part, Results, Silence, Survivor, Window
from chaos.inplace_gpu.report import markdown, percentile
from chaos.inplace_gpu.watch import silence
from chaos.machine import machine
from elastic.errors import ElasticError
from elastic.vllm import plugin
from healer.targets.vllm.in_place import unsupported
from tests.vllm.gpu_profiles import KNOWN_ERRORS, as_the_daemon_reads, dry_run, errors, needs_servers, profile_of


@pytest.mark.parametrize("kind", ["h200", "cpu"])
@pytest.mark.parametrize("in_place", [True, False])
def test_the_daemon_heals_in_place_in_one_group_and_has_nothing_to_do_it_with_in_the_other(
    tmp_path: Path, kind: str, in_place: bool
) -> None:
    profile = of(profile_of(tmp_path, kind), site=tmp_path / "site", ranks=3, in_place=in_place)
    target, deployment = as_the_daemon_reads(profile, tmp_path)
    assert target.ranks == 3
    assert unsupported(target, deployment.arguments) == ("" if in_place else "spec.target.inPlace is off")
    assert errors(deployment) == KNOWN_ERRORS[kind]
    # vLLM loads every plugin that it finds, so a stock group must not find this one
    found = str(tmp_path / "site") in target.env["PYTHONPATH"].split(":")
    assert found == in_place


def test_redundancy_and_the_balancers_interval_reach_vllm(tmp_path: Path) -> None:
    base = profile_of(tmp_path, "h200")
    profile = of(base, site=tmp_path, ranks=4, in_place=True, redundant=16, balance_every=40)
    given = json.loads(profile.args[profile.args.index("--eplb-config") + 1])
    assert (given["num_redundant_experts"], given["step_interval"], given["window_size"]) == (16, 40, 40)
    untouched = json.loads(base.args[base.args.index("--eplb-config") + 1])
    assert {key: given[key] for key in ("use_async", "communicator")} == {
        key: untouched[key] for key in ("use_async", "communicator")
    }


def test_vllm_finds_the_plugin_where_the_benchmark_puts_it(tmp_path: Path) -> None:
    found = next(iter(importlib.metadata.distributions(path=[str(distribution(tmp_path))])))
    points = {(point.group, point.name): point for point in found.entry_points}
    assert points["vllm.general_plugins", "healer_in_place"].load() is plugin.register
    assert points["vllm.endpoint_plugins", "healer_in_place"].load() is plugin.endpoints


# --- what a rank's clients saw ------------------------------------------------------------------------------------------


def test_a_silence_that_began_before_the_signal_counts_from_its_own_begin() -> None:
    arrivals = [0.0, 1.0, 2.0, 2.9, 4.5, 4.6, 9.0, 9.1]
    found = silence(arrivals, 3.0, 5.0)
    assert found is not None
    # the longest that touches the stretch begins in it and ends after it
    assert (found.at_s, found.took_s, found.ended_s) == pytest.approx((1.6, 4.4, 6.0))
    first = silence(arrivals, 3.0, 4.0)
    assert first is not None
    assert (first.at_s, first.took_s, first.ended_s) == pytest.approx((-0.1, 1.6, 1.5))


@pytest.mark.parametrize("arrivals", [[], [1.0], [1.0, 2.0]])
def test_clients_that_got_nothing_around_an_event_saw_no_silence(arrivals: list[float]) -> None:
    assert silence(arrivals, 5.0, 6.0) is None


def test_a_capture_and_an_eager_step_are_read_from_a_ranks_log() -> None:
    lines = [
        "(Worker_DP1 pid=7) INFO 11-30 06:00:00 [model_runner.py:1164] Graph capturing finished in 2 secs, took 0.10 GiB",
        "(APIServer pid=5) INFO 11-30 06:00:10 [cuda_graph.py:122] **CUDAGraph Stats:**",
        "| Unpadded Tokens | Padded Tokens | Num Paddings | Runtime Mode | Count |",
        "|-----------------|---------------|--------------|--------------|-------|",
        "| 3               | 4             | 1            | FULL         | 120   |",
        "| 4               | 4             | 0            | FULL         | 30    |",
        "| 9               | 9             | 0            | NONE         | 2     |",
    ]
    assert rank_log.captures(lines) == 1
    assert rank_log.modes(lines) == {"FULL": 150, "NONE": 2}
    assert rank_log.modes(lines[:4]) == {}


def test_experts_that_were_lost_with_a_rank_are_read_from_a_survivors_log() -> None:
    line = "[in-place] slots [0, 2]: steps ended 70 ms, loaded 130 ms; {} experts reloaded, {} bytes here"
    assert rank_log.reloaded([line.format(64, 201_326_592), "else", line.format(0, 0)]) == (
        64,
        pytest.approx(201.3, 0.01),
    )
    assert rank_log.reloaded(["nothing"]) == (0, 0)


# --- stock and plugin ---------------------------------------------------------------------------------------------------


def pairs(*ratios: float) -> list[Window]:
    """Of which the stock window comes first in even ones; the machine gets slower from pair to pair."""
    found = list[Window]()
    for number, ratio in enumerate(ratios):
        stock = 1000.0 / (number + 1)
        two = [
            Window(plugin=has, tokens_per_s=stock * (ratio if has else 1), median_wait_ms=1.0, p99_wait_ms=2.0)
            for has in (False, True)
        ]
        found += two if number % 2 == 0 else reversed(two)
    return found


def test_a_machine_that_gets_slower_falls_on_both_groups() -> None:
    found = overhead.compare(pairs(0.99, 1.01, 1.0, 1.0))["tokens_per_s"]
    assert found.ratio == pytest.approx(1.0)
    # Student's t for three degrees of freedom, deviation 0.00816
    assert (found.low, found.high) == pytest.approx((1 - 0.012974, 1 + 0.012974), abs=1e-4)


def test_a_slower_plugin_is_seen() -> None:
    found = overhead.compare(pairs(0.95, 0.951, 0.949, 0.95))["tokens_per_s"]
    assert found.high < 0.99


def test_a_plugin_that_costs_more_than_one_percent_is_missed() -> None:
    assert overhead.missed(overhead.compare(pairs(0.995, 0.996))) == ""
    assert overhead.missed(overhead.compare(pairs(0.98, 0.98))) == "tokens_per_s is 2.0 % worse than stock's"


def test_one_pair_proves_nothing() -> None:
    found = overhead.compare(pairs(1.0))["tokens_per_s"]
    assert found.low == -float("inf")


# --- memory over many deaths ---------------------------------------------------------------------------------------------


def cycles(grow_mb: float, threads: int = 0) -> list[Case]:
    """Slots 0 and 1 die in turn; what is allocated once comes in the first ones."""
    first = [500.0, 100.0, 0.0]
    return [
        case(
            survivor(1 - number % 2, 0.3, memory_mb=9.0),
            survivor(
                2,
                0.3,
                memory_mb=2000.0 + grow_mb * number - (first[number] if number < 3 else 0.0),
                shared_mb=100.0 * number,
                threads=300 + threads * number,
            ),
            gpu_memory_mb=(9000 - number % 2, 8000),
        )
        for number in range(20)
    ]


def test_memory_that_grows_with_every_death_is_missed() -> None:
    figures, grown = growth.held(cycles(30.0), 2)
    assert figures["growth, memory of slot 2_mb_a_cycle"] == pytest.approx(30.0)
    assert grown == "memory of slot 2: +30.0 a cycle (mb)"


def test_a_thread_that_stays_behind_at_each_death_is_missed() -> None:
    _, grown = growth.held(cycles(0.0, threads=1), 2)
    assert grown == "threads of slot 2: +1.0 a cycle (count)"


def test_what_is_allocated_once_is_no_growth() -> None:
    figures, grown = growth.held(cycles(0.0), 2)
    assert grown == ""
    assert figures["memory of slot 2_mb"] == [2000.0, 2000.0]
    assert growth.held(cycles(30.0)[:4], 2) == ({}, ""), "two points of a settled stretch are the least"


# --- a round of the balancer ---------------------------------------------------------------------------------------------


async def test_a_round_that_begins_after_the_look_is_seen_in_the_log_of_any_rank(tmp_path: Path) -> None:
    old, quiet = tmp_path / "a", tmp_path / "b"
    old.write_text("INFO Rearranging experts (async mode) ...\n")
    quiet.write_text("")
    waiting = asyncio.create_task(kills._round_begins([old, quiet]))
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(asyncio.shield(waiting), 0.1)
    with quiet.open("a") as file:
        for piece in ("INFO Rearranging exp", "erts (async mode)"):
            file.write(piece)
            file.flush()
            await asyncio.sleep(0.02)
    await asyncio.wait_for(waiting, 10.0)


async def test_a_group_without_a_balancer_is_an_error_and_no_kill(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kills, "ROUND_S", 0.05)
    (tmp_path / "a").write_text("")
    with pytest.raises(ElasticError, match="no round of the balancer began"):
        await kills._round_begins([tmp_path / "a"])


# --- the report ---------------------------------------------------------------------------------------------------------


def survivor(slot: int, back_s: float, **more: Any) -> Survivor:
    given: dict[str, Any] = {
        "slot": slot,
        "right": 9,
        "wrong": 0,
        "errors": 0,
        "heal": Silence(0.01, back_s - 0.01),
        "refill": Silence(40.0, 0.25),
        "same_process": True,
        "captures": 0,
        "modes": {"FULL": 700, "NONE": 3},
        "memory_mb": 2000.0,
    }
    return Survivor(**(given | more))


def case(*survivors: Survivor, **more: Any) -> Case:
    given: dict[str, Any] = {
        "slot": 1,
        "under_load": True,
        "killed": 2,
        "healed_s": 0.2,
        "answered_s": 1.5,
        "filled_s": 42.0,
        "survivors": survivors,
        "victim_errors": 17,
        "router": None,
        "sequences": (),
        "gpu_memory_mb": (9000, 8000),
        "problems": (),
    }
    return Case(**(given | more))


def results(*parts: Part) -> Results:
    return Results(
        machine=machine(),
        gpus=("NVIDIA H200",),
        versions={"vllm": "0.33.0"},
        profile="h200",
        ranks=3,
        args=(),
        spares=0,
        env={"UCX_CUDA_IPC_CACHE": "n"},
        streams=4,
        tokens=64,
        began="2026-11-30T00:00:00Z",
        took_s=9.0,
        parts=parts,
    )


def test_the_report_says_when_survivors_were_back_and_what_was_missed() -> None:
    cases = (
        case(survivor(0, 0.31), survivor(2, 0.33)),
        case(survivor(0, 0.9), problems=("slot 0 captured its graphs again",)),
    )
    part = Part(name="load", title="kills", began_s=1.0, took_s=99.0, figures={}, cases=cases, error="one thing")
    text = markdown(results(part))
    row = "| 1 | load | 0.20 s | 0.31, 0.33 | 0.30, 0.32 | 1.50 s | 42.0 s | 0.25, 0.25 | 0, -, 17 | 0 | 0 | FULL 1400, NONE 6 |"
    assert row in text
    assert "slot 0 captured its graphs again |" in text
    twice = case(survivor(0, 0.4, reloaded=64, reloaded_mb=201.3), second=2, second_after_s=2.5)
    assert "| 64, 201 MB |" in markdown(results(msgspec.structs.replace(part, cases=(twice,))))
    assert "| 1, then 2 | load, 2.5 s into the refill |" in markdown(
        results(msgspec.structs.replace(part, cases=(twice,)))
    )
    assert "3 samples: median 0.330 s, 95th percentile 0.900 s, longest 0.900 s" in text
    assert "| kills | 99.0 s | one thing |" in text
    assert "UCX_CUDA_IPC_CACHE=n" in text


def test_the_report_compares_stock_and_plugin() -> None:
    part = Part(
        name="overhead",
        title="in turn",
        began_s=0.0,
        took_s=60.0,
        figures={},
        windows=tuple(pairs(1.0, 0.998)),
        compared={"tokens_per_s": Compared(0.999, 0.98, 1.018)},
    )
    text = markdown(results(part))
    assert "| plugin | 1000.0 | 1.00 ms | 2.00 ms |" in text
    assert "tokens_per_s with the plugin, of stock's: 0.9990 (95 %: 0.9800 to 1.0180)" in text


@pytest.mark.parametrize(("share", "expected"), [(0.5, 5.0), (0.95, 10.0), (0.1, 1.0)])
def test_a_percentile_is_a_value_that_was_seen(share: float, expected: float) -> None:
    assert percentile([float(value) for value in range(10, 0, -1)], share) == expected


def test_records_survive_json() -> None:
    part = Part(
        name="load", title="t", began_s=0.0, took_s=1.0, figures={"ready_s": 1.0}, cases=(case(survivor(0, 1.0)),)
    )
    found = results(part)
    assert msgspec.json.decode(msgspec.json.encode(found), type=Results) == found


# --- vLLM's own servers -------------------------------------------------------------------------------------------------


@pytest.mark.vllm
@pytest.mark.slow
@pytest.mark.timeout(3600)
@needs_servers
def test_a_dry_run_on_a_cpu_heals_every_slot_and_misses_nothing(tmp_path: Path) -> None:
    """Ranks: 3, of which one may die at a time. Stub workers have no balancer, so no round of it."""
    names = [name for name in benchmark.PARTS if name not in ("round", "second")]
    few = ["--streams", "2", "--windows", "2", "--window", "3", "--cycles", "2"]
    code = benchmark.main([*dry_run(tmp_path, budget_s=3500), *few])
    found = msgspec.json.decode((tmp_path / "out/inplace-gpu-cpu.json").read_bytes(), type=Results)
    assert {part.name: part.error for part in found.parts} == dict.fromkeys(names, "")
    assert code == 0
    parts = {part.name: part for part in found.parts}
    assert [len(parts[name].cases) for name in ("load", "idle", "cycles")] == [3, 3, 2]
    for one in parts["load"].cases:
        assert one.router is not None
        assert one.router.right > 0
        assert all(survivor.heal is not None and survivor.heal.ended_s > 0 for survivor in one.survivors)
        assert one.filled_s > one.healed_s
    assert all(a.plugin != b.plugin for a, b in pairwise(parts["overhead"].windows[:2]))
    assert parts["restart"].figures["restarted_s"] > max(one.healed_s for one in parts["load"].cases)
