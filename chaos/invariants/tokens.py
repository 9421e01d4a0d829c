"""Invariants 4 and 5 by what clients got, what ranks emitted, and what a fault-free run answers."""

from collections import defaultdict
from collections.abc import Iterator

import msgspec

from chaos import records
from chaos.invariants.violation import Violation
from chaos.records import Request
from chaos.report.source import RunData
from elastic.flight import Emission, StepLine

ENDED = ("length", "stop")


class _Said(msgspec.Struct, frozen=True):
    """One token that a rank emitted."""

    token: int
    attempt: int
    at: float


_Emitted = dict[str, dict[int, list[_Said]]]
"""By request and index of the token."""


def check(data: RunData) -> Iterator[Violation]:
    emitted = _emitted(data)
    yield from _one_answer(emitted)
    expected = {prompt.id: prompt.expected for prompt in data.baseline.prompts} if data.baseline else {}
    for request in data.requests:
        yield from _request(request, expected.get(request.prompt))
        if emitted and request.id:
            yield from _from_a_rank(request, emitted.get(request.id, {}))
            yield from _again(request, emitted.get(request.id, {}))


def _emitted(data: RunData) -> _Emitted:
    """What ranks emitted, whatever the attempt."""
    found: _Emitted = defaultdict(lambda: defaultdict(list))
    for path in records.step_files(data.path).values():
        for line in records.lines(path, StepLine):
            if isinstance(line, Emission):
                for request, attempt, start, tokens in line.tokens:
                    for index, token in enumerate(tokens, start):
                        found[request][index].append(_Said(token, attempt, line.at))
    return found


def _one_answer(emitted: _Emitted) -> Iterator[Violation]:
    for request, by_index in emitted.items():
        for index, said in by_index.items():
            tokens = {one.token for one in said}
            if len(tokens) > 1:
                yield Violation(4, f"request {request}", f"token {index} was emitted as each of {sorted(tokens)}")
                break


def _request(request: Request, expected: tuple[int, ...] | None) -> Iterator[Violation]:
    where = f"request {request.n} {request.id}".rstrip()
    if expected is not None:
        for index, token in enumerate(request.tokens):
            if index >= len(expected):
                yield Violation(5, where, f"{len(request.tokens)} tokens, {len(expected)} were asked for")
                break
            if token != expected[index]:
                yield Violation(4, where, f"token {index} is {token}, without faults {expected[index]}")
                break
        if request.finish in ENDED and len(request.tokens) < len(expected):
            yield Violation(5, where, f"ended as complete with {len(request.tokens)} of {len(expected)} tokens")
    if request.id and not request.finish and not request.error:
        yield Violation(5, where, "was accepted and had neither an end nor an error")


def _from_a_rank(request: Request, emitted: dict[int, list[_Said]]) -> Iterator[Violation]:
    for index, token in enumerate(request.tokens):
        if token not in (one.token for one in emitted.get(index, ())):
            yield Violation(4, f"request {request.n} {request.id}", f"token {index} ({token}) was emitted by no rank")
            return


def _again(request: Request, emitted: dict[int, list[_Said]]) -> Iterator[Violation]:
    """A request that is moved goes on behind what its client has. An older attempt may speak late, of a rank that hung."""
    for index, had_at in enumerate(request.times):
        if said := emitted.get(index):
            newest = max(said, key=lambda one: (one.attempt, one.at))
            if newest.at > had_at:
                yield Violation(
                    5,
                    f"request {request.n} {request.id}",
                    f"token {index} was emitted again by attempt {newest.attempt}, "
                    f"{1e3 * (newest.at - had_at):.1f} ms after the client had it",
                )
                return
