"""The network between hosts, in a group whose ranks are in network namespaces: see `chaos.hosts`."""

import time
from typing import Annotated, ClassVar, Literal

import msgspec
from pydantic import Field

from chaos.injectors.base import Done, Duration, Family, Injector, Place, members_in

Host = Annotated[int, Field(ge=0, le=15)]


class _OfNetwork(Injector):
    family: ClassVar[Family] = "network"
    needs: ClassVar[tuple[str, ...]] = ("hosts",)
    lasts: ClassVar[bool] = True
    is_fault: bool = False
    """Whether healing may remove ranks for it: those of `apart`, or all."""

    def change(self, place: Place, **rules: object) -> Done:
        self.checked(place)
        assert place.hosts is not None
        hosts, at = place.hosts, time.monotonic()
        before = hosts.rules
        hosts.set(msgspec.structs.replace(before, **rules))

        def mend() -> None:
            hosts.set(msgspec.structs.replace(hosts.rules, **{name: getattr(before, name) for name in rules}))

        return Done(at=at, undo="the links are as before", take_back=mend)


class Partition(_OfNetwork):
    """The hosts in `apart` hear each other, and nobody else; the others likewise."""

    kind: Literal["partition"]
    apart: Annotated[tuple[Host, ...], Field(strict=False, min_length=1)]
    is_fault: bool = True

    def inject(self, place: Place) -> Done:
        count = place.host_count
        slots = [slot for slot in range(4096) if count and slot % count in self.apart]
        members = members_in(place.run_dir, slots)
        done = self.change(place, apart=tuple(self.apart))
        done.members, done.must_be_replaced = members, self.is_fault
        return done


class Loss(_OfNetwork):
    """A share of all packets is lost; TCP sends them again."""

    kind: Literal["loss"]
    share: Annotated[float, Field(gt=0, lt=1)] = 0.02

    def inject(self, place: Place) -> Done:
        return self.change(place, loss=self.share)


class Delay(_OfNetwork):
    """Every packet takes longer."""

    kind: Literal["delay"]
    delay_s: Duration = 0.005

    def inject(self, place: Place) -> Done:
        return self.change(place, delay_s=self.delay_s)
