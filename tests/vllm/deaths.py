"""Ranks of a `Stand` die or hang, and the others must go on as they are."""

import json
import os
import signal
from collections.abc import Sequence
from pathlib import Path

from elastic import process
from elastic.controller.records import RankGone
from healer.targets.vllm.records import Part
from tests.vllm.stand import Stand


async def kill(stand: Stand, slot: int, *, replace: bool) -> None:
    """The engine of `slot` dies; the target is told to go on once it has seen that."""
    os.kill(stand.pid(slot, Part.ENGINE), signal.SIGKILL)
    await stand.until(lambda: any(isinstance(e, RankGone) and e.member.slot == slot for e in stand.events))
    stand.target.lose([slot], cause="process-death", detected=0.0, replace=replace)


async def hang(stand: Stand, slot: int, *, rest: Sequence[int]) -> None:
    """The engine of `slot` stops; once `rest` serve without it, it must have been ended."""
    engine = stand.pid(slot, Part.ENGINE)
    started = process.start_time(engine)
    os.kill(engine, signal.SIGSTOP)
    stand.target.lose([slot], cause="stopped", detected=0.0, replace=False)
    await stand.serves(*rest)
    assert not process.is_alive(engine, started), "it could wake up beside its group"


def engines(stand: Stand, *slots: int) -> list[tuple[int, int]]:
    """Process ids of API server and engine."""
    return [(stand.pid(slot), stand.pid(slot, Part.ENGINE)) for slot in slots]


def broken_rules(folder: Path) -> list[object]:
    """What was done to a rank that the real one does not bear."""
    return [json.loads(path.read_text()) for path in (folder / "group/broken_rules").glob("*")]
