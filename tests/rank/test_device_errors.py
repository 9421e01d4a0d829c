"""A rank whose device has failed must be gone at once, wherever the error shows; its group heals like after a kill."""

import asyncio
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from elastic.client import Traffic, random_prompts
from elastic.errors import ElasticError, Unreachable
from elastic.rank.fatal import DEVICE_ERROR_EXIT, EXCHANGE_EXIT, THREAD_ERROR_EXIT, device_error
from tests.controller.test_executor import VOCAB, checkpoint, group, run_dir, until

__all__ = ["checkpoint", "run_dir"]

ILLEGAL = "CUDA error: an illegal memory access was encountered"


@pytest.fixture(autouse=True)
def spoiled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shutil.copy(Path(__file__).parent / "spoiled_device.py", tmp_path / "sitecustomize.py")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))


async def test_a_rank_whose_step_fails_on_the_device_ends_itself_and_no_token_is_wrong(
    checkpoint: Path, run_dir: Path
) -> None:
    async with group(checkpoint, run_dir) as owner:
        prompts = random_prompts(6, VOCAB, seed=21)
        want = await owner.answers(prompts)
        log = run_dir / "logs" / f"rank-1.{owner.member(1).incarnation}.log"
        pid = owner.member(1).pid
        traffic = Traffic(owner.executor.gateway_http, prompts, 32)
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(traffic.run())
            await traffic.reached(30)
            (run_dir / "spoil-step-1").touch()
        assert [a.tokens for a in traffic.answers] == want
        await owner.executor.settled(deadline_s=30)
        assert owner.member(1).pid != pid
        words = log.read_text().splitlines()[-1]
        assert words.startswith("error: round ")
        assert ILLEGAL in words
        assert await owner.answers(prompts) == want


@pytest.mark.parametrize("place", ["copy", pytest.param("disconnect", marks=pytest.mark.slow)])
async def test_a_survivor_that_fails_while_it_heals_is_lost_too_and_the_rest_goes_on(
    checkpoint: Path, run_dir: Path, place: str
) -> None:
    """In the coverage copies of the commit, or when it takes down its connections behind the first step."""
    async with group(checkpoint, run_dir, max_ranks=3, slots_per_rank=16, redundant_experts=0) as owner:
        prompts = random_prompts(6, VOCAB, seed=22)
        want = await owner.answers(prompts)
        member, log = owner.member(0), run_dir / "logs" / f"rank-2.{owner.member(2).incarnation}.log"
        traffic = Traffic(owner.executor.gateway_http, prompts, 32)
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(traffic.run())
            await traffic.reached(30)
            (run_dir / f"spoil-{place}-2").touch()
            owner.signal(1, signal.SIGKILL)
        assert [a.tokens for a in traffic.answers] == want
        await until(lambda: any(r.kind == "loss" and r.live == (0,) for r in owner.reports), 20)
        assert ILLEGAL in log.read_text().splitlines()[-1]
        await owner.executor.settled(deadline_s=30)
        assert owner.member(0) == member
        assert owner.executor.status().live == (0, 1, 2)
        assert await owner.answers(prompts) == want


@pytest.mark.parametrize("place", ["connect", pytest.param("copy", marks=pytest.mark.slow)])
async def test_a_joiner_whose_device_fails_is_tried_again_and_costs_nobody(
    checkpoint: Path, run_dir: Path, place: str
) -> None:
    async with group(checkpoint, run_dir) as owner:
        prompts = random_prompts(4, VOCAB, seed=23)
        want = await owner.answers(prompts)
        members = [owner.member(s) for s in range(3)]
        (run_dir / f"spoil-{place}-3").touch()
        owner.executor.scale(4, reason="test")
        await owner.executor.settled(deadline_s=30)
        assert owner.member(3).incarnation == 2
        assert [owner.member(s) for s in range(3)] == members
        assert await owner.answers(prompts) == want


@pytest.mark.parametrize("what", ["unreachable", "stops"])
async def test_a_joiner_that_cannot_connect_is_ended_while_others_wait_for_it(
    checkpoint: Path, run_dir: Path, what: str
) -> None:
    """On NIXL EP whoever is in a connect to it does nothing else until it is dead, and answers nobody."""
    async with group(checkpoint, run_dir) as owner:
        prompts = random_prompts(4, VOCAB, seed=23)
        want = await owner.answers(prompts)
        members = [owner.member(s) for s in range(3)]
        (run_dir / "spoil-connect-3").write_text(what)
        for survivor in range(3):
            (run_dir / f"spoil-connect-{survivor}").write_text("waits 3 1")
        owner.executor.scale(4, reason="test")
        await owner.executor.settled(deadline_s=30)
        assert owner.member(3).incarnation == 2
        assert [owner.member(s) for s in range(3)] == members
        assert await owner.answers(prompts) == want


CAUSED = Unreachable("no way", [1])
CAUSED.__cause__ = RuntimeError("Failed: CUDA error nixl_ep.cu:77 'misaligned address'")


@pytest.mark.parametrize(
    ("error", "sticky"),
    [
        (torch.AcceleratorError(ILLEGAL), True),
        (RuntimeError(f"{ILLEGAL}\nCUDA kernel errors might be reported later"), True),
        (CAUSED, True),
        (ExceptionGroup("in a thread", [ValueError("x"), CAUSED]), True),
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB"), False),
        (ElasticError("the host tier is not pinned: cudaHostRegister"), False),
        (RuntimeError("shape mismatch"), False),
    ],
)
def test_only_what_leaves_the_device_useless_ends_a_rank(error: BaseException, sticky: bool) -> None:
    assert (device_error(error) is not None) == sticky


def test_a_rank_whose_exchange_is_lost_ends_with_the_reason_as_its_last_word() -> None:
    program = """
from elastic.rank.fatal import ExchangeLost, end_if_fatal
from elastic.errors import ElasticError
try:
    raise ElasticError("no join") from ExchangeLost("rank 0: the exchange is in no known state")
except ElasticError as error:
    end_if_fatal(error, "Link")
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=50)
    assert done.returncode == EXCHANGE_EXIT
    assert done.stderr.splitlines()[-1].startswith("error: Link: ")


@pytest.mark.parametrize(
    ("error", "code", "words"),
    [
        (f"torch.AcceleratorError('{ILLEGAL}')", DEVICE_ERROR_EXIT, f"error: ep-release: {ILLEGAL}"),
        ("KeyError('x')", THREAD_ERROR_EXIT, "error: ep-release: KeyError: 'x'"),
    ],
)
def test_a_thread_that_a_rank_needs_takes_the_rank_with_it(error: str, code: int, words: str) -> None:
    """Its main thread may be waiting in a kernel for a peer that only this thread could release."""
    program = f"""
import threading, time, torch
from elastic.rank.fatal import essential
def fail():
    raise {error}
threading.Thread(target=essential("ep-release", fail)).start()
time.sleep(60)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=50)
    assert done.returncode == code
    assert done.stderr.splitlines()[-1].startswith(words)
