"""Many scenarios, one after the other: those that want the same group share it, and one that did not pass leaves it to nobody."""

import contextlib
import os
import shutil
import time
from collections import Counter
from collections.abc import Callable, Iterable
from pathlib import Path

from chaos import records
from chaos.load import ledger
from chaos.machine import machine, versions
from chaos.records import Baseline, Campaign, LoadFacts, Run, ScenarioFacts, Verdict
from chaos.runner import Order, Runner
from chaos.scenario import Group
from chaos.stage import Skip, Stage, make_model
from elastic.errors import ElasticError

MAX_PATIENCE = 6.0


class Troupe:
    """Gives each scenario its group. Use as `async with`: the last one is ended then."""

    def __init__(self, work: Path, say: Callable[[str], None], restarts: int = 0) -> None:
        """`restarts`: how often it is measured, on the first group, what a restart takes."""
        self._work, self._say, self._restarts = work, say, restarts
        self._restarts_s: tuple[float, ...] = ()
        self._stage: Stage | None = None
        self._runner: Runner | None = None
        self._models: dict[str, Path] = {}

    async def __aenter__(self) -> "Troupe":
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._leave()
        shutil.rmtree(self._work, ignore_errors=True)

    async def play(self, order: Order, out: Path, *, fresh: bool = False) -> Run:
        """Run it on a group as it wants; raises nothing but CancelledError."""
        try:
            runner = await self._runner_for(order.scenario.spec.group, fresh=fresh)
        except Skip as skip:
            return _unplayed(order, out, "skipped", str(skip))
        except (ElasticError, OSError) as error:
            return _unplayed(order, out, "error", f"the group does not start: {error}")
        run = await runner.run(order, out)
        assert self._stage is not None
        if self._stage.spoiled or self._stage.group.fresh:
            await self._leave()
        return run

    async def _runner_for(self, group: Group, *, fresh: bool) -> Runner:
        if self._stage is not None and (fresh or group.fresh or self._stage.group.key != group.key):
            await self._leave()
        if self._stage is None or self._runner is None:
            stage = Stage(group, self._model_for(group.ep_backend))
            await stage.__aenter__()
            self._stage, self._runner = stage, Runner(stage, self._say)
            if self._restarts:
                await stage.measure_restarts(self._restarts)
                self._restarts, self._restarts_s = 0, stage.restarts_s
            stage.restarts_s = self._restarts_s
        return self._runner

    def _model_for(self, ep_backend: str) -> Path:
        kind = "gpu" if ep_backend == "nixl-ep" else "cpu"
        if kind not in self._models:
            self._models[kind] = make_model(self._work / f"{kind}-moe", ep_backend)
        return self._models[kind]

    async def _leave(self) -> None:
        stage, self._stage, self._runner = self._stage, None, None
        if stage is not None:
            await stage.__aexit__()


def patience(wanted: float | None) -> float:
    """How much longer than on an idle machine things may take; from the load of the machine where nobody says."""
    cores = len(os.sched_getaffinity(0))
    return wanted or min(MAX_PATIENCE, max(1.0, os.getloadavg()[0] / cores))


def write_campaign(
    out: Path, results: Iterable[Run], command: tuple[str, ...], seed: int, began_wall: float
) -> Campaign:
    runs = list(results)
    campaign = Campaign(
        command=command,
        seed=seed,
        began_wall=began_wall,
        ended_wall=time.time(),
        machine=machine(),
        versions=versions(),
        runs=tuple(run.id for run in runs),
        verdicts=dict(Counter(run.verdict for run in runs)),
        faults=sum(run.faults for run in runs),
    )
    records.write(out / records.CAMPAIGN, campaign)
    return campaign


def _unplayed(order: Order, out: Path, verdict: Verdict, why: str) -> Run:
    now, load = time.monotonic(), order.scenario.spec.load
    run = Run(
        id=out.name,
        scenario=ScenarioFacts(
            name=order.scenario.name,
            fear=order.scenario.metadata.fear,
            file=order.file,
            text=order.text,
            tags=order.scenario.metadata.tags,
        ),
        seed=order.seed,
        command=order.command,
        verdict=verdict,
        why=why,
        began=now,
        began_wall=time.time(),
        ended=now,
        machine=machine(),
        load_after=os.getloadavg(),
        versions=versions(),
        group=None,
        load=LoadFacts(
            rate_per_s=load.rate_per_s,
            prompts=load.prompts,
            max_tokens=load.max_tokens,
            seed=order.seed,
            late_after_s=load.late_after_s,
        ),
        ledger=ledger((), (), 0),
        expectations=(),
        faults=0,
    )
    records.write(out / records.RUN, run)
    records.write(out / records.BASELINE, Baseline(prompts=(), tokens_per_s=0.0, longest_gap_s=0.0))
    with contextlib.suppress(OSError):
        (out / records.STEPS).mkdir(exist_ok=True)
    return run
