"""Faults of a vLLM group as timelines: what is decided at each second, from what is known then. Each file in golden/ is one."""

from pathlib import Path
from typing import Any

import pytest
from ruamel.yaml import YAML

from healer.policy.schema import VllmDeadlines
from healer.targets.vllm.endpoints import Engine, EngineStatus, FaultStatus, Gate, Phase, Scaling
from healer.targets.vllm.machine import State
from healer.targets.vllm.plan import Facts, RankFacts, decide
from healer.targets.vllm.records import Canaried, Held, Look, Role

GOLDEN = sorted((Path(__file__).parent / "golden").glob("*.yaml"))


@pytest.mark.parametrize("path", GOLDEN, ids=lambda path: path.stem)
def test_timeline(path: Path) -> None:
    told: dict[str, Any] = YAML(typ="safe", pure=True).load(path.read_text(encoding="utf-8"))
    settle = VllmDeadlines.model_validate({"settle": told["settle"]} if "settle" in told else {}).settle_s
    unhealthy, dead, lost, retries, seen = dict[int, float](), set[int](), dict[int, str](), 0, dict[int, str]()
    for now in range(told["ends"] + 1):
        event = told["events"].get(now, {})
        unhealthy |= {slot: float(now) for slot in event.get("unhealthy", ())}
        dead |= set(event.get("dead", ()))
        lost |= event.get("lost", {})
        retries += event.get("retried", False)
        ranks = tuple(rank(slot, now, unhealthy.get(slot), slot not in dead) for slot in range(told.get("ranks", 2)))
        facts = Facts(
            state=State.SERVING,
            now=float(now),
            ranks=ranks,
            target=tuple(one.held.slot for one in ranks),
            lost=lost,
            retries=retries,
            settle_s=settle,
        )
        step = decide(facts)
        if step.do != next(reversed(seen.values()), ""):
            seen[now] = step.do.value
    assert seen == told["decisions"], told["fear"]


def rank(slot: int, now: int, unhealthy_since: float | None, alive: bool) -> RankFacts:
    sick = unhealthy_since is not None
    engine = Engine(slot, EngineStatus.UNHEALTHY if sick else EngineStatus.HEALTHY, "RuntimeError" if sick else "")
    look = Look(
        at=float(now),
        health=True,
        gate=Gate.OPEN,
        scaling=Scaling(False, Phase.IDLE),
        fault=FaultStatus(1, 1, (engine,)),
    )
    held = Held(slot, 0, slot, 10 + slot, 1, "http://x", Role.LIVE)
    canary = Canaried(float(now), True, (1,))
    return RankFacts(held=held, look=look, alive=alive, unhealthy_since=unhealthy_since, canary=canary)
