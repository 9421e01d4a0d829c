"""What a chaos run leaves behind: one directory, the *run record*, from which report and checkers work without the group.

========================  =============================  ==============================================================
File                      One line is                    Written by
========================  =============================  ==============================================================
``run.json``              `Run` (the whole file)         the runner, last: a directory without it is a run cut short
``baseline.json``         `Baseline` (the whole file)    the runner, before the first fault
``faults.jsonl``          `Fault`                        the runner, one line for each fault, when the run ends
``requests.jsonl``        `Request`                      the load generator, one line for each request, in order of `n`
``steps/slot-N.jsonl``    `Boot`, `Viewed`, `Stepped`    each rank itself, one file a slot: its incarnations one after
                          or `Emission`                  another (`elastic.rank.recorder`)
``evidence.jsonl``        `JournalEntry`                 the daemon's journal: kinds ``evidence`` and ``verdict``
``decisions.jsonl``       `JournalEntry`                 the same: ``decision``, ``action``, ``lifecycle``, ``outcome``
``sequences.jsonl``       `PhaseEvent`, `ReportEvent`    the daemon's executor, at the moment, one file for all daemons
                          or `DaemonEvent`
``logs/``                 text                           daemon and ranks; only of a run that did not pass
========================  =============================  ==============================================================

Several runs of one command lie side by side under one directory with a ``campaign.json`` (`Campaign`).

Every ``at``, ``began``, ``…_at`` is in seconds of the monotonic clock of the host that ran everything, so that the lines of
all files can be put on one axis; ``Run.began`` and ``Run.began_wall`` are the same moment on both clocks. Durations end in
``_s``. Hashes are hexadecimal blake2b digests of 8 bytes. A file that is large may be there compressed, as
``slot-N.jsonl.gz``; `lines` reads both. A last line without its line end (a process was killed while it wrote) is no line.

``python -m chaos.records`` prints the JSON schema of all of these, which is kept in ``chaos/records.schema.json``.
"""

import gzip
import hashlib
import json
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, Literal, TypeVar

import msgspec

from chaos.machine import Machine
from elastic.controller.records import SequenceReport
from elastic.errors import ElasticError
from elastic.flight import Boot, Emission, Stepped, Viewed
from elastic.view import Member

FORMAT = 1
"""Of `Run.format` and `Campaign.format`; raised when a reader of the old one would be misled."""

RUN, BASELINE, CAMPAIGN = "run.json", "baseline.json", "campaign.json"
FAULTS, REQUESTS, STEPS = "faults.jsonl", "requests.jsonl", "steps"
EVIDENCE, DECISIONS, SEQUENCES = "evidence.jsonl", "decisions.jsonl", "sequences.jsonl"

Verdict = Literal["passed", "failed", "skipped", "error"]
"""passed: all expectations held. failed: one did not. skipped: this machine lacks something that the scenario needs; nothing
was injected. error: the run itself could not be carried out (a group that does not start, an injector that was refused)."""

RequestOutcome = Literal["right", "differs", "lost", "duplicated", "refused", "failed", "cut", "unended"]
"""right: every token as without faults. differs: a token is another one (`Request.differs_at`). lost: it ended as complete with
fewer tokens than asked for, all of them right. duplicated: more tokens than asked for. refused: answered 429 or 503 before the
first token. failed: one explicit error, before or after some tokens, which are right as far as they go. cut: the connection
broke without a word (`Request.error` says how). unended: nothing ended it by the client's deadline. All but ``right`` and, where
a scenario allows them, ``refused``, ``failed`` and ``cut``, break invariant 5."""


class Line(msgspec.Struct, frozen=True, kw_only=True):
    """Base of all; unknown keys are ignored, so that a newer writer does not stop an older reader."""


# --- run.json -----------------------------------------------------------------------------------------------------------


class ScenarioFacts(Line, frozen=True, kw_only=True):
    name: str
    """Unique among the scenarios, such as ``killing-rank-zero-loses-no-token``."""
    fear: str
    """What one would be afraid of: one sentence."""
    file: str
    """Where it was read; ``random`` for one that was drawn."""
    text: str
    """The YAML, as it can be run again by itself; for a random one with all that was drawn."""
    tags: tuple[str, ...] = ()


class GroupFacts(Line, frozen=True, kw_only=True):
    """The group at the beginning of the run."""

    name: str
    run_dir: str
    target: Literal["embedded", "vllm", "sensors"]
    """sensors: no group, the daemon's sensors and diagnosis alone."""
    ranks: int
    """Live ranks that were asked for at its start."""
    max_ranks: int
    slots_per_rank: int
    """Physical expert slots of a rank, per MoE layer."""
    redundant_experts: int
    """Replicas per layer beyond one of each, over the group."""
    experts: int
    """Logical experts per MoE layer."""
    moe_layers: int
    ep_backend: str
    stall_after_s: float
    """`spec.detection.stallAfter`: a rank that stands for less long is no fault."""
    fresh: bool
    """Whether it was started for this run; else it served the run before too."""


class LoadFacts(Line, frozen=True, kw_only=True):
    """Open loop: arrivals are drawn ahead (Poisson) and do not wait for answers."""

    rate_per_s: float
    """Mean arrivals; 0: no load."""
    prompts: int
    """Different prompts, drawn with `seed`."""
    max_tokens: int
    """Asked for in each request."""
    seed: int
    late_after_s: float
    """A first token, or a gap between two, that takes longer makes the request late; 0: nothing counts as late."""


class Ledger(Line, frozen=True, kw_only=True):
    """Totals over `requests.jsonl`."""

    sent: int
    outcomes: dict[RequestOutcome, int]
    """Only those that occur."""
    late: int
    tokens: int
    """Received by all clients."""
    tokens_expected: int
    """Of the requests that ended right, or should have."""
    longest_gap_s: float
    """Of any client, between two tokens of one answer or from sending to the first."""
    replayed: int
    """Requests that the gateway moved to another rank; from its metrics."""


class Expectation(Line, frozen=True, kw_only=True):
    """Something that the scenario asserts, and what was found."""

    name: str
    """Such as ``tokens``, ``live``, ``removals``, ``whole-within``, ``probe:models answers``."""
    expected: str
    found: str
    ok: bool


class ProbeResult(Line, frozen=True, kw_only=True):
    """One look at the deployment; conventions of Litmus: start and end of test, continuous, once on a fault."""

    name: str
    mode: Literal["start", "during", "end"]
    at: float
    ok: bool
    found: str


class Run(Line, frozen=True, kw_only=True):
    format: int = FORMAT
    id: str
    """Name of the directory."""
    scenario: ScenarioFacts
    seed: int
    """Of everything that was drawn in this run: targets, moments, arrivals."""
    command: tuple[str, ...]
    """That repeats it."""
    verdict: Verdict
    why: str
    """One sentence; of a run that passed: empty."""
    began: float
    began_wall: float
    """The same moment, seconds since the epoch."""
    ended: float
    machine: Machine
    load_after: tuple[float, float, float]
    """Load averages at the end; `Machine.load` has those of the beginning."""
    versions: dict[str, str]
    group: GroupFacts | None
    """None where none was started."""
    load: LoadFacts
    ledger: Ledger
    expectations: tuple[Expectation, ...]
    probes: tuple[ProbeResult, ...] = ()
    faults: int
    """Lines of `faults.jsonl` that were injected."""
    minimal: tuple[str, ...] = ()
    """Of a run that failed and was minimised: ids of the faults that are enough to fail, see `Fault.id`."""
    minimal_command: tuple[str, ...] = ()
    """That repeats the failure with those alone."""


class Campaign(Line, frozen=True, kw_only=True):
    """``campaign.json``, beside the directories of its runs."""

    format: int = FORMAT
    command: tuple[str, ...]
    seed: int
    began_wall: float
    ended_wall: float
    machine: Machine
    versions: dict[str, str]
    runs: tuple[str, ...]
    """Names of directories, in the order in which they ran."""
    verdicts: dict[Verdict, int]
    faults: int


# --- baseline.json ------------------------------------------------------------------------------------------------------


class Prompt(Line, frozen=True, kw_only=True):
    id: int
    """From 0; `Request.prompt`."""
    tokens: tuple[int, ...]
    expected: tuple[int, ...]
    """The answer without faults, `LoadFacts.max_tokens` tokens, greedy."""
    expected_hash: str
    """`tokens_hash` of it."""


class Baseline(Line, frozen=True, kw_only=True):
    """The same machine without faults."""

    prompts: tuple[Prompt, ...]
    tokens_per_s: float
    """Of all clients together, under the load of the run, without a fault; 0: not measured."""
    longest_gap_s: float
    """Of any client in that time."""
    restart_s: float = 0.0
    """The alternative to healing, measured here: from SIGKILL of all ranks until a newly formed group gave its first token;
    0: not measured in this run."""
    restart_samples_s: tuple[float, ...] = ()
    """All of them, where there are several; `restart_s` is their median."""


# --- faults.jsonl -------------------------------------------------------------------------------------------------------


class SequenceState(Line, frozen=True, kw_only=True):
    """What the executor was going through."""

    sequence: str
    """form, loss, join, retire; empty: none."""
    step: str
    """A state of `elastic.controller.phases.Step`; empty: none."""
    epoch: int
    """0: not known."""


class Fault(Line, frozen=True, kw_only=True):
    """One fault that was due, in the order of injection."""

    id: str
    """``f1``, ``f2``, … in the order of the scenario's list; a fault that repeats: ``f1.2``."""
    kind: str
    """Name of the injector, such as ``kill``."""
    family: str
    """process, resources, rank, nvml, kernel-log, exchange, network, disk, clock, daemon, checkpoint."""
    parameters: dict[str, Any]
    """As written or drawn: slot, duration_s, value, …"""
    trigger: str
    """What brought it about, in words: ``after 2.00 s``, ``at request 40``, ``when join reaches load``."""
    state: SequenceState
    """Of the moment of injection. Exact where the trigger is a state: the daemon waits there until the fault is injected.
    Otherwise as the executor last said."""
    members: tuple[Member, ...]
    """The ranks that it was done to: slot, incarnation, process."""
    daemon_pid: int = 0
    """The daemon that it was done to; 0: none."""
    at: float
    """Right before it was done; 0: never."""
    done_at: float
    """When the injector had seen its effect; 0: never."""
    undo: str
    """What takes it back; empty: nothing can or need."""
    undone_at: float = 0.0
    """When that was done; 0: never, or not yet at the end of the run."""
    must_be_replaced: bool
    """Whether the members may be removed by healing. A removal of anybody else breaks invariant 9."""
    whole_at: float = 0.0
    """When the runner saw every slot of the target live, no sequence running and nobody of `members` who must be replaced
    alive; one fault after the other share it. 0: it never did, or did not wait."""
    refused: str = ""
    """Why it was not done; empty: it was."""


# --- requests.jsonl -----------------------------------------------------------------------------------------------------


class Request(Line, frozen=True, kw_only=True):
    n: int
    """From 0, by `due_at`."""
    id: str
    """The gateway's own, ``cmpl-…``, as in `Emission`; empty: it was never accepted."""
    prompt: int
    """`Prompt.id`."""
    due_at: float
    """When the plan of arrivals wanted it sent."""
    sent_at: float
    tokens: tuple[int, ...]
    times: tuple[float, ...]
    """When each of `tokens` came; those of one chunk have the same time."""
    ended_at: float
    finish: str
    """The gateway's ``finish_reason``; empty: none came."""
    status: int
    """Of HTTP; 0: no answer at all."""
    error: str
    """In the gateway's words, or the client's where the connection broke; empty: none."""
    outcome: RequestOutcome
    expected_hash: str
    tokens_hash: str
    differs_at: int = -1
    """Index of the first token that is not as expected; -1: none, as far as they came."""
    late: bool = False
    longest_gap_s: float


# --- steps/slot-N.jsonl: `Boot`, `Viewed`, `Stepped`, `Emission`, defined where ranks can import them: elastic/flight.py -----


# --- evidence.jsonl, decisions.jsonl: the journal -----------------------------------------------------------------------


class JournalEntry(Line, frozen=True, kw_only=True):
    """As `healer export` prints it. `body` by kind: evidence: `healer.evidence.Evidence`. verdict: ``verdict``
    (`healer.diagnosis.Verdict`) and ``entries``, the `seq` of its evidence. decision: `healer.policy.records.Decision`.
    action: what was about to be done (``step``, ``slots``, …). lifecycle: ``event`` and its fields. outcome: ``report``
    (as in `ReportEvent`) or ``refused``."""

    seq: int
    """Grows by one; a gap is a lost entry, except where `Run.began` cuts."""
    wall: float
    monotonic: float
    """When it was written; a verdict's and an evidence's own moment is in the body."""
    kind: str
    incident: str
    """Empty: part of none."""
    body: dict[str, Any]


# --- sequences.jsonl: the executor --------------------------------------------------------------------------------------


class PhaseEvent(Line, frozen=True, kw_only=True, tag_field="line", tag="phase"):
    """A sequence goes on to its next state. Written before anything of that state is done."""

    at: float
    daemon_pid: int
    kind: str
    """form, loss, join, retire."""
    phase: str
    """A state of `elastic.controller.phases.Step`."""
    epoch: int
    slots: tuple[int, ...]
    """Lost, joining or leaving."""


class ReportEvent(Line, frozen=True, kw_only=True, tag_field="line", tag="report"):
    """A sequence has ended."""

    at: float
    daemon_pid: int
    report: SequenceReport


class DaemonEvent(Line, frozen=True, kw_only=True, tag_field="line", tag="daemon"):
    """A daemon began, adopted a group, or saw something of it."""

    at: float
    daemon_pid: int
    what: Literal["began", "rank-gone", "boot-failed", "fenced"]
    slot: int = -1
    incarnation: int = -1
    text: str = ""


SequenceLine = PhaseEvent | ReportEvent | DaemonEvent

SCHEMA_OF: tuple[Any, ...] = (
    Run,
    Campaign,
    Baseline,
    Fault,
    Request,
    Boot,
    Viewed,
    Stepped,
    Emission,
    JournalEntry,
    PhaseEvent,
    ReportEvent,
    DaemonEvent,
)

T = TypeVar("T")


def tokens_hash(tokens: Iterable[int]) -> str:
    """Of an answer: 16 hexadecimal digits, equal only for the same tokens in the same order."""
    text = b"".join(token.to_bytes(8, "little", signed=True) for token in tokens)
    return hashlib.blake2b(text, digest_size=8).hexdigest()


def write(path: Path, record: Line) -> None:
    """A whole file, readable for people too."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(msgspec.json.format(msgspec.json.encode(record)) + b"\n")


def write_lines(path: Path, records: Iterable[Line]) -> int:
    """How many there were."""
    path.parent.mkdir(parents=True, exist_ok=True)
    count = 0
    with path.open("wb") as file:
        for record in records:
            file.write(msgspec.json.encode(record) + b"\n")
            count += 1
    return count


def read(path: Path, kind: type[T]) -> T:
    """A whole file. Raises ElasticError naming it."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=kind)
    except FileNotFoundError:
        raise ElasticError(f"{path}: no such file, expected a {kind.__name__} of a run record") from None
    except (OSError, msgspec.MsgspecError) as error:
        raise ElasticError(f"{path}: {error}, expected a {kind.__name__} of a run record") from None


def lines(path: Path, kind: Any) -> Iterator[Any]:
    """Each line as `kind`, such as ``Fault`` or ``StepLine``; none where the file is absent. Reads ``<path>.gz`` where only that
    is there. Raises ElasticError naming file and line."""
    decoder: msgspec.json.Decoder[Any] = msgspec.json.Decoder(kind)
    packed = path.with_name(path.name + ".gz")
    if not path.exists() and not packed.exists():
        return
    with path.open("rb") if path.exists() else gzip.open(packed, "rb") as file:
        for number, text in enumerate(file, 1):
            if not text.endswith(b"\n"):
                return
            try:
                yield decoder.decode(text)
            except msgspec.MsgspecError as error:
                raise ElasticError(f"{path}:{number}: {error}") from None


def step_files(run: Path) -> dict[int, Path]:
    """Of the ranks, by slot; give each to `lines` with `elastic.flight.StepLine`."""
    found = {}
    for path in (run / STEPS).glob("slot-*.jsonl*"):
        slot = path.name.removeprefix("slot-").partition(".")[0]
        if slot.isdigit():
            found[int(slot)] = path.with_name(f"slot-{slot}.jsonl")
    return dict(sorted(found.items()))


def schema() -> dict[str, Any]:
    """JSON schema (2020-12) of every record, by name."""
    _, components = msgspec.json.schema_components(SCHEMA_OF, ref_template="#/$defs/{name}")
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "Run record of a chaos run",
        "description": "Made by `python -m chaos.records`; the meaning of each field is in chaos/records.py.",
        "$defs": dict(sorted(components.items())),
    }


if __name__ == "__main__":
    json.dump(schema(), sys.stdout, indent=1)
    sys.stdout.write("\n")
