"""How many clients ask at a time, over a run: a ramp, a spike, a day, a stop."""

import math
from itertools import pairwise

import msgspec

LOW, HIGH = 3, 20


class Stretch(msgspec.Struct, frozen=True):
    """A part of the run. Between `begin` and `end` clients the number changes evenly; a day is one wave from LOW to HIGH
    and back."""

    name: str
    seconds: float
    begin: int
    end: int
    day: bool = False
    peak: bool = False
    """The load rises to its height in it and falls back by the next peak."""


STRETCHES = (
    Stretch("calm", 12, LOW, LOW),
    Stretch("ramp", 25, LOW, HIGH, peak=True),
    Stretch("plateau", 10, HIGH, HIGH),
    Stretch("after the ramp", 20, LOW, LOW),
    Stretch("spike", 8, HIGH, HIGH, peak=True),
    Stretch("after the spike", 22, LOW, LOW),
    Stretch("day", 50, LOW, LOW, day=True, peak=True),
    Stretch("stop", 25, 0, 0),
)


class Shape:
    """The stretches one after another, each `pace` times as long."""

    def __init__(self, pace: float) -> None:
        ends = [0.0]
        for stretch in STRETCHES:
            ends.append(ends[-1] + stretch.seconds * pace)
        self.spans = tuple((s, begin, end) for s, (begin, end) in zip(STRETCHES, pairwise(ends), strict=True))

    @property
    def seconds(self) -> float:
        return self.spans[-1][2]

    @property
    def peaks(self) -> tuple[tuple[str, float, float], ...]:
        """Each peak with what follows it: name, first second, first second of the next peak or end of the run."""
        begins = [(stretch.name, begin) for stretch, begin, _ in self.spans if stretch.peak]
        ends = [*(begin for _, begin in begins[1:]), self.seconds]
        return tuple((name, begin, end) for (name, begin), end in zip(begins, ends, strict=True))

    def at(self, second: float) -> Stretch:
        return next((s for s, _, end in self.spans if second < end), STRETCHES[-1])

    def clients(self, second: float) -> int:
        for stretch, begin, end in self.spans:
            if second < end:
                share = (second - begin) / (end - begin)
                if stretch.day:
                    return round(LOW + (HIGH - LOW) * (1 - math.cos(2 * math.pi * share)) / 2)
                return round(stretch.begin + (stretch.end - stretch.begin) * share)
        return 0
