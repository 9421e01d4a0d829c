"""What a diagnosis must know beside the evidence: which GPUs there are, which rank is on which, what an XID means."""

from collections.abc import Callable, Collection, Mapping
from enum import StrEnum

import msgspec

from healer.evidence import GpuRef, HostRef, RankRef


class XidAction(StrEnum):
    """What the catalogue asks for. The order is the order of blame: the later, the graver."""

    IGNORE = "ignore"
    RESTART_APP = "restart-app"
    UNKNOWN = "unknown"
    """No entry, or one that needs a decoding that failed: a human's, never destructive."""
    HUMAN = "human"
    DRAIN = "drain"
    RESET = "reset"
    REBOOT = "reboot"


GRAVITY = {action: place for place, action in enumerate(XidAction)}
ENDS_THE_GPU = frozenset({XidAction.DRAIN, XidAction.RESET, XidAction.REBOOT})
"""The GPU itself is not to be used any more. RESTART_APP concerns the process alone."""


class Advice(msgspec.Struct, frozen=True):
    """What the catalogue knows of one XID."""

    name: str
    action: XidAction


Advise = Callable[[int, str], Advice]
"""Code and the source's own words -> what the catalogue says."""


def unadvised(code: int, detail: str) -> Advice:
    """Without a catalogue every XID is unknown."""
    return Advice("not in the catalogue", XidAction.UNKNOWN)


class Hardware(msgspec.Struct, frozen=True, kw_only=True):
    """As known now; empty where there is none, or nobody looks."""

    gpus: tuple[GpuRef, ...] = ()
    """All that the driver lists."""
    placed: Mapping[RankRef, GpuRef] = {}
    """The GPU of each rank that is known to be on one."""
    since: Mapping[RankRef, float] = {}
    """From when on, in monotonic seconds, a rank has been in the group, where that was seen: what befell its GPU before is
    none of its own."""
    deaths: Mapping[GpuRef, Collection[float]] = {}
    """When processes of ranks that have left the group ended on a GPU, in monotonic seconds."""
    host: HostRef | None = None
    """The machine that these GPUs are in."""
    advise: Advise = unadvised
