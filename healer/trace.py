"""Traces: what the sensors said, as JSON lines, so that a case can be judged again.

The first line is a header: version, limits of the diagnosis, and the view at the beginning. Then, in the order in which the
daemon saw it, a line for each piece of evidence and for each change of the view (who is live, which rank is on which GPU).
Times are monotonic seconds of one host. A recorder starts a new file when one is full; each begins with the view and with
what stood then, so each can be read by itself.
"""

import math
import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TextIO, TypeVar

import msgspec

from elastic.errors import ElasticError
from healer import __version__
from healer.diagnosis import Hardware, Limits
from healer.evidence import Evidence, GpuRef, HostRef, RankRef, wrong_value

T = TypeVar("T")

TRACE_VERSION = 1
MAX_BYTES = 16 << 20
"""Of one file; with its predecessor twice as much."""
MAX_SLOTS = 1_000_000
LATEST_WALL = 32_503_680_000.0
"""The year 3000, in seconds since the epoch: calendars end somewhere after it."""
LARGEST_S = 1e10
"""Of a monotonic clock: 300 years."""
BACK_S = 1.0
"""Evidence carries the time of its source, which may be read a little after the line that is written next."""


class TraceError(ElasticError):
    """A trace that cannot be read; the message names file and line."""


class Placed(msgspec.Struct, frozen=True):
    rank: RankRef
    gpu: GpuRef


class ViewLine(msgspec.Struct, frozen=True, kw_only=True, tag_field="line", tag="view", forbid_unknown_fields=True):
    """Who is live from here on, and on what."""

    at: float
    live: tuple[RankRef, ...]
    gpus: tuple[GpuRef, ...] = ()
    """All that the driver lists."""
    placed: tuple[Placed, ...] = ()
    host: HostRef | None = None
    driver: str = ""
    """Version of the GPU driver, which the meaning of some XIDs depends on; empty: not known."""
    generation: str = ""
    """Of the GPUs, as the XID catalogue names it; empty: not known."""


class Header(msgspec.Struct, frozen=True, kw_only=True, tag_field="line", tag="header", forbid_unknown_fields=True):
    version: int
    healer: str
    """The version that wrote it."""
    limits: Limits
    view: ViewLine
    note: str = ""
    """What it shows, where a human has said so."""


class EvidenceLine(
    msgspec.Struct, frozen=True, kw_only=True, tag_field="line", tag="evidence", forbid_unknown_fields=True
):
    evidence: Evidence


class LoadLine(msgspec.Struct, frozen=True, kw_only=True, tag_field="line", tag="load", forbid_unknown_fields=True):
    """The load of the group at one moment, as the signals of the policy that was in force."""

    at: float
    wall: float
    """Seconds since the epoch, for schedules."""
    values: dict[str, float]
    """By signal, over the whole group."""
    idle: tuple[str, ...] = ()
    """Signals with nothing to measure; what is in neither is missing."""


Line = ViewLine | EvidenceLine
AnyLine = Line | LoadLine

_header = msgspec.json.Decoder(Header)
_line = msgspec.json.Decoder(AnyLine)


def at_of(line: Line) -> float:
    """When it happened, monotonic seconds."""
    return line.at if isinstance(line, ViewLine) else line.evidence.at


class Trace:
    """A trace in a file. Iterate over its lines; they are read as they are needed."""

    def __init__(self, path: Path) -> None:
        """Reads the header. Raises TraceError."""
        self.path = path
        self.cut = ""
        """Once all lines were read: which one was cut off and did not count; empty: none was."""
        try:
            if path.exists() and not path.is_file() and not path.is_dir():
                # a pipe would be waited for, and a device has no end
                raise TraceError(f"{path}: is no regular file, expected a trace")
            with path.open("rb") as file:
                first = file.readline()
        except OSError as error:
            raise TraceError(f"{path}: cannot be read: {error.strerror}") from error
        if not first.strip():
            raise TraceError(f"{path}:1: the file is empty, expected the header of a trace")
        self.header = self._decode(_header, first, 1, "the header of a trace")
        if self.header.version != TRACE_VERSION:
            raise TraceError(f"{path}:1: version {self.header.version} is not known, expected {TRACE_VERSION}")
        if wrong := _wrong(self.header.view):
            raise TraceError(f"{path}:1: {wrong}")

    def __iter__(self) -> Iterator[Line]:
        """All that is to be judged. Raises TraceError as `lines`."""
        return (line for line in self.lines() if not isinstance(line, LoadLine))

    def lines(self) -> Iterator[AnyLine]:
        """Raises TraceError at a line that is none, or that cannot follow those before it. A last line that was cut off, as
        by a crash of the daemon, ends the trace; `cut` then names it."""
        self.cut = ""
        order = _Order(self.header.view.at)
        with self.path.open("rb") as file:
            for number, text in enumerate(file, 1):
                if number == 1 or not text.strip():
                    continue
                try:
                    line = self._decode(
                        _line, text, number, 'a line of evidence, or of a view, such as {"line": "view", …}'
                    )
                except TraceError:
                    if text.endswith(b"\n"):
                        raise
                    self.cut = f"{self.path}:{number}: the last line was cut off and does not count"
                    return
                if wrong := _wrong(line) or order.wrong(line, number):
                    raise TraceError(f"{self.path}:{number}: {wrong}")
                yield line

    def _decode(self, decoder: "msgspec.json.Decoder[T]", text: bytes, number: int, expected: str) -> T:
        try:
            return decoder.decode(text)
        except (msgspec.MsgspecError, UnicodeDecodeError) as error:
            raise TraceError(f"{self.path}:{number}: {error}, expected {expected}") from None


class _Order:
    """Whether each line may follow those before it. What was seen may be told late, so evidence may be older than the line
    before it; views and load are written at their own time, which does not go back."""

    def __init__(self, began: float) -> None:
        self._newest, self._newest_line = began, 1

    def wrong(self, line: AnyLine, number: int) -> str:
        """What is wrong with the time; empty: nothing."""
        at = line.evidence.at if isinstance(line, EvidenceLine) else line.at
        if not isinstance(line, EvidenceLine) and at < self._newest - BACK_S:
            return (
                f"is at {at:g} s, before line {self._newest_line} at {self._newest:g} s, expected a time not before it"
            )
        if at > self._newest:
            self._newest, self._newest_line = at, number
        return ""


def _wrong(line: AnyLine) -> str:
    """What is wrong with the values of one line; empty: nothing."""
    if isinstance(line, EvidenceLine):
        found = line.evidence
        ranks = tuple(one for one in (found.subject, found.reporter) if isinstance(one, RankRef))
        return wrong_value(found.what, found.value) or _wrong_times(found.at, found.wall) or _wrong_ranks(ranks)
    if isinstance(line, LoadLine):
        endless = next((name for name, value in line.values.items() if not math.isfinite(value)), "")
        both = sorted(line.values.keys() & {*line.idle})
        if endless:
            return f"{endless} is {line.values[endless]}, expected a number"
        if both:
            return f"{both[0]} has a value and is idle, expected one of the two"
        return _wrong_times(line.at, line.wall)
    placed = tuple(one.rank for one in line.placed)
    return _wrong_times(line.at, 0.0) or _wrong_ranks(line.live, once=True) or _wrong_ranks(placed, once=True)


def _wrong_times(at: float, wall: float) -> str:
    if not 0.0 <= at <= LARGEST_S:
        return f"is at {at:g} s, expected seconds from 0 to {LARGEST_S:g}"
    if not 0.0 <= wall <= LATEST_WALL:
        return f"has the wall clock {wall:g}, expected seconds since 1970, up to the year 3000"
    return ""


def _wrong_ranks(ranks: Iterable[RankRef], *, once: bool = False) -> str:
    seen: set[int] = set()
    for rank in ranks:
        if not 0 <= rank.slot < MAX_SLOTS or rank.incarnation < 0:
            return f"names slot {rank.slot}, incarnation {rank.incarnation}, expected numbers from 0, slots below {MAX_SLOTS}"
        if once and rank.slot in seen:
            return f"names slot {rank.slot} twice, expected each once"
        seen.add(rank.slot)
    return ""


def view_line(
    at: float, live: Iterable[RankRef], hardware: Hardware, *, driver: str = "", generation: str = ""
) -> ViewLine:
    live = tuple(sorted(live))
    return ViewLine(
        at=at,
        live=live,
        gpus=hardware.gpus,
        placed=tuple(Placed(rank, hardware.placed[rank]) for rank in live if rank in hardware.placed),
        host=hardware.host,
        driver=driver,
        generation=generation,
    )


class Recorder:
    """Writes a trace. A place that cannot be written ends the recording, never the daemon: `error` says why."""

    def __init__(self, path: Path, limits: Limits, max_bytes: int = MAX_BYTES) -> None:
        """Opens nothing yet: the first view does."""
        self.error = ""
        self._path, self._limits, self._max_bytes = path, limits, max_bytes
        self._file: TextIO | None = None
        self._written = 0
        self._view: ViewLine | None = None

    def view(self, view: ViewLine) -> None:
        """The first, and each change."""
        if self._view is not None and msgspec.structs.replace(view, at=self._view.at) == self._view:
            return
        self._view = view
        if self._file is None:
            self._begin(())
        else:
            self._write(view)

    @property
    def full(self) -> bool:
        """The next evidence begins a new file."""
        return self._file is not None and self._written > self._max_bytes

    def evidence(self, found: Iterable[Evidence], standing: Iterable[Evidence]) -> None:
        """New evidence; `standing`: what counted before it, for the beginning of a new file. Nothing is written before the
        first view."""
        if self.full:
            self._begin(standing)
        if self._file is None:
            return
        for one in found:
            self._write(EvidenceLine(evidence=one))
        self.flush()

    def load(self, line: LoadLine) -> None:
        if self._file is not None:
            self._write(line)

    def flush(self) -> None:
        if self._file is not None:
            try:
                self._file.flush()
            except OSError as error:
                self._give_up(error)

    def close(self) -> None:
        self.flush()
        if self._file is not None:
            self._file.close()
            self._file = None

    def _begin(self, standing: Iterable[Evidence]) -> None:
        """A new file; the former one becomes `<name>.1`."""
        if self.error or self._view is None:
            return
        try:
            if self._file is not None:
                self._file.close()
            if self._path.exists():
                os.replace(self._path, f"{self._path}.1")
            self._file, self._written = self._path.open("w"), 0
        except OSError as error:
            self._give_up(error)
            return
        self._write(Header(version=TRACE_VERSION, healer=__version__, limits=self._limits, view=self._view))
        for one in sorted(standing, key=lambda e: e.at):
            self._write(EvidenceLine(evidence=one))

    def _write(self, line: Header | AnyLine) -> None:
        if self._file is None:
            return
        text = msgspec.json.encode(line).decode()
        try:
            self._file.write(text + "\n")
        except OSError as error:
            self._give_up(error)
        self._written += len(text) + 1

    def _give_up(self, error: OSError) -> None:
        self.error = f"{self._path}: cannot be written: {error.strerror}"
        self._file = None
