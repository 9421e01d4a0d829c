"""The round loop: one step of the model per round, in lockstep with every live rank, each step a transaction.

A step is committed only if no mask changed since the last commit of a view and no halt was ordered; otherwise it is
discarded and its tokens are never emitted. Nothing here waits for a peer except inside `Runner.run`, whose waits end on
arrival, on `EpBackend.release`, or on the timeout.
"""

import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import msgspec
import torch

from elastic.config import GroupConfig
from elastic.protocol import Cancel, Counters, Emitted, Rejected, Resumed, Submit
from elastic.rank.comm.base import EpBackend, RoundBoard
from elastic.rank.fatal import end_if_fatal
from elastic.rank.gate import Gate, Order
from elastic.rank.recorder import StepRecorder
from elastic.rank.runner import Runner
from elastic.rank.scheduler import Batch, Scheduler
from elastic.rank.steplog import StepLog, WorkLog
from elastic.view import View

IDLE_WAIT_S = 0.5
"""An idle loop looks around this often, woken or not; only a lost wake would ever need it."""


@dataclass(frozen=True)
class _Staged:
    view: View
    epoch: int
    base: int


class Engine:
    """Owned by the main thread. The agent's threads use `inbox`, `gate` and the fields said to be readable."""

    def __init__(
        self,
        config: GroupConfig,
        slot: int,
        gate: Gate,
        runner: Runner,
        ep: EpBackend,
        board: RoundBoard,
        emit: Callable[[Sequence[Emitted | Rejected]], None],
        tell: Callable[[Resumed], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.inbox: deque[Submit | Cancel] = deque()
        self.view: View | None = None
        self.discarded_steps = 0
        self.tokens = 0
        self.stood = clock()
        """When the last step returned, committed or not; readable by any thread."""
        self.steps = StepLog()
        self.works = WorkLog()
        self._staged: _Staged | None = None
        self._when_launched: list[Callable[[], None]] = []
        self._held: list[Emitted | Rejected] = []
        """Committed, and handed out when the next step is on its way."""
        self.recorder: StepRecorder | None = None
        """Where each step is to be written down."""
        self._slot = slot
        self._gate, self._runner, self._ep, self._board = gate, runner, ep, board
        self._emit, self._tell, self._clock = emit, tell, clock
        self._scheduler = Scheduler(config.max_tokens, config.max_seqs, config.max_model_len, runner.vocab)
        self._peers: tuple[int, ...] = ()
        self._generation = ep.mask_generation
        self._last_commit: float | None = None
        self._epoch = 0
        self._report_pause = False
        gate.before_standing = self._tell_launched
        self._busy = False
        """Whether anybody had work in the last round: all ranks draw the same conclusion, so all sleep or none."""

    @property
    def waiting(self) -> int:
        return self._scheduler.waiting + len(self.inbox)

    @property
    def running(self) -> int:
        return self._scheduler.running

    @property
    def counters(self) -> Counters:
        graphs = self._runner.graphs
        return Counters(
            captures=graphs.captures,
            replays=graphs.replays,
            address_changes=graphs.address_changes,
            discarded_steps=self.discarded_steps,
            tokens=self.tokens,
        )

    def take_view(self, view: View, epoch: int, generation: int) -> None:
        """Part of a commit; the loop stands, masks are as the view wants them since `generation`. Raises NeedsReplan, with
        nothing changed."""
        self._runner.stage_placement(view.placement, view.live)
        self._runner.switch_placement()
        self._use(view, epoch, generation)

    def stage(self, view: View, epoch: int, base: int) -> None:
        """Lay down the view that `switch` takes over, while the loop runs. Raises NeedsReplan, as if nothing was staged."""
        self._staged = None
        self._runner.stage_placement(view.placement, view.live)
        self._staged = _Staged(view, epoch, base)

    def switch(self, round_: int) -> bool:
        """Take over the staged view before `round_`, between two steps, in the loop's thread. False, with nothing changed: a
        mask has changed since the last step counted, or nothing is staged."""
        staged, self._staged = self._staged, None
        if staged is None or self._ep.mask_generation != self._generation:
            return False
        if self._busy:
            # this rank has ended the round before and runs this one for certain: a joiner, who sleeps until it hears so, gets
            # ready meanwhile
            self._board.announce(round_, True, [s for s in staged.view.live if s != self._slot])
        with self.works.note("switch: masks"):
            generation = self._ep.take_over(staged.view.live, staged.base)
        with self.works.note("switch: map"):
            self._runner.switch_placement()
        self._use(staged.view, staged.epoch, generation)
        if self.recorder is not None:
            self.recorder.committing(staged.view, round_, staged.base)
        return True

    def when_launched(self, call: Callable[[], None]) -> None:
        """Call once when the next step is on its way, or there is none to launch: what then begins does not hold it up. Loop's
        thread."""
        self._when_launched.append(call)

    def _tell_launched(self) -> None:
        if self._held:
            held, self._held = self._held, []
            self._emit(held)
        while self._when_launched:
            self._when_launched.pop()()

    def _use(self, view: View, epoch: int, generation: int) -> None:
        self.view, self._generation = view, generation
        self._peers = tuple(s for s in view.live if s != self._slot)
        self._epoch, self._report_pause = epoch, True

    def run(self) -> None:
        """Until the gate says EXIT. An error of the device ends the process; others are raised, and no round follows."""
        try:
            while True:
                order = self._gate.next()
                if order is Order.EXIT:
                    self._tell_launched()
                    return
                if order is Order.IDLE and not self._busy and not self._wait_for_work():
                    continue
                self._round()
        except Exception as error:
            end_if_fatal(error, f"round {self._gate.round}")
            raise

    def _wait_for_work(self) -> bool:
        """True as soon as this rank or a peer has something to do for the next round; False on a wish of the gate.

        A joiner must not begin before a peer has ended the round before: NIXL EP's kernels zero the words of the next call, and
        with them what came too early. It hears of the round from a peer that has come to it, or has work of its own, which is
        given to it when all have taken its view over."""
        self._tell_launched()
        while True:
            ticket = self._board.ticket()
            self._drain_inbox()
            if self._scheduler.has_work or self._board.begun(self._gate.round, self._peers):
                return True
            if self._gate.wanted():
                return False
            if not self._gate.idle:
                self._gate.idle = True
                self._last_commit = None
                if self._report_pause:
                    self._report_pause = False
                    self._tell(Resumed(epoch=self._epoch, pause_s=0.0, idle=True))
            self._board.wait(ticket, IDLE_WAIT_S)

    def _round(self) -> None:
        entered = self._clock()
        if not self._gate.enter():
            return
        self._drain_inbox()
        batch = self._scheduler.build()
        round_, has_work = self._gate.round, batch.rows > 0
        self._board.announce(round_, has_work, self._peers)
        began = self._clock()
        self._ep.begin_step()
        self._runner.run(batch)
        launched = self._clock()
        self._tell_launched()
        self._ep.end_step()
        self.stood = self._clock()
        if self.recorder is not None:
            self.recorder.ran(self.view, round_, batch.rows, began)
        if self._ep.mask_generation != self._generation or self._gate.halted:
            self._scheduler.discard(batch)
            self.discarded_steps += 1
            if self.recorder is not None:
                self.recorder.ended(committed=False)
            if not self._gate.halted:
                self._gate.park_self()
            return
        tokens = self._runner.choose(batch)
        emissions = self._scheduler.commit(batch, tokens)
        if any(sample.logits for sample in batch.samples):
            emissions = _with_logits(emissions, batch, self._runner.logits(batch))
        self.tokens += len(tokens)
        self._note_commit()
        if self.recorder is not None:
            self.recorder.ended(committed=True)
        self._gate.committed()
        if self._runner.runs_behind:
            # the agent's thread would take Python's lock from the next launch, for which the GPU waits
            self._held += emissions
        elif emissions:
            self._emit(emissions)
        self._busy = has_work or self._board.any_work(round_, self._peers)
        self.steps.add(
            self.stood,
            self._epoch,
            began - entered,
            launched - began,
            self.stood - launched,
            self._clock() - self.stood,
        )

    def _note_commit(self) -> None:
        now = self._clock()
        if self._report_pause:
            self._report_pause = False
            gap = 0.0 if self._last_commit is None else now - self._last_commit
            self._tell(Resumed(epoch=self._epoch, pause_s=gap, idle=self._last_commit is None))
        self._last_commit = now

    def _drain_inbox(self) -> None:
        answers: list[Emitted | Rejected] = []
        while self.inbox:
            message = self.inbox.popleft()
            if isinstance(message, Cancel):
                self._scheduler.cancel(message.request, message.attempt)
            elif (answer := self._scheduler.submit(message)) is not None:
                answers.append(answer)
        if answers:
            self._emit(answers)


def _with_logits(emissions: Sequence[Emitted], batch: Batch, logits: torch.Tensor) -> list[Emitted]:
    """`logits` [len(batch.samples), vocab] go along with the tokens of the requests that asked for them."""
    rows = {
        sample.request: row for sample, row in zip(batch.samples, logits.float().cpu(), strict=True) if sample.logits
    }
    return [
        msgspec.structs.replace(e, logits=rows[e.request].numpy().tobytes()) if e.request in rows else e
        for e in emissions
    ]
