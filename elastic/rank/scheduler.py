"""Continuous batching over a fixed number of KV sequences; a step is a transaction.

`build` proposes the rows of the next step and changes nothing that lasts. `commit` takes over what the step produced;
`discard` forgets the proposal, and the next `build` proposes the same work again. Nothing is emitted before the commit.

Order: decodes first, the least recently served before others; then the prompts of admitted requests and, while a KV
sequence is free, of waiting ones, first come first served. While a prompt waits, decodes leave it a quarter of the rows.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from elastic.protocol import Emitted, Rejected, Sampling, Submit


@dataclass(frozen=True, slots=True)
class Sample:
    """A row of a batch whose logits give the next token of a request."""

    row: int
    position: int
    """Answer index of that token: with the seed it determines the draw."""
    sampling: Sampling
    request: str = ""
    logits: bool = False
    """The request wants them."""


@dataclass(frozen=True, slots=True)
class Chunk:
    """The rows of one request in a batch: `count` tokens from position `start` of KV sequence `seq`."""

    ticket: int
    """Unique for each submission, for the life of the scheduler."""
    seq: int
    start: int
    count: int
    sampled: bool
    """The last row is the last known token: its logits are sampled."""


@dataclass(frozen=True, slots=True)
class Batch:
    """One step's rows, by row: token id, KV sequence, position. Samples are in the order of chunks."""

    tokens: tuple[int, ...] = ()
    seqs: tuple[int, ...] = ()
    positions: tuple[int, ...] = ()
    samples: tuple[Sample, ...] = ()
    chunks: tuple[Chunk, ...] = ()

    @property
    def rows(self) -> int:
        return len(self.tokens)


@dataclass(slots=True)
class _Request:
    submit: Submit
    ticket: int
    tokens: list[int]
    """Prompt and committed answer."""
    submitted_at: float
    seq: int = -1
    """KV sequence; -1 while waiting."""
    cached: int = 0
    """Tokens whose keys and values are in the cache, by committed steps."""
    queued_s: float = 0.0
    """From its submission to the step in which it got its KV sequence."""
    served: int = -1
    """The last committed step that had rows of this request."""
    stop_ids: frozenset[int] = field(init=False)

    def __post_init__(self) -> None:
        self.stop_ids = frozenset(self.submit.stop_ids)

    @property
    def pending(self) -> int:
        return len(self.tokens) - self.cached

    @property
    def answered(self) -> int:
        return len(self.tokens) - self.submit.prompt_len

    def finish(self) -> str | None:
        """Why the answer is complete: "stop" (its last token is a stop token), "length", or None."""
        if self.answered and self.tokens[-1] in self.stop_ids:
            return "stop"
        return "length" if self.answered >= self.submit.max_tokens else None


class Scheduler:
    """The requests of one rank. Not thread-safe: the round loop owns it and feeds it messages between steps."""

    def __init__(
        self,
        max_tokens: int,
        max_seqs: int,
        max_model_len: int,
        vocab: int | None = None,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        """`max_tokens`: rows of a step. `max_model_len`: positions of a sequence, prompt and answer. `vocab`: refuse
        token ids from here on; None: whoever submits has checked them."""
        self._max_tokens, self._max_model_len, self._vocab = max_tokens, max_model_len, vocab
        self._max_seqs, self._now = max_seqs, now
        self._free = list(range(max_seqs))
        self._requests: dict[int, _Request] = {}
        self._tickets: dict[tuple[str, int], int] = {}
        self._next_ticket = 0
        self._steps = 0
        self._pending: Batch | None = None

    @property
    def waiting(self) -> int:
        """Requests without a KV sequence."""
        return len(self._requests) - self.running

    @property
    def running(self) -> int:
        """Requests that hold a KV sequence."""
        return self._max_seqs - len(self._free)

    @property
    def has_work(self) -> bool:
        return bool(self._requests)

    def submit(self, submit: Submit) -> Emitted | Rejected | None:
        """Queue a request. Answer tokens already in `submit.tokens` are continued, never emitted again.

        Returns Rejected for one that can never run here, an Emitted without tokens for one whose answer is complete
        already, else None. A submission that is known (same request, same attempt) is ignored.
        """
        why = self._refusal(submit)
        if why is not None:
            return Rejected(request=submit.request, attempt=submit.attempt, why=why)
        key = (submit.request, submit.attempt)
        if key in self._tickets:
            return None
        request = _Request(submit, self._next_ticket, list(submit.tokens), self._now())
        if (finish := request.finish()) is not None:
            return Emitted(
                request=submit.request, attempt=submit.attempt, start=request.answered, tokens=(), finish=finish
            )
        self._next_ticket += 1
        self._requests[request.ticket] = request
        self._tickets[key] = request.ticket
        return None

    def cancel(self, request: str, attempt: int) -> bool:
        """Forget a request at once, in the middle of a step too: what that step gives it is dropped. False: unknown."""
        ticket = self._tickets.get((request, attempt))
        if ticket is None:
            return False
        self._forget(self._requests[ticket])
        return True

    def clear(self) -> None:
        """Forget every request: whoever sent them is gone."""
        for request in list(self._requests.values()):
            self._forget(request)

    def build(self) -> Batch:
        """The rows of the next step; empty when there is no work. Only the newest batch can be committed."""
        decodes: list[_Request] = []
        prompts: list[_Request] = []
        waiting: list[_Request] = []
        for request in self._requests.values():
            (waiting if request.seq < 0 else decodes if request.pending == 1 else prompts).append(request)
        prompts += waiting[: len(self._free)]
        free = iter(self._free)
        room = self._max_tokens
        keep = room // 4 if prompts else 0
        decodes.sort(key=lambda r: (r.served, r.ticket))

        chunks: list[Chunk] = []
        samples: list[Sample] = []
        tokens: list[int] = []
        seqs: list[int] = []
        positions: list[int] = []
        for request in decodes[: room - keep] + prompts:
            count = min(request.pending, self._max_tokens - len(tokens))
            if count == 0:
                break
            seq = request.seq
            if seq < 0:
                seq, request.queued_s = next(free), self._now() - request.submitted_at
            start, end = request.cached, request.cached + count
            tokens += request.tokens[start:end]
            seqs += [seq] * count
            positions += range(start, end)
            sampled = end == len(request.tokens)
            if sampled:
                submit = request.submit
                samples.append(
                    Sample(len(tokens) - 1, request.answered, submit.sampling, submit.request, submit.logits)
                )
            chunks.append(Chunk(request.ticket, seq, start, count, sampled))
        self._pending = Batch(tuple(tokens), tuple(seqs), tuple(positions), tuple(samples), tuple(chunks))
        return self._pending

    def discard(self, batch: Batch) -> None:
        """The step of `batch` did not count: nothing of it is kept."""
        if self._pending is batch:
            self._pending = None

    def commit(self, batch: Batch, tokens: Sequence[int]) -> list[Emitted]:
        """Take over a step: `tokens` are the choices for `batch.samples`. Returns what to send, one message a request.

        A stop token is emitted like any other and ends the answer. Raises ValueError for a batch that is not the newest
        or was committed or discarded already: its rows may belong to others by now.
        """
        if self._pending is not batch:
            raise ValueError("commit: not the batch that was built last")
        if len(tokens) != len(batch.samples):
            raise ValueError(f"commit: {len(tokens)} tokens for {len(batch.samples)} samples")
        self._pending = None
        self._steps += 1
        emitted: list[Emitted] = []
        chosen = iter(tokens)
        for chunk in batch.chunks:
            token = next(chosen) if chunk.sampled else None
            request = self._requests.get(chunk.ticket)
            if request is None:
                continue
            if request.seq < 0:
                self._free.remove(chunk.seq)
                request.seq = chunk.seq
            request.cached += chunk.count
            request.served = self._steps
            if token is not None:
                emitted.append(self._emit(request, token))
        return emitted

    def _emit(self, request: _Request, token: int) -> Emitted:
        start = request.answered
        request.tokens.append(token)
        finish = request.finish()
        if finish is not None:
            self._forget(request)
        submit = request.submit
        first = start == len(submit.tokens) - submit.prompt_len
        return Emitted(
            request=submit.request,
            attempt=submit.attempt,
            start=start,
            tokens=(token,),
            finish=finish,
            queued_s=request.queued_s if first else 0.0,
        )

    def _forget(self, request: _Request) -> None:
        del self._requests[request.ticket]
        del self._tickets[request.submit.request, request.submit.attempt]
        if request.seq >= 0:
            self._free.append(request.seq)
            self._free.sort()

    def _refusal(self, submit: Submit) -> str | None:
        total = submit.prompt_len + submit.max_tokens
        if not 1 <= submit.prompt_len <= len(submit.tokens):
            return (
                f"prompt of {submit.prompt_len} tokens, {len(submit.tokens)} tokens sent: a prompt holds at least one"
            )
        if submit.max_tokens < 1:
            return f"max_tokens {submit.max_tokens} is below 1"
        if total > self._max_model_len:
            return (
                f"prompt of {submit.prompt_len} + max_tokens {submit.max_tokens} = {total} tokens, above the "
                f"{self._max_model_len} that a sequence holds"
            )
        if len(submit.tokens) > total:
            return f"{len(submit.tokens) - submit.prompt_len} answer tokens sent, above max_tokens {submit.max_tokens}"
        if min(submit.tokens) < 0 or (self._vocab is not None and max(submit.tokens) >= self._vocab):
            return f"a token id is outside the vocabulary of {self._vocab}"
        return None
