"""Random scenarios: faults, targets and moments drawn with one seed. Every one of them must end with nothing lost."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from random import Random
from typing import Any

import msgspec

from chaos.scenario import API_VERSION, Scenario

Fault = dict[str, Any]

STATES: tuple[tuple[str, str], ...] = (
    ("", "rank-gone"),
    ("loss", "park"),
    ("loss", "commit"),
    ("loss", "resume"),
    ("loss", "ended"),
    ("join", "load"),
    ("join", "connect"),
    ("join", "park"),
    ("join", "commit"),
    ("join", "resume"),
    ("join", "ended"),
)
"""Of a healing: a kill comes first, the next fault at one of these."""
BETWEEN_S = (0.2, 4.0)
"""From one fault to the next, so that some come while the one before is still being healed."""


def _ms(seconds: float) -> str:
    return f"{int(seconds * 1000)}ms"


def _kill(draw: Random) -> list[Fault]:
    return [{"kind": "kill", "random": 1}]


def _kill_two(draw: Random) -> list[Fault]:
    return [{"kind": "kill", "random": 2}]


def _stop(draw: Random) -> list[Fault]:
    return [{"kind": "stop", "random": 1}]


def _terminate(draw: Random) -> list[Fault]:
    return [{"kind": "terminate", "random": 1}]


def _stuck(draw: Random) -> list[Fault]:
    return [{"kind": "stuck", "random": 1}]


def _pause(draw: Random) -> list[Fault]:
    """Under the stall rule: nobody may be removed for it."""
    return [{"kind": "stop", "random": 1, "isFault": False, "duration": _ms(draw.uniform(0.05, 0.4))}]


def _slow(draw: Random) -> list[Fault]:
    return [
        {"kind": "slow", "random": 1, "delay": _ms(draw.uniform(0.001, 0.01)), "duration": _ms(draw.uniform(0.5, 2.0))}
    ]


def _daemon_kill(draw: Random) -> list[Fault]:
    return [{"kind": "daemon-kill"}]


def _daemon_stop(draw: Random) -> list[Fault]:
    return [{"kind": "daemon-stop", "duration": _ms(draw.uniform(0.3, 3.0))}]


def _second_at_a_state(draw: Random) -> list[Fault]:
    sequence, step = draw.choice(STATES)
    when = {"sequence": sequence, "step": step}
    second: Fault = {"kind": "kill", "random": 1} if draw.random() < 0.6 else {"kind": "daemon-kill"}
    return [{"kind": "kill", "random": 1}, second | {"when": when}]


def _joiner_at_a_state(draw: Random) -> list[Fault]:
    when = {"sequence": "join", "step": draw.choice(("load", "connect", "park", "commit", "resume"))}
    return [{"kind": "kill", "random": 1}, {"kind": "kill", "slots": "sequence", "when": when}]


def _slow_disk(draw: Random) -> list[Fault]:
    return [{"kind": "disk-slow", "delay": "500ms", "duration": "3s"}, {"kind": "kill", "random": 1}]


def _illegal_address(draw: Random) -> list[Fault]:
    return [{"kind": "illegal-address", "random": 1}]


def _misaligned_address(draw: Random) -> list[Fault]:
    return [{"kind": "misaligned-address", "random": 1}]


def _device_assert(draw: Random) -> list[Fault]:
    return [{"kind": "device-assert", "random": 1}]


def _burst(draw: Random) -> list[Fault]:
    return [{"kind": "burst", "requests": draw.randint(20, 80)}]


def _compiling(draw: Random) -> list[Fault]:
    """As long as a kernel takes to be compiled at its first use."""
    return [
        {"kind": "slow", "random": 1, "delay": _ms(draw.uniform(0.05, 0.3)), "duration": _ms(draw.uniform(0.3, 0.8))}
    ]


def _neighbour(draw: Random) -> list[Fault]:
    share = round(draw.uniform(0.3, 0.7), 2)
    return [{"kind": "throttle", "random": 1, "share": share, "duration": _ms(draw.uniform(0.5, 3.0))}]


def _telemetry(draw: Random) -> list[Fault]:
    """An outage of NVML, or something that it reports and that is no fault."""
    fault = draw.choice(("hang", "crash", "throttled", "ecc-correctable"))
    about = {"gpu": draw.randrange(4), "fault": fault, "isFault": False}
    return [{"kind": "nvml"} | about | {"duration": _ms(draw.uniform(1.0, 5.0))}]


def _talk(draw: Random) -> list[Fault]:
    text = draw.choice(("audit: nothing to see here", "usb 1-1: new high-speed USB device number 4"))
    return [{"kind": "kernel-line", "gpu": 0, "isFault": False, "text": text, "count": draw.randint(10, 3000)}]


def _clock(draw: Random) -> list[Fault]:
    return [{"kind": "clock-jump", "by": draw.uniform(-3600.0, 3600.0), "duration": _ms(draw.uniform(0.5, 3.0))}]


def _disk(draw: Random) -> list[Fault]:
    return [{"kind": "disk-slow", "delay": "300ms", "duration": _ms(draw.uniform(0.5, 3.0))}]


def _context_freed(draw: Random) -> list[Fault]:
    return [{"kind": "context-freed", "random": 1}]


OWN_FAULTS = frozenset({"illegal-address", "misaligned-address", "device-assert", "context-freed"})
"""A rank commits these itself, when it is told to."""


@dataclass(frozen=True)
class Lot:
    """What a campaign draws from."""

    cases: tuple[tuple[Callable[[Random], list[Fault]], int], ...]
    """What may happen, and how often against the others."""
    fear: str = "something that nobody thought of happens at a moment that nobody thought of"
    group: Mapping[str, Any] = field(default_factory=dict)
    rate_per_s: float = 5.0
    expect: Mapping[str, Any] = field(default_factory=dict)
    between_s: tuple[float, float] = BETWEEN_S


FAULTS = Lot(
    (
        (_kill, 24),
        (_kill_two, 8),
        (_stop, 12),
        (_terminate, 4),
        (_stuck, 4),
        (_pause, 6),
        (_slow, 4),
        (_daemon_kill, 8),
        (_daemon_stop, 6),
        (_second_at_a_state, 14),
        (_joiner_at_a_state, 6),
        (_slow_disk, 4),
    )
)
GPUS = Lot(
    (
        (_kill, 24),
        (_stop, 12),
        (_illegal_address, 16),
        (_misaligned_address, 4),
        (_device_assert, 4),
        (_context_freed, 4),
        (_kill_two, 4),
        (_daemon_kill, 4),
        (_second_at_a_state, 8),
        (_joiner_at_a_state, 4),
    ),
    group={
        "ranks": 4,
        "maxRanks": 4,
        "slotsPerRank": 4,
        "redundantExperts": 8,
        "epBackend": "nixl-ep",
        "spares": 12,
        # each slot fails again and again here, and a proof of the device before each start takes seconds
        "policy": {"healing": {"probation": {"repeated": 1000}}},
    },
)
"""On real GPUs, one or several, which the slots take in turn: errors of kernels too, which end the CUDA context of a process and
leave the GPU as it was."""
HONEST = Lot(
    (
        (_pause, 20),
        (_compiling, 16),
        (_neighbour, 12),
        (_slow, 12),
        (_burst, 16),
        (_telemetry, 20),
        (_talk, 6),
        (_clock, 6),
        (_disk, 6),
    ),
    fear="a rank that has done nothing is removed",
    group={
        "gpus": True,
        "policy": {
            "healing": {
                "rules": [
                    {
                        "name": "sick-gpu",
                        "match": {
                            "cause": ["xid", "recovery-action", "gpu-lost", "ecc", "remap"],
                            "confidence": ["conclusive", "quorum"],
                        },
                        "actions": ["scale-down", "human"],
                    },
                    {
                        "name": "dead-or-hung",
                        "match": {
                            "cause": ["process-death", "agent-lost", "executor", "stopped", "hang", "stuck", "silent"]
                        },
                        "actions": ["replace", "human"],
                    },
                    {"name": "anything-else", "actions": ["human"]},
                ]
            }
        },
    },
    rate_per_s=12.0,
    expect={"noAction": True, "kept": [0, 1, 2, 3], "allowed": ["refused"]},
    between_s=(0.1, 1.5),
)
"""Nothing is wrong, though much looks like it."""
LOTS = {"faults": FAULTS, "gpus": GPUS, "honest": HONEST}


def drawn(seed: int, number: int, faults: int, lot: str = "faults") -> tuple[Scenario, str]:
    """The `number`-th scenario of a campaign, with at least `faults` faults, and its text."""
    draw, of = Random(f"{seed}/{number}"), LOTS[lot]
    found: list[Fault] = []
    at_s = draw.uniform(0.3, 1.5)
    while len(found) < faults:
        case = draw.choices([c for c, _ in of.cases], [weight for _, weight in of.cases])[0]
        for fault in case(draw):
            found.append(fault if "when" in fault else fault | {"at": _ms(at_s)})
        at_s += draw.uniform(*of.between_s)
    # a state may not be come to once a fault before it has changed what happens, and a rank that boots or was stopped takes no order
    refusable = sum("when" in fault or fault["kind"] in {*OWN_FAULTS, "slow"} for fault in found)
    text = {
        "apiVersion": API_VERSION,
        "kind": "Scenario",
        "metadata": {"name": f"random-{number:04d}", "fear": of.fear, "tags": ["random"]},
        "spec": {
            **({"group": dict(of.group)} if of.group else {}),
            "load": {"ratePerSecond": of.rate_per_s},
            "faults": found,
            "expect": {"wholeWithin": "60s", "refusedFaults": refusable} | dict(of.expect),
        },
    }
    return Scenario.model_validate(text), msgspec.json.format(msgspec.json.encode(text), indent=1).decode() + "\n"
