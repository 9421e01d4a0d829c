"""Gathers what ranks, executor and journal wrote between two moments into a run record."""

import gzip
import os
import shutil
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import msgspec

from chaos import records
from chaos.records import JournalEntry
from elastic.errors import ElasticError
from healer.journal import exported, open_readonly

PACK_BYTES = 1 << 20
"""Step records above this are kept compressed."""


class Harvest:
    """Of one group, run after run: each takes what was written since the one before."""

    def __init__(self, run_dir: Path, events: Path) -> None:
        self._run_dir, self._events = run_dir, events
        self._events_at = 0
        self._context: dict[str, tuple[bytes, bytes]] = {}
        """By file of steps, the last `Boot` and `Viewed` before the run: they say what the rank was then."""

    def begin(self) -> None:
        """A run begins, and the group stands idle. What was written before is dropped."""
        self._events_at = self._events.stat().st_size if self._events.exists() else 0
        for path in (self._run_dir / records.STEPS).glob("slot-*.jsonl"):
            self._context[path.name] = _last(path, self._context.get(path.name, (b"", b"")))
            # ranks append, so they go on at the new end
            os.truncate(path, 0)

    def gather(self, out: Path, began: float, ended: float) -> list[JournalEntry]:
        """Write steps/, sequences.jsonl, evidence.jsonl and decisions.jsonl. Returns the journal's entries."""
        (out / records.STEPS).mkdir(parents=True, exist_ok=True)
        for path in sorted((self._run_dir / records.STEPS).glob("slot-*.jsonl")):
            _copy(path, out / records.STEPS / path.name, b"".join(self._context.get(path.name, ())))
        with (out / records.SEQUENCES).open("wb") as copy:
            if self._events.exists():
                with self._events.open("rb") as file:
                    file.seek(self._events_at)
                    shutil.copyfileobj(file, copy)
        entries = list(journal(self._run_dir, began, ended))
        seen = [e for e in entries if e.kind in ("evidence", "verdict")]
        records.write_lines(out / records.EVIDENCE, seen)
        records.write_lines(out / records.DECISIONS, [e for e in entries if e.kind not in ("evidence", "verdict")])
        return entries


def journal(run_dir: Path, began: float, ended: float) -> Iterator[JournalEntry]:
    """The entries of this span; none where the journal cannot be read."""
    try:
        connection = open_readonly(run_dir / "journal.db")
    except ElasticError:
        return
    with closing(connection):
        for entry in exported(connection):
            if began <= entry.monotonic <= ended:
                yield msgspec.convert(msgspec.to_builtins(entry), JournalEntry)


def _last(path: Path, found: tuple[bytes, bytes]) -> tuple[bytes, bytes]:
    boot, view = found
    with path.open("rb") as file:
        for line in file:
            if line.startswith(b'{"line":"boot"'):
                boot, view = line, b""
            elif line.startswith(b'{"line":"view"'):
                view = line
    return boot, view


def _copy(source: Path, target: Path, before: bytes) -> None:
    with source.open("rb") as file, target.open("wb") as copy:
        copy.write(before)
        shutil.copyfileobj(file, copy)
    if target.stat().st_size > PACK_BYTES:
        with target.open("rb") as plain, gzip.open(f"{target}.gz", "wb", compresslevel=3) as packed:
            shutil.copyfileobj(plain, packed)
        target.unlink()
