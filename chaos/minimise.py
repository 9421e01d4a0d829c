"""The smallest list of faults that still fails, and what repeats it.

The algorithm is delta debugging, ddmin, of Zeller and Hildebrandt, "Simplifying and Isolating Failure-Inducing Input", IEEE
Transactions on Software Engineering 28(2), 2002.
"""

from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from chaos import records
from chaos.campaign import Troupe
from chaos.records import Fault, Run
from chaos.runner import Order
from chaos.scenario import Scenario

T = TypeVar("T")

TRIALS = 24
"""Runs at most; each needs a group of its own."""


async def ddmin(items: Sequence[T], fails: Callable[[Sequence[T]], Awaitable[bool]], trials: int = TRIALS) -> list[T]:
    """A part of `items`, in their order, that fails, and of which, when there were trials enough, no smaller part of those that
    were tried does. `items` itself is taken to fail."""
    found, parts = list(items), 2
    while len(found) >= 2 and trials > 0:
        size = -(-len(found) // parts)
        chunks = [found[i : i + size] for i in range(0, len(found), size)]
        rests = [[one for j, other in enumerate(chunks) if j != i for one in other] for i in range(len(chunks))]
        for number, candidate in enumerate([*chunks, *(rests if len(chunks) > 2 else [])]):
            if trials <= 0:
                return found
            trials -= 1
            if await fails(candidate):
                found, parts = candidate, 2 if number < len(chunks) else max(parts - 1, 2)
                break
        else:
            if parts >= len(found):
                return found
            parts = min(len(found), 2 * parts)
    return found


def concrete(scenario: Scenario, faults: Sequence[Fault]) -> tuple[Scenario, dict[str, Any]]:
    """The same with the targets that were drawn: a part of it then hurts the same ranks."""
    data = msgspec.json.decode(scenario.model_dump_json(by_alias=True, exclude_defaults=True).encode())
    by_number = {fault.id.partition(".")[0]: fault for fault in faults if fault.at}
    for number, fault in enumerate(data["spec"].get("faults", ()), 1):
        drawn = by_number.get(f"f{number}")
        if fault.get("random") and drawn is not None and drawn.members:
            fault.pop("random")
            fault["slots"] = [member.slot for member in drawn.members]
    _durations(data)
    return Scenario.model_validate(data), data


async def minimise(order: Order, run: Run, out: Path, troupe: Troupe, say: Callable[[str], None]) -> Run:
    """Run parts of a run that failed until the least that fails is known; note it in the record at `out`, with a scenario of it
    beside it. Returns the record's new head."""
    faults = list(records.lines(out / records.FAULTS, Fault))
    scenario, data = concrete(order.scenario, faults)
    numbered = list(enumerate(scenario.spec.faults, 1))

    async def fails(part: Sequence[tuple[int, Any]]) -> bool:
        smaller = _with(scenario, part)
        trial = Order(smaller, "", order.file, order.seed, order.command, order.patience)
        found = await troupe.play(trial, out / "trials" / "-".join(f"f{n}" for n, _ in part), fresh=True)
        say(f"      with {', '.join(f'f{n}' for n, _ in part)}: {found.verdict}")
        return found.verdict in ("failed", "error")

    if not await fails(numbered):
        say("      it does not fail again with the same faults: the moment matters, and is not in the list")
        return run
    least = await ddmin(numbered, fails)
    data["spec"]["faults"] = [data["spec"]["faults"][n - 1] for n, _ in least]
    path = out / "minimal.yaml"
    path.write_bytes(msgspec.json.format(msgspec.json.encode(data), indent=1) + b"\n")
    command = ("healer-chaos", "run", str(path), "--seed", str(order.seed))
    run = msgspec.structs.replace(run, minimal=tuple(f"f{n}" for n, _ in least), minimal_command=command)
    records.write(out / records.RUN, run)
    return run


def _with(scenario: Scenario, part: Sequence[tuple[int, Any]]) -> Scenario:
    waits = sum(1 for _, fault in part if fault.when is not None)
    expect = scenario.spec.expect.model_copy(update={"refused_faults": max(waits, scenario.spec.expect.refused_faults)})
    spec = scenario.spec.model_copy(update={"faults": tuple(fault for _, fault in part), "expect": expect})
    return scenario.model_copy(update={"spec": spec})


DURATIONS = frozenset(
    {"at", "after", "duration", "every", "delay", "wholeWithin", "gapBelow", "settle", "atLeast", "lateAfter"}
)


def _durations(node: Any) -> None:
    """Seconds back into the form of a file."""
    if isinstance(node, dict):
        for key, value in node.items():
            if key in DURATIONS and isinstance(value, int | float):
                node[key] = f"{value:g}s"
            else:
                _durations(value)
    elif isinstance(node, list):
        for one in node:
            _durations(one)
