"""The coordinator child and the one that stands by: real processes with a coordinator that writes down what it was told."""

import asyncio
import json
import os
import signal
from pathlib import Path

import pytest

from elastic import process
from elastic.vllm.coordination.coordinator import Coordinators

pytestmark = pytest.mark.timeout(30)

ROOT = Path(__file__).parents[2]
FAKE = """\
import json, os, pathlib, time
PLACE = pathlib.Path(os.environ["FAKE_VLLM"])
(PLACE / f"imported-{os.getpid()}").touch()
class DPCoordinatorProc:
    @staticmethod
    def run_coordinator(**told):
        part = PLACE / "part"
        part.write_text(json.dumps(told))
        part.replace(PLACE / f"told-{os.getpid()}")
        time.sleep(1000)
"""
TOLD = ["2", "tcp://a", "tcp://b", "tcp://c"]


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    module = tmp_path / "vllm/v1/engine"
    module.mkdir(parents=True)
    for each in (module, module.parent, module.parents[1]):
        (each / "__init__.py").touch()
    (module / "coordinator.py").write_text(FAKE)
    monkeypatch.setenv("PYTHONPATH", f"{ROOT}:{tmp_path}")
    monkeypatch.setenv("FAKE_VLLM", str(tmp_path))
    return tmp_path


async def there(place: Path, name: str) -> list[Path]:
    async with asyncio.timeout(20):
        while not (found := list(place.glob(name))):  # noqa: ASYNC110
            await asyncio.sleep(0.02)
    return found


async def test_what_stands_by_becomes_the_coordinator_and_ends_with_its_owner(place: Path) -> None:
    found = Coordinators()
    await found.stand_by()
    await found.stand_by()
    (imported,) = await there(place, "imported-*")
    one = await found.start(TOLD)
    assert imported.name == f"imported-{one.pid}"
    (told,) = await there(place, f"told-{one.pid}")
    assert json.loads(told.read_text()) == {
        "engine_count": 2,
        "front_publish_address": "tcp://a",
        "back_output_address": "tcp://b",
        "back_publish_address": "tcp://c",
    }
    assert one.stdin is not None
    one.stdin.close()
    assert await one.wait() == 0
    await found.stand_by()
    pid, start = (spare := found._spare).pid, process.start_time(spare.pid)  # type: ignore[union-attr]
    await found.aclose()
    assert not process.is_alive(pid, start)


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP], ids=["dead", "stopped"])
async def test_one_that_cannot_is_not_waited_for(place: Path, how: signal.Signals) -> None:
    found = Coordinators()
    await found.stand_by()
    (imported,) = await there(place, "imported-*")
    pid = int(imported.name.removeprefix("imported-"))
    start = process.start_time(pid)
    os.kill(pid, how)
    while process.state(pid, start) not in "TtZX":  # noqa: ASYNC110
        await asyncio.sleep(0.01)
    one = await found.start(TOLD)
    assert one.pid != pid
    await there(place, f"told-{one.pid}")
    one.kill()
    await one.wait()
    assert not process.is_alive(pid, start)


async def test_one_that_does_not_come_up_is_tried_again_ever_more_slowly(place: Path) -> None:
    now, pids = [0.0], []
    found = Coordinators(clock=lambda: now[0])
    for expected in (5.0, 10.0):
        await found.stand_by()
        spare = found._spare
        assert spare is not None
        pids.append(spare.pid)
        spare.kill()
        await spare.wait()
        await found.stand_by()
        now[0] += expected - 0.1
        await found.stand_by()
        assert found._spare is None
        now[0] += 0.2
    await found.stand_by()
    assert found._spare is not None
    assert found._spare.pid not in pids
    await found.aclose()
