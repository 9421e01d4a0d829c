"""Processes that stand by to become ranks: kept at the wanted number in the background, taken by launches.

A spare is no rank: no sequence counts it, and its death changes nothing but the time of the next launch. It ends with its daemon,
since its end of the socket says so; one that is stopped and does not hear it is ended by the next daemon, which finds it in
`spares.json` by pid and start time.
"""

import asyncio
import os
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path

import msgspec
import structlog

from elastic import process
from elastic.controller.records import SpareStage, SpareState
from elastic.errors import ElasticError
from elastic.launch.base import Launched
from elastic.paths import log_path, read_json, write_json
from healer.policy.schema import VllmTarget
from healer.targets.vllm import commands
from healer.targets.vllm.in_place import interpreter
from healer.targets.vllm.processes import Processes
from healer.targets.vllm.spare import Spare, Unfit, log_name, log_of

log = structlog.get_logger("healer.vllm")

CALM_S = 5.0
"""The group has served undisturbed for so long before a process is started: it takes a core for seconds."""
UP_S = 300.0
"""To import all. 34 s were seen on two cores with a load of 8."""
PAUSE_S, PAUSE_MAX_S = 5.0, 300.0
"""Before one that did not come up, or died, is tried again, doubled each time."""
STEADY_S = 60.0
"""One that stood for so long before it died does not count towards the pause."""
POLL_S = 0.2
LACKS = "No module named 'elastic"


class _Listed(msgspec.Struct, frozen=True):
    pid: int
    pid_start: int


def path_of(run_dir: Path) -> Path:
    return run_dir / "spares.json"


async def end_left(run_dir: Path, processes: Processes, ranks: Collection[Launched] = ()) -> None:
    """End what an earlier daemon left. `ranks`: what it had made ranks of. A file that cannot be read tells of nobody."""
    listed = _listed(run_dir)
    if listed is None:
        return
    left = [one for one in listed if one not in ranks and process.is_alive(*one)]
    if left:
        log.info("spares.left", pids=[one.pid for one in left])
        await processes.fence(left)
    path_of(run_dir).unlink(missing_ok=True)


def _listed(run_dir: Path) -> list[Launched] | None:
    """None: there is no list that can be read."""
    try:
        return [Launched(one.pid, one.pid_start) for one in read_json(path_of(run_dir), list[_Listed])]
    except ElasticError:
        return None


class _Place:
    """Of one number."""

    def __init__(self) -> None:
        self.spare: Spare | None = None
        self.ready = False
        self.since = 0.0
        self.why = ""
        """How the last process of this number ended; empty: it did not, or was used."""
        self.failures = 0
        self.not_before = 0.0
        self.task: asyncio.Task[None] | None = None


class Spares:
    """Owned by the target, used in its loop."""

    def __init__(
        self,
        target: VllmTarget,
        processes: Processes,
        *,
        variables: Callable[[], Mapping[str, str]] = dict,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`variables`: what ranks are started with besides, as of now."""
        self._target, self._processes, self._variables, self._clock = target, processes, variables, clock
        self._run_dir = Path(target.run_dir)
        self._places = [_Place() for _ in range(target.spares)]
        self._without: list[str] = []
        self._used: list[Launched] = []
        """Ordered to become ranks: the group's own file names them when it is calm again, not before."""
        self._recorded: list[Launched] | None = None
        """What stands in `spares.json`; None: it is not ours."""
        self._unsaved = False
        self._calm_since: float | None = None
        self._off, self._python = "", ""
        if (commands.arguments(target).number("api-server-count", 1) or 1) > 1:
            # its children take over the socket that their parent has bound, and those of a spare let go of it
            self._off = "--api-server-count is above 1"
        elif target.spares:
            try:
                self._python = interpreter(target.executable)
            except ElasticError as error:
                self._off = str(error)

    # --- kept ------------------------------------------------------------------------------------------------------------

    async def keep(self, calm: Callable[[], bool]) -> None:
        """Have the wanted number, for as long as the caller lets this run. `calm`: the group serves, and nothing is under way."""
        while self._places and not self._off:
            try:
                self._tend(calm())
            except Exception as error:
                log.error("spares.failed", exc_info=error)
            await asyncio.sleep(POLL_S)

    def _tend(self, calm: bool) -> None:
        now = self._clock()
        self._calm_since = (self._calm_since or now) if calm else None
        self._processes.reap()
        if calm:
            self._used = []
        self._record()
        for number, place in enumerate(self._places):
            if place.ready and place.spare is not None and place.spare.gone:
                self._failed(number, f"ended while it stood by; logs/{log_name(number)}.log may say why")
        if self._calm_since is None or now - self._calm_since < CALM_S:
            return
        if any(place.task is not None for place in self._places):
            return  # one after the other: they take a core each
        due = [n for n, place in enumerate(self._places) if place.spare is None and now >= place.not_before]
        if due:
            place = self._places[due[0]]
            place.task = asyncio.create_task(self._boot(due[0]), name=f"spare {due[0]}")

    async def _boot(self, number: int) -> None:
        place = self._places[number]
        place.since = self._clock()
        try:
            log_of(self._run_dir, number).unlink(missing_ok=True)
            base = commands.spare_environment(self._target, os.environ, self._variables())
            place.spare = await Spare.start(number, self._processes, self._python, base, self._without)
            self._record()
            async with asyncio.timeout(UP_S):
                await place.spare.up()
        except Unfit as error:
            if error.module in self._without:
                self._failed(number, str(error))
            else:
                self._without.append(error.module)
                log.warning("spare.unfit", number=number, why=str(error))
                await self._end(place)
        except TimeoutError:
            self._failed(number, f"not up within {UP_S:g} s")
        except Exception as error:
            # a bug too: the process must not be lost sight of
            ended = place.spare is not None and place.spare.gone
            self._failed(number, self._words(number) if ended else str(error) or type(error).__name__)
        else:
            place.ready, place.since, place.why = True, self._clock(), ""
            log.info("spare.ready", number=number, pid=place.spare.process.pid)
        finally:
            place.task = None

    def _words(self, number: int) -> str:
        words = self._processes.last_words(log_name(number))
        return f"healer's package is not beside vLLM: {words}" if LACKS in words else words

    def _failed(self, number: int, why: str) -> None:
        place, now = self._places[number], self._clock()
        if place.ready and now - place.since > STEADY_S:
            place.failures = 0
        pause = min(PAUSE_MAX_S, PAUSE_S * 2 ** min(place.failures, 10))
        place.failures, place.not_before, place.why = place.failures + 1, now + pause, why
        log.warning("spare.failed", number=number, why=why, again_in_s=pause)
        spare, place.spare, place.ready = place.spare, None, False
        if spare is not None:
            self._kill(spare)

    def _kill(self, spare: Spare) -> None:
        """Nobody waits for its end."""
        spare.close()
        self._processes.kill(spare.process)

    @property
    def complete(self) -> bool:
        return all(place.ready for place in self._places)

    # --- used ------------------------------------------------------------------------------------------------------------

    async def become(self, command: Sequence[str], environment: Mapping[str, str], name: str) -> Launched | None:
        """Make one the rank of this command; `name`: of its log. None: none stands by, or those that did died of it."""
        for number, place in enumerate(self._places):
            spare = place.spare
            if not place.ready or spare is None:
                continue
            place.spare, place.ready = None, False
            self._used.append(spare.process)
            try:
                # as vLLM has it by itself, where it does not take care to be safe: children begin with what is imported
                taken = await spare.become(
                    command, {"VLLM_WORKER_MULTIPROC_METHOD": "fork", **environment}, log_path(self._run_dir, name)
                )
            except BaseException:
                spare.close()
                await self._processes.fence([spare.process])
                raise
            spare.close()
            if taken:
                place.failures = 0
                log.info("spare.used", number=number, pid=spare.process.pid, log=name)
                return spare.process
            # it may have heard the order and be slow: it must be gone before another one takes the rank's port
            await self._processes.fence([spare.process])
            self._failed(number, f"did not become {name}: {self._words(number)}")
        return None

    # --- told and ended ----------------------------------------------------------------------------------------------------

    def status(self) -> tuple[SpareState, ...]:
        slots = tuple(range(self._target.max_ranks))
        found = []
        for number, place in enumerate(self._places):
            stage: SpareStage = "given-up" if self._off or place.why else "absent"
            if place.spare is not None:
                stage = "ready" if place.ready else "booting"
            pid = place.spare.process.pid if place.spare is not None and place.ready else 0
            why = self._off or place.why
            found.append(SpareState(number=number, state=stage, pid=pid, slots=slots if pid else (), why=why))
        return tuple(found)

    def _record(self) -> None:
        spares = [*self._used, *(place.spare.process for place in self._places if place.spare is not None)]
        if spares == (self._recorded or []):
            return
        if self._recorded is not None and _listed(self._run_dir) not in (self._recorded, None):
            return  # another daemon keeps spares here by now, and this one's lease is over
        try:
            write_json(path_of(self._run_dir), [_Listed(*one) for one in spares])
        except OSError as error:
            if not self._unsaved:
                log.error("spares.not_saved", error=str(error))
            self._unsaved = True
        else:
            self._recorded, self._unsaved = spares, False

    async def end(self) -> None:
        """All of them, those on their way too. May be called again."""
        tasks = [place.task for place in self._places if place.task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await asyncio.gather(*(self._end(place) for place in self._places))
        if self._recorded is not None and _listed(self._run_dir) == self._recorded:  # else it is of another daemon
            path_of(self._run_dir).unlink(missing_ok=True)
        self._recorded = None

    async def _end(self, place: _Place) -> None:
        spare, place.spare, place.ready = place.spare, None, False
        if spare is not None:
            spare.close()
            await self._processes.fence([spare.process])
