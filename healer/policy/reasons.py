"""What a decision asks for and why: the two enumerations that healing, load, metrics, journal and `docs/decisions.md` share.

`python -m healer.policy.reasons` prints `docs/decisions.md`.
"""

from enum import StrEnum


class _Documented(StrEnum):
    """A value with the text that the documentation shows for it."""

    text: str

    def __new__(cls, value: str, text: str) -> "_Documented":
        self = str.__new__(cls, value)
        self._value_ = value
        self.text = text
        return self


class Step(_Documented):
    """What a decision asks of the target."""

    NONE = "none", "Nothing is done."
    REPLACE = "replace", "Release a live rank and refill its slot."
    SCALE_DOWN = "scale-down", "Release a live rank; its slot leaves the target."
    DRAIN = "drain", "Retire a rank that still serves: its requests are handed over, then its slot leaves the target."
    RETRY = (
        "retry",
        "Leave the rank as it is for the backoff, and look again; where the group waits for it, drop the step in flight "
        "and run it again.",
    )
    HOOK = "hook", "Run a hook of the policy for the slot."
    REFILL = "refill", "Ask for a rank in an empty slot."
    GIVE_UP = "give-up", "Take an empty slot out of the target."
    SCALE = "scale", "Set the target, as an operator or a load rule asked."
    HUMAN = "human", "Leave it to a human: nothing is done."


ACTS = frozenset(Step) - {Step.NONE, Step.HUMAN}
"""Steps that change something."""


class Reason(_Documented):
    """Why, of healing and of load alike. Each is a label of `healer_decisions_total` or the `reason` of a scaling decision;
    the words stay."""

    STARTING = "starting", "No live rank is known yet."
    ALL_HEALTHY = "all-healthy", "Every live rank is heard, and the group has its intended size."
    IN_PROGRESS = "in-progress", "Nothing is wrong beyond what is already being worked on."
    SUSPICION = "suspicion", "Evidence exists, too weak to act upon."
    TELEMETRY_LOST = "telemetry-lost", "The daemon itself was late: silence means nothing."

    RULE_MATCHED = "rule-matched", "An unhealthy rank, and the first action of its rule that is allowed."
    NO_RULE = "no-rule", "No rule matches the verdict."
    RULE_SAYS_HUMAN = "rule-says-human", "The rule's ladder has come to `human`."
    NOT_UNHEALTHY = (
        "not-unhealthy",
        "The rule matches a rank that is not unhealthy, and its next action would touch the rank.",
    )

    BACKOFF = "backoff", "The last attempt failed or had no effect yet; the next one is not due."
    RETRY_DUE = "retry-due", "The last attempt failed or had no effect, and the same action is tried again."
    NEXT_ACTION = "next-action", "An action had no success within its attempts; the ladder's next one is taken."
    REPLACEMENT_FAILED = "replacement-failed", "A replacement failed and is asked for again."
    REPAIRED = "repaired", "A hook has succeeded; the slot is filled again."
    ATTEMPTS_EXHAUSTED = "attempts-exhausted", "Every attempt that the rule allows has failed."
    BOOT_FAILED = "boot-failed", "A rank that an operator asked for does not start."
    RUNNING = "running", "The action of the ladder is under way and within its deadline."

    BELOW_MIN_RANKS = "below-min-ranks", "A smaller group would be below `bounds.minRanks`."
    BELOW_REDUNDANCY = "below-redundancy", "Fewer losses than `bounds.redundancyFloor` would be survivable."
    ABOVE_MAX_RANKS = "above-max-ranks", "A larger group would be above `bounds.maxRanks` or the slots that exist."
    ABOVE_GPUS = "above-gpus", "More GPUs would be taken than `bounds.maxGpus` allows or than there are."
    NOT_DIVISIBLE = "not-divisible", "The size would not be a multiple of `bounds.divisibility`."

    QUEUED = "queued", "A reconfiguration is in flight; this one is decided upon again when it has ended."
    MAX_UNAVAILABLE = "max-unavailable", "More ranks than `bounds.maxUnavailable` would be missing at once."
    BREAKER_OPEN = "breaker-open", "The circuit breaker is open: no new destructive step until it is reset."
    QUARANTINED = "quarantined", "The slot used up its fault budget: it is not filled until its quarantine ends."
    QUARANTINE_OVER = (
        "quarantine-over",
        "The quarantine of a slot that healing had given up has ended: it is filled again.",
    )
    TELEMETRY_SETTLING = "telemetry-settling", "Telemetry came back a moment ago; only conclusive evidence counts yet."
    STALE = "stale", "The evidence is too old, or is about a rank that is gone."
    AWAITING_EVIDENCE = "awaiting-evidence", "A rule matches, and its `require` is not met yet."
    PAUSED = "paused", "Healing is paused: verdicts are reported, and only an operator acts."
    MAINTENANCE = "maintenance", "A window of `bounds.maintenance` is open."

    OPERATOR = "operator", "Asked through the API."
    LOAD = "load", "A load rule or a schedule asks for another size."
    EXECUTOR = "executor", "The executor itself gave a rank up and is replacing it."
    REFUSED = "refused", "A request that cannot be met: the bounds or the target refuse it."
    HEALING_FIRST = "healing-first", "A change of size waits, since a rank is being healed."

    NO_RULES = "no-rules", "The policy has no load rules, and no bound asks for another size."
    CONTENT = "content", "No load rule wants another size."
    RULE = "rule", "A load rule wants another size, and nothing speaks against it."
    SCHEDULE = "schedule", "A bound of a schedule asks for another size."
    BOUNDS = "bounds", "The size is outside of `spec.bounds`, or has no room for every expert."
    SIGNAL_MISSING = "signal-missing", "A load rule cannot be judged: nothing shrinks, and it lets nothing grow."
    STABILISATION = "stabilisation", "Not wanted for long enough (`load.behavior`, stabilizationWindow)."
    RATE = "rate", "As much was changed lately as `load.behavior` allows (policies)."
    DISABLED = "direction-disabled", "`load.behavior` forbids this direction (selectPolicy)."
    COOLDOWN = "cooldown", "The size changed within `load.cooldown`."
    DOES_NOT_FIT = "does-not-fit", "The load would not fit fewer ranks with `load.fitMargin` to spare."
    AT_BOUND = "at-bound", "The bounds or a schedule allow no more, or no less."
    BUDGET = "budget", "The rank-hours of the day are spent (`bounds.budgetRankHoursPerDay`)."
    HELD = (
        "held",
        "A reconfiguration, an incident, a pause or a maintenance window: healing and people come before load. The "
        "sentence says which.",
    )


SCALING = frozenset(
    {
        Reason.NO_RULES,
        Reason.CONTENT,
        Reason.RULE,
        Reason.SCHEDULE,
        Reason.BOUNDS,
        Reason.SIGNAL_MISSING,
        Reason.STABILISATION,
        Reason.RATE,
        Reason.DISABLED,
        Reason.COOLDOWN,
        Reason.DOES_NOT_FIT,
        Reason.AT_BOUND,
        Reason.BUDGET,
        Reason.HELD,
    }
)
"""Reasons that only the load loop gives."""
BOTH = frozenset({Reason.STARTING, Reason.REFUSED})
"""Reasons that both loops give."""


_HEAD = """\
# Decisions

<!-- generated by `python -m healer.policy.reasons`; do not edit -->

Every decision has a step, a reason and one sentence. They are written to the journal (`healer history`), logged as
`decision`, and counted in `healer_decisions_total{step, reason}`. A decision that repeats the one before is counted and
written once.

## How a decision comes about

1. **Rule.** The first rule whose `match` fits a verdict answers it. `require` may ask for more evidence: then the rule waits,
   and no later one is tried. While a ladder is under way, only an earlier rule takes over. `healer policy explain` shows which
   rule matches and, for each other, which keys do not fit.
2. **Ladder.** The rule's actions are taken in order. Each has attempts, a backoff that doubles up to an hour, and a deadline;
   after the last attempt comes the next action, or a human where `onFailure` says so.
   * `retry` gives the rank time; a dead rank gets none. Where the group waits for the rank, all ranks drop the step in flight
     and run it again, so that a hiccup costs one pause and no rank; one that does not answer within `deadlines.commit` is lost.
     So it is where two ranks that beat wait for each other (`mutual-wait`): neither is touched. The attempts of a retry begin
     anew only when the rank has been healthy for its backoff, and for twice `detection.stallAfter`, since the last one.
   * `replace` releases the other ranks at once and refills the slot.
   * `scale-down` does the same, and the slot leaves the target.
   * `drain` hands the requests over first. A rank that cannot answer is scaled down instead.
   * `hook` of the kind `reset` or `reboot`: the slot is emptied first, by draining where the rank still serves. When the hook
     has succeeded, a rank is started there again. Hooks of other kinds run beside the rank; where the group waits for the
     rank, the next action is taken at the same time.
   * `human` does nothing and asks for one.
3. **Bounds** forbid sizes: an action that would leave them is passed over. Where none is left and the group waits for the
   rank, it is replaced: that releases the others and keeps the size.
4. **Guards** hold back what is destructive: a reconfiguration in flight, the circuit breaker, `maxUnavailable`. What is held
   back is decided upon again in each round.
5. **Pause, maintenance, dry run** come last: the sentence tells what would have been done.

A step is destructive if it ends a rank whose process is alive, or leads to a hook that resets or reboots. Releasing the ranks
that wait for a dead one, and refilling its slot, is recovery: no guard blocks it. A group that waits for a rank (it is dead,
hangs, or has lost its GPU) does not wait for a reconfiguration in flight either.

Old news is not acted upon: a verdict that rests on events alone, such as an XID, must have a recent one when healing takes it
up. It then stays taken up however long others are in its way, until a pause or an open breaker: after these, fresh evidence is
needed. Silence, or a GPU that the driver wants reset, is no event but a state, and counts for as long as it lasts.

Ladders, failures, quarantines, the breaker and a pause are remembered across restarts of the daemon and of the host: each
change is a note in the journal.

## Steps

"""


def document() -> str:
    """`docs/decisions.md`."""
    steps = ["| Step | Meaning |", "|---|---|", *(f"| `{step}` | {step.text} |" for step in Step)]
    reasons = ["| Reason | Of | Meaning |", "|---|---|---|", *(f"| `{r}` | {_of(r)} | {r.text} |" for r in Reason)]
    return _HEAD + "\n".join(steps) + _REASONS + "\n".join(reasons) + "\n"


def _of(reason: Reason) -> str:
    return "both" if reason in BOTH else "load" if reason in SCALING else "healing"


_REASONS = """

## Reasons

Two loops decide: healing, upon faults and requests, and load, upon the size ([autoscaling.md](autoscaling.md)). They share one
set of reasons. A decision of healing is counted in `healer_decisions_total` with its reason. One of load is logged and
journalled as `scaling` with its reason, and `healer status` shows the newest; when it changes the size, the change itself is a
decision with step `scale` and reason `load`. Where load waits for healing or for people (`held`), its sentence repeats what
healing says, such as `paused`, `maintenance` or `healing-first`.

"""


if __name__ == "__main__":
    print(document(), end="")
