"""What all injectors share: where they are, what they leave, and the words of a scenario file."""

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Annotated, Any, ClassVar, Literal, Protocol

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, model_validator
from pydantic.alias_generators import to_camel

from chaos import inject
from chaos.hook import Hook, Point
from chaos.hosts import Hosts
from elastic.errors import ElasticError
from elastic.view import Member
from healer.policy.schema.base import parse_duration, parse_window, show_duration

Family = Literal[
    "process", "resources", "rank", "nvml", "kernel-log", "exchange", "network", "disk", "clock", "daemon", "checkpoint",
    "load", "operator",
]  # fmt: skip

STRICT = ConfigDict(
    extra="forbid",
    frozen=True,
    strict=True,
    populate_by_name=True,
    alias_generator=lambda name: to_camel(name.removesuffix("_s")),
)
Duration = Annotated[float, BeforeValidator(parse_duration)]
Window = Annotated[float, BeforeValidator(parse_window)]
Slot = Annotated[int, Field(ge=0, le=4095)]


class Daemons(Protocol):
    """The daemon of a group that a scenario started itself."""

    def pid(self) -> int:
        """Of the daemon that acts; 0: none lives."""
        ...

    def kill(self) -> None:
        """SIGKILL, and wait for its end."""
        ...

    def start(self) -> None:
        """Another one, as a supervisor would; returns at once."""
        ...

    def start_second(self) -> int:
        """Beside the one that runs; its pid."""
        ...

    def order(self, path: str, body: dict[str, Any]) -> None:
        """POST to its API. Raises ElasticError where it refuses."""
        ...


@dataclass
class Place:
    """What an injector may touch. Whatever is None is not there, and what needs it is refused."""

    run_dir: Path
    draw: Random
    daemons: Daemons | None = None
    hook: Hook | None = None
    gpu_script: Path | None = None
    kernel_log: Path | None = None
    checkpoint: Path | None = None
    """A copy that belongs to the run: it may be spoiled."""
    hosts: Hosts | None = None
    host_count: int = 0
    """A rank is on the host with the number of its slot modulo this."""
    own_disk: Path | None = None
    """The mount point of a file system that belongs to the run."""
    extra_load: Callable[[int], None] | None = None
    """Send so many requests more, at once."""
    sequence_slots: tuple[int, ...] = ()
    """Of the sequence at whose state the fault is due."""


@dataclass
class Done:
    """One fault that was injected."""

    at: float
    """Right before it, seconds of the monotonic clock."""
    members: tuple[Member, ...] = ()
    daemon_pid: int = 0
    undo: str = ""
    """What takes it back, for people; empty: nothing."""
    take_back: Callable[[], None] | None = None
    must_be_replaced: bool = False
    parameters: dict[str, Any] = field(default_factory=dict)
    """As drawn."""
    done_at: float = 0.0

    def __post_init__(self) -> None:
        self.done_at = self.done_at or time.monotonic()


class When(BaseModel):
    """A state of the executor's sequences, at which the daemon stands until the fault is there."""

    model_config = STRICT

    sequence: Literal["form", "loss", "join", "retire", "any", ""] = "any"
    step: Literal["rank-gone", "vacate", "load", "connect", "handover", "move", "park", "commit", "resume", "ended"]
    nth: Annotated[int, Field(ge=1, le=1000)] = 1
    """The first, the second, … time in the run."""
    after_s: Window = 0.0
    """The daemon goes on, and the fault comes so much later."""

    @property
    def point(self) -> Point:
        return Point(sequence="" if self.step == "rank-gone" else self.sequence, step=self.step)

    def __str__(self) -> str:
        later = f", {show_duration(self.after_s)} later" if self.after_s else ""
        return f"when {self.point}{f' for the {self.nth}. time' if self.nth > 1 else ''}{later}"


class Repeat(BaseModel):
    model_config = STRICT

    times: Annotated[int, Field(ge=2, le=10_000)]
    every_s: Duration


class Injector(BaseModel):
    """The parameters of one kind of fault; `inject` does it. Blocking for at most some seconds; called from any thread."""

    model_config = STRICT

    family: ClassVar[Family]
    needs: ClassVar[tuple[str, ...]] = ()
    """Fields of `Place` without which it is refused."""
    lasts: ClassVar[bool] = False
    """Whether it stands until it is taken back."""
    kind: str
    at_s: Window | None = None
    """So long after the load has begun."""
    at_request: Annotated[int, Field(ge=0)] | None = None
    """When this request of the load is sent, from 0."""
    when: When | None = None
    probability: Annotated[float, Field(gt=0, le=1)] = 1.0
    """Drawn once for each fault, with the seed of the run."""
    duration_s: Duration | None = None
    """Taken back after this; else when the run has been judged."""
    repeat: Repeat | None = None

    @model_validator(mode="after")
    def _one_trigger(self) -> "Injector":
        given = [name for name in ("at_s", "at_request", "when") if getattr(self, name) is not None]
        if len(given) > 1:
            raise ValueError("expected one of at, atRequest and when")
        if self.duration_s is not None and not self.lasts:
            raise ValueError(f"{self.kind} is over at once, expected no duration")
        if self.repeat is not None and self.when is not None:
            raise ValueError("what comes at a state cannot repeat, expected nth")
        return self

    @property
    def trigger(self) -> str:
        """In words."""
        if self.when is not None:
            return str(self.when)
        if self.at_request is not None:
            return f"at request {self.at_request}"
        return f"after {show_duration(self.at_s or 0.0)}"

    @property
    def parameters(self) -> dict[str, Any]:
        """What is its own, as a scenario file has it."""
        known = {"kind", "atRequest", "at", "when", "probability", "duration", "repeat"}
        return {key: value for key, value in self.model_dump(by_alias=True).items() if key not in known}

    def inject(self, place: Place) -> Done:
        """Raises ElasticError, with nothing done."""
        raise NotImplementedError

    def checked(self, place: Place) -> None:
        """Raises ElasticError where the place lacks what this kind needs."""
        for need in self.needs:
            if getattr(place, need) is None:
                raise ElasticError(f"{self.kind}: needs {_NEEDS[need]}, which this run does not have")


_NEEDS = {
    "daemons": "a daemon that the run started itself",
    "hook": "a daemon with hooks",
    "gpu_script": "a group with `gpus: true`",
    "kernel_log": "a group with `gpus: true`",
    "checkpoint": "a checkpoint of its own",
    "hosts": "a group with `hosts: N`, and the right to make network namespaces",
    "own_disk": "a group with `disk: SIZE`, and the right to mount it",
    "extra_load": "load",
}


class OfRanks(Injector):
    """Done to some ranks: to those in `slots`, to `random` many that are drawn, or to those of the sequence that is under way."""

    slots: Annotated[tuple[Slot, ...], Field(strict=False)] | Literal["sequence"] = ()
    """``sequence``: those that are lost, joining or leaving at the state that triggers the fault."""
    random: Annotated[int, Field(ge=0, le=64)] = 0
    """So many living ranks, drawn with the seed of the run."""

    @model_validator(mode="after")
    def _one_of_both(self) -> "OfRanks":
        if bool(self.slots) == bool(self.random):
            raise ValueError("expected either slots, such as [1], or random, the number of ranks to draw")
        return self

    def chosen(self, place: Place) -> tuple[int, ...]:
        """Slots with a living rank. Raises ElasticError where one has none."""
        living = inject.living_ranks(place.run_dir)
        if self.slots == "sequence":
            slots = tuple(slot for slot in place.sequence_slots if slot in living)
            if not slots:
                raise ElasticError(f"{self.kind}: no rank of the sequence lives, slots {list(place.sequence_slots)}")
            return slots
        if self.random:
            if len(living) < self.random:
                raise ElasticError(f"{self.kind}: {self.random} ranks are to be drawn, {len(living)} live")
            return tuple(sorted(place.draw.sample(sorted(living), self.random)))
        absent = [slot for slot in self.slots if slot not in living]
        if absent:
            raise ElasticError(f"{self.kind}: no living rank in slot {', '.join(map(str, absent))}")
        return tuple(self.slots)


def members_in(run_dir: Path, slots: Iterable[int]) -> tuple[Member, ...]:
    living = inject.living_ranks(run_dir)
    return tuple(living[slot] for slot in sorted(slots) if slot in living)
