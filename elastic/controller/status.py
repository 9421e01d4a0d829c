"""The group as its owner sees it: one record, made from what the controller knows at this moment."""

import time
from collections.abc import Collection, Mapping
from typing import Protocol

from elastic.controller.group import Group
from elastic.controller.link import RankLink
from elastic.controller.records import GroupStatus, SlotState, SlotStatus, SpareState
from elastic.placement import HOLE, losses_survivable
from elastic.protocol import Counters


class Coming(Protocol):
    """The ranks on their way: `elastic.controller.boots`."""

    @property
    def booting(self) -> Collection[int]: ...

    @property
    def ready(self) -> Mapping[int, RankLink]: ...

    @property
    def quarantined(self) -> Mapping[int, str]: ...


def group_status(
    group: Group,
    boots: Coming,
    spares: tuple[SpareState, ...],
    *,
    target: tuple[int, ...],
    lost: Collection[int],
    sequence: str | None,
    gateway: str,
    term: int,
    fenced: str,
) -> GroupStatus:
    """`lost`: given up, and still in the view. `sequence`: what runs, and its phase.
    `gateway`: what is wrong with it."""
    config, view = group.config, group.view
    return GroupStatus(
        name=config.name,
        epoch=group.epoch,
        live=group.live,
        target=target,
        max_ranks=config.max_ranks,
        sequence=sequence,
        placement_hash=view.hash if view else "",
        uncovered=len(view.placement.uncovered(view.live)) if view else 0,
        losses_survivable=losses_survivable(
            experts=group.model.experts, slots_per_rank=config.slots_per_rank, live=len(group.live)
        ),
        losses_without_load=group.losses_without_load,
        slots=tuple(_slot_status(s, group, boots, lost) for s in range(config.max_ranks)),
        gateway=gateway,
        spares=spares,
        term=term,
        fenced=fenced,
    )


def _slot_status(slot: int, group: Group, boots: Coming, lost: Collection[int]) -> SlotStatus:
    link = group.links.get(slot) or boots.ready.get(slot)
    state: SlotState = "empty"
    if slot in lost:
        state = "lost"
    elif slot in group.live:
        state = "live"
    elif slot in boots.ready:
        state = "ready"
    elif slot in boots.booting:
        state = "booting"
    elif slot in boots.quarantined:
        state = "quarantined"
    held = group.view.placement.of_rank(slot) if group.view else ()
    return SlotStatus(
        slot=slot,
        state=state,
        member=link.member if link else None,
        last_beat_age_s=time.monotonic() - link.beat_at if link else None,
        round=link.beat.round if link and link.beat else 0,
        waiting=link.beat.waiting if link and link.beat else 0,
        running=link.beat.running if link and link.beat else 0,
        counters=link.counters if link else Counters(),
        experts=sum(1 for row in held for e in row if e != HOLE),
    )
