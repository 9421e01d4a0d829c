"""The parts of `chaos.vllm_gpu` that need neither a GPU nor vLLM."""

import asyncio
import subprocess
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from chaos.machine import machine
from chaos.vllm_gpu import __main__ as scenario
from chaos.vllm_gpu.boot import gaps
from chaos.vllm_gpu.load import Load, LoadReport, reference
from chaos.vllm_gpu.parts import PARTS
from chaos.vllm_gpu.records import Part, Phase, Results, Sequence
from chaos.vllm_gpu.report import markdown
from elastic.errors import ElasticError
from healer.targets.vllm import commands
from tests.vllm.gpu_profiles import KNOWN_ERRORS, as_the_daemon_reads, dry_run, errors, needs_servers, profile_of
from tests.vllm.router_fakes import FakeRank, Fault, right_tokens

SMALL = {
    "hidden_size": 512,
    "moe_intermediate_size": 64,
    "num_experts": 8,
    "num_experts_per_tok": 4,
    "num_hidden_layers": 2,
    "vocab_size": 512,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
}
TOKENS = 6


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from chaos.vllm_gpu import model

    folder = tmp_path_factory.mktemp("model")
    model.write(folder, model.CONFIG | SMALL)
    return folder


def greedy(model: Any) -> list[list[int]]:
    import torch

    answers = []
    for prompt in ([5, 9, 200, 3, 77, 8, 400, 13], [2]):
        ids = torch.tensor([prompt])
        with torch.no_grad():
            for _ in range(TOKENS):
                following = model(ids).logits[0, -1].float().argmax()
                ids = torch.cat([ids, following[None, None]], 1)
        answers.append(ids[0, len(prompt) :].tolist())
    return answers


def test_the_models_answers_are_the_same_in_other_arithmetic_and_need_every_expert(checkpoint: Path) -> None:
    """By transformers. A masked rank's experts are left out of a step: that must be seen in its token."""
    import torch
    from transformers import Qwen3MoeForCausalLM

    torch.set_num_threads(1)
    model: Any = Qwen3MoeForCausalLM.from_pretrained(checkpoint, dtype=torch.bfloat16)
    rounded = greedy(model)
    assert len({token for answer in rounded for token in answer}) == 2 * TOKENS, "it goes in circles"
    assert greedy(model.float()) == rounded
    weights = dict(model.named_parameters())
    together = weights.get("model.layers.1.mlp.experts.down_proj")
    down = together[2] if together is not None else weights["model.layers.1.mlp.experts.2.down_proj.weight"]
    with torch.no_grad():
        down.zero_()
    assert greedy(model) != rounded


def test_the_models_tokenizer_knows_every_token(checkpoint: Path) -> None:
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(checkpoint / "tokenizer.json"))
    assert tokenizer.get_vocab_size() == SMALL["vocab_size"]
    assert tokenizer.decode([400, 511]) == "<x400><x511>"


def test_a_model_whose_parts_do_not_fit_its_hidden_size_is_refused() -> None:
    from chaos.vllm_gpu import model

    with pytest.raises(ValueError, match="hidden size 512 does not hold 256"):
        model.weights(model.CONFIG | SMALL | {"moe_intermediate_size": 256})


@pytest.mark.parametrize("kind", ["h200", "cpu"])
def test_the_policy_is_valid_and_the_preflight_finds_nothing_that_stops_it(tmp_path: Path, kind: str) -> None:
    _, deployment = as_the_daemon_reads(profile_of(tmp_path, kind), tmp_path)
    assert errors(deployment) == KNOWN_ERRORS[kind]


def test_the_slots_get_the_gpus_in_turn(tmp_path: Path) -> None:
    target, _ = as_the_daemon_reads(profile_of(tmp_path, "h200"), tmp_path)
    found = [commands.environment(target, {}, slot=slot, joins=False, api_key="") for slot in range(3)]
    assert [each["CUDA_VISIBLE_DEVICES"] for each in found] == ["0", "1", "0"]


def test_the_launcher_runs_the_vllm_of_the_folder_with_the_given_interpreter(tmp_path: Path) -> None:
    profile = profile_of(tmp_path, "h200")
    package = tmp_path / "packages/vllm/entrypoints/cli"
    package.mkdir(parents=True)
    (package / "main.py").write_text("import sys\ndef main(): print(*sys.argv[1:])\n")
    done = subprocess.run(
        [profile.executable, "serve", "m"], env=profile.env, capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "serve m"


def test_a_start_is_told_by_the_silences_in_its_log() -> None:
    launched = time.mktime((2026, 11, 29, 12, 0, 0, 0, 0, -1))
    log = [
        "(APIServer pid=7) INFO 11-29 12:00:12 [serve.py:1] ",
        "no line of vLLM's",
        "(EngineCore_DP0 pid=9) WARNING 11-29 12:00:30 [core.py:1] Initializing",
        "(APIServer pid=7) INFO 11-29 12:00:31 [serve.py:2] waits",
        "(EngineCore_DP0 pid=9) INFO 11-29 12:00:32 [core.py:2] loading",
        "(APIServer pid=7) INFO 11-29 12:01:40 [serve.py:2] ready",
        "(APIServer pid=7) INFO 11-29 13:00:00 [serve.py:2] long after",
    ]
    found = [(g.process, g.at_s, g.took_s, g.then) for g in gaps(log, launched, 101.0)]
    assert found == [
        ("APIServer", 0.0, 12.0, "its banner"),
        ("EngineCore_DP0", 12.0, 18.0, "Initializing"),
        ("APIServer", 32.0, 68.0, "ready"),
    ]


# --- the clients ----------------------------------------------------------------------------------------------------


PROMPTS = [[2, 3], [4, 5], [6, 7, 8]]
COUNT = 12


async def watched(rank: FakeRank, act: Callable[[Load], Awaitable[None]], *, finish: bool = True) -> LoadReport:
    want = [right_tokens(prompt, COUNT) for prompt in PROMPTS]
    load = Load(lambda _: rank.url, PROMPTS, want, streams=3, deadline_s=20.0)
    async with load.running(finish=finish):
        await act(load)
    return load.report()


async def until(holds: Callable[[], bool], deadline_s: float = 20.0) -> None:
    end = time.monotonic() + deadline_s
    while not holds():
        assert time.monotonic() < end
        await asyncio.sleep(0.01)


@pytest.fixture
async def rank() -> AsyncIterator[FakeRank]:
    found = FakeRank()
    await found.start()
    yield found
    await found.kill()


async def test_the_fault_free_answers_are_what_clients_compare_with(rank: FakeRank) -> None:
    assert await reference(rank.url, PROMPTS, COUNT, deadline_s=10.0) == [right_tokens(p, COUNT) for p in PROMPTS]
    found = await watched(rank, lambda load: load.answered(6, 20.0))
    assert (found.wrong, found.errors, found.cut_off) == (0, 0, 0)
    assert found.right >= 6
    assert found.tokens == COUNT * found.right
    assert sum(found.tokens_per_s) <= found.tokens


async def test_a_reference_that_is_cut_short_is_no_reference(rank: FakeRank) -> None:
    rank.faults = [Fault("abort", after=3)]
    with pytest.raises(ElasticError, match="no fault-free answer: 3 tokens"):
        await reference(rank.url, PROMPTS, COUNT, deadline_s=10.0)


async def test_one_wrong_token_and_one_abort_are_seen_among_many_answers(rank: FakeRank) -> None:
    async def act(load: Load) -> None:
        await load.answered(3, 20.0)
        rank.bend = 1
        await until(lambda: load.wrong > 0)
        rank.bend = 0
        rank.faults = [Fault("abort", after=4)]
        await until(lambda: load.errors > 0)
        await load.answered(3, 20.0)

    found = await watched(rank, act)
    assert found.wrong >= 1
    assert found.errors == 1
    assert any(
        "it ended with abort" in text for text in (*found.shown, "it ended with abort" if found.wrong > 4 else "")
    )


async def test_a_silence_is_as_long_as_it_is_and_starts_when_it_does(rank: FakeRank) -> None:
    silent_s = 0.6

    async def act(load: Load) -> None:
        await load.answered(3, 20.0)
        rank.hold.clear()
        await asyncio.sleep(silent_s)
        rank.hold.set()
        await load.answered(3, 20.0)

    found = await watched(rank, act)
    assert (found.errors, found.wrong) == (0, 0)
    assert found.longest_silence_s >= silent_s - 0.1
    assert found.longest_wait_s >= silent_s - 0.1
    assert 0 < found.longest_silence_at < found.seconds - silent_s + 0.1


async def test_a_request_that_never_ends_is_cut_off_and_its_wait_counts(rank: FakeRank) -> None:
    async def act(load: Load) -> None:
        await load.answered(3, 20.0)
        rank.hold.clear()
        await asyncio.sleep(0.5)

    found = await watched(rank, act, finish=False)
    assert found.cut_off == 3
    assert found.errors == 0
    assert found.longest_wait_s >= 0.4


async def test_a_part_that_is_cut_off_waits_for_no_client(rank: FakeRank) -> None:
    async def act(load: Load) -> None:
        await load.answered(3, 20.0)
        rank.hold.clear()
        await asyncio.sleep(60.0)

    began = time.monotonic()
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(2.0):
            await watched(rank, act)
    assert time.monotonic() - began < 15.0, "the clients' own deadline is 20 s"


async def test_a_server_that_is_gone_is_an_error_for_each_request_and_no_crash(rank: FakeRank) -> None:
    async def act(load: Load) -> None:
        await load.answered(3, 20.0)
        await rank.kill()
        await until(lambda: load.errors >= 4)

    found = await watched(rank, act)
    assert found.errors >= 4
    assert found.wrong == 0


# --- the report ------------------------------------------------------------------------------------------------------


def test_the_report_names_what_a_part_missed() -> None:
    load = LoadReport(
        seconds=9.0,
        right=40,
        wrong=0,
        errors=2,
        cut_off=0,
        tokens=480,
        shown=("error: 500",),
        error_at=(3.0,),
        longest_wait_s=4.5,
        longest_wait_at=1.0,
        longest_silence_s=3.25,
        longest_silence_at=1.0,
        tokens_per_s=(10,),
    )
    sequence = Sequence(
        kind="loss", outcome="committed", reason="r", began_s=0.1, ended_s=150.0, phases=(Phase("fence", 0.1, 0.5),)
    )
    part = Part(
        name="kill",
        title="a kill",
        began_s=1.0,
        took_s=9.0,
        event_at_s=2.0,
        figures={"healed_s": 150.0},
        load=load,
        sequences=(sequence,),
        boots=(),
        error="2 errors and 0 wrong answers at the clients",
    )
    results = Results(
        machine=machine(),
        gpus=("NVIDIA H200",),
        versions={"vllm": "0.33.0"},
        profile="h200",
        args=(),
        sizes={},
        streams=16,
        tokens=64,
        began="2026-11-30T00:00:00Z",
        took_s=9.0,
        parts=(part,),
    )
    text = markdown(results)
    assert "| a kill | 9.0 s | 40 | 0 | 2 | 4.50 s | 3.25 s | 2 errors and 0 wrong answers at the clients |" in text
    assert "loss committed, 0.10 s to 150.00 s after the event: fence 0.5 s" in text


# --- vLLM's own servers ---------------------------------------------------------------------------------------------


@pytest.mark.vllm
@pytest.mark.slow
@pytest.mark.timeout(2400)
@needs_servers
def test_the_whole_scenario_loses_nothing_under_healer_and_the_group_without_it_serves_nothing(tmp_path: Path) -> None:
    assert scenario.main(dry_run(tmp_path, budget_s=2300)) == 0
    found = msgspec.json.decode((tmp_path / "out/vllm-gpu-cpu.json").read_bytes(), type=Results)
    parts = {part.name: part for part in found.parts}
    assert list(parts) == list(PARTS)
    for name in ("grow", "shrink", "kill", "retry"):
        load = parts[name].load
        assert load is not None
        assert (load.errors, load.wrong) == (0, 0)
    assert parts["stock"].figures["served_after_half_a_second"] == 0
