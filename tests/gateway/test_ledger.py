from collections.abc import Iterable

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, invariant, precondition, rule

from elastic.gateway.ledger import (
    BARREN_LIMIT,
    Failure,
    Ledger,
    Order,
    RankId,
    Reason,
    State,
    Verdict,
)
from elastic.protocol import Emitted, Sampling

A, B = RankId(0, 1), RankId(1, 1)
END = 99


def order(request: str = "r", *, max_tokens: int = 10, stop_ids: Iterable[int] = (END,)) -> Order:
    return Order(request, (1, 2, 3), max_tokens, Sampling(), tuple(stop_ids))


def emitted(start: int, *tokens: int, attempt: int = 1, finish: str | None = None, request: str = "r") -> Emitted:
    return Emitted(request=request, attempt=attempt, start=start, tokens=tokens, finish=finish)


@pytest.fixture
def ledger() -> Ledger:
    ledger = Ledger()
    ledger.admit(order(), now=0.0)
    return ledger


def test_only_the_continuation_of_the_current_attempt_counts(ledger: Ledger) -> None:
    entry = ledger.get("r")
    assert entry is not None
    assert ledger.emit(A, emitted(0, 5), 1.0) is Verdict.STALE, "no rank holds it"
    ledger.assign("r", A, 0.0)
    assert ledger.emit(B, emitted(0, 5), 1.0) is Verdict.STALE, "another rank holds it"
    assert ledger.emit(A, emitted(0, 5, attempt=2), 1.0) is Verdict.STALE, "an attempt that was never made"
    assert ledger.emit(A, emitted(0, 5, 6), 1.0) is Verdict.ACCEPTED
    assert ledger.emit(A, emitted(0, 5, 6), 1.0) is Verdict.DUPLICATE
    assert ledger.emit(A, emitted(1, 6, 7), 1.0) is Verdict.BROKEN, "an overlap that also brings something"
    assert ledger.emit(A, emitted(3, 8), 1.0) is Verdict.BROKEN, "a gap"
    assert entry.accepted == [5, 6]
    ledger.release("r", lost=True)
    submit = ledger.assign("r", B, 0.0)
    assert (submit.attempt, submit.tokens, submit.prompt_len) == (2, (1, 2, 3, 5, 6), 3)
    assert ledger.emit(A, emitted(2, 7), 1.0) is Verdict.STALE, "the rank it was taken from"
    assert ledger.emit(B, emitted(2, 7, attempt=1), 1.0) is Verdict.STALE
    assert ledger.emit(B, emitted(2, 7, attempt=2), 1.0) is Verdict.ACCEPTED
    assert entry.accepted == [5, 6, 7]
    assert ledger.totals().dropped_tokens == 10
    assert ledger.totals().replayed == 1


@pytest.mark.parametrize(
    ("tokens", "told", "kept", "finish"),
    [
        ((5, END), None, [5, END], "stop"),
        ((5, END, 6, 7), None, [5, END], "stop"),
        (tuple(range(12)), None, list(range(10)), "length"),
        ((5,), "length", [5], "length"),
        ((), "stop", [], "stop"),
    ],
)
def test_answer_ends_by_its_own_tokens_whatever_the_rank_still_says(
    ledger: Ledger, tokens: tuple[int, ...], told: str | None, kept: list[int], finish: str
) -> None:
    entry = ledger.get("r")
    assert entry is not None
    ledger.assign("r", A, 0.0)
    assert ledger.emit(A, emitted(0, *tokens, finish=told), 1.0) is Verdict.ACCEPTED
    assert (entry.accepted, entry.finish, entry.state) == (kept, finish, State.COMPLETED)
    assert (len(ledger), ledger.in_flight(A)) == (0, 0)
    assert ledger.emit(A, emitted(len(kept), 5), 1.0) is Verdict.STALE


def test_request_that_loses_rank_after_rank_without_a_token_is_ended(ledger: Ledger) -> None:
    for loss in range(BARREN_LIMIT):
        submit = ledger.assign("r", A, 0.0)
        assert ledger.emit(A, emitted(0, attempt=submit.attempt), 1.0) is Verdict.ACCEPTED
        entry = ledger.release("r", lost=True)
        assert (entry.state is State.FAILED) == (loss == BARREN_LIMIT - 1)
    assert entry.failure is not None
    assert entry.failure.reason is Reason.BARREN


def test_ranks_that_were_dead_before_they_took_the_request_are_not_held_against_it(ledger: Ledger) -> None:
    for _ in range(BARREN_LIMIT * 2):
        ledger.assign("r", A, 0.0)
        entry = ledger.release("r", lost=True)
    assert entry.state is State.WAITING


def test_progress_and_hand_overs_do_not_count_as_losses(ledger: Ledger) -> None:
    for attempt in range(1, BARREN_LIMIT * 2):
        ledger.assign("r", A, 0.0)
        ledger.emit(A, emitted(attempt - 1, 5, attempt=attempt), 1.0)
        entry = ledger.release("r", lost=attempt % 2 == 0)
    assert entry.state is State.WAITING


def test_request_without_a_token_for_too_long_is_overdue_with_the_reason(ledger: Ledger) -> None:
    assert ledger.overdue(9.9, 10) == []
    assert ledger.overdue(10.0, 10)[0][1].reason is Reason.UNROUTABLE
    ledger.assign("r", A, 0.0)
    assert ledger.overdue(10.0, 10)[0][1].reason is Reason.SILENT
    ledger.emit(A, emitted(0, 5), 5.0)
    assert ledger.overdue(14.9, 10) == []


def test_waiting_requests_keep_the_order_in_which_they_came() -> None:
    ledger = Ledger()
    for name in "abc":
        ledger.admit(order(name), 0.0)
        ledger.assign(name, A, 0.0)
    for name in "cab":
        ledger.release(name, lost=True)
    assert ledger.waiting() == ["a", "b", "c"]


LENGTH = 12


class AnswersAreExact(RuleBasedStateMachine):
    """No token is lost or sent twice, and no answer has two ends, for any interleaving of emissions (late, doubled,
    reordered between attempts, cut by deaths), deaths, hand-overs and replays."""

    requests: Bundle[str] = Bundle("requests")

    def __init__(self) -> None:
        super().__init__()
        self.ledger = Ledger()
        self.now = 0.0
        self.entries: dict[str, object] = {}
        self.said: list[tuple[RankId, Emitted]] = []
        """Everything that any rank ever said: it may arrive at any time, again too."""
        self.live: dict[str, tuple[RankId, int, int]] = {}
        """Where each request runs: rank, attempt, next position."""
        self.ended: dict[str, int] = {}

    @staticmethod
    def truth(request: str) -> list[int]:
        base = int(request) * 1000
        return [base + position for position in range(LENGTH)]

    @rule(target=requests)
    def admit(self) -> str:
        request = str(len(self.entries))
        self.entries[request] = self.ledger.admit(order(request, max_tokens=LENGTH, stop_ids=()), self.now)
        self.ended[request] = 0
        return request

    @rule(slot=st.integers(0, 2), incarnation=st.integers(1, 2))
    def place(self, slot: int, incarnation: int) -> None:
        rank = RankId(slot, incarnation)
        for request in self.ledger.waiting():
            submit = self.ledger.assign(request, rank, 0.0)
            have = len(submit.tokens) - submit.prompt_len
            assert list(submit.tokens[submit.prompt_len :]) == self.truth(request)[:have]
            self.live[request] = (rank, submit.attempt, have)

    @rule(request=requests, count=st.integers(1, 4), deliver=st.booleans())
    def step(self, request: str, count: int, deliver: bool) -> None:
        if request not in self.live:
            return
        rank, attempt, at = self.live[request]
        tokens = tuple(self.truth(request)[at : at + count])
        if not tokens:
            return
        finish = "length" if at + len(tokens) == LENGTH else None
        message = emitted(at, *tokens, attempt=attempt, finish=finish, request=request)
        self.said.append((rank, message))
        if deliver:
            self.live[request] = (rank, attempt, at + len(tokens))
            self.deliver(rank, message)
        else:
            # the rank died with the message on its way: it may still come
            self.lose(request, lost=True)

    @precondition(lambda self: self.said)
    @rule(pick=st.integers(0, 10_000))
    def say_again(self, pick: int) -> None:
        self.deliver(*self.said[pick % len(self.said)])

    @rule(request=requests)
    def hand_over(self, request: str) -> None:
        self.lose(request, lost=False)

    def lose(self, request: str, *, lost: bool) -> None:
        entry = self.ledger.get(request)
        self.live.pop(request, None)
        if entry is not None and entry.state is State.RUNNING:
            self.ledger.release(request, lost=lost)
            self.ended[request] += not entry.open

    @rule(request=requests)
    def cancel(self, request: str) -> None:
        if self.ledger.get(request) is not None and int(request) % 5 == 4:
            self.ledger.cancel(request)
            self.live.pop(request, None)
            self.ended[request] += 1

    def deliver(self, rank: RankId, message: Emitted) -> None:
        entry = self.ledger.get(message.request)
        self.now += 1
        verdict = self.ledger.emit(rank, message, self.now)
        if verdict is Verdict.BROKEN:
            self.lose(message.request, lost=True)
        if entry is not None and verdict is Verdict.ACCEPTED and not entry.open:
            self.ended[message.request] += 1
            self.live.pop(message.request, None)

    @invariant()
    def accepted_is_a_prefix_of_the_truth(self) -> None:
        for request, entry in self.entries.items():
            assert entry.accepted == self.truth(request)[: len(entry.accepted)]

    @invariant()
    def each_answer_ends_at_most_once_and_whole(self) -> None:
        for request, entry in self.entries.items():
            assert self.ended[request] == (0 if entry.open else 1)
            assert (entry.state is State.COMPLETED) == (len(entry.accepted) == LENGTH)
            assert (self.ledger.get(request) is entry) == entry.open
        totals = self.ledger.totals()
        assert totals.accepted == len(self.ledger) + totals.completed + totals.failed + totals.cancelled

    @invariant()
    def load_counts_what_ranks_hold(self) -> None:
        for slot in range(3):
            for incarnation in (1, 2):
                rank = RankId(slot, incarnation)
                assert self.ledger.in_flight(rank) == len(self.ledger.held_by(rank))

    def teardown(self) -> None:
        """Whatever happened, one quiet rank brings every open request to its end."""
        quiet = RankId(9, 1)
        for request in self.ledger.requests():
            entry = self.ledger.get(request)
            assert entry is not None
            if entry.state is State.RUNNING:
                self.ledger.release(request, lost=False)
            submit = self.ledger.assign(request, quiet, 0.0)
            at = len(submit.tokens) - submit.prompt_len
            rest = self.truth(request)[at:]
            message = emitted(at, *rest, attempt=submit.attempt, request=request)
            assert self.ledger.emit(quiet, message, self.now) is Verdict.ACCEPTED
            assert entry.accepted == self.truth(request)
        assert len(self.ledger) == 0


AnswersAreExact.TestCase.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
test_no_token_is_lost_or_sent_twice_for_any_interleaving = AnswersAreExact.TestCase


def test_a_failed_request_is_told_why_and_where_it_still_runs(ledger: Ledger) -> None:
    ledger.assign("r", A, 0.0)
    entry = ledger.get("r")
    assert ledger.fail("r", Failure(Reason.SHUTDOWN, "over")) == A
    assert entry is not None
    assert entry.failure == (Reason.SHUTDOWN, "over")
    assert ledger.get("r") is None
