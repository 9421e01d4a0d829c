"""What was seen and judged, written down: in the journal, the log, the metrics, and a trace where one is recorded."""

from collections.abc import Iterable

from healer.casebook import Casebook
from healer.diagnosis import Hardware, Limits, Verdict
from healer.evidence import Evidence, RankRef
from healer.journal import Journal, Kind
from healer.judge import Judge, Judgement
from healer.logs import LateLog
from healer.machine import Machine
from healer.metrics import Metrics
from healer.trace import Placed, Recorder, view_line


class Chronicle:
    """The judge, with a record of all that goes in and comes out. Owned by the supervisor's loop."""

    def __init__(
        self,
        limits: Limits,
        machine: Machine,
        casebook: Casebook,
        journal: Journal,
        metrics: Metrics,
        log: LateLog,
        recorder: Recorder | None,
    ) -> None:
        self._judge = Judge(limits)
        self._machine, self._casebook, self._journal, self._metrics = machine, casebook, journal, metrics
        self._log, self._recorder = log, recorder
        self._live: tuple[RankRef, ...] = ()
        self._hardware = Hardware()
        self._entry_of: dict[str, int] = {}  # by evidence id, its entry in the journal

    @property
    def ranks(self) -> tuple[Verdict, ...]:
        return self._judge.diagnosis.ranks

    @property
    def gpus(self) -> tuple[Verdict, ...]:
        return self._judge.diagnosis.gpus

    @property
    def hosts(self) -> tuple[Verdict, ...]:
        return self._judge.diagnosis.hosts

    @property
    def below(self) -> tuple[Verdict, ...]:
        """On the hosts, and on the GPUs that live ranks are on."""
        used = set(self._hardware.placed.values())
        return (*self.hosts, *(v for v in self.gpus if v.subject in used))

    @property
    def hardware(self) -> Hardware:
        return self._hardware

    @property
    def placed(self) -> tuple[Placed, ...]:
        return tuple(Placed(rank, gpu) for rank, gpu in sorted(self._hardware.placed.items()))

    def adopt(self, limits: Limits) -> None:
        """Those of another policy, from now on."""
        self._judge.limits = limits

    def watch(self, live: Iterable[RankRef], now: float) -> None:
        self._live = tuple(live)
        self._judge.watch(self._live, now, self._casebook.id)
        self._record_view(now)

    def equip(self, hardware: Hardware, now: float) -> None:
        if hardware != self._hardware:
            self._hardware = hardware
            self._judge.equip(hardware)
            self._record_view(now)

    def take(self, found: list[Evidence], now: float) -> list[Evidence]:
        """File new evidence; returns it as it was filed."""
        if self._recorder is not None and found:
            self._recorder.evidence(found, self._judge.standing(now).values() if self._recorder.full else ())
        return self._judge.take(found)

    def judge(self, now: float) -> Judgement:
        return self._judge.judge(now)

    def standing(self, now: float) -> dict[str, Evidence]:
        """What counts now, by id."""
        return self._judge.standing(now)

    def write(self, fresh: Iterable[Evidence], found: Judgement) -> None:
        """Into the journal and the log, as part of the open incident if there is one."""
        for evidence in fresh:
            self._entry_of[evidence.id] = self._journal.add(Kind.EVIDENCE, evidence, self._casebook.id)
            self._metrics.saw(evidence)
        for verdict in found.changed:
            body = {"verdict": verdict, "entries": self._entries(verdict.evidence)}
            self._journal.add(Kind.VERDICT, body, self._casebook.id)
            self._log.say(
                "info",
                "verdict",
                subject=str(verdict.subject),
                health=verdict.health,
                cause=verdict.cause,
                why=verdict.sentence,
            )
        for refined in found.refined:
            self._casebook.refine(refined, self._entries(refined.evidence))
            self._log.say(
                "warning",
                "incident.refined",
                incident=refined.departed.incident,
                cause=refined.cause,
                why=refined.sentence,
            )

    def tidy(self, now: float) -> None:
        """Forget where the journal has what does not count any more."""
        standing = self._judge.standing(now)
        self._entry_of = {e: seq for e, seq in self._entry_of.items() if e in standing}
        if self._recorder is not None and self._recorder.error:
            self._log.say("error", "trace.unwritable", error=self._recorder.error)
            self._recorder = None

    def close(self) -> None:
        if self._recorder is not None:
            self._recorder.close()

    def _entries(self, ids: Iterable[str]) -> list[int]:
        return [self._entry_of[e] for e in ids if e in self._entry_of]

    def _record_view(self, now: float) -> None:
        if self._recorder is not None:
            machine = self._machine
            view = view_line(now, self._live, self._hardware, driver=machine.driver, generation=machine.generation)
            self._recorder.view(view)
