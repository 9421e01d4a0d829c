"""A group under traffic that is hurt and changed, and what its own records say about it."""

import asyncio
import signal
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from statistics import median
from types import MappingProxyType

import msgspec

from chaos.gpu_bench import ranks, timeline
from chaos.gpu_bench.clients import Clients, Order, Told
from chaos.gpu_bench.lab import VOCAB, forget
from chaos.gpu_bench.records import Gap, Sample, Survivor
from chaos.gpu_bench.records import Sequence as SequenceRecord
from elastic import process
from elastic.client import random_prompts
from elastic.config import GroupConfig
from elastic.controller.executor import Executor
from elastic.controller.records import BootFailed, Event, RankGone, SequenceEnded, SequenceReport
from elastic.errors import ElasticError
from elastic.protocol import Source
from elastic.view import Member

REQUESTS, TOKENS = 16, 64
SETTLE_S = 90.0
AFTER_S = 0.4
"""The rank's own clean-up behind the first step belongs to the operation, and the steps after it show that it is over."""
BEFORE_S = 1.0
NOBODY: Mapping[int, ranks.Seen] = MappingProxyType({})
STEADY_S = 0.3
"""Steps that the medians before and after are taken from."""


class BenchGroup:
    """Drives the executor, with an owner that condemns a rank when a witness says that it is dead."""

    def __init__(self, config: GroupConfig, seed: int) -> None:
        self.config = config
        try:
            self.executor = Executor(config, self._on_event)
        except BaseException:
            forget(config)
            raise
        self.replace = True
        """Whether a dead rank stays in the target."""
        self.notes: list[str] = []
        self._prompts = random_prompts(REQUESTS, VOCAB, seed)
        self._clients: Clients | None = None
        self._reports: list[SequenceReport] = []
        self._changed = asyncio.Event()

    async def start(self) -> None:
        await self.executor.start()
        self._clients = await Clients.start(Order(self.executor.gateway_http, self._prompts, TOKENS))
        await self.spares_ready()

    async def stop(self) -> list[Told]:
        """Every answer since the start."""
        told: list[Told] = []
        self.notes += [f"spare {s.number} was given up: {s.why}" for s in self.executor.status().spares if s.why]
        try:
            if self._clients is not None:
                async with asyncio.timeout(60.0):
                    told = await self._clients.stop()
        except TimeoutError:
            self.notes.append("the clients did not end")
        finally:
            if self._clients is not None:
                await self._clients.kill()
            await self.executor.stop()
            forget(self.config)
        return told

    async def spares_ready(self) -> None:
        await self._until(
            lambda: all(s.state in ("ready", "given-up") for s in self.executor.status().spares), "the spares stand by"
        )

    async def spare_for(self, slot: int) -> None:
        """Wait until a spare stands by that may take this slot; at once where the group has none."""

        def there() -> bool:
            spares = self.executor.status().spares
            open_ = [s for s in spares if s.state in ("booting", "absent")]
            return not spares or not open_ or any(slot in s.slots for s in spares if s.state == "ready")

        await self._until(there, f"a spare for slot {slot} stands by")

    async def idle_gap(self, sample: Sample) -> Sample:
        """With the longest gap of any rank since the sample was over."""
        since = sample.at + sample.capacity_s + AFTER_S
        seen = await self._look(self.executor.status().live, since)
        until = time.monotonic()
        found = [
            one.steps[at].end - one.steps[at - 1].end
            for one in seen.values()
            if (at := timeline.longest(one.steps, since, until))
        ]
        return msgspec.structs.replace(sample, idle_gap_s=max(found, default=None))

    def member(self, slot: int) -> Member:
        member = self.executor.status().slots[slot].member
        if member is None:
            raise ElasticError(f"slot {slot} has no rank")
        return member

    # --- operations -----------------------------------------------------------------------------------------------

    async def kill(self, slots: Collection[int], held_s: float = 0.0) -> Sample:
        """SIGKILL ranks; wait until others serve in their place (or, without `replace`, the others alone). `held_s`: they are
        stopped for that long before, so that the survivors wait for them in a kernel."""
        victims = [self.member(s) for s in slots]
        before = await self._look(self._others(slots), time.monotonic() - BEFORE_S)
        booting = sum(s.state == "booting" for s in self.executor.status().spares)
        self._reports.clear()
        if held_s:
            for victim in victims:
                process.send_signal(victim.pid, victim.pid_start, signal.SIGSTOP)
            await asyncio.sleep(held_s)
        sent = time.monotonic()
        for victim in victims:
            process.send_signal(victim.pid, victim.pid_start, signal.SIGKILL)
        await self._until(lambda: {*slots} <= self._seen_lost(), "the loss is dealt with")
        await self.executor.settled(deadline_s=SETTLE_S)
        return await self._sample("kill", tuple(slots), sent, before, booting)

    async def scale(self, target: int | Collection[int]) -> Sample:
        status = self.executor.status()
        wanted = set(self.executor.scale(target, reason="benchmark"))
        slots = wanted ^ set(status.live)
        before = await self._look([s for s in status.live if s in wanted], time.monotonic() - BEFORE_S)
        self._reports.clear()
        sent = time.monotonic()
        await self.executor.settled(deadline_s=SETTLE_S)
        return await self._sample("grow" if wanted > set(status.live) else "shrink", tuple(slots), sent, before)

    async def _sample(
        self, what: str, slots: tuple[int, ...], sent: float, before: dict[int, ranks.Seen], spares_booting: int = 0
    ) -> Sample:
        await asyncio.sleep(AFTER_S)
        after = await self._look(before, sent - BEFORE_S)
        joined = await self._look([s for s in self.executor.status().live if s not in before], sent)
        return sample_of(what, slots, sent, list(self._reports), before, after, joined, spares_booting)

    def _others(self, slots: Collection[int]) -> list[int]:
        return [s for s in self.executor.status().live if s not in slots]

    async def _look(self, slots: Collection[int], since: float) -> dict[int, ranks.Seen]:
        return await ranks.look_at_all(self.config.name, [self.member(s) for s in slots], since)

    def _seen_lost(self) -> set[int]:
        return {s for r in self._reports if r.kind == "loss" and r.outcome == "committed" for s in r.slots}

    async def _until(self, condition: Callable[[], bool], what: str) -> None:
        end = time.monotonic() + SETTLE_S
        while not condition():
            if time.monotonic() > end:
                raise ElasticError(f"not within {SETTLE_S:g} s: {what}")
            self._changed.clear()
            try:
                # an event tells of most changes, not of a spare that has come up
                async with asyncio.timeout(0.1):
                    await self._changed.wait()
            except TimeoutError:
                continue

    def _on_event(self, event: Event) -> None:
        if isinstance(event, RankGone):
            self.executor.lose([event.member.slot], cause="death", detected=event.at, replace=self.replace)
        elif isinstance(event, SequenceEnded):
            self._reports.append(event.report)
        elif isinstance(event, BootFailed):
            self.notes.append(f"boot of rank {event.slot}.{event.incarnation} failed: {event.why}")
        self._changed.set()


# --- from records to a sample ---------------------------------------------------------------------------------------


def sample_of(
    what: str,
    slots: tuple[int, ...],
    sent: float,
    reports: Sequence[SequenceReport],
    before: dict[int, ranks.Seen],
    after: dict[int, ranks.Seen],
    joined: Mapping[int, ranks.Seen] = NOBODY,
    spares_booting: int = 0,
) -> Sample:
    """`before` and `after`: the ranks that stayed; `joined`: those that came. Raises ElasticError where a rank that should have stayed was replaced."""
    if replaced := [s for s in before if after[s].status.pid != before[s].status.pid]:
        raise ElasticError(f"slots {replaced} were not hurt, yet their processes were replaced")
    losses = [r for r in reports if r.kind == "loss" and r.outcome == "committed"]
    over = max((r.ended for r in reports), default=sent)
    # a fault's own pause ends with the first step after its commit; what follows is the refill
    calm = max((_first_s(seen, losses[-1]) or sent for seen in after.values()), default=sent) if losses else sent
    return Sample(
        what=what,
        slots=slots,
        at=sent,
        seen_s=min(r.began for r in losses) - sent if losses else None,
        capacity_s=over - sent,
        sequences=tuple(_sequence(r, sent, after, joined) for r in reports),
        survivors=tuple(_survivor(before[s], after[s], sent, calm, over) for s in sorted(before)),
        spares_booting=spares_booting,
    )


def _sequence(
    report: SequenceReport, sent: float, after: dict[int, ranks.Seen], joined: Mapping[int, ranks.Seen]
) -> SequenceRecord:
    phases = {p.name.split()[0]: (p.start - sent, p.seconds) for p in report.phases}
    first = {slot: _first_s(seen, report) for slot, seen in after.items()}
    loads = list(report.loaded.values())
    moved = {
        name: sum((getattr(loaded, name) for loaded in loads), start=Source()) for name in ("peer", "host", "disk")
    }
    gaps = {slot: _gap(seen, report) for slot, seen in after.items()}
    pauses = {slot: _pause(seen, report, sent) for slot, seen in after.items()}
    return SequenceRecord(
        kind=report.kind,
        outcome=report.outcome,
        slots=report.slots,
        phases=phases,
        pause_s={s: p for s, p in pauses.items() if p is not None},
        gaps={s: msgspec.structs.replace(g, at=g.at - sent) for s, g in gaps.items() if g is not None},
        first_step_s={s: f - sent for s, f in first.items() if f is not None},
        moved=moved,
        copy_s=max((loaded.seconds for loaded in loads), default=0.0),
        joiners=report.joiners,
        joined_s={s: began for s in report.joiners if s in joined and (began := _began(joined[s], report, sent))},
    )


def _began(seen: ranks.Seen, report: SequenceReport, sent: float) -> tuple[float, float] | None:
    at = timeline.first_under(seen.steps, report.epoch)
    if at is None:
        return None
    step = seen.steps[at]
    return step.end - step.wait_s - step.launch_s - sent, step.end - sent


def _first_s(seen: ranks.Seen, report: SequenceReport) -> float | None:
    """When the first step under the view of this sequence had ended."""
    at = timeline.first_under(seen.steps, report.epoch)
    return None if at is None else seen.steps[at].end


def _gap(seen: ranks.Seen, report: SequenceReport) -> Gap | None:
    at = timeline.first_under(seen.steps, report.epoch)
    return timeline.gap(seen.steps, seen.works, at) if at else None


def _pause(seen: ranks.Seen, report: SequenceReport, sent: float) -> float | None:
    """To the first step under the new view from the last one before it; after a fault from the last one before the fault: steps
    between, which its own round may still have committed, belong to neither."""
    first = timeline.first_under(seen.steps, report.epoch)
    if not first:
        return None
    last = timeline.last_before(seen.steps, sent) if report.kind == "loss" else first - 1
    return None if last is None else seen.steps[first].end - seen.steps[last].end


def _survivor(before: ranks.Seen, after: ranks.Seen, sent: float, calm: float, over: float) -> Survivor:
    was, now = before.status.counters, after.status.counters
    earlier = timeline.gaps(before.steps, sent - BEFORE_S, sent)
    # from behind the clean-up on
    later = timeline.gaps(after.steps, over + AFTER_S - STEADY_S, over + AFTER_S)
    at = timeline.longest(after.steps, calm, over + AFTER_S)
    longest = None if at is None else timeline.gap(after.steps, after.works, at)
    return Survivor(
        slot=before.member.slot,
        captures=(was.captures, now.captures),
        address_changes=(was.address_changes, now.address_changes),
        step_before_s=median(earlier) if earlier else None,
        step_after_s=median(later) if later else None,
        longest_gap_s=longest.took_s if longest else None,
        longest=msgspec.structs.replace(longest, at=longest.at - sent) if longest else None,
    )


def with_answers(samples: Sequence[Sample], told: Sequence[Told]) -> list[Sample]:
    """Each sample with the answers that were under way from its fault on until it was over."""
    done = []
    for sample in samples:
        until = sample.at + sample.capacity_s + AFTER_S
        mine = [t for t in told if t.ended >= sample.at and t.began <= until]
        wrong = tuple(t.wrong for t in mine if t.wrong)
        done.append(
            msgspec.structs.replace(sample, answers=len(mine), wrong=wrong, tokens_equal=not wrong if mine else None)
        )
    return done
