"""What the load rules decide, as records: each rule's vote, and what came of them."""

from enum import StrEnum

import msgspec

from healer.policy.reasons import Reason


class Stance(StrEnum):
    """What a rule says."""

    WANTS = "wants"
    CONTENT = "content"
    """The value is where it should be: the size is kept."""
    QUIET = "quiet"
    """Its condition does not hold, or there is nothing to measure: others decide."""
    PENDING = "pending"
    """Its condition holds, not yet for long enough."""
    MISSING = "missing"
    """Its signal is missing: nothing shrinks."""


class Vote(msgspec.Struct, frozen=True):
    rule: str
    stance: Stance
    wanted: int
    """Ranks; the present size unless `stance` is WANTS."""
    text: str
    """What was compared: "waiting per rank 9.2 over target 4"."""


class ScaleDecision(msgspec.Struct, frozen=True, kw_only=True):
    """One evaluation. Something is to be done when `acts`."""

    reason: Reason
    current: int
    """The target size now, ranks."""
    wanted: int
    """What the rules want, before windows, rates and bounds."""
    size: int
    """What is to be set; `current`: nothing."""
    rule: str
    """Whose wish it is; empty where no rule has one."""
    sentence: str
    held_s: float = 0.0
    """For so long nothing will change, as far as that is known."""
    votes: tuple[Vote, ...] = ()
    dry_run: bool = False
    """True: the policy forbids acting; `size` is what would have been set."""

    @property
    def acts(self) -> bool:
        return self.size != self.current and not self.dry_run

    @property
    def key(self) -> tuple[object, ...]:
        """Two decisions in a row with the same key are one, said twice."""
        return self.reason, self.current, self.wanted, self.size, self.rule, self.dry_run


class Change(msgspec.Struct, frozen=True):
    """The target size changed, whoever asked."""

    at: float
    before: int
    after: int
