"""Invariants 4 and 5 by what clients got, what ranks emitted, and what a fault-free run answers."""

from collections import defaultdict
from collections.abc import Iterator

from chaos import records
from chaos.invariants.violation import Violation
from chaos.records import Request
from chaos.report.source import RunData
from elastic.flight import Emission, StepLine

ENDED = ("length", "stop")


def check(data: RunData) -> Iterator[Violation]:
    emitted = _emitted(data)
    yield from _one_answer(emitted)
    expected = {prompt.id: prompt.expected for prompt in data.baseline.prompts} if data.baseline else {}
    for request in data.requests:
        yield from _request(request, expected.get(request.prompt))
        if emitted and request.id:
            yield from _from_a_rank(request, emitted.get(request.id, {}))


def _emitted(data: RunData) -> dict[str, dict[int, set[int]]]:
    """By request and index of the token: which tokens ranks emitted, whatever the attempt."""
    found: dict[str, dict[int, set[int]]] = defaultdict(lambda: defaultdict(set))
    for path in records.step_files(data.path).values():
        for line in records.lines(path, StepLine):
            if isinstance(line, Emission):
                for request, _, start, tokens in line.tokens:
                    for index, token in enumerate(tokens, start):
                        found[request][index].add(token)
    return found


def _one_answer(emitted: dict[str, dict[int, set[int]]]) -> Iterator[Violation]:
    for request, by_index in emitted.items():
        for index, tokens in by_index.items():
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


def _from_a_rank(request: Request, emitted: dict[int, set[int]]) -> Iterator[Violation]:
    for index, token in enumerate(request.tokens):
        if token not in emitted.get(index, ()):
            yield Violation(4, f"request {request.n} {request.id}", f"token {index} ({token}) was emitted by no rank")
            return
