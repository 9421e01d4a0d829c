"""What the end-to-end tests add to a deployment: signals by slot, and comparison token by token."""

import signal
import time
from collections.abc import Iterable, Sequence

from elastic import process
from elastic.client import Answer, Tokens
from elastic.controller.state import GroupState
from elastic.paths import read_json, state_path
from elastic.view import Member
from healer.deployment import Deployment


def members(deployment: Deployment) -> dict[int, Member]:
    return {m.slot: m for m in read_json(state_path(deployment.run_dir), GroupState).members}


def send(deployment: Deployment, slots: Iterable[int], signum: signal.Signals) -> float:
    """Signal ranks; returns the moment, on the monotonic clock."""
    known, at = members(deployment), time.monotonic()
    for slot in slots:
        member = known[slot]
        assert process.send_signal(member.pid, member.pid_start, signum), f"slot {slot} has no process"
    return at


def assert_same(answers: Sequence[Answer], expected: Sequence[Tokens]) -> None:
    """Every request ended in full, token for token as expected."""
    for i, (answer, want) in enumerate(zip(answers, expected, strict=True)):
        assert answer.error is None, f"request {i}: {answer.error}"
        assert answer.tokens == want, f"request {i}: differs from token {_first_difference(answer.tokens, want)} on"
        assert answer.finish == "length", f"request {i}: finish {answer.finish!r}"


def _first_difference(a: Tokens, b: Tokens) -> int:
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
