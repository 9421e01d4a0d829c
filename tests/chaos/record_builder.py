"""Writes run records of a group that never was, for tests of what reads them."""

import random
from pathlib import Path

import msgspec

from chaos import records
from chaos.machine import Machine
from chaos.records import (
    Baseline,
    Fault,
    GroupFacts,
    JournalEntry,
    Ledger,
    LoadFacts,
    PhaseEvent,
    Prompt,
    ReportEvent,
    Request,
    Run,
    ScenarioFacts,
    SequenceState,
    Verdict,
    tokens_hash,
)
from elastic.controller.records import Phase, SequenceReport
from elastic.flight import Boot, StepLine, Stepped
from elastic.view import Member

MACHINE = Machine(cpu="a CPU", cores=2, memory_gb=23.0, kernel="6.1", load=(0.5, 0.4, 0.3))
STEADY = SequenceState(sequence="", step="", epoch=3)
ANSWER = tuple(range(100, 132))
PROMPT = Prompt(id=0, tokens=(1, 2, 3), expected=ANSWER, expected_hash=tokens_hash(ANSWER))
BEGAN = 1000.0


def member(slot: int, incarnation: int = 1) -> Member:
    return Member(slot=slot, incarnation=incarnation, pid=100 + slot, pid_start=1, address=f"slot-{slot}.sock")


def kill(number: int, at: float, slot: int, state: SequenceState = STEADY, whole_s: float = 3.0) -> Fault:
    return Fault(
        id=f"f{number}",
        kind="kill",
        family="process",
        parameters={"slot": slot},
        trigger=f"after {at - BEGAN:.2f} s",
        state=state,
        members=(member(slot),),
        at=at,
        done_at=at + 0.001,
        undo="",
        must_be_replaced=True,
        whole_at=at + whole_s,
    )


def loss(fault: Fault, seconds: float, detect_s: float = 0.002, pause_s: float | None = None) -> SequenceReport:
    began, end = fault.at + detect_s, fault.at + seconds
    part = (end - began) / 4
    phases = tuple(
        Phase(n, began + i * part, began + (i + 1) * part) for i, n in enumerate(("begin", "park", "commit", "resume"))
    )
    slots = tuple(m.slot for m in fault.members)
    return SequenceReport(
        kind="loss",
        outcome="committed",
        reason="a rank is lost",
        slots=slots,
        live=tuple(s for s in range(4) if s not in slots),
        epoch=4,
        began=began,
        ended=end,
        phases=phases,
        pause_s={s: seconds if pause_s is None else pause_s for s in range(4) if s not in slots},
        loaded={},
    )


def request(
    n: int, sent: float, every: float = 0.02, hole: tuple[float, float] | None = None, **changes: object
) -> Request:
    times = []
    at = sent
    for _ in ANSWER:
        at += every
        if hole and hole[0] <= at < hole[1]:
            at = hole[1]
        times.append(at)
    gap = max(b - a for a, b in zip([sent, *times], times, strict=False))
    made = Request(
        n=n,
        id=f"cmpl-{n}",
        prompt=0,
        due_at=sent,
        sent_at=sent,
        tokens=ANSWER,
        times=tuple(times),
        ended_at=times[-1],
        finish="length",
        status=200,
        error="",
        outcome="right",
        expected_hash=PROMPT.expected_hash,
        tokens_hash=PROMPT.expected_hash,
        longest_gap_s=gap,
    )
    return msgspec.structs.replace(made, **changes)


def steps(slot: int, until: float, died: float | None = None, reborn: float | None = None) -> list[StepLine]:
    lines: list[StepLine] = []
    at, incarnation, round_number = BEGAN, 1, 0
    lines.append(Boot(slot=slot, incarnation=1, pid=100 + slot, at=BEGAN - 5, capacity=4, slots_per_rank=8))
    while at < until:
        if died and died <= at < (reborn or until):
            if not reborn:
                break
            at, incarnation = reborn, 2
            lines.append(Boot(slot=slot, incarnation=2, pid=200 + slot, at=died + 1, capacity=4, slots_per_rank=8))
        lines.append(
            Stepped(
                at=at + 0.02,
                began=at,
                incarnation=incarnation,
                round=round_number,
                epoch=3,
                placement_hash="aa",
                table_hash="bb",
                captures=5,
                address_hash="cc",
                committed=True,
                masked=(),
                halted=False,
                rows=2,
            )
        )
        at += 0.02
        round_number += 1
    return lines


def write_run(
    path: Path,
    *,
    faults: tuple[Fault, ...] = (),
    reports: tuple[SequenceReport, ...] = (),
    requests: tuple[Request, ...] | None = None,
    verdict: Verdict = "passed",
    why: str = "",
    steps_of: dict[int, list[StepLine]] | None = None,
    restart_s: tuple[float, ...] = (11.0, 12.0, 13.0),
    seed: int = 7,
    tags: tuple[str, ...] = (),
) -> Path:
    holes = [(r.began, r.ended) for r in reports if r.kind == "loss"]
    if requests is None:
        rng = random.Random(seed)
        made: list[Request] = []
        sent = BEGAN
        while sent < BEGAN + 20:
            sent += rng.expovariate(12)
            hole = next((h for h in holes if sent < h[1] and sent + 0.7 > h[0]), None)
            made.append(request(len(made), sent, hole=hole))
        requests = tuple(made)
    outcomes: dict[records.RequestOutcome, int] = {}
    for each in requests:
        outcomes[each.outcome] = outcomes.get(each.outcome, 0) + 1
    run = Run(
        id=path.name,
        scenario=ScenarioFacts(
            name=path.name, fear="Something breaks.", file=f"{path.name}.yaml", text="kind: Scenario", tags=tags
        ),
        seed=seed,
        command=("healer-chaos", "run", f"{path.name}.yaml", "--seed", str(seed)),
        verdict=verdict,
        why=why,
        began=BEGAN,
        began_wall=1.79e9,
        ended=BEGAN + 22,
        machine=MACHINE,
        load_after=(1.5, 1.0, 0.5),
        versions={"healer": "0.1.0", "python": "3.12.0"},
        group=GroupFacts(
            name="g",
            run_dir="run",
            target="embedded",
            ranks=4,
            max_ranks=4,
            slots_per_rank=8,
            redundant_experts=16,
            experts=16,
            moe_layers=4,
            ep_backend="cpu",
            stall_after_s=1.0,
            fresh=True,
        ),
        load=LoadFacts(rate_per_s=12, prompts=1, max_tokens=32, seed=seed, late_after_s=0),
        ledger=Ledger(
            sent=len(requests),
            outcomes=outcomes,
            late=sum(r.late for r in requests),
            tokens=sum(len(r.tokens) for r in requests),
            tokens_expected=32 * len(requests),
            longest_gap_s=max((r.longest_gap_s for r in requests), default=0.0),
            replayed=2,
        ),
        expectations=(
            records.Expectation(name="tokens", expected="all as without faults", found="all", ok=verdict == "passed"),
        ),
        faults=len(faults),
    )
    baseline = Baseline(
        prompts=(PROMPT,),
        tokens_per_s=384.0,
        longest_gap_s=0.03,
        restart_s=12.0 if restart_s else 0.0,
        restart_samples_s=restart_s,
    )
    records.write(path / records.BASELINE, baseline)
    records.write_lines(path / records.FAULTS, faults)
    records.write_lines(path / records.REQUESTS, requests)
    lines: list[PhaseEvent | ReportEvent] = [ReportEvent(at=r.ended, daemon_pid=9, report=r) for r in reports]
    records.write_lines(path / records.SEQUENCES, lines)
    journal = JournalEntry(seq=1, wall=1.79e9, monotonic=BEGAN, kind="lifecycle", incident="", body={"event": "began"})
    records.write_lines(path / records.DECISIONS, [journal])
    for slot, found in (steps_of or {}).items():
        target = path / records.STEPS / f"slot-{slot}.jsonl"
        target.parent.mkdir(exist_ok=True)
        target.write_bytes(b"".join(msgspec.json.encode(line) + b"\n" for line in found))
    records.write(path / records.RUN, run)
    return path
