"""The journal: an append-only record of evidence, verdicts, decisions, actions and outcomes, in SQLite.

Intent before effect: what led to an action, and the action, are flushed before it is handed over. That flush is one
prepared statement in one transaction without a wait for the disk: from then on the death of the daemon loses nothing.
`harden` and `checkpoint`, which do wait, run in a thread, off the hot path.

A journal that cannot be written never stops healing: entries stay in memory, in order, and are written with the next flush
that can. Where there is no file to write to (it cannot be opened, was removed, is damaged) a stand-in in memory takes its
place until `reopen` has found or made one.
"""

import contextlib
import os
import sqlite3
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from enum import StrEnum
from pathlib import Path
from typing import Any

import msgspec

from elastic.errors import ElasticError
from healer.clock import Clock
from healer.journal_file import BUSY_S, Opened, identity, is_damage, move_letters_and_answers, open_file, stand_in
from healer.retention import Retention, prune

MAX_PENDING = 10_000
_INSERT = "INSERT INTO entries (seq, wall, monotonic, kind, incident, body) VALUES (?, ?, ?, ?, ?, ?)"
_COLUMNS = "seq, wall, monotonic, kind, incident, body"


class Kind(StrEnum):
    EVIDENCE = "evidence"
    VERDICT = "verdict"
    DECISION = "decision"
    ACTION = "action"
    OUTCOME = "outcome"
    LIFECYCLE = "lifecycle"


class Entry(msgspec.Struct, frozen=True):
    seq: int
    wall: float
    monotonic: float
    """Of the host; comparable within one boot only."""
    kind: Kind
    incident: str
    """Empty: part of none."""
    body: dict[str, Any]


class Answer(msgspec.Struct, frozen=True):
    """To a control call."""

    digest: str
    """Of the call: the same id with another call is a mistake of the caller."""
    status: int
    text: str


class Journal:
    """Written from one thread. `open` it; close it."""

    def __init__(self, opened: Opened, path: Path, clock: Clock) -> None:
        self.path = path
        self.set_aside = opened.set_aside
        """Where a damaged predecessor was moved, or None."""
        self.error = ""
        """Why the last flush failed; empty when it did not."""
        self.dropped = 0
        """Entries that were given up, since too many waited."""
        self.may_write: Callable[[], bool] = lambda: True
        """False: another daemon writes here now; `flush` keeps what it has."""
        self._clock = clock
        self._pending: deque[tuple[int, float, float, str, str, str]] = deque()
        self._found: Opened | None = None
        """By `reopen`, for the next flush."""
        self._damaged = False
        self._use(opened)
        self._next = self._newest() + 1

    @classmethod
    def open(cls, path: Path, clock: Clock) -> "Journal":
        """Open or create. A damaged file is set aside, whole, as `<name>.corrupt-<time>`, and a fresh one begun. Where the
        disk is at fault the journal begins without its file: `error` says why. Raises ElasticError where a newer version
        wrote the file or the place is no file."""
        try:
            return cls(open_file(path, clock.wall()), path, clock)
        except sqlite3.OperationalError as error:
            journal = cls(stand_in(path), path, clock)
            journal.error = f"it cannot be opened: {error}"
            return journal

    @property
    def connection(self) -> sqlite3.Connection:
        """Of the file, or of the stand-in: to be asked for anew for each use."""
        return self._connection

    def add(self, kind: Kind, body: msgspec.Struct | dict[str, Any], incident: str = "") -> int:
        """Append in memory; `flush` writes. Returns the entry's sequence number, which is final."""
        seq = self._next
        self._next += 1
        text = msgspec.json.encode(body).decode()
        self._pending.append((seq, self._clock.wall(), self._clock.monotonic(), kind, incident, text))
        if len(self._pending) > MAX_PENDING:
            self._pending.popleft()
            self.dropped += 1
        return seq

    def flush(self) -> bool:
        """Write what was added, in one transaction. False: it could not be; `error` says why, and nothing is lost yet."""
        if self._found is not None:
            self._take(self._found)
        if not self._pending:
            return True
        if not self.may_write():
            self.error = "another daemon writes it"
            return False
        if self._file is None:
            return False
        try:
            self._connection.execute("BEGIN IMMEDIATE")
            self._connection.executemany(_INSERT, self._pending)
            self._connection.execute("COMMIT")
        except sqlite3.Error as error:
            with contextlib.suppress(sqlite3.Error):
                self._connection.execute("ROLLBACK")
            self.error = str(error)
            if isinstance(error, sqlite3.IntegrityError):
                self._renumber()
            self._damaged |= is_damage(error)
            return False
        self._written += len(self._pending)
        self._pending.clear()
        self.error = ""
        return True

    def _renumber(self) -> None:
        """A daemon that lost its lease wrote after this one had begun: these entries move behind, and the next flush works."""
        with contextlib.suppress(sqlite3.Error):
            by = max(0, self._newest() + 1 - self._pending[0][0])
            self._pending = deque((entry[0] + by, *entry[1:]) for entry in self._pending)
            self._next += by

    # --- without a file -------------------------------------------------------------------------------------------

    def lost_its_file(self) -> bool:
        """Whether there is no file to write to, or it or its log is not the one that was opened. One look at the names."""
        return self._file is None or self._damaged or identity(self.path) != self._file

    def let_go(self) -> None:
        """Of a file that is lost; a stand-in takes its place. Closed before another file of this name is opened: SQLite
        would remove the log of that one."""
        if self._file is not None:
            self.error = "the file is damaged" if self._damaged else "the file or its log is gone"
            self._connection.close()
            self._use(stand_in())

    def reopen(self) -> None:
        """Find the file, or make one; the next flush writes into it. Waits for the disk: for a thread of its own, after
        `let_go`."""
        try:
            self._found = open_file(self.path, self._clock.wall(), damaged=self._damaged)
        except (ElasticError, sqlite3.Error) as error:
            self.error = f"it cannot be opened: {error}"

    def _take(self, found: Opened) -> None:
        self._found, self._damaged = None, False
        with contextlib.suppress(sqlite3.Error):
            move_letters_and_answers(self._connection, found.connection)
        self._connection.close()
        self.set_aside = found.set_aside or self.set_aside
        self._use(found)
        if self._pending:
            self._renumber()
        self._next = max(self._next, self._newest() + 1)
        self.error = ""

    def _use(self, opened: Opened) -> None:
        self._connection, self._file = opened.connection, opened.file
        self._written = int(self._connection.execute("SELECT count(*) FROM entries").fetchone()[0])

    def _newest(self) -> int:
        return int(self._connection.execute("SELECT coalesce(max(seq), 0) FROM entries").fetchone()[0])

    def checkpoint(self) -> None:
        """Fold the write-ahead log into the file; waits for the disk. For a thread of its own: it uses its own connection
        and does not hold up `flush`."""
        with (
            contextlib.suppress(sqlite3.Error),
            contextlib.closing(sqlite3.connect(self.path, timeout=BUSY_S)) as other,
        ):
            other.execute("PRAGMA wal_checkpoint(PASSIVE)").fetchall()

    def harden(self) -> None:
        """Have the disk keep what was flushed, as far as it can be told: against a loss of power, since a process's death
        loses nothing. Waits for the disk; for a thread of its own, after the survivors have been released."""
        with contextlib.suppress(OSError):
            fd = os.open(f"{self.path}-wal", os.O_RDONLY)
            try:
                os.fdatasync(fd)
            finally:
                os.close(fd)

    def prune(self, retention: Retention, open_incident: str) -> bool:
        """Forget one batch of what is too old. True: there may be more of it."""
        if not self.may_write() or self._file is None:
            return False
        try:
            deleted = prune(self._connection, retention, open_incident)
        except sqlite3.Error as error:
            self.error = str(error)
            return False
        self._written -= deleted
        return deleted > 0

    def answered(self, request: str) -> Answer | None:
        """What was answered to a control call of this id; None: it is new. Raises ElasticError."""
        query = "SELECT digest, status, answer FROM requests WHERE id = ?"
        with self._readable():
            row = self._connection.execute(query, (request,)).fetchone()
        return Answer(*row) if row else None

    def answer(self, request: str, answer: Answer) -> None:
        """Remember it. The first answer to an id stays."""
        with contextlib.suppress(sqlite3.Error):
            row = (request, answer.digest, answer.status, answer.text)
            self._connection.execute(
                "INSERT OR IGNORE INTO requests (id, digest, status, answer) VALUES (?, ?, ?, ?)", row
            )

    @property
    def entries(self) -> int:
        return self._written + len(self._pending)

    @property
    def waiting(self) -> int:
        """Entries that are not written yet."""
        return len(self._pending)

    @property
    def wal_bytes(self) -> int:
        try:
            return Path(f"{self.path}-wal").stat().st_size
        except OSError:
            return 0

    def recent(self, kind: Kind, limit: int) -> list[Entry]:
        """The newest entries of a kind, newest first. Raises ElasticError, as the others that read."""
        with self._readable():
            return recent(self._connection, kind, limit)

    def incidents(self, limit: int) -> list[Entry]:
        """All entries of the newest `limit` incidents, by sequence."""
        with self._readable():
            return incident_entries(self._connection, limit)

    def timeline(self, incident: str) -> list[Entry]:
        """The entries of one incident and the evidence that its verdicts name, by sequence; empty for an unknown one."""
        with self._readable():
            return timeline(self._connection, incident)

    @contextlib.contextmanager
    def _readable(self) -> Iterator[None]:
        try:
            yield
        except sqlite3.Error as error:
            self._damaged |= is_damage(error)
            raise ElasticError(f"{self.path}: the journal cannot be read: {error}") from error

    def close(self) -> int:
        """Returns the entries that could not be written, and are lost."""
        self.flush()
        self._connection.close()
        return len(self._pending)


def open_readonly(path: Path) -> sqlite3.Connection:
    """For reading a journal while no daemon runs. Raises ElasticError."""
    if not path.exists():
        raise ElasticError(f"{path}: no journal; has `healer run` been started with this run directory?")
    try:
        connection = sqlite3.connect(f"file:{path}?mode=ro", uri=True, timeout=BUSY_S)
        connection.execute("SELECT count(*) FROM entries").fetchone()
    except sqlite3.Error as error:
        raise ElasticError(f"{path}: the journal cannot be read: {error}") from error
    return connection


def exported(connection: sqlite3.Connection, incident: str = "") -> Iterator[Entry]:
    """All entries by sequence, or those of one incident and the evidence that its verdicts name. Read as they are asked
    for: a journal need not fit into memory."""
    if incident:
        yield from timeline(connection, incident)
        return
    for row in connection.execute(f"SELECT {_COLUMNS} FROM entries ORDER BY seq"):
        yield from _entries([row])


def recent(connection: sqlite3.Connection, kind: Kind, limit: int) -> list[Entry]:
    query = f"SELECT {_COLUMNS} FROM entries WHERE kind = ? ORDER BY seq DESC LIMIT ?"
    return _entries(connection.execute(query, (kind, limit)))


def incident_entries(connection: sqlite3.Connection, limit: int) -> list[Entry]:
    query = (
        f"SELECT {_COLUMNS} FROM entries WHERE incident IN (SELECT incident FROM entries WHERE incident != '' "
        "GROUP BY incident ORDER BY min(seq) DESC LIMIT ?) ORDER BY seq"
    )
    return _entries(connection.execute(query, (limit,)))


def timeline(connection: sqlite3.Connection, incident: str) -> list[Entry]:
    if not incident:
        return []
    own = _entries(connection.execute(f"SELECT {_COLUMNS} FROM entries WHERE incident = ? ORDER BY seq", (incident,)))
    named = {int(seq) for entry in own if entry.kind == Kind.VERDICT for seq in entry.body.get("entries", ())}
    earlier = sorted(named - {entry.seq for entry in own})
    found: list[Entry] = []
    for seq in earlier:
        found += _entries(connection.execute(f"SELECT {_COLUMNS} FROM entries WHERE seq = ?", (seq,)))
    return sorted(found + own, key=lambda entry: entry.seq)


def _entries(rows: Iterable[tuple[Any, ...]]) -> list[Entry]:
    return [
        Entry(seq, wall, monotonic, Kind(kind), incident, msgspec.json.decode(body))
        for seq, wall, monotonic, kind, incident, body in rows
    ]
