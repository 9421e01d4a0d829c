"""What the executor says of its own work, written down: phases, sequences, replacements that do not start."""

from elastic.controller.records import BootFailed, PhaseBegan, SequenceEnded
from healer.casebook import Casebook
from healer.diagnosis import Cause
from healer.journal import Journal, Kind
from healer.logs import LateLog
from healer.metrics import Metrics
from healer.policy.decide import Decision, Reason, Step


class Progress:
    """Owned by the supervisor's loop; decides nothing."""

    def __init__(self, casebook: Casebook, journal: Journal, metrics: Metrics, log: LateLog) -> None:
        self.in_sequence = False
        """The executor is at work: its view may count ranks whose commit has not ended."""
        self._casebook, self._journal, self._metrics, self._log = casebook, journal, metrics, log

    def boot_failed(self, event: BootFailed) -> None:
        self._log.say(
            "warning", "boot.failed", slot=event.slot, attempt=event.attempt, gave_up=event.gave_up, why=event.why
        )
        self._journal.add(Kind.LIFECYCLE, {"event": "boot-failed", "failure": event}, self._casebook.id)

    def phase_began(self, event: PhaseBegan) -> None:
        self.in_sequence = True
        self._log.say("debug", "phase", sequence=event.kind, phase=event.phase, epoch=event.epoch, slots=event.slots)

    def sequence_ended(self, event: SequenceEnded) -> None:
        self.in_sequence = False
        report = event.report
        self._metrics.sequence_ended(report)
        self._journal.add(Kind.OUTCOME, {"report": report}, self._casebook.id)
        self._log.say(
            "info",
            "sequence.ended",
            sequence=report.kind,
            outcome=report.outcome,
            slots=report.slots,
            epoch=report.epoch,
            took_s=round(report.ended - report.began, 4),
            reason=report.reason,
        )


def given_up(slots: tuple[int, ...]) -> Decision:
    """The executor itself has found these ranks dead, or past a deadline, and is replacing them."""
    return Decision(
        step=Step.NONE,
        reason=Reason.EXECUTOR,
        slots=slots,
        cause=Cause.EXECUTOR,
        rule="",
        sentence=f"did nothing: the executor itself gave up slots {', '.join(map(str, slots))} and replaces them",
    )
