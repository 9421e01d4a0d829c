"""Orders: what an operator can ask of the daemon, as records. The API decodes them, the supervisor carries them out."""

from typing import Annotated

import msgspec

Slot = Annotated[int, msgspec.Meta(ge=0, le=4095)]
Reason = Annotated[str, msgspec.Meta(max_length=500, pattern="^[^\\x00-\\x1f\\x7f-\\x9f]*$(?!\\n)")]
"""Without control characters: it is shown in logs and on terminals."""
Seconds = Annotated[float, msgspec.Meta(gt=0, le=30 * 86400)]


class Order(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Base of all orders."""


class Pause(Order, frozen=True):
    """Observe and report from now on, act on nothing by yourself. Orders are still carried out."""

    reason: Reason = ""


class Resume(Order, frozen=True):
    """Heal and scale again."""


class Scale(Order, frozen=True):
    """Set the number of ranks, or the very slots: exactly one of the two."""

    ranks: Annotated[int, msgspec.Meta(ge=1, le=4096)] | None = None
    slots: Annotated[list[Slot], msgspec.Meta(min_length=1, max_length=4096)] | None = None


class Drain(Order, frozen=True):
    """Let one rank go: its requests are handed over and its experts moved first."""

    slot: Slot


class Replace(Order, frozen=True):
    """Give one rank up and start another in its slot; its requests are replayed on the others."""

    slot: Slot
    reason: Reason = ""


class Quarantine(Order, frozen=True):
    """Keep a slot empty until it is released, or for a time."""

    slot: Slot
    for_s: Seconds | None = None
    reason: Reason = ""


class Release(Order, frozen=True):
    """End a quarantine; the slot is filled again where the target has room for it."""

    slot: Slot


class Cancel(Order, frozen=True):
    """Give up what is being prepared: slots that are empty leave the target. Nothing that serves is touched."""


class ResetBreaker(Order, frozen=True):
    """Allow destructive steps again after the circuit breaker has opened."""


ORDERS: dict[str, type[Order]] = {
    "/pause": Pause,
    "/resume": Resume,
    "/scale": Scale,
    "/drain": Drain,
    "/replace": Replace,
    "/quarantine": Quarantine,
    "/release": Release,
    "/cancel": Cancel,
    "/breaker/reset": ResetBreaker,
}
"""By path of the API."""


class Carried(msgspec.Struct, frozen=True):
    """What became of an order."""

    sentence: str
    target: tuple[int, ...]
    """Slots that should be live now."""
