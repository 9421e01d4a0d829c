"""Carrying decisions out: the intent into the journal, then the target or a hook. Small; decides nothing."""

from pathlib import Path
from typing import Any

import msgspec

from elastic.errors import ElasticError, Infeasible
from healer.authority import Authority
from healer.casebook import Casebook
from healer.clock import Clock
from healer.diagnosis import Cause
from healer.hooks import HookFacts, HookResult, HookRunner
from healer.journal import Entry, Journal, Kind
from healer.logs import LateLog
from healer.metrics import Metrics
from healer.policy import bounds
from healer.policy.begun import notes_of
from healer.policy.decide import Decision, Reason, Step
from healer.policy.guards import WAITED_FOR
from healer.policy.memory import (
    Ended,
    Memory,
    Note,
    Recovered,
    Returned,
    moved,
    recall,
)
from healer.policy.schema import Policy
from healer.roster import Roster
from healer.targets import Target

NOTE = "healing-note"
"""Lifecycle event in the journal: one change of what healing remembers."""
SUMMARY_EVERY = 500
"""Notes after which the whole memory is written once, so that a restart reads few entries."""
RECALL_LIMIT = 4 * SUMMARY_EVERY
"""Lifecycle entries that a restart looks at; other events are rare."""


class Actions:
    """Owned by the supervisor, called in its loop."""

    def __init__(
        self,
        target: Target,
        roster: Roster,
        casebook: Casebook,
        journal: Journal,
        metrics: Metrics,
        log: LateLog,
        clock: Clock,
        policy: Policy | None = None,
        hooks: type[HookRunner] = HookRunner,
        authority: Authority | None = None,
    ) -> None:
        """Takes up what an earlier daemon remembered, from the journal. `policy` has the hooks and the bounds of sizes that
        are asked for; without it there are none. `authority`: asked right before each act; without it all may be done."""
        self._target, self._roster, self._casebook = target, roster, casebook
        self._journal, self._metrics, self._log, self._clock = journal, metrics, log, clock
        self._policy = policy
        self.authority = authority or Authority()
        self._hooks = hooks(policy.spec.hooks if policy else {}, self._hook_ended)
        self._boot = boot_id()
        self._unsummarised = 0
        roster.memory = recalled(journal.recent(Kind.LIFECYCLE, RECALL_LIMIT), clock, self._boot)
        roster.on_note = self.write_note
        if roster.memory != Memory():
            self.write_note(roster.memory)

    def adopt(self, policy: Policy) -> None:
        """The hooks and bounds of another policy, from now on; hooks that run go on."""
        self._policy = policy
        self._hooks.hooks = policy.spec.hooks

    async def close(self) -> None:
        """End the hooks that run."""
        await self._hooks.close()

    def record(self, decision: Decision) -> None:
        self._journal.add(Kind.DECISION, decision, self._casebook.id)
        self._metrics.decisions.labels(decision.step, decision.reason).inc()
        self._log.say("info", "decision", step=decision.step, reason=decision.reason, sentence=decision.sentence)

    def carry_out(self, decision: Decision) -> None:
        """Give an acting decision to the target or a hook. Returns at once; what becomes of it is reported by events.
        Where the target refuses, the ladder goes on, and a failed replacement becomes a human's."""
        intent = {"step": decision.step, "slots": decision.slots, "cause": decision.cause, "rule": decision.rule}
        if decision.hook:
            intent["hook"] = decision.hook
        action = self._journal.add(Kind.ACTION, intent, self._casebook.id)
        now = self._clock.monotonic()
        self._note_begun(decision, now)
        self._journal.flush()
        slots, target = decision.slots, set(self._roster.group.target)
        try:
            self.authority.check()
            match decision.step:
                case Step.REPLACE | Step.SCALE_DOWN:
                    self._lose(decision)
                case Step.RETRY if decision.cause in WAITED_FOR:
                    self._target.release()
                case Step.REFILL:
                    for slot in slots:
                        self._roster.asked_again(slot, now)
                    self._target.scale(sorted({*target, *slots}), reason=decision.sentence)
                case Step.GIVE_UP | Step.DRAIN:
                    self._target.scale(sorted(target - {*slots}), reason=decision.sentence)
                case Step.HOOK:
                    for slot in slots:
                        self.authority.check()
                        self._hooks.start(self._facts(decision, slot))
        except ElasticError as error:
            self._journal.add(Kind.OUTCOME, {"action": action, "refused": str(error)}, self._casebook.id)
            for slot in slots:
                self._roster.note(Ended(slot, decision.rung, False, str(error), now))
                self._roster.refused(slot, str(error), now)
            self._log.say("error", "action.refused", step=decision.step, slots=slots, error=str(error))

    def _note_begun(self, decision: Decision, now: float) -> None:
        if decision.rule:
            self._roster.xids |= {v.rank.slot: next(iter(v.xids), 0) for v in decision.verdicts}
        self._roster.note(*notes_of(decision, self._roster.last_in_slot, now))

    def _lose(self, decision: Decision) -> None:
        detected = min(v.since for v in decision.verdicts)
        for verdict in decision.verdicts:
            self._roster.condemn(verdict.rank, decision.rule)
        replace = decision.step == Step.REPLACE
        self._target.lose(decision.slots, cause=str(decision.cause), detected=detected, replace=replace)
        self._metrics.reaction.observe(max(0.0, self._clock.monotonic() - detected))

    # --- hooks ------------------------------------------------------------------------------------------------------

    def _facts(self, decision: Decision, slot: int) -> HookFacts:
        gpu = self._roster.gpus.get(slot)
        return HookFacts(
            hook=decision.hook,
            slot=slot,
            rule=decision.rule,
            cause=str(decision.cause),
            incident=self._casebook.id,
            host=self._roster.hosts.get(slot, ""),
            gpu_uuid=gpu.uuid if gpu is not None else "",
            gpu_pci=gpu.pci if gpu is not None else "",
            xid=self._roster.xids.get(slot, 0),
            sentence=decision.sentence,
        )

    def _hook_ended(self, facts: HookFacts, result: HookResult) -> None:
        ladder = self._roster.memory.ladders.get(facts.slot)
        outcome = {"hook": facts.hook, "slot": facts.slot, **msgspec.structs.asdict(result)}
        self._journal.add(Kind.OUTCOME, outcome, self._casebook.id)
        self._log.say(
            "info" if result.ok else "warning",
            "hook.ended",
            hook=facts.hook,
            slot=facts.slot,
            ok=result.ok,
            text=result.text,
        )
        if ladder is not None and ladder.rule == facts.rule and self._is_hook(ladder.rule, ladder.rung, facts.hook):
            ended = Ended(facts.slot, ladder.rung, result.ok, result.text, self._clock.monotonic())
            self._roster.note(ended)
        self._journal.flush()

    def _is_hook(self, rule: str, index: int, hook: str) -> bool:
        rules = self._policy.spec.healing.rules if self._policy else ()
        found = next((one for one in rules if one.name == rule), None)
        return found is not None and index < len(found.ladder) and found.ladder[index].hook == hook

    # --- what healing remembers -------------------------------------------------------------------------------------

    def write_note(self, note: Note) -> None:
        """One change of the memory, into the journal."""
        self._journal.add(Kind.LIFECYCLE, {"event": NOTE, "boot": self._boot, "note": note})
        self._unsummarised = 0 if isinstance(note, Memory) else self._unsummarised + 1
        if self._unsummarised >= SUMMARY_EVERY:
            self.write_note(self._roster.memory)

    # --- requests ---------------------------------------------------------------------------------------------------

    def scale(
        self, wanted: int | tuple[int, ...], *, who: str, refuse: str, reason: Reason = Reason.OPERATOR
    ) -> tuple[int, ...]:
        """A request, of an operator or of the load rules. `refuse`: why it must not be; empty when it may. Returns the new
        target; raises Infeasible with the reason, nothing changed, and Superseded where this daemon may not act."""
        shown = f"{wanted} ranks" if isinstance(wanted, int) else f"slots {', '.join(map(str, wanted))}"
        try:
            refuse = refuse or self._out_of_bounds(wanted)
            if refuse:
                raise Infeasible(refuse)
            self._journal.add(Kind.ACTION, {"step": Step.SCALE, "wanted": shown, "who": who})
            self._journal.flush()
            self.authority.check()
            target = self._target.scale(wanted, reason=f"{who} asked for {shown}")
        except Infeasible as error:
            self.record(asked(Step.NONE, Reason.REFUSED, (), f"refused {shown}, asked by {who}: {error}"))
            raise
        # who sets the target has the last word: no slot comes back by itself after it
        now = self._clock.monotonic()
        memory, live = self._roster.memory, {rank.slot for rank in self._roster.live}
        self._roster.note(*(Returned(slot, now) for slot in memory.returning))
        self._roster.note(*(Recovered(slot, now) for slot in sorted(memory.ladders.keys() - live - set(target))))
        self.record(asked(Step.SCALE, reason, target, f"scales to slots {list(target)}: {who} asked for {shown}"))
        return target

    def _out_of_bounds(self, wanted: int | tuple[int, ...]) -> str:
        if self._policy is None:
            return ""
        target, most = self._roster.group.target, self._roster.group.max_ranks
        if isinstance(wanted, int):
            if not 0 < wanted <= most:
                return ""  # the target refuses, and knows better why
            # as the target chooses: the lowest slots that it has, then the lowest free ones
            kept = sorted(target)[:wanted]
            free = (slot for slot in range(most) if slot not in kept)
            slots = {*kept, *(slot for slot, _ in zip(free, range(wanted - len(kept)), strict=False))}
        else:
            slots = set(wanted)
        block = bounds.wanted(self._policy, self._roster.state(), slots)
        return block.text if block is not None else ""


def boot_id() -> str:
    """Of this boot of the host; empty where the kernel tells none."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    except OSError:
        return ""


def recalled(newest_first: list[Entry], clock: Clock, boot: str) -> Memory:
    """The memory that the journal's notes give. Times of an earlier boot are brought over by the wall clock, the only one
    that both boots share."""
    notes: list[Note] = []
    for entry in newest_first:
        if entry.body.get("event") != NOTE:
            continue
        try:
            note: Any = msgspec.convert(entry.body["note"], Note, str_keys=True)
        except (msgspec.ValidationError, KeyError):
            continue  # a later version wrote it
        if entry.body.get("boot") != boot or not boot:
            note = moved(note, clock.monotonic() - entry.monotonic - (clock.wall() - entry.wall))
        notes.append(note)
        if isinstance(note, Memory):
            break
    return recall(reversed(notes))


def asked(step: Step, reason: Reason, slots: tuple[int, ...], sentence: str) -> Decision:
    """The decision that records what an operator asked for."""
    return Decision(step=step, reason=reason, slots=slots, cause=Cause.NONE, rule="", sentence=sentence)
