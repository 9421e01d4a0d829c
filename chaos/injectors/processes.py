"""Signals to ranks: they die, hang, or are asked to end."""

import os
import signal
import time
from typing import ClassVar, Literal

from chaos import inject
from chaos.injectors.base import Done, Family, OfRanks, Place
from elastic import process
from elastic.errors import ElasticError

EFFECT_S = 5.0


class Kill(OfRanks):
    """SIGKILL: a machine check, the kernel's OOM killer, an operator's mistake."""

    family: ClassVar[Family] = "process"
    kind: Literal["kill"]

    def inject(self, place: Place) -> Done:
        return _signalled(inject.kill(place.run_dir, self.chosen(place)), place, must_be_replaced=True)


class Stop(OfRanks):
    """SIGSTOP: the process hangs with its sockets open, as in a stuck driver. Taken back by SIGCONT.

    Longer than `detection.stallAfter` it is a fault, shorter an honest pause: `isFault` says which is meant.
    """

    family: ClassVar[Family] = "process"
    lasts: ClassVar[bool] = True
    kind: Literal["stop"]
    is_fault: bool = True

    def inject(self, place: Place) -> Done:
        injections = inject.stop(place.run_dir, self.chosen(place))

        def go_on() -> None:
            for one in injections:
                # who was replaced meanwhile is gone, and its pid may be another's
                process.send_signal(one.member.pid, one.member.pid_start, signal.SIGCONT)

        done = _signalled(injections, place, must_be_replaced=self.is_fault)
        done.take_back = go_on
        return done


class Terminate(OfRanks):
    """SIGTERM: somebody ends a rank by hand."""

    family: ClassVar[Family] = "process"
    kind: Literal["terminate"]

    def inject(self, place: Place) -> Done:
        slots, at = self.chosen(place), time.monotonic()
        living = inject.living_ranks(place.run_dir)
        for slot in slots:
            if not process.send_signal(living[slot].pid, living[slot].pid_start, signal.SIGTERM):
                raise ElasticError(f"{living[slot]}: ended before it could be signalled")
        return Done(
            at=at,
            members=tuple(living[slot] for slot in slots),
            must_be_replaced=True,
            parameters={"slots": list(slots)},
        )


class KillGateway(OfRanks):
    """SIGKILL to the gateway. `slots` and `random` mean nothing here."""

    family: ClassVar[Family] = "process"
    kind: Literal["gateway-kill"]
    random: int = 1

    def inject(self, place: Place) -> Done:
        pid, start = _gateway(place)
        at = time.monotonic()
        if not process.send_signal(pid, start, signal.SIGKILL):
            raise ElasticError("the gateway ended before it could be signalled")
        return Done(at=at)


def _gateway(place: Place) -> tuple[int, int]:
    from elastic.controller.state import GatewayProcess
    from elastic.paths import gateway_path, read_json

    found = read_json(gateway_path(place.run_dir), GatewayProcess)
    if not process.is_alive(found.pid, found.pid_start) or found.pid == os.getpid():
        raise ElasticError(f"{place.run_dir}: no living gateway")
    return found.pid, found.pid_start


def _signalled(injections: tuple[inject.Injection, ...], place: Place, *, must_be_replaced: bool) -> Done:
    inject.await_effect(injections, deadline_s=EFFECT_S)
    return Done(
        at=min(one.sent for one in injections),
        members=tuple(one.member for one in injections),
        undo="; ".join(one.undo for one in injections if one.undo),
        must_be_replaced=must_be_replaced,
        parameters={"slots": [one.member.slot for one in injections]},
    )
