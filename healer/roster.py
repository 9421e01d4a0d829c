"""Who is live, who was condemned, and what healing remembers: the supervisor's picture of the group, from what the target
reports and what the supervisor itself asked for."""

from collections.abc import Callable, Collection, Iterable, Mapping

from elastic.controller.records import BootFailed, GroupStatus
from elastic.view import Member
from healer.diagnosis import Verdict
from healer.evidence import Evidence, GpuRef, RankRef
from healer.policy.memory import (
    Memory,
    Note,
    Phase,
    RefillAsked,
    RefillFailed,
    RefillRefused,
    RefillSettled,
    remember,
)
from healer.policy.observe import observe
from healer.policy.records import State
from healer.policy.schema import Policy
from healer.sensors import ref


class Roster:
    """Owned by the supervisor's loop."""

    def __init__(self, group: GroupStatus) -> None:
        self.group = group
        self.live: dict[RankRef, Member] = {}
        """Live ranks that nobody has condemned."""
        self.memory = Memory()
        self.on_note: Callable[[Note], None] = lambda note: None
        """Told of every change of the memory, so that it can be written down."""
        self.hosts: dict[int, str] = {}
        """By slot, the host of its last known rank."""
        self.gpus: dict[int, GpuRef] = {}
        """By slot, the GPU of its last known rank, for hooks that run when the rank is gone."""
        self.xids: dict[int, int] = {}
        """By slot, the XID that its last action was about; 0: none."""
        self._condemned: dict[int, RankRef] = {}  # by slot, the incarnation handed to the target as lost
        self._rules: dict[int, str] = {}  # by condemned slot, the rule by which it is replaced
        self._given_up: set[int] = set()  # slots that the target itself declared lost, until they are live again

    def note(self, *notes: Note) -> None:
        for one in notes:
            self.memory = remember(self.memory, one)
            self.on_note(one)

    def refresh(self, group: GroupStatus, now: float = 0.0) -> bool:
        """Take over what the target reports. True when the live ranks are others than before."""
        self.group = group
        seen = {s.member.slot: s.member for s in group.slots if s.state == "live" and s.member is not None}
        self.hosts |= {slot: member.host for slot, member in seen.items()}
        for slot, rank in list(self._condemned.items()):
            if slot in seen and ref(seen[slot]) != rank:
                del self._condemned[slot]
                self._rules.pop(slot, None)
        self._given_up -= set(seen)
        # a slot that is live has been refilled; one that left the target needs no refill
        settled = [slot for slot in self.memory.failed if slot in seen or slot not in group.target]
        self.note(*(RefillSettled(slot, now) for slot in settled))
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

    def last_in_slot(self, slot: int) -> RankRef:
        """The rank that is or was in the slot, as far as it is known."""
        ladder = self.memory.ladders.get(slot)
        known = self.in_slot(slot) or self._condemned.get(slot) or (ladder.rank if ladder else None)
        return known or RankRef(slot, 0)

    def boot_failed(self, event: BootFailed) -> None:
        """The target gave up starting a rank in this slot."""
        ladder, known = self.memory.ladders.get(event.slot), self.memory.failed.get(event.slot)
        # the memory outlives the daemon; what was condemned does not
        rule = self._rules.get(event.slot) or (ladder.rule if ladder else "") or (known.rule if known else "")
        self.note(RefillFailed(event.slot, rule, event.why, event.at))

    def asked_again(self, slot: int, now: float) -> None:
        if slot in self.memory.failed:
            self.note(RefillAsked(slot, now))

    def refused(self, slot: int, why: str, now: float) -> None:
        """What was decided about a failed replacement cannot be done: from now on it is a human's."""
        if slot in self.memory.failed:
            self.note(RefillRefused(slot, why, now))

    @property
    def waiting(self) -> bool:
        """A slot may be due for its next step, with time alone."""
        if any(not failed.asked for failed in self.memory.failed.values()):
            return True
        return any(one.phase in (Phase.EMPTYING, Phase.SUCCEEDED) for one in self.memory.ladders.values())

    @property
    def settled(self) -> bool:
        """The group is what it should be, nobody lost is still in it, and no slot is taken out for repair."""
        if self.group.live != self.group.target or any(map(self.is_lost, self.group.live)):
            return False
        return all(slot in self.group.target for slot in self.memory.ladders)

    def observe(self, policy: Policy, verdicts: Collection[Verdict], state: State, now: float) -> State:
        """Note what is new in these verdicts; the state to decide upon."""
        found = observe(policy, verdicts, state, now)
        if not found:
            return state
        self.note(*found)
        return self.state(state.evidence.values(), wall=state.wall, hosts=state.hosts, gpus=state.gpus)

    def state(
        self,
        evidence: Iterable[Evidence] = (),
        *,
        wall: float | None = None,
        hosts: Mapping[int, str] | None = None,
        gpus: int | None = None,
        placed: Mapping[RankRef, GpuRef] | None = None,
    ) -> State:
        """`evidence`: what stands; `placed`: the GPU of each rank that is known to be on one. The rest as in `State`."""
        self.gpus |= {rank.slot: gpu for rank, gpu in (placed or {}).items()}
        return State(
            live=tuple(self.live),
            target=self.group.target,
            sequence=self.group.sequence or "",
            failed=self.memory.failed,
            memory=self.memory,
            evidence={one.id: one for one in evidence},
            occupied=frozenset(s.slot for s in self.group.slots if s.state not in ("empty", "quarantined")),
            hosts=self.hosts if hosts is None else hosts,
            losses_survivable=self.group.losses_survivable,
            gpus=gpus,
            wall=wall,
        )
