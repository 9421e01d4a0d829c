"""The soak tells a process that grows from one that is busy, runs for a moment, and refuses wrong usage."""

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import pytest

from chaos.soak_report import Reading, grown


def soak(*options: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "chaos.soak", *options]
    with tempfile.TemporaryDirectory(prefix="soak-", dir="/tmp") as folder:
        env = os.environ | {"TMPDIR": folder}
        return subprocess.run(command, env=env, capture_output=True, text=True, timeout=240, check=False)


def life(
    rss: list[float], fds: list[int], started: float = 1.0, ranks: Callable[[int], int] | None = None
) -> list[Reading]:
    """One reading each four seconds. `ranks`: of the number of the reading."""
    return [
        Reading(
            at_s=4.0 * i,
            kind="daemon",
            pid=1,
            started=started,
            rss_mb=mb,
            fds=n,
            threads=5,
            ranks=ranks(i) if ranks else 4,
        )
        for i, (mb, n) in enumerate(zip(rss, fds, strict=True))
    ]


def test_a_process_that_holds_ever_more_is_found() -> None:
    (leak,) = grown(life([50 + i for i in range(60)], [20] * 60))
    assert leak.too_much
    (leak,) = grown(life([50.0] * 60, [20 + i // 2 for i in range(60)]))
    assert leak.too_much
    assert "20" in leak.sentence or "descriptors" in leak.sentence


def test_a_process_that_loads_at_first_and_works_in_bursts_is_not() -> None:
    loads = [20.0 + 5 * min(i, 10) for i in range(60)]
    bursts = [20 + (6 if i % 9 == 0 else 0) for i in range(60)]
    (life_,) = grown(life(loads, bursts))
    assert not life_.too_much


def test_a_process_that_was_hardly_seen_is_not_judged() -> None:
    assert grown(life([50.0 * (i + 1) for i in range(10)], [20] * 10)) == ()


def test_a_process_that_gets_more_peers_for_a_while_does_not_leak() -> None:
    peers = [20 + 9 * (i // 7 % 2) for i in range(60)]
    (life_,) = grown(life([50.0] * 60, peers))
    assert not life_.too_much


def test_a_group_that_grew_to_more_ranks_does_not_leak() -> None:
    (life_,) = grown(life([50.0] * 90, [30] * 50 + [39] * 40, ranks=lambda i: 4 if i < 50 else 6))
    assert not life_.too_much
    (life_,) = grown(life([50.0] * 90, [30] * 50 + [39] * 40))
    assert life_.too_much


def test_a_rank_whose_peers_took_long_to_boot_does_not_leak() -> None:
    """They are there, but it is not connected to them before they join."""
    (life_,) = grown(life([50.0] * 90, [39] * 50 + [45] * 40, ranks=lambda i: 0 if i < 50 else 6))
    assert not life_.too_much
    assert grown(life([50.0] * 60, [39] * 60, ranks=lambda i: 0)) == ()


def test_two_processes_with_one_pid_are_two() -> None:
    first, second = life([60.0] * 40, [20] * 40), life([300.0] * 40, [40] * 40, started=2.0)
    assert not any(one.too_much for one in grown([*first, *second]))


@pytest.mark.slow
def test_a_short_soak_loses_nothing(tmp_path: Path) -> None:
    out = tmp_path / "soak.json"
    done = soak("--hours", "0.012", "--every", "10", "--seed", "3", "--out", str(out))
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads(out.read_bytes())
    assert found["problems"] == []
    assert found["requests"]["right"] > 0
    assert len(found["faults"]) >= 2
    assert all(fault["healed_s"] is not None for fault in found["faults"])
    assert "No problem was found." in out.with_suffix(".md").read_text()


@pytest.mark.parametrize("options", [["--hours", "0"], ["--every", "-1"], ["--seed", "x"]])
def test_a_soak_refuses_wrong_options(options: list[str]) -> None:
    done = soak(*options)
    assert done.returncode == 2
    assert options[0] in done.stderr
    assert "Traceback" not in done.stderr
