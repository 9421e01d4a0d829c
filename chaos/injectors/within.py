"""Faults that a rank commits itself, in a group with `faultInjection: true`: a stuck thread, GPU errors, a slow rank, and the
links of its exchange and of its weight transfers. See `elastic.rank.faults`, which carries them out."""

import contextlib
import threading
import time
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, ClassVar, Literal

from pydantic import Field

from chaos import inject
from chaos.injectors.base import Done, Duration, Family, Injector, OfRanks, Place, Slot, members_in
from elastic import process
from elastic.errors import ElasticError, Retryable
from elastic.paths import config_path, fault_path, read_config
from elastic.view import Member

TAKEN_S = 3.0
"""A rank looks for orders every few milliseconds, unless it is stopped."""
_turns: defaultdict[Path, threading.Lock] = defaultdict(threading.Lock)
"""One order at a time for a rank: there is one file for it."""


def tell(run_dir: Path, members: Iterable[Member], order: str) -> float:
    """Give each rank an order and wait until it has taken it; returns when the first was given.

    Raises ElasticError where the group does not allow faults; Retryable where a rank does not take it.
    """
    if not read_config(config_path(run_dir)).fault_injection:
        raise ElasticError(f"{config_path(run_dir)}: faultInjection is not set, so its ranks commit no faults")
    told = sorted((fault_path(run_dir, m.slot, m.incarnation), m) for m in members)
    with contextlib.ExitStack() as turns:
        for path, _ in told:
            turns.enter_context(_turns[path])
        at = time.monotonic()
        for path, _ in told:
            part = path.with_name(f".{path.name}.part")
            part.write_text(order)
            part.replace(path)
        for path, member in told:
            while path.exists() and process.is_alive(member.pid, member.pid_start):
                if time.monotonic() > at + TAKEN_S:
                    path.unlink(missing_ok=True)
                    raise Retryable(f"{member}: has not taken the order {order!r} within {TAKEN_S:g} s")
                time.sleep(0.001)
    return at


class Within(OfRanks):
    """Nothing takes it back: the rank must be replaced."""

    family: ClassVar[Family] = "rank"
    kind: Literal["stuck", "illegal-address", "misaligned-address", "device-assert", "gpu-memory", "context-freed"]

    def inject(self, place: Place) -> Done:
        members = members_in(place.run_dir, self.chosen(place))
        at = tell(place.run_dir, members, self.kind)
        return Done(at=at, members=members, must_be_replaced=True, parameters={"slots": [m.slot for m in members]})


class _Rules(OfRanks):
    """Changes the rules of the ranks' links; `restore` takes all of them back."""

    family: ClassVar[Family] = "exchange"
    lasts: ClassVar[bool] = True
    is_fault: bool = False
    """Whether healing may remove the ranks for it."""

    def order(self) -> str:
        raise NotImplementedError

    def inject(self, place: Place) -> Done:
        members = members_in(place.run_dir, self.chosen(place))
        at = tell(place.run_dir, members, self.order())
        return _restorable(place.run_dir, at, members, self.is_fault)


class Slow(_Rules):
    """Each exchange of a layer begins `delay` later on this rank: a GPU that is throttled, a host that is overloaded."""

    family: ClassVar[Family] = "rank"
    kind: Literal["slow"]
    delay_s: Duration = 0.005

    def order(self) -> str:
        return f"slow {self.delay_s:g}"


class TransferLate(_Rules):
    """The completion of each weight transfer into this rank is seen `delay` later."""

    kind: Literal["transfer-late"]
    delay_s: Duration = 0.5

    def order(self) -> str:
        return f"transfer-late {self.delay_s:g}"


class TransferDrop(_Rules):
    """Completions of weight transfers into this rank are never seen."""

    kind: Literal["transfer-drop"]

    def order(self) -> str:
        return "transfer-drop"


class TransferKill(_Rules):
    """So many transfers into this rank fail as if their source had gone."""

    kind: Literal["transfer-kill"]
    count: Annotated[int, Field(ge=1, le=1_000_000)] = 1

    def order(self) -> str:
        return f"transfer-kill {self.count}"


class _OfLink(Injector):
    """The link between two ranks, as `slot` sees it."""

    family: ClassVar[Family] = "exchange"
    lasts: ClassVar[bool] = True
    slot: Slot
    peer: Slot
    is_fault: bool = False
    """Whether healing may remove one of the two for it."""

    def pair(self, place: Place) -> tuple[Member, Member]:
        living = inject.living_ranks(place.run_dir)
        absent = [slot for slot in (self.slot, self.peer) if slot not in living]
        if absent or self.slot == self.peer:
            raise ElasticError(
                f"{self.kind}: no link between slots {self.slot} and {self.peer}; slots with a rank: {sorted(living)}"
            )
        return living[self.slot], living[self.peer]


class LinkLost(_OfLink):
    """What `slot` sends to `peer` is lost; with `both` the other direction too."""

    kind: Literal["link-lost"]
    both: bool = False
    is_fault: bool = True

    def inject(self, place: Place) -> Done:
        one, other = self.pair(place)
        at = tell(place.run_dir, [one], f"link-lost {other.slot}")
        if self.both:
            tell(place.run_dir, [other], f"link-lost {one.slot}")
        return _restorable(place.run_dir, at, (one, other), self.is_fault)


class LinkDelay(_OfLink):
    """What `slot` sends to `peer` leaves `delay` later, and holds it up meanwhile."""

    kind: Literal["link-delay"]
    delay_s: Duration = 0.01

    def inject(self, place: Place) -> Done:
        one, other = self.pair(place)
        at = tell(place.run_dir, [one], f"link-delay {other.slot} {self.delay_s:g}")
        return _restorable(place.run_dir, at, (one, other), self.is_fault)


class CompletionLate(_OfLink):
    """The word that announces rows of `slot` at `peer` comes `delay` later; for the exchange over shared memory."""

    kind: Literal["completion-late"]
    delay_s: Duration = 0.05

    def inject(self, place: Place) -> Done:
        one, other = self.pair(place)
        at = tell(place.run_dir, [one], f"completion-late {other.slot} {self.delay_s:g}")
        return _restorable(place.run_dir, at, (one, other), self.is_fault)


class CompletionDrop(_OfLink):
    """So many words that announce rows of `slot` at `peer` are swallowed. The peer waits until somebody ends that."""

    kind: Literal["completion-drop"]
    count: Annotated[int, Field(ge=1, le=1_000_000)] = 1
    is_fault: bool = True

    def inject(self, place: Place) -> Done:
        one, other = self.pair(place)
        at = tell(place.run_dir, [one], f"completion-drop {other.slot} {self.count}")
        return _restorable(place.run_dir, at, (one, other), self.is_fault)


class Mask(_OfLink):
    """`slot` masks `peer` by itself, as NIXL EP does after its timeout: one-sided, and `peer` is healthy."""

    kind: Literal["mask"]
    lasts: ClassVar[bool] = False

    def inject(self, place: Place) -> Done:
        one, other = self.pair(place)
        at = tell(place.run_dir, [one], f"mask {other.slot}")
        return Done(
            at=at, members=(one,), must_be_replaced=self.is_fault, parameters={"slot": one.slot, "peer": other.slot}
        )


def _restorable(run_dir: Path, at: float, members: tuple[Member, ...], is_fault: bool) -> Done:
    def restore() -> None:
        left = [m for m in members if process.is_alive(m.pid, m.pid_start)]
        tell(run_dir, left, "restore")

    return Done(
        at=at,
        members=members,
        undo=f"restores the links of slots {', '.join(str(m.slot) for m in members)}",
        take_back=restore,
        must_be_replaced=is_fault,
        parameters={"slots": [m.slot for m in members]},
    )
