"""Who is live, who was condemned, which replacements failed: the supervisor's picture of the group, from what the target
reports and what the supervisor itself asked for."""

from collections.abc import Collection

import msgspec

from elastic.controller.records import BootFailed, GroupStatus
from elastic.view import Member
from healer.evidence import RankRef
from healer.policy.decide import FailedRefill, State
from healer.sensors import ref


class Roster:
    """Owned by the supervisor's loop."""

    def __init__(self, group: GroupStatus) -> None:
        self.group = group
        self.live: dict[RankRef, Member] = {}
        """Live ranks that nobody has condemned."""
        self._condemned: dict[int, RankRef] = {}  # by slot, the incarnation handed to the target as lost
        self._rules: dict[int, str] = {}  # by condemned slot, the rule by which it is replaced
        self._failed: dict[int, FailedRefill] = {}
        self._given_up: set[int] = set()  # slots that the target itself declared lost, until they are live again

    def refresh(self, group: GroupStatus) -> bool:
        """Take over what the target reports. True when the live ranks are others than before."""
        self.group = group
        seen = {s.member.slot: s.member for s in group.slots if s.state == "live" and s.member is not None}
        for slot, rank in list(self._condemned.items()):
            if slot in seen and ref(seen[slot]) != rank:
                del self._condemned[slot]
                self._rules.pop(slot, None)
        self._given_up -= set(seen)
        # a slot that is live has been refilled; one that left the target needs no refill
        self._failed = {s: f for s, f in self._failed.items() if s not in seen and s in group.target}
        before = self.live
        self.live = {ref(m): m for m in seen.values() if self._condemned.get(m.slot) != ref(m)}
        return self.live != before

    def condemn(self, rank: RankRef, rule: str) -> None:
        """The rank is handed to the target as lost: from the next `refresh` on it is not
        judged any more."""
        self._condemned[rank.slot] = rank
        self._rules[rank.slot] = rule

    def given_up(self, slots: Collection[int]) -> None:
        """The target itself declared these slots lost; some may have no rank that anybody knows of."""
        self._given_up |= set(slots)
        for rank in [rank for rank in self.live if rank.slot in slots]:
            self.condemn(rank, "")

    def is_lost(self, slot: int) -> bool:
        return slot in self._condemned or slot in self._given_up

    def in_slot(self, slot: int) -> RankRef | None:
        return next((rank for rank in self.live if rank.slot == slot), None)

    def boot_failed(self, event: BootFailed) -> None:
        """The target gave up starting a rank in this slot."""
        before = self._failed.get(event.slot)
        self._failed[event.slot] = FailedRefill(
            rule=self._rules.get(event.slot, ""),
            attempts=before.attempts + 1 if before else 1,
            failed_at=event.at,
            asked=False,
            why=event.why,
        )

    def asked_again(self, slot: int) -> None:
        self._failed[slot] = msgspec.structs.replace(self._failed[slot], asked=True)

    def refused(self, slot: int, why: str) -> None:
        """What was decided about a failed replacement cannot be done: from now on it is a human's."""
        if slot in self._failed:
            self._failed[slot] = msgspec.structs.replace(self._failed[slot], rule="", asked=False, why=why)

    @property
    def waiting(self) -> bool:
        """A failed replacement may be due for its next step, with time alone."""
        return any(not failed.asked for failed in self._failed.values())

    @property
    def settled(self) -> bool:
        """The group is what it should be, and nobody lost is still in it."""
        return self.group.live == self.group.target and not any(map(self.is_lost, self.group.live))

    def state(self) -> State:
        return State(
            live=tuple(self.live),
            target=self.group.target,
            sequence=self.group.sequence or "",
            failed=dict(self._failed),
        )
