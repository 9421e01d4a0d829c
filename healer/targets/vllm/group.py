"""The target's picture of one vLLM group: who holds which slot, what each said last, what is wanted, what is written down."""

import asyncio
import time
from collections.abc import Callable
from pathlib import Path

import msgspec
import structlog

from elastic.controller.records import Event, GroupStatus, SlotState, SlotStatus
from elastic.errors import ElasticError
from elastic.protocol import Counters
from healer.policy.schema import Policy, VllmTarget
from healer.router.config import RankSpec
from healer.targets.vllm import commands, signals
from healer.targets.vllm import state as files
from healer.targets.vllm.deployment import experts
from healer.targets.vllm.endpoints import Endpoints
from healer.targets.vllm.in_place import InPlace
from healer.targets.vllm.machine import Machine, State
from healer.targets.vllm.plan import LEAST_RANKS, Facts
from healer.targets.vllm.records import Held, Part, Role
from healer.targets.vllm.router import RouterLink
from healer.targets.vllm.starters import LocalStarter, Starter
from healer.targets.vllm.watch import RankWatch

log = structlog.get_logger("healer.vllm")

SCALES = frozenset({State.GROWING, State.SHRINKING})
SERVES = SCALES | {State.SERVING, State.FILLING}
BUSY = SCALES | {State.REMOVING, State.HEALING}
"""Gates may be shut and engines stand still, and nobody is suspected for it."""


class Group:
    """Owned by the target's loop; its sequences write to it too, one at a time."""

    def __init__(
        self,
        policy: Policy,
        target: VllmTarget,
        starter: Starter,
        router: RouterLink | None,
        emit: Callable[[Event], None],
        api_key: str,
        *,
        observes: bool = False,
        armed: Callable[[], bool] = lambda: True,
    ) -> None:
        """`observes`: files and router are another daemon's, and are left alone. So they are where this one is not `armed`: its
        lease is over."""
        self.observes, self._armed = observes, armed
        self.name, self.config, self.starter, self.router = policy.metadata.name, target, starter, router
        self.arguments = commands.arguments(target)
        self.model = commands.model_name(target)
        self.run_dir = Path(target.run_dir)
        self.poll_s = policy.spec.detection.heartbeat_interval_s
        self.stall_after_s = policy.spec.detection.stall_after_s
        self.emit = emit
        self.machine = Machine()
        self.ranks: dict[int, RankWatch] = {}
        self.target: tuple[int, ...] = tuple(range(target.ranks))
        self.lost: dict[int, str] = {}
        self.attempts: dict[int, int] = {}
        """Failed starts in a row, by slot."""
        self.incarnations: dict[int, int] = {}
        self.epoch = 0
        self.rpc_port = 0
        self.launch_size = target.ranks
        self.experts = experts(target)
        self.redundant: int | None = None
        """Of this launch, where it is another number than the user's."""
        self.scaled, self.retries, self.not_before = False, 0, 0.0
        self.can_remove = False
        """Every rank of this launch said so."""
        self.removed: tuple[int, ...] = ()
        """DP ranks of this launch that are dead and that vLLM goes on without."""
        self.removing = False
        self.in_place: InPlace | None = None
        """Where launches have the plugin."""
        self.spares = starter.spares if isinstance(starter, LocalStarter) else None
        self.why_not_in_place = "it is off"
        """Why those who are left cannot go on by themselves, as last found out; empty: they can."""
        self.coordinated = self.ordered = self.unbalanced = False
        self.holes: dict[int, int] = {}
        """DP ranks that are empty inside the running group, with the slot that each was of."""
        self.lost_since = 0.0
        self.reference: tuple[int, ...] = ()
        self.pending: files.Pending | None = None
        self.vllm_epoch: str | None = None
        self.leaving: frozenset[int] = frozenset()
        """Slots that take no new requests."""
        self.sequence = ""
        self.polled = asyncio.Condition()
        self.api_key = api_key
        self._routes: tuple[RankSpec, ...] | None = None

    @property
    def owns_files(self) -> bool:
        return not self.observes and self._armed()

    # --- ranks ------------------------------------------------------------------------------------------------------

    def held(self, role: Role | None = None) -> list[Held]:
        """By DP rank."""
        found = sorted((r.held for r in self.ranks.values()), key=lambda h: h.dp_rank)
        return [h for h in found if role is None or h.role == role]

    def live(self) -> list[RankWatch]:
        return [self.ranks[h.slot] for h in self.held(Role.LIVE)]

    def add(self, held: Held) -> RankWatch:
        endpoints = Endpoints(held.url, api_key=self.api_key)
        rank = RankWatch(held, endpoints, self.starter.tail(held), stall_after_s=self.stall_after_s)
        self.ranks[held.slot] = rank
        self.incarnations[held.slot] = max(held.incarnation, self.incarnations.get(held.slot, -1))
        return rank

    async def drop(self, slots: list[int]) -> None:
        for slot in slots:
            rank = self.ranks.pop(slot, None)
            if rank is not None:
                await rank.aclose()

    def set_role(self, slot: int, role: Role) -> None:
        rank = self.ranks[slot]
        rank.held = msgspec.structs.replace(rank.held, role=role)
        if role == Role.LIVE:
            found = self.starter.processes([rank.held]).get(slot, [])
            rank.watch_processes(found, self.on_gone)
        else:
            rank.unwatch()

    def abandon(self) -> None:
        """No rank is part of the group any more; what is left of them is to be ended."""
        for held in self.held(Role.LIVE):
            self.set_role(held.slot, Role.RETIRING)
        self.lost = {}
        self.publish()

    def may_end(self, rank: RankWatch) -> bool:
        """vLLM was asked to leave this rank out, and its engine and worker end when that is done: before the answer to the request
        comes."""
        ends = rank.gone is not None and rank.gone.part in (Part.ENGINE, Part.WORKER)
        return ends and self.pending is not None and rank.held.slot in self.pending.leavers

    def on_gone(self, rank: RankWatch) -> None:
        if rank.gone is not None and self.may_end(rank):
            log.info("rank.part_left", slot=rank.held.slot, part=rank.gone.part.value, pid=rank.gone.pid)
        elif rank.held.role == Role.LIVE and rank.gone is not None:
            log.warning("rank.part_ended", slot=rank.held.slot, part=rank.gone.part.value, pid=rank.gone.pid)
            self.emit(signals.gone(rank, time.monotonic()))
        self.publish()

    def next_incarnation(self, slot: int) -> int:
        self.incarnations[slot] = self.incarnations.get(slot, -1) + 1
        return self.incarnations[slot]

    async def after_poll(self, deadline: float) -> None:
        """Wait for the next time that all were asked. Raises TimeoutError at the deadline (monotonic)."""
        async with asyncio.timeout(max(0.01, deadline - time.monotonic())), self.polled:
            await self.polled.wait()

    @property
    def calm(self) -> bool:
        """It serves, and nothing is under way."""
        return self.machine.state == State.SERVING and not self.lost and not self.sequence

    def variables(self, *, fills: bool = False) -> dict[str, str]:
        """Environment of a launch beside the rest. `fills`: of ranks that take empty places."""
        return self.in_place.variables(joins=fills) if self.in_place is not None and self.coordinated else {}

    # --- who serves -------------------------------------------------------------------------------------------------

    def publish(self) -> None:
        """Tell the router, where anything changed."""
        if self.router is None or not self.owns_files:
            return
        routes = tuple(
            RankSpec(r.held.slot, r.held.incarnation, r.held.url, self._admits(r))
            for r in self.live()
            if r.held.slot not in self.lost and r.gone is None
        )
        if routes == self._routes:
            return
        self.epoch = max(self.epoch, self.router.epoch) + 1
        self._routes = routes
        self.router.route(self.epoch, routes)

    def _admits(self, rank: RankWatch) -> bool:
        """Shut gates of a commit are the router's business: it asks the ranks itself."""
        if self.machine.state not in SERVES or rank.held.slot in self.leaving or not rank.alive:
            return False
        look = rank.look
        if look is None or look.dead or look.unhealthy or rank.wrong:
            return False
        return rank.still_since(time.monotonic()) is None or self.machine.state in SCALES

    # --- what is known ----------------------------------------------------------------------------------------------

    @property
    def unstartable(self) -> frozenset[int]:
        return frozenset(s for s, count in self.attempts.items() if count >= self.config.start_attempts)

    @property
    def can_reset_caches(self) -> bool:
        """Whether what a fault left in the prefix caches can be thrown away."""
        if not self.arguments.flag("enable-prefix-caching", True):
            return True
        value = self.config.env.get("VLLM_SERVER_DEV_MODE", "0").strip().lower()
        return value in ("1", "true")

    def facts(self) -> Facts:
        now, limits = time.monotonic(), self.config.deadlines
        return Facts(
            state=self.machine.state,
            now=now,
            ranks=tuple(r.facts(now) for r in self.ranks.values()),
            target=self.target,
            lost=self.lost,
            unstartable=self.unstartable,
            epoch=self.vllm_epoch,
            scaled=self.scaled,
            can_retry=self.can_reset_caches and not any(r.sticky for r in self.live() if r.held.slot not in self.lost),
            can_remove=self.can_remove and self.starter.fences and self.asked_redundant > 0,
            least_ranks=self.least_ranks(),
            in_place=self.why_not_in_place,
            holes=bool(self.holes),
            ordered=self.ordered,
            unbalanced=self.unbalanced,
            lost_since=self.lost_since,
            removed=bool(self.removed),
            retries=self.retries,
            poll_s=self.poll_s,
            gate_s=limits.gate_s,
            settle_s=limits.settle_s,
            stall_s=limits.stall_s,
            not_before=self.not_before,
        )

    def least_ranks(self) -> int:
        """The fewest ranks that hold every expert; expert slots of a rank are settled at the launch."""
        return max(LEAST_RANKS, self.least_in_place())

    def least_in_place(self) -> int:
        """As `least_ranks`; inside a running group one rank is enough if it holds them. Where the experts are not known the
        ranks find out, and refuse."""
        if self.experts is None:
            return 1
        redundant = self.asked_redundant if self.redundant is None else self.redundant
        return -(-self.experts * self.launch_size // (self.experts + redundant))

    def place_for(self, slot: int) -> int:
        """The empty DP rank that a rank in this slot is to fill: the slot's own, else the lowest."""
        return next((number for number, of in self.holes.items() if of == slot), min(self.holes))

    @property
    def asked_redundant(self) -> int:
        """Redundant experts, as the user's arguments say."""
        found = self.arguments.config("eplb-config").get("num_redundant_experts", 0)
        return found if isinstance(found, int) else 0

    @property
    def tensor(self) -> int:
        return self.arguments.number("tensor-parallel-size", 1) or 1

    def status(self) -> GroupStatus:
        now, members = time.monotonic(), {r.held.slot: r for r in self.ranks.values()}
        live = tuple(sorted(h.slot for h in self.held(Role.LIVE)))
        slots = []
        for slot in range(self.config.max_ranks):
            rank = members.get(slot)
            load = rank.look.load if rank and rank.look else None
            slots.append(
                SlotStatus(
                    slot=slot,
                    state=self._state_of(slot, rank),
                    member=rank.held.member if rank else None,
                    last_beat_age_s=now - rank.look.at if rank and rank.look else None,
                    round=rank.generated if rank else 0,
                    waiting=int(load.waiting) if load else 0,
                    running=int(load.running) if load else 0,
                    counters=Counters(tokens=rank.generated if rank else 0),
                    experts=0,
                )
            )
        state = self.machine.state
        yielded = f"another controller is at work: {self.machine.why}" if state == State.YIELDED else ""
        trouble = self.router.trouble if self.router is not None else ""
        down = f"nothing serves: {self.machine.why}" if state == State.DOWN else ""
        return GroupStatus(
            name=self.name,
            epoch=self.epoch,
            live=live,
            target=self.target,
            max_ranks=self.config.max_ranks,
            sequence=self.sequence or None,
            placement_hash="",
            uncovered=0,
            losses_survivable=max(0, len(live) - self.least_ranks()),
            slots=tuple(slots),
            gateway="; ".join(text for text in (yielded, down, trouble) if text),
            spares=self.spares.status() if self.spares is not None else (),
        )

    def _state_of(self, slot: int, rank: RankWatch | None) -> SlotState:
        if rank is None:
            return "quarantined" if slot in self.unstartable else "empty"
        if slot in self.lost:
            return "lost"
        return "live" if rank.held.role == Role.LIVE else "booting" if rank.held.role == Role.BOOTING else "ready"

    def save(self) -> None:
        """What cannot be written is logged: the daemon then cannot adopt, and says so at its next start."""
        if not self.owns_files:
            return
        found = files.VllmState(
            group=self.name,
            epoch=self.epoch,
            target=self.target,
            ranks=tuple(self.held()),
            incarnations=self.incarnations,
            rpc_port=self.rpc_port,
            scaled=self.scaled,
            reference=self.reference,
            pending=self.pending,
            launch_size=self.launch_size,
            removed=self.removed,
            removing=self.removing,
            holes=self.holes,
            coordinated=self.coordinated,
            ordered=self.ordered,
            unbalanced=self.unbalanced,
            redundant=self.redundant,
        )
        try:
            files.save(self.run_dir, found)
        except ElasticError as error:
            log.error("state.not_saved", error=str(error))
