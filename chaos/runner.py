"""One scenario on one group: load, faults, probes, until the group is whole again; then the verdict and the run record."""

import asyncio
import contextlib
import os
import shutil
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any

import httpx
import msgspec

from chaos import inject, judge, probes, records
from chaos.collect import Harvest
from chaos.faultline import NO_STATE, Faultline
from chaos.injectors.base import Injector, Place
from chaos.invariants import suite
from chaos.load import Generator, ledger
from chaos.machine import machine, versions
from chaos.records import Baseline, Expectation, LoadFacts, ProbeResult, Prompt, Run, ScenarioFacts, SequenceState
from chaos.scenario import Scenario
from chaos.stage import Stage, replays
from elastic.errors import ElasticError
from elastic.view import Member

POLL_S = 0.05
QUIET_S = 1.0
"""A fault that waits for a state which has not come when the group was whole for this long, and nothing else is due, does not
come any more."""
ANSWERS_S = 100.0
PROMPT_SEED = 1
"""Of the prompts, whatever the seed of the run: so their answers are asked for once for each group."""


@dataclass
class Order:
    """What to run."""

    scenario: Scenario
    text: str
    file: str
    seed: int
    command: tuple[str, ...]
    patience: float = 1.0
    """How many times longer than the scenario says the group may take to be whole: on a machine that does much else."""
    id: str = ""

    def __post_init__(self) -> None:
        self.id = self.id or f"{self.scenario.name}.s{self.seed}"


@dataclass
class _Watched:
    """How the group stood, and since when."""

    whole_at: float | None = None
    """Since when it has been whole at every look; None: it is not."""
    looked_at: float = 0.0
    """When the newest look was begun."""
    why: str = "the daemon was not asked yet"
    live: tuple[int, ...] = ()
    after: dict[int, Member] = field(default_factory=dict)
    daemon_ended: str = ""


class Runner:
    """Runs scenarios on one stage, one at a time. `say` gets lines for people."""

    def __init__(self, stage: Stage, say: Callable[[str], None] = lambda _: None) -> None:
        self._stage, self._say = stage, say
        self._harvest = Harvest(stage.run_dir, stage.hook.events)

    async def run(self, order: Order, out: Path) -> Run:
        """Write the record to `out` and return its head. What goes wrong on the way is the run's verdict; raises nothing but
        CancelledError."""
        facts = machine()
        out.mkdir(parents=True, exist_ok=True)
        self._stage.runs += 1
        fresh, one = self._stage.runs == 1, _One(self._stage, self._harvest, order, self._say)
        expectations: tuple[Expectation, ...] = ()
        error, began, wall = "", time.monotonic(), time.time()
        try:
            await one.prepare()
            began, wall = time.monotonic(), time.time()
            await one.play()
        except (ElasticError, OSError, httpx.HTTPError, ExceptionGroup) as failure:
            error = _words(failure)
        ended = time.monotonic()
        try:
            entries = self._harvest.gather(out, began, ended)
            if not error:
                expectations = judge.judge(one.found(tuple(entries)))
        except (ElasticError, OSError) as failure:
            error = error or _words(failure)
        spec, faults = order.scenario.spec, one.faultline.records() if one.faultline else []
        records.write_lines(out / records.REQUESTS, one.requests)
        records.write_lines(out / records.FAULTS, faults)
        records.write(out / records.BASELINE, one.baseline)
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
            verdict="error",
            why=error,
            began=began,
            began_wall=wall,
            ended=ended,
            machine=facts,
            load_after=os.getloadavg(),
            versions=versions(),
            group=self._stage.facts(fresh=fresh),
            load=LoadFacts(
                rate_per_s=spec.load.rate_per_s,
                prompts=spec.load.prompts,
                max_tokens=spec.load.max_tokens,
                seed=order.seed,
                late_after_s=spec.load.late_after_s,
            ),
            ledger=ledger(one.requests, one.prompts, one.replayed),
            expectations=expectations,
            probes=tuple(one.looked),
            faults=sum(1 for fault in faults if fault.at),
        )
        records.write(out / records.RUN, run)
        if not error:
            run = await asyncio.to_thread(_judged, run, out)
            records.write(out / records.RUN, run)
        if run.verdict != "passed":
            self._stage.spoiled = run.why
            self._keep_logs(out)
        return run

    def _keep_logs(self, out: Path) -> None:
        root = self._stage.deployment.root
        kept = [*root.glob("*.log"), *(self._stage.run_dir / "logs").glob("*.log"), root / "policy.yaml"]
        (out / "logs").mkdir(exist_ok=True)
        for path in kept:
            with contextlib.suppress(OSError):
                shutil.copyfile(path, out / "logs" / path.name)


def _judged(run: Run, out: Path) -> Run:
    """With what the checkers of invariants say of the record, and the verdict."""
    try:
        found = suite.check(out)
        broken = f"{len(found)} violations: {found[0]}" if found else "so it was"
    except ElasticError as error:
        found, broken = [], f"the record cannot be read: {error}"
    invariants = Expectation(name="invariants", expected="all hold", found=broken, ok=broken == "so it was")
    expectations = (*run.expectations, invariants)
    wrong = [e for e in expectations if not e.ok]
    return msgspec.structs.replace(
        run,
        expectations=expectations,
        verdict="failed" if wrong else "passed",
        why=f"{wrong[0].name}: expected {wrong[0].expected}; found {wrong[0].found}" if wrong else "",
    )


def _words(error: BaseException) -> str:
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return str(error) or repr(error)


class _One:
    """One run of one scenario."""

    def __init__(self, stage: Stage, harvest: Harvest, order: Order, say: Callable[[str], None]) -> None:
        self._stage, self._harvest, self._order, self._say = stage, harvest, order, say
        self._spec = order.scenario.spec
        expect = self._spec.expect
        self._expect = expect.model_copy(update={"whole_within_s": expect.whole_within_s * order.patience})
        self._before: dict[int, Member] = {}
        self._state = NO_STATE
        self._watched = _Watched()
        self._whole_after_s: float | None = None
        self._generator: Generator | None = None
        self.prompts: tuple[Prompt, ...] = ()
        self.baseline = Baseline(prompts=(), tokens_per_s=0.0, longest_gap_s=0.0)
        self.faultline: Faultline | None = None
        self.looked: list[ProbeResult] = []
        self.replayed = 0

    @property
    def requests(self) -> list[records.Request]:
        return self._generator.records() if self._generator else []

    async def prepare(self) -> None:
        """Nothing of it belongs to the record. Raises ElasticError where the group is not as it should be."""
        stage, spec = self._stage, self._spec
        await stage.restore()
        self.prompts = await stage.prompts(spec.load, PROMPT_SEED)
        self.baseline = await stage.baseline(spec.load, self.prompts)
        self._before = inject.living_ranks(stage.run_dir)
        await asyncio.to_thread(self._harvest.begin)

    async def play(self) -> None:
        """Raises ElasticError where it cannot be carried out."""
        stage, spec = self._stage, self._spec
        replayed = await replays(stage.deployment)
        await self._look("start")
        self._generator = Generator(stage.deployment.gateway(), stage.model, spec.load, self.prompts, self._order.seed)
        self.faultline = self._faults(self._generator)
        async with asyncio.TaskGroup() as tasks:
            asking = tasks.create_task(self._generator.run())
            during = [probe for probe in spec.probes if probe.mode == "during"]
            looking = tasks.create_task(probes.watch(during, stage.deployment, self.looked))
            watching = tasks.create_task(self._watch())
            try:
                await self._until_whole(self.faultline)
            finally:
                self._generator.stop()
            try:
                async with asyncio.timeout(ANSWERS_S):
                    await asking
            except TimeoutError:
                asking.cancel()
            looking.cancel()
            watching.cancel()
        self.replayed = max(0, await replays(stage.deployment) - replayed)
        await self._look("end")
        self._watched.after = inject.living_ranks(stage.run_dir)
        daemon = stage.deployment.daemon
        if daemon is not None and daemon.poll() is not None:
            self._watched.daemon_ended = f"it ended with exit code {daemon.returncode}"
        await self.faultline.end()

    def found(self, journal: tuple[records.JournalEntry, ...]) -> judge.Found:
        watched, faultline = self._watched, self.faultline
        return judge.Found(
            expect=self._expect,
            base=self._stage.base,
            before=self._before,
            after=watched.after,
            live=watched.live,
            whole_after_s=self._whole_after_s,
            what_is_open=watched.why,
            requests=tuple(self.requests),
            faults=tuple(faultline.records()) if faultline else (),
            probes=tuple(self.looked),
            asked=self._spec.probes,
            journal=journal,
            daemon_ended=watched.daemon_ended,
        )

    # --- parts of it --------------------------------------------------------------------------------------------------

    def _faults(self, generator: Generator) -> Faultline:
        stage, loop = self._stage, asyncio.get_running_loop()

        def burst(count: int) -> None:
            loop.call_soon_threadsafe(generator.burst, count)

        place = Place(
            run_dir=stage.run_dir,
            draw=Random(f"targets {self._order.seed}"),
            daemons=stage,
            hook=stage.hook,
            gpu_script=stage.gpu_script,
            kernel_log=stage.kernel_log,
            checkpoint=stage.checkpoint,
            hosts=stage.hosts,
            host_count=self._spec.group.hosts,
            own_disk=stage.own_disk,
            extra_load=burst,
        )
        faultline = Faultline(self._spec.faults, place, stage.hook, Random(f"chances {self._order.seed}"))
        faultline.state = lambda: self._state
        faultline.log = lambda text: self._say(f"      {text}")
        generator.on_sent = faultline.request
        return faultline

    async def _until_whole(self, faultline: Faultline) -> None:
        """Until everything is injected, over and healed, or the time for that has passed."""
        spec, began = self._spec, time.monotonic()
        faultline.begin()
        while True:
            await asyncio.sleep(POLL_S)
            # asked first: a fault is injected in a thread, and what was not done here must not count as healed below
            states_only = faultline.waits_for_states_only
            now, watched = time.monotonic(), self._watched
            since = max(began, faultline.last_at)
            whole = watched.whole_at is not None and watched.looked_at > faultline.last_at
            whole_at = max(watched.whole_at or now, faultline.last_at)
            if whole and not faultline.standing:
                faultline.whole(whole_at)
            if faultline.waiting or faultline.standing:
                # by looks that came back: on a busy machine the last one may be older than the fault's consequences
                quiet = whole and watched.looked_at - whole_at > QUIET_S
                if states_only and not faultline.standing and quiet and now - began > spec.load.at_least_s:
                    faultline.give_up("this state was not reached")
                elif now - since > self._expect.whole_within_s + _longest_wait_s(self._order.scenario):
                    faultline.give_up(f"not within {now - began:.0f} s: {', '.join(faultline.waiting)}")
                    return
                continue
            if whole and watched.looked_at - since >= spec.settle_s and now - began >= spec.load.at_least_s:
                self._whole_after_s = max(0.0, whole_at - since)
                return
            if now - since > self._expect.whole_within_s + spec.settle_s:
                return

    async def _watch(self) -> None:
        """Keep `_watched` and the executor's state up to date."""
        stage, watched = self._stage, self._watched
        expected = stage.base if self._spec.expect.live is None else tuple(sorted(self._spec.expect.live))
        async with httpx.AsyncClient(trust_env=False, verify=False, timeout=5.0) as client:
            while True:
                self._state = await asyncio.to_thread(_last_state, stage)
                why, looked_at = "", time.monotonic()
                try:
                    status = (await client.get(stage.deployment.api() + "/status")).raise_for_status().json()
                except (httpx.HTTPError, OSError, ValueError) as error:
                    why = f"the daemon does not answer: {error!r}"
                else:
                    watched.live = tuple(status["live"])
                    why = self._open(status, expected)
                if not why:
                    watched.whole_at = watched.whole_at or looked_at
                else:
                    watched.whole_at = None
                watched.why, watched.looked_at = why, looked_at
                await asyncio.sleep(POLL_S)

    def _open(self, status: dict[str, Any], expected: tuple[int, ...]) -> str:
        """What is still open; empty: the group is whole."""
        group = status["group"]
        if tuple(status["live"]) != expected or tuple(group["live"]) != expected or tuple(group["target"]) != expected:
            return f"live {group['live']}, target {group['target']}; {status['why']}"
        if group["sequence"]:
            return f"under way: {group['sequence']}"
        living = inject.living_ranks(self._stage.run_dir)
        hurt = [
            m
            for done in (self.faultline.hurt() if self.faultline else ())
            if done.must_be_replaced
            for m in done.members
        ]
        kept = set(self._spec.expect.kept)
        left = [str(m) for m in hurt if living.get(m.slot) == m and m.slot in expected and m.slot not in kept]
        if left and self._spec.expect.replaced is None:
            return f"{', '.join(left)} lives"
        return "" if status["state"] == "ok" else f"{status['state']}: {status['why']}"

    async def _look(self, mode: str) -> None:
        for probe in self._spec.probes:
            if probe.mode == mode:
                self.looked.append(await probes.look(probe, self._stage.deployment))


def _longest_wait_s(scenario: Scenario) -> float:
    """Until the last fault by time is due and over."""
    ends = [0.0]
    faults: tuple[Injector, ...] = scenario.spec.faults
    for fault in faults:
        turns_s = (fault.repeat.times - 1) * fault.repeat.every_s if fault.repeat else 0.0
        ends.append((fault.at_s or 0.0) + turns_s + (fault.duration_s or 0.0))
    return max(ends)


def _last_state(stage: Stage) -> SequenceState:
    """What the executor said last."""
    path = stage.hook.events
    try:
        with path.open("rb") as file:
            file.seek(max(0, path.stat().st_size - 16384))
            lines = file.read().splitlines()
    except OSError:
        return NO_STATE
    for text in reversed(lines):
        with contextlib.suppress(msgspec.MsgspecError):
            line = msgspec.json.decode(text, type=records.SequenceLine)
            if isinstance(line, records.PhaseEvent):
                return SequenceState(sequence=line.kind, step=line.phase, epoch=line.epoch)
            if isinstance(line, records.ReportEvent):
                return SequenceState(sequence="", step="", epoch=line.report.epoch)
    return NO_STATE
