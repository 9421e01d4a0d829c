"""The real daemon over a simulated launcher, which ends itself by SIGKILL at a point that a test has chosen.

Points: the beginning of each step of a sequence; before and after each write of the journal (entries, and what was answered to
an order) and of the state file; before each command, after it has been sent, and after its answer; before and after each
process that is started or ended. Questions change nothing and are no points.
"""

import sys
from pathlib import Path
from typing import Any

from elastic.channel import Channel
from elastic.controller import boots, executor, roster
from elastic.controller.recorder import Recorder
from elastic.errors import ElasticError
from elastic.protocol import GatewayQuery, Query
from healer import daemon, logs
from healer.journal import Journal
from healer.policy.load import load_policy
from tests.durable.fault_plan import Planned
from tests.durable.points import Points
from tests.durable.simulated_launcher import SimulatedLauncher


def run(arguments: tuple[str, ...]) -> None:
    policy, page, server = arguments
    points = Points(Path(page))
    install(points)
    read = load_policy(Path(policy))
    points.on_pass = Planned(Path(page).with_name("plan.json"), Path(read.spec.target.run_dir)).consider
    executor.LocalLauncher = lambda config: SimulatedLauncher(config, server, points.pass_)  # type: ignore[assignment,misc]
    # a second launch soon: what is tested is that it comes, not when
    boots.BACKOFF_S = (0.0, 0.05, 0.1)  # type: ignore[assignment]
    logs.configure("json", "info")
    try:
        daemon.run(read)
    except ElasticError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(1)


def install(points: Points) -> None:
    flush, save, send, call = Journal.flush, roster.save_state, Channel.send, Channel.call
    phase, end, answer = Recorder.phase, Recorder.end, Journal.answer

    def flushed(self: Journal) -> bool:
        if not self._pending:
            return flush(self)
        kinds = ", ".join(dict.fromkeys(str(entry[3]) for entry in self._pending))
        points.pass_(f"before journal: {kinds}")
        done = flush(self)
        points.pass_(f"after journal: {kinds}")
        return done

    def answered(self: Journal, *arguments: Any) -> None:
        points.pass_("before journal: answer")
        answer(self, *arguments)
        points.pass_("after journal: answer")

    def saved(*arguments: Any) -> None:
        points.pass_("before state file")
        save(*arguments)
        points.pass_("after state file")

    def sent(self: Channel, message: Any) -> None:
        if isinstance(message, Query | GatewayQuery):
            send(self, message)
            return
        what = f"{type(message).__name__} to {self.name}"
        points.pass_(f"before {what}")
        send(self, message)
        points.pass_(f"after {what}")

    async def called(self: Channel, message: Any, *arguments: Any, **options: Any) -> Any:
        answer = await call(self, message, *arguments, **options)
        if not isinstance(message, Query | GatewayQuery):
            points.pass_(f"answered {type(message).__name__} to {self.name}")
        return answer

    def phased(self: Recorder, step: Any) -> Any:
        points.pass_(f"step {self.kind} {step}")
        points.note_move(self.kind, self.state, step)
        return phase(self, step)

    def ended(self: Recorder, outcome: Any, *arguments: Any) -> None:
        if not self._ended:
            points.note_move(self.kind, self.state, outcome)
        end(self, outcome, *arguments)

    Recorder.phase = phased  # type: ignore[method-assign]
    Recorder.end = ended  # type: ignore[method-assign]
    Journal.flush = flushed  # type: ignore[method-assign]
    Journal.answer = answered  # type: ignore[method-assign]
    roster.save_state = saved  # type: ignore[assignment,attr-defined]
    Channel.send = sent  # type: ignore[method-assign]
    Channel.call = called  # type: ignore[method-assign,assignment]
