"""`healer demo`: a group of four ranks on this machine, a fault under traffic, and what became of it.

Nothing is canned: the model is made, the daemon and its ranks run as they would elsewhere, the fault is a signal that
`healer-chaos` sends, and every figure is read from the daemon, the gateway and the clients.
"""

import argparse
import asyncio
import contextlib
import sys
import time
import traceback
from collections.abc import Coroutine, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import msgspec
from rich.console import Console

from elastic.client import Tokens, Traffic, random_prompts
from elastic.errors import ElasticError
from healer import __version__, drill
from healer.demo_report import DemoReport, Fault, Survivor, problems_of, show
from healer.deployment import Deployment
from healer.interrupt import Interrupted, run_to_its_end
from healer.tables import console

T = TypeVar("T")

RANKS, MAX_RANKS, VOCAB = 4, 6, 512
MODEL = "tiny-moe"
MAX_REQUESTS, MAX_TOKENS = 64, 200
START_S, HEAL_S, CHILD_S = 120.0, 120.0, 60.0


@dataclass(frozen=True)
class Options:
    slot: int
    fault: Fault
    requests: int
    tokens: int
    json: Path | None
    keep: bool


def main(arguments: Sequence[str]) -> int:
    """Exit code: 0 all is as it should be; 1 something is not, or an error, told in one message; 2 wrong usage; 128 and
    the signal's number when interrupted. No process is left behind, and no file unless something failed or `--keep`."""
    options = _options(arguments)
    try:
        return run_to_its_end(_demo(options))
    except Interrupted as interrupted:
        print("interrupted: all that was started is ended, its files are removed", file=sys.stderr)
        return interrupted.exit_code


async def _demo(options: Options) -> int:
    try:
        deployment = Deployment(Path(MODEL), target={"ranks": RANKS, "maxRanks": MAX_RANKS})
    except OSError as error:
        raise ElasticError(f"no temporary directory can be made: {error}") from error
    keep = options.keep
    try:
        with contextlib.closing(_Progress(console())) as progress:
            report = await _Demo(options, deployment, progress).run()
        keep |= bool(report.problems)
        show(report)
        if options.json is not None:
            options.json.write_bytes(msgspec.json.format(msgspec.json.encode(report)) + b"\n")
    except Exception as error:
        keep = True
        said = (
            str(error) if isinstance(error, ElasticError | OSError) else f"unexpected {type(error).__name__}: {error}"
        )
        (deployment.root / "demo.log").write_text(traceback.format_exc())
        print(f"error: {said}", file=sys.stderr)
        return 1
    finally:
        deployment.end(keep=keep)
        if keep:
            print(f"logs, journal and policy are kept in {deployment.root}", file=sys.stderr)
    return 1 if report.problems else 0


class _Progress:
    """A line for what is done, with the time since the start; on a terminal also what is being done."""

    def __init__(self, out: Console) -> None:
        self._out, self._began = out, time.monotonic()
        self._status = out.status("")
        self._status.start()

    @property
    def elapsed_s(self) -> float:
        return time.monotonic() - self._began

    def done(self, text: str) -> None:
        self._out.print(f"{self.elapsed_s:5.1f} s  {text}", markup=False)

    def doing(self, text: str) -> None:
        self._status.update(text)

    def close(self) -> None:
        self._status.stop()


class _Demo:
    def __init__(self, options: Options, deployment: Deployment, progress: _Progress) -> None:
        self._options, self._deployment, self._progress = options, deployment, progress
        self._prompts = random_prompts(options.requests, VOCAB, seed=7)

    async def run(self) -> DemoReport:
        """Raises ElasticError where no report can be given."""
        report = await self._deployment.watched(self._show())
        self._progress.doing("stopping")
        await self._deployment.stop()
        self._progress.done("the daemon has stopped the group and itself")
        return report

    async def _show(self) -> DemoReport:
        options, deployment, progress = self._options, self._deployment, self._progress
        before = _by_slot(await self._start())
        known = await drill.incidents(deployment)
        expected, usual_silence_s = await self._without_fault()
        replays, traffic = await drill.replays(deployment), self._traffic()
        started, fault_at = await self._fault(traffic)
        replayed = await drill.replays(deployment) - replays
        progress.done(f"all {options.requests} requests ended, {replayed} were replayed on another rank")
        healing = await drill.healed(
            deployment, known, fault_at, HEAL_S, lambda at: progress.doing(f"healing: {at or 'refill: boot'}")
        )
        progress.done(f"slot {options.slot} was live again {healing.capacity_s:.2f} s after the fault")
        progress.doing("the same requests on the healed group")
        again = await self._traffic().run()
        after = _by_slot(await deployment.settled(HEAL_S))
        progress.done("the same requests once more on the healed group")
        survivors = tuple(_survivor(before[s], after[s], healing) for s in before if s != options.slot)
        in_flight = drill.in_flight(traffic.answers, fault_at)
        live_again = _is_replaced(before[options.slot], after[options.slot])
        wrong = drill.wrong(traffic.answers, expected)
        wrong += [f"{one} (on the healed group)" for one in drill.wrong(again, expected)]
        return DemoReport(
            version=__version__,
            fault=options.fault,
            slot=options.slot,
            fault_at_s=fault_at - started,
            requests=options.requests,
            tokens=options.tokens,
            in_flight=in_flight,
            completed=sum(1 for a in traffic.answers if a.error is None and a.finish),
            replayed=replayed,
            tokens_equal=[a.tokens for a in traffic.answers] == expected == [a.tokens for a in again],
            silence_s=drill.longest_gap_s(traffic.answers, fault_at, fault_at + healing.capacity_s),
            usual_silence_s=usual_silence_s,
            live_again=live_again,
            healing=healing,
            survivors=survivors,
            problems=problems_of(wrong, in_flight, options.slot, live_again, survivors),
            took_s=progress.elapsed_s,
        )

    async def _without_fault(self) -> tuple[list[Tokens], float]:
        """The tokens of each answer, and the longest silence of a client in seconds."""
        self._progress.doing("requests without a fault")
        answers = await self._traffic().run()
        wrong = drill.wrong(answers, [a.tokens for a in answers])
        if wrong:
            raise ElasticError(f"without any fault: {'; '.join(wrong)}")
        began, ended = min(a.times[0] for a in answers), max(a.times[-1] for a in answers)
        silence_s = drill.longest_gap_s(answers, began, ended)
        self._progress.done(
            f"{len(answers)} concurrent requests of {self._options.tokens} tokens without a fault: "
            f"{ended - began:.2f} s, longest silence {silence_s * 1000:.0f} ms"
        )
        return [a.tokens for a in answers], silence_s

    async def _start(self) -> dict[str, Any]:
        deployment, progress = self._deployment, self._progress
        progress.doing("making a small random model")
        model = deployment.root / MODEL
        await _child("-m", "elastic.tools.make_checkpoint", str(model), "--vocab", str(VOCAB))
        progress.done("a small random Mixture-of-Experts model is made")
        progress.doing("the daemon starts and forms the group")

        def forming(group: dict[str, Any]) -> None:
            states = [s["state"] for s in group["slots"]]
            shown = ", ".join(f"{states.count(s)} {s}" for s in ("booting", "ready", "live") if s in states)
            progress.doing(f"the daemon forms the group{': ranks ' if shown else ''}{shown}")

        group = await deployment.start(START_S, forming)
        progress.done(f"the daemon has formed a group of {len(group['live'])} ranks; serving on {deployment.gateway()}")
        return group

    def _traffic(self) -> Traffic:
        return Traffic(self._deployment.gateway(), self._prompts, self._options.tokens)

    async def _fault(self, traffic: Traffic) -> tuple[float, float]:
        """Send the requests and, in the middle of their answers, the fault. Returns both moments; all requests have ended
        then."""
        options, progress = self._options, self._progress
        progress.doing("the same requests, and a fault")
        injector = await _spawn(
            *("-m", "chaos.cli", "inject", options.fault, "--slot", str(options.slot)),
            *("--run-dir", str(self._deployment.run_dir), "--armed", "--json"),
        )
        # it has started, so that the order takes effect at once
        await _within(injector.stderr.readline(), "healer-chaos is armed")  # type: ignore[union-attr]
        started, running = time.monotonic(), asyncio.create_task(traffic.run())
        try:
            middle = options.requests * options.tokens // 2
            await traffic.reached(middle)
            out, errors = await _within(injector.communicate(b"\n"), "healer-chaos has injected the fault")
            sent = _sent(out, errors)
            progress.done(f"the same again; {options.fault} slot {options.slot} (pid {sent['member']['pid']}) half-way")
            await running
        finally:
            running.cancel()
        return started, float(sent["sent"])


def _sent(out: bytes, errors: bytes) -> dict[str, Any]:
    try:
        answer = msgspec.json.decode(out)
        found: dict[str, Any] = answer["injected"][0]
    except (msgspec.DecodeError, KeyError):
        said = (out + errors).decode(errors="replace").strip()
        raise ElasticError(f"the fault could not be injected: {said or 'healer-chaos said nothing'}") from None
    return found


async def _spawn(*arguments: str) -> asyncio.subprocess.Process:
    pipe = asyncio.subprocess.PIPE
    return await asyncio.create_subprocess_exec(
        sys.executable, *arguments, stdin=pipe, stdout=pipe, stderr=pipe, start_new_session=True
    )


async def _child(*arguments: str) -> None:
    """Raises ElasticError with its last words."""
    child = await _spawn(*arguments)
    out, errors = await _within(child.communicate(), f"{arguments[1]} has ended")
    if child.returncode:
        said = (errors or out).decode(errors="replace").strip().splitlines() or ["it said nothing"]
        raise ElasticError(f"{arguments[1]}: {said[-1].removeprefix('error: ')}")


async def _within(work: Coroutine[Any, Any, T], what: str) -> T:
    try:
        return await asyncio.wait_for(work, CHILD_S)
    except TimeoutError:
        raise ElasticError(f"not within {CHILD_S:g} s: {what}") from None


def _by_slot(group: dict[str, Any]) -> dict[int, dict[str, Any]]:
    """The slots that have a process."""
    return {s["slot"]: s for s in group["slots"] if s["member"] is not None}


def _survivor(before: dict[str, Any], after: dict[str, Any], healing: drill.Healing) -> Survivor:
    old, new = before["counters"], after["counters"]
    return Survivor(
        slot=before["slot"],
        pause_s=healing.pause_s.get(before["slot"]),
        captures=(old["captures"], new["captures"]),
        address_changes=(old["address_changes"], new["address_changes"]),
        same_process=before["member"] == after["member"],
    )


def _is_replaced(before: dict[str, Any], after: dict[str, Any]) -> bool:
    return bool(after["state"] == "live" and before["member"] != after["member"])


def _options(arguments: Sequence[str]) -> Options:
    parser = argparse.ArgumentParser(
        prog="healer demo",
        description="Start a small group, kill a rank under traffic, and show how it heals.",
        epilog="Example: healer demo --kill 0 --json report.json",
    )
    parser.add_argument("--kill", type=_number(0, RANKS - 1), default=1, metavar="SLOT", help="whom; default: 1")
    parser.add_argument("--signal", choices=("kill", "stop"), default="kill", help="how; stop: it hangs; default: kill")
    parser.add_argument(
        "--requests", type=_number(1, MAX_REQUESTS), default=16, metavar="N", help="at once; default: 16"
    )
    parser.add_argument("--tokens", type=_number(1, MAX_TOKENS), default=64, metavar="N", help="each; default: 64")
    parser.add_argument("--json", type=_file, metavar="FILE", help="write the report there too")
    parser.add_argument("--keep", action="store_true", help="keep logs, journal and policy")
    given = parser.parse_args(list(arguments))
    return Options(given.kill, given.signal, given.requests, given.tokens, given.json, given.keep)


def _number(least: int, most: int) -> Any:
    def parse(text: str) -> int:
        if not (text.isascii() and text.isdigit() and least <= int(text[:9]) <= most):
            raise argparse.ArgumentTypeError(f"{text!r} is not a number from {least} to {most}")
        return int(text)

    return parse


def _file(text: str) -> Path:
    path = Path(text)
    if path.is_dir() or not path.absolute().parent.is_dir():
        raise argparse.ArgumentTypeError(f"{text!r} cannot be a file: its folder must exist")
    return path
