import hashlib
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from elastic.protocol import Emitted, Rejected, Sampling, Submit
from elastic.rank.scheduler import Batch, Scheduler

VOCAB = 50


def submit(
    name: str, prompt: Sequence[int], max_tokens: int, *, answer: Sequence[int] = (), stop: Sequence[int] = ()
) -> Submit:
    return Submit(
        request=name,
        attempt=0,
        tokens=(*prompt, *answer),
        prompt_len=len(prompt),
        max_tokens=max_tokens,
        sampling=Sampling(),
        stop_ids=tuple(stop),
    )


def next_token(prefix: Sequence[int]) -> int:
    """A stand-in for the model: depends on every token before it."""
    return hashlib.blake2b(bytes(prefix), digest_size=1).digest()[0] % VOCAB


def answer_of(request: Submit) -> list[int]:
    """What a fault-free run of this request alone gives."""
    tokens = list(request.tokens[: request.prompt_len])
    while len(tokens) < request.prompt_len + request.max_tokens:
        tokens.append(next_token(tokens))
        if tokens[-1] in request.stop_ids:
            break
    return tokens[request.prompt_len :]


class Cache:
    """A KV cache that holds the token itself: a row may only see its own request's tokens."""

    def __init__(self, sequences: int, length: int) -> None:
        self.cells = [[-1] * length for _ in range(sequences)]

    def run(self, batch: Batch) -> list[int]:
        for token, seq, position in zip(batch.tokens, batch.seqs, batch.positions, strict=True):
            self.cells[seq][position] = token
        return [next_token(self.cells[batch.seqs[s.row]][: batch.positions[s.row] + 1]) for s in batch.samples]


def drain(scheduler: Scheduler, cache: Cache, answers: dict[str, list[int]], limit: int = 2000) -> dict[str, str]:
    finished: dict[str, str] = {}
    for _ in range(limit):
        if not scheduler.has_work:
            return finished
        batch = scheduler.build()
        assert batch.rows > 0
        take(scheduler.commit(batch, cache.run(batch)), answers, finished)
    raise AssertionError("requests are left over")


def take(emitted: list[Emitted], answers: dict[str, list[int]], finished: dict[str, str]) -> None:
    for message in emitted:
        assert message.request not in finished
        assert message.start == len(answers[message.request])
        answers[message.request] += message.tokens
        if message.finish is not None:
            finished[message.request] = message.finish


@st.composite
def requests(draw: st.DrawFn) -> Submit:
    prompt = draw(st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=12))
    max_tokens = draw(st.integers(1, 8))
    given_tokens = draw(st.integers(0, max_tokens))
    stop = draw(st.lists(st.integers(0, VOCAB - 1), max_size=3))
    request = submit("r", prompt, max_tokens, stop=stop)
    answer = answer_of(request)[:given_tokens]
    return submit("r", prompt, max_tokens, answer=answer, stop=stop)


@settings(max_examples=100, deadline=None)
@given(
    actions=st.lists(st.one_of(requests(), st.sampled_from(["commit", "commit", "discard", "cancel"])), max_size=40),
    max_seqs=st.integers(1, 4),
    max_tokens=st.integers(1, 9),
)
def test_whatever_is_submitted_cancelled_or_discarded_every_answer_is_the_fault_free_one(
    actions: list[Submit | str], max_seqs: int, max_tokens: int
) -> None:
    scheduler = Scheduler(max_tokens, max_seqs, 20, VOCAB)
    cache = Cache(max_seqs, 20)
    sent: dict[str, Submit] = {}
    answers: dict[str, list[int]] = {}
    finished: dict[str, str] = {}
    for n, action in enumerate(actions):
        if isinstance(action, Submit):
            request = Submit(
                request=str(n),
                attempt=0,
                tokens=action.tokens,
                prompt_len=action.prompt_len,
                max_tokens=action.max_tokens,
                sampling=action.sampling,
                stop_ids=action.stop_ids,
            )
            sent[str(n)] = request
            answers[str(n)] = list(request.tokens[request.prompt_len :])
            at_once = scheduler.submit(request)
            if at_once is not None:
                assert isinstance(at_once, Emitted)
                take([at_once], answers, finished)
        elif action == "cancel":
            open_ = [name for name in sent if name not in finished]
            if open_:
                assert scheduler.cancel(open_[0], 0)
                del sent[open_[0]]
        else:
            batch = scheduler.build()
            assert batch.rows <= max_tokens
            assert all(0 <= seq < max_seqs for seq in batch.seqs)
            tokens = cache.run(batch)
            if action == "discard":
                scheduler.discard(batch)
                assert scheduler.build() == batch
            else:
                take(scheduler.commit(batch, tokens), answers, finished)
        assert 0 <= scheduler.running <= max_seqs
        assert scheduler.waiting >= 0
    finished |= drain(scheduler, cache, answers)
    for name, request in sent.items():
        assert answers[name] == answer_of(request)
        stopped = answers[name][-1] in request.stop_ids
        assert finished[name] == ("stop" if stopped else "length")
    assert (scheduler.running, scheduler.waiting) == (0, 0)


def test_a_cancel_in_the_middle_of_a_step_drops_its_token_and_frees_its_sequence() -> None:
    scheduler, cache = Scheduler(8, 1, 20, VOCAB), Cache(1, 20)
    scheduler.submit(submit("gone", [1, 2], 5))
    scheduler.submit(submit("next", [3, 4], 2))
    batch = scheduler.build()
    tokens = cache.run(batch)
    assert scheduler.cancel("gone", 0)
    assert scheduler.commit(batch, tokens) == []
    answers: dict[str, list[int]] = {"next": []}
    drain(scheduler, cache, answers)
    assert answers["next"] == answer_of(submit("next", [3, 4], 2))


def test_a_resubmission_under_the_same_name_gets_nothing_from_the_step_of_the_cancelled_one() -> None:
    scheduler, cache = Scheduler(8, 2, 20, VOCAB), Cache(2, 20)
    scheduler.submit(submit("r", [1, 2], 3))
    batch = scheduler.build()
    tokens = cache.run(batch)
    scheduler.cancel("r", 0)
    scheduler.submit(submit("r", [9, 9, 9], 3))
    assert scheduler.commit(batch, tokens) == []
    answers: dict[str, list[int]] = {"r": []}
    drain(scheduler, cache, answers)
    assert answers["r"] == answer_of(submit("r", [9, 9, 9], 3))


def test_a_stale_batch_cannot_be_committed() -> None:
    scheduler, cache = Scheduler(8, 2, 20, VOCAB), Cache(2, 20)
    scheduler.submit(submit("r", [1, 2], 3))
    old = scheduler.build()
    tokens = cache.run(old)
    scheduler.discard(old)
    with pytest.raises(ValueError, match="not the batch that was built last"):
        scheduler.commit(old, tokens)
    new = scheduler.build()
    scheduler.discard(old)
    with pytest.raises(ValueError, match="0 tokens for 1"):
        scheduler.commit(new, [])
    assert len(scheduler.commit(new, tokens)) == 1
    with pytest.raises(ValueError, match="not the batch"):
        scheduler.commit(new, tokens)


def test_more_decodes_than_rows_starve_neither_each_other_nor_a_new_prompt() -> None:
    scheduler, cache = Scheduler(4, 9, 200, VOCAB), Cache(9, 200)
    asked = [submit(str(n), [n], 100) for n in range(8)]
    for request in asked:
        scheduler.submit(request)
    answers: dict[str, list[int]] = {str(n): [] for n in range(9)}
    finished: dict[str, str] = {}
    before = [0] * 8
    for n in range(60):
        batch = scheduler.build()
        take(scheduler.commit(batch, cache.run(batch)), answers, finished)
        if n == 20:
            before = [len(answers[str(n)]) for n in range(8)]
    gained = [len(answers[str(n)]) - before[n] for n in range(8)]
    assert max(gained) - min(gained) <= 1
    scheduler.submit(submit("8", list(range(12)), 5))
    for _ in range(16):
        batch = scheduler.build()
        take(scheduler.commit(batch, cache.run(batch)), answers, finished)
    assert answers["8"], "the prompt's twelve rows had a quarter of each step"


def test_prompts_are_served_first_come_first_served_beside_running_decodes() -> None:
    scheduler, cache = Scheduler(8, 3, 64, VOCAB), Cache(3, 64)
    answers: dict[str, list[int]] = {name: [] for name in "abc"}
    scheduler.submit(submit("a", [1], 20))
    batch = scheduler.build()
    take(scheduler.commit(batch, cache.run(batch)), answers, {})
    scheduler.submit(submit("b", [2] * 9, 2))
    scheduler.submit(submit("c", [3] * 9, 2))
    first = scheduler.build()
    assert [(c.seq, c.count) for c in first.chunks] == [(0, 1), (1, 7)]
    take(scheduler.commit(first, cache.run(first)), answers, {})
    second = scheduler.build()
    assert [(c.seq, c.count) for c in second.chunks] == [(0, 1), (1, 2), (2, 5)]
    assert (scheduler.running, scheduler.waiting) == (2, 1)


@pytest.mark.parametrize(
    ("request_", "why"),
    [
        (submit("r", [1] * 10, 11), "prompt of 10 \\+ max_tokens 11 = 21 tokens, above the 20"),
        (submit("r", [], 3), "holds at least one"),
        (submit("r", [1], 0), "max_tokens 0 is below 1"),
        (submit("r", [1, VOCAB], 3), "outside the vocabulary"),
        (submit("r", [-1], 3), "outside the vocabulary"),
        (submit("r", [1], 2, answer=[1, 2, 3]), "3 answer tokens sent, above max_tokens 2"),
    ],
)
def test_a_request_that_can_never_run_is_rejected_with_its_reason(request_: Submit, why: str) -> None:
    scheduler = Scheduler(8, 2, 20, VOCAB)
    answer = scheduler.submit(request_)
    assert isinstance(answer, Rejected)
    assert answer.request == "r"
    with pytest.raises(AssertionError, match=why):
        raise AssertionError(answer.why)
    assert not scheduler.has_work


def test_the_wait_for_a_kv_sequence_is_told_once_with_the_first_token() -> None:
    seconds = [100.0]
    scheduler = Scheduler(8, 1, 20, VOCAB, now=lambda: seconds[0])
    for name in ("first", "second"):
        assert scheduler.submit(submit(name, [1], 2)) is None
    told: list[tuple[str, float]] = []
    while scheduler.has_work:
        batch = scheduler.build()
        seconds[0] += 3.0
        told += [(one.request, one.queued_s) for one in scheduler.commit(batch, [5] * len(batch.samples))]
    assert told == [("first", 0.0), ("first", 0.0), ("second", 6.0), ("second", 0.0)]


def test_a_replay_of_a_complete_answer_is_finished_without_a_token() -> None:
    scheduler = Scheduler(8, 2, 20, VOCAB)
    full = scheduler.submit(submit("full", [1], 2, answer=[5, 6]))
    stopped = scheduler.submit(submit("stopped", [1], 5, answer=[5, 7], stop=[7]))
    assert full == Emitted(request="full", attempt=0, start=2, tokens=(), finish="length")
    assert stopped == Emitted(request="stopped", attempt=0, start=2, tokens=(), finish="stop")
    assert not scheduler.has_work


def test_a_submission_that_arrives_twice_runs_once() -> None:
    scheduler, cache = Scheduler(8, 2, 20, VOCAB), Cache(2, 20)
    for _ in range(2):
        assert scheduler.submit(submit("r", [1, 2], 3)) is None
    answers: dict[str, list[int]] = {"r": []}
    drain(scheduler, cache, answers)
    assert answers["r"] == answer_of(submit("r", [1, 2], 3))


def test_after_the_sender_is_gone_nothing_is_left() -> None:
    scheduler = Scheduler(4, 2, 20, VOCAB)
    for n in range(4):
        scheduler.submit(submit(str(n), [1, 2], 3))
    batch = scheduler.build()
    scheduler.clear()
    assert scheduler.commit(batch, [0] * len(batch.samples)) == []
    assert (scheduler.has_work, scheduler.running, scheduler.waiting) == (False, 0, 0)
    assert scheduler.build().rows == 0
