"""When faults come: by time, by request, and at a state, where the daemon stands until they are there."""

import asyncio
import json
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from random import Random
from typing import Any, ClassVar, Literal

import msgspec
import pytest

from chaos.faultline import Faultline
from chaos.hook import ARMED, SOCKET, Hook, Point, Reached
from chaos.injectors.base import Done, Family, Injector, Place
from elastic.errors import ElasticError


class Marked(Injector):
    """A fault that only notes what is done to it."""

    family: ClassVar[Family] = "load"
    lasts: ClassVar[bool] = True
    kind: Literal["marked"] = "marked"
    name: str = "x"
    fails: bool = False
    marks: ClassVar[list[str]] = []

    def inject(self, place: Place) -> Done:
        if self.fails:
            raise ElasticError("nothing to hurt here")
        at = time.monotonic()
        self.marks.append(f"+{self.name}")
        return Done(at=at, take_back=lambda: self.marks.append(f"-{self.name}"))


@pytest.fixture(autouse=True)
def _empty() -> None:
    Marked.marks.clear()


@pytest.fixture
def hook(tmp_path: Path) -> Iterator[Hook]:
    made = Hook(tmp_path / "h", lambda _: None)
    yield made
    made.close()


def line_of(*faults: Injector, hook: Hook | None = None, seed: int = 1) -> Faultline:
    place = Place(run_dir=Path("/nonexistent"), draw=Random(seed), hook=hook)
    return Faultline(faults, place, hook, Random(seed))


async def until(check: Any, why: str) -> None:
    end = time.monotonic() + 20
    while not check():
        assert time.monotonic() < end, f"not in time: {why}; {Marked.marks}"
        await asyncio.sleep(0.005)


def come_to(hook: Hook, point: Point, slots: tuple[int, ...] = ()) -> float:
    """As the daemon does; seconds for which it stood."""
    began = time.monotonic()
    with socket.socket(socket.AF_UNIX) as there:
        there.settimeout(20)
        there.connect(str(hook.folder / SOCKET))
        there.sendall(msgspec.json.encode(Reached(point=point, epoch=5, slots=slots, daemon_pid=1)) + b"\n")
        assert there.recv(1) == b"g"
    return time.monotonic() - began


async def test_what_lasts_is_taken_back_after_its_time_and_the_rest_at_the_end() -> None:
    line = line_of(Marked(name="short", at_s="0s", duration_s="50ms"), Marked(name="long", at_s="0s"))
    line.begin()
    await until(lambda: "-short" in Marked.marks, "the short one is taken back")
    assert "-long" not in Marked.marks
    assert not line.standing
    await line.end()
    assert sorted(Marked.marks) == ["+long", "+short", "-long", "-short"]
    short, long = sorted(line.records(), key=lambda f: f.parameters["name"], reverse=True)
    assert short.undone_at > short.at > 0
    assert long.undone_at > 0


async def test_an_injection_that_waits_for_a_stopped_rank_does_not_keep_it_from_being_continued() -> None:
    gone_on = threading.Event()

    class Waits(Marked):
        def inject(self, place: Place) -> Done:
            assert gone_on.wait(20), "nobody took the other fault back"
            return super().inject(place)

    class Stops(Marked):
        def inject(self, place: Place) -> Done:
            return Done(at=time.monotonic(), take_back=gone_on.set)

    line = line_of(Stops(at_s="0s", duration_s="200ms"), Waits(at_s="50ms", name="waits"))
    line.begin()
    await until(lambda: "+waits" in Marked.marks, "the second fault is there")
    await line.end()


async def test_a_fault_comes_with_the_request_that_it_names() -> None:
    line = line_of(Marked(name="third", at_request=2))
    line.begin()
    for n in (0, 1):
        line.request(n)
    await asyncio.sleep(0)
    assert Marked.marks == []
    line.request(2)
    await until(lambda: Marked.marks == ["+third"], "it is injected")
    await line.end()


async def test_the_daemon_stands_at_a_state_until_the_fault_is_there(hook: Hook) -> None:
    going, gone = threading.Event(), threading.Event()

    class Slowly(Marked):
        kind: Literal["slowly"] = "slowly"  # type: ignore[assignment]

        def inject(self, place: Place) -> Done:
            going.set()
            assert gone.wait(20)
            assert place.sequence_slots == (3,)
            return super().inject(place)

    line = line_of(Slowly(name="mid", when={"sequence": "join", "step": "commit"}), hook=hook)
    line.begin()
    daemon = asyncio.create_task(asyncio.to_thread(come_to, hook, Point("join", "commit"), (3,)))
    await asyncio.to_thread(going.wait, 20)
    assert not daemon.done()
    gone.set()
    await daemon
    assert Marked.marks == ["+mid"]
    (fault,) = line.records()
    assert (fault.state.sequence, fault.state.step, fault.state.epoch) == ("join", "commit", 5)
    await line.end()


async def test_only_the_second_time_where_the_second_is_asked_for(hook: Hook) -> None:
    line = line_of(Marked(when={"sequence": "loss", "step": "park", "nth": 2}), hook=hook)
    line.begin()
    await asyncio.to_thread(come_to, hook, Point("loss", "park"))
    await asyncio.to_thread(come_to, hook, Point("join", "park"))
    assert Marked.marks == []
    await asyncio.to_thread(come_to, hook, Point("loss", "park"))
    assert Marked.marks == ["+x"]
    assert json.loads((hook.folder / ARMED).read_text()) == [], "nobody stands there again"
    await line.end()


async def test_what_is_refused_is_told_and_harms_nothing() -> None:
    line = line_of(Marked(fails=True, at_s="0s"))
    line.begin()
    await until(lambda: not line.waiting, "it was tried")
    (fault,) = line.records()
    assert fault.refused == "nothing to hurt here"
    assert fault.at == 0.0
    await line.end()


async def test_a_fault_repeats_as_often_as_it_says() -> None:
    line = line_of(Marked(at_s="0s", repeat={"times": 3, "every": "20ms"}))
    line.begin()
    await until(lambda: not line.waiting, "all three came")
    assert [f.id for f in line.records()] == ["f1.1", "f1.2", "f1.3"]
    await line.end()
    assert Marked.marks.count("-x") == 3


def test_chance_is_drawn_with_the_seed() -> None:
    def drawn(seed: int) -> list[bool]:
        line = line_of(*[Marked(at_s="1h", probability=0.5)] * 20, seed=seed)
        return [bool(f.refused) for f in line.records()]

    assert drawn(1) == drawn(1)
    assert 0 < sum(drawn(1)) < 20
    assert drawn(1) != drawn(2)


async def test_after_the_end_nothing_is_injected_any_more() -> None:
    line = line_of(Marked(at_s="30ms"))
    line.begin()
    await line.end()
    await asyncio.sleep(0.06)
    assert Marked.marks == []
    assert line.records()[0].refused
