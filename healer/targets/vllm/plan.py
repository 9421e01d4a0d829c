"""What is to be done next about a vLLM group: pure, from what is known now.

What decides is what vLLM can do. Stock 0.33 can leave out its highest DP ranks and add ranks behind them, while all that it has
are alive; it can retry after a fault in which every process lives. With pull request 46370 it can also go on without ranks that
are dead, and change its size no more from then on. Where the ranks have healer's plugin, the group goes on around any dead rank
and its slot is filled again. All else is cured by a restart of the whole group.
"""

from enum import StrEnum

import msgspec

from healer.targets.vllm.endpoints import Gate, Phase
from healer.targets.vllm.machine import ACTS_NEVER, State
from healer.targets.vllm.records import Canaried, Held, Look, Role

LEAST_RANKS = 2
FRESH_POLLS = 4
"""A look that is older than so many polls is none: a request to scale is not sent on it."""
TOGETHER_S = 5.0
"""For the policy to give up another dead rank too, so that both are left out at once; `settle_s` where that is shorter."""
WRONG_CANARIES = 2
"""In a row, with other tokens than the first one: the rank is not believed any more."""


class Do(StrEnum):
    NOTHING = "nothing"
    START = "start"
    """Launch what the target asks for; nothing runs."""
    RESTART = "restart"
    RETRY = "retry"
    REMOVE = "remove"
    """Go on without dead ranks, by pull request 46370."""
    HEAL = "heal"
    """Go on inside the running group, by the plugin: without the slots that are named, or, with none, all together."""
    FILL = "fill"
    """A rank for an empty place of the running group, by the plugin."""
    GROW = "grow"
    SHRINK = "shrink"
    YIELD = "yield"


class Step(msgspec.Struct, frozen=True):
    do: Do
    why: str
    """A sentence."""
    slots: tuple[int, ...] = ()
    """RESTART: those at fault; GROW, SHRINK, REMOVE, HEAL, FILL: those that join or leave."""


class RankFacts(msgspec.Struct, frozen=True, kw_only=True):
    held: Held
    look: Look | None
    alive: bool
    """Every process of the rank that was there when it was sound; where there are none on this host: it answers."""
    unhealthy_since: float | None = None
    shut_since: float | None = None
    """Since when it lets nobody in although nothing scales."""
    still_since: float | None = None
    """Since when it has requests, or a canary, and generates nothing."""
    canary: Canaried | None = None
    wrong: int = 0
    """Canaries in a row that gave other tokens than they should."""
    eplb_stopped: bool = False
    idle_since: float | None = None
    """Since when it has served nobody but canaries."""
    sticky: bool = False
    """Its CUDA context is broken."""


class Facts(msgspec.Struct, frozen=True, kw_only=True):
    state: State
    now: float
    ranks: tuple[RankFacts, ...]
    target: tuple[int, ...]
    """Slots that should be live."""
    lost: dict[int, str]
    """By slot, why the owner has given it up."""
    unstartable: frozenset[int] = frozenset()
    """Slots that failed to start too often: nobody tries them until the target is set again."""
    epoch: str | None = None
    """Of the last scaling that healer knows; what differs from it is another controller's."""
    scaled: bool = False
    can_retry: bool = True
    """No CUDA context is broken, and prefix caches are off or can be reset."""
    can_remove: bool = False
    """Every rank knows `scale_down`, experts are redundant, and ranks can be ended for certain."""
    least_ranks: int = LEAST_RANKS
    """That hold every expert."""
    in_place: str = "it is off"
    """Why those who are not lost cannot go on by the plugin; empty: they can."""
    holes: bool = False
    """Places of the running group are empty; only the plugin fills them."""
    ordered: bool = False
    """The plugin has carried out an order in this launch."""
    unbalanced: bool = False
    """An order has ended the balancers, and no refill has started them since."""
    lost_since: float = 0.0
    removed: bool = False
    """Ranks were removed from this launch: vLLM changes the size no more."""
    retries: int = 0
    """Since the group last proved to be sound."""
    poll_s: float = 1.0
    gate_s: float = 120.0
    settle_s: float = 45.0
    stall_s: float = 60.0
    not_before: float = 0.0
    """After a failure: nothing planned before this."""


def decide(facts: Facts) -> Step:
    """The first that applies."""
    if facts.state in ACTS_NEVER or facts.state not in (State.SERVING, State.DOWN):
        return Step(Do.NOTHING, f"the group is {facts.state}")
    if facts.state == State.SERVING and (why := other_controller(facts)):
        return Step(Do.YIELD, why)
    if facts.lost:
        return _lost(facts)
    wanted = tuple(slot for slot in facts.target if slot not in facts.unstartable)
    if facts.state == State.DOWN:
        if facts.now < facts.not_before:
            return Step(Do.NOTHING, "the last start has failed, the next is due later")
        if len(wanted) < LEAST_RANKS:
            return Step(
                Do.NOTHING, f"only {len(wanted)} of the slots can be started, and vLLM needs {LEAST_RANKS} ranks"
            )
        return Step(Do.START, "nothing serves", wanted)
    return _broken(facts) or _faulty(facts) or _sized(facts, wanted) or Step(Do.NOTHING, "all is as it should be")


def _lost(facts: Facts) -> Step:
    slots = tuple(sorted(facts.lost))
    shown = "; ".join(f"slot {slot}: {why}" for slot, why in sorted(facts.lost.items()))
    if not facts.in_place:
        others = [rank.held.slot for rank in _live(facts) if not rank.alive and rank.held.slot not in facts.lost]
        if not others:
            return Step(Do.HEAL, f"the others go on in place without a lost rank ({shown})", slots)
        if facts.now - facts.lost_since < min(TOGETHER_S, facts.settle_s):
            return Step(Do.NOTHING, f"slots {others} are not sound either, and may be given up too")
    if why := _no_removal(facts):
        return Step(Do.RESTART, f"vLLM cannot go on without a lost rank ({shown}): {why}", slots)
    return Step(Do.REMOVE, f"the others go on without a lost rank ({shown})", slots)


def _no_removal(facts: Facts) -> str:
    left = [rank for rank in _live(facts) if rank.held.slot not in facts.lost]
    if facts.holes:
        return "places of the group are empty, and its scale_down knows of none"
    if not facts.can_remove:
        return "this deployment has no scale_down for dead ranks"
    if facts.scaled:
        return "the size has changed since the launch"
    if len(left) < facts.least_ranks:
        return f"{len(left)} ranks are left, {facts.least_ranks} are needed for all experts"
    if bad := [rank.held.slot for rank in left if not rank.alive or rank.sticky or (rank.look and rank.look.dead)]:
        return f"slots {bad} are not sound either"
    return "" if facts.can_retry else "the prefix caches may hold wrong blocks and cannot be reset"


def other_controller(facts: Facts) -> str:
    """Why somebody else must be at work on this group; empty: nobody is. Only looks of ranks that healer left alone count."""
    for rank in facts.ranks:
        look = rank.look
        if rank.held.role != Role.LIVE or look is None:
            continue
        if look.gate == Gate.RETIRED:
            return f"slot {rank.held.slot} was scaled away, and not by healer"
        scaling = look.scaling
        if scaling is None:
            continue
        if scaling.epoch is not None and scaling.epoch != facts.epoch:
            size = scaling.requested_data_parallel_size
            return f"somebody asked for {size} ranks (epoch {scaling.epoch[:8]}, {scaling.phase}), and not healer"
        if scaling.is_scaling_elastic_ep and scaling.phase in (Phase.PREPARING, Phase.COMMITTING):
            return f"slot {rank.held.slot} is {scaling.phase}, and healer asked for nothing"
    return ""


def _live(facts: Facts) -> list[RankFacts]:
    return sorted((r for r in facts.ranks if r.held.role == Role.LIVE), key=lambda r: r.held.dp_rank)


def _broken(facts: Facts) -> Step | None:
    """What no retry and no scaling ends."""
    live = _live(facts)
    for rank in live:
        slot = rank.held.slot
        scaling = rank.look.scaling if rank.look else None
        if scaling is not None and scaling.phase == Phase.FAILED:
            why = scaling.error or "no reason given"
            return Step(Do.RESTART, f"slot {slot}: the scaling has failed, and vLLM never undoes it: {why}", (slot,))
        if rank.shut_since is not None and facts.now - rank.shut_since >= facts.gate_s:
            text = f"slot {slot} has answered 503 for {facts.now - rank.shut_since:.0f} s with nothing to wait for"
            return Step(Do.RESTART, text, (slot,))
        if rank.wrong >= WRONG_CANARIES:
            return Step(Do.RESTART, f"slot {slot} generates other tokens than it should", (slot,))
        # healing in place ends the thread itself, and a refill starts it anew
        if rank.eplb_stopped and not facts.unbalanced:
            text = (
                f"slot {slot}: the thread that rebalances experts has ended; all would wait for it at the next scaling"
            )
            return Step(Do.RESTART, text, (slot,))
    still = [rank for rank in live if rank.still_since is not None]
    if live and len(still) == len(live):
        since = max(rank.still_since for rank in still if rank.still_since is not None)
        if facts.now - since >= facts.stall_s:
            text = f"all ranks have stood still for {facts.now - since:.0f} s, and none can be told from the others"
            return Step(Do.RESTART, text, tuple(rank.held.slot for rank in live))
    return None


def _faulty(facts: Facts) -> Step | None:
    """Engines that say that they met a fault."""
    live = _live(facts)
    sick = [rank for rank in live if rank.unhealthy_since is not None]
    if not sick:
        return None
    slots = tuple(rank.held.slot for rank in live)
    if not all(rank.alive for rank in live):
        return Step(Do.NOTHING, "a rank is dead: that comes first, and the policy decides about it")
    if not facts.in_place and not facts.retries:
        return Step(Do.HEAL, "engines met a fault, and every process lives: all go on in place, with their requests")
    if len(sick) == len(live):
        reason = _no_retry(facts)
        if not reason:
            return Step(Do.RETRY, "every engine met a fault, and every process lives", slots)
        return Step(Do.RESTART, f"every engine met a fault; no retry: {reason}", slots)
    since = min(rank.unhealthy_since for rank in sick if rank.unhealthy_since is not None)
    if facts.now - since < facts.settle_s:
        return Step(Do.NOTHING, "the others may report the fault too")
    names = ", ".join(str(rank.held.slot) for rank in sick)
    text = f"slots {names} met a fault, the others did not within {facts.settle_s:g} s: a retry would wait for them"
    return Step(Do.RESTART, text, tuple(rank.held.slot for rank in sick))


def _no_retry(facts: Facts) -> str:
    if not facts.can_retry:
        return "a CUDA context is broken, or the prefix caches may hold wrong blocks and cannot be reset"
    if facts.ordered:
        return "vLLM refuses it after an order of the plugin"
    if facts.scaled:
        return "vLLM would build its groups for the size at the launch, and the size has changed since"
    if facts.retries:
        return "the last one did not help"
    return ""


def _sized(facts: Facts, wanted: tuple[int, ...]) -> Step | None:
    if facts.now < facts.not_before:
        return None
    live = _live(facts)
    slots = [rank.held.slot for rank in live]
    leaving = tuple(slot for slot in slots if slot not in facts.target)
    joining = tuple(slot for slot in wanted if slot not in slots)
    if not leaving and not joining:
        return None
    if facts.removed:
        return _sized_anew(facts, live)
    if why := _not_sure(facts, live):
        return Step(Do.NOTHING, f"no scaling now: {why}")
    if facts.holes:
        if leaving:
            return Step(Do.NOTHING, f"{not_with_holes(leaving)}")
        return Step(Do.FILL, f"slot {joining[0]} is to be filled", joining[:1])
    if leaving:
        if set(slots[len(slots) - len(leaving) :]) != set(leaving):
            return Step(Do.NOTHING, f"{not_highest(slots, leaving)}")
        return Step(Do.SHRINK, f"slots {list(leaving)} are to leave", leaving)
    return Step(Do.GROW, f"slots {list(joining)} are to join", joining)


def _sized_anew(facts: Facts, live: list[RankFacts]) -> Step:
    """The size of a group that goes on without dead ranks changes by a restart only: when it costs nobody anything, since a load
    rule may ask for more ranks just when everybody is served."""
    if live and all(r.idle_since is not None and facts.now - r.idle_since >= facts.stall_s for r in live):
        return Step(
            Do.RESTART, "nobody is served, and vLLM changes its size by a restart only after a removal", facts.target
        )
    return Step(
        Do.NOTHING, "vLLM changes its size by a restart only after a removal: that waits until nobody is served"
    )


def not_with_holes(leaving: tuple[int, ...]) -> str:
    return f"slots {sorted(leaving)} cannot leave while a place of the group is empty: vLLM scales whole groups only"


def not_highest(slots: list[int], leaving: tuple[int, ...]) -> str:
    """`slots`: by DP rank."""
    last = slots[len(slots) - len(leaving) :]
    return f"vLLM can drop its last ranks only, on slots {sorted(last)}; slots {sorted(leaving)} were asked for"


def _not_sure(facts: Facts, live: list[RankFacts]) -> str:
    """Why a request to scale must not be sent now: a rank that is not known to be alive would block all others for minutes,
    behind shut gates that never open again."""
    for rank in live:
        slot, look = rank.held.slot, rank.look
        if not rank.alive:
            return f"slot {slot} is not known to be alive"
        if look is None or not look.answers or facts.now - look.at > FRESH_POLLS * facts.poll_s:
            return f"slot {slot} has not answered lately"
        if look.health is not True or look.gate != Gate.OPEN or look.unhealthy or look.dead:
            return f"slot {slot} is not fit"
        if rank.still_since is not None:
            return f"slot {slot} generates nothing"
        if rank.canary is None or not rank.canary.ok:
            return f"slot {slot} has not answered its last canary"
        scaling = look.scaling
        if scaling is None or scaling.is_scaling_elastic_ep or scaling.phase not in (Phase.IDLE, Phase.COMPLETED):
            return f"slot {slot} does not say that nothing scales"
    return ""
