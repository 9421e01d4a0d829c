"""The journal: an append-only record of evidence, verdicts, decisions, actions and outcomes, in SQLite.

Intent before effect: what led to an action, and the action, are flushed before it is handed over. That flush is one
prepared statement in one transaction without a wait for the disk: from then on the death of the daemon loses nothing.
`harden` and `checkpoint`, which do wait, run in a thread, off the hot path.

A journal that cannot be written never stops healing: entries stay in memory, in order, and are written with the next flush.
"""

import contextlib
import os
import sqlite3
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from enum import StrEnum
from pathlib import Path
from typing import Any

import msgspec

from elastic.errors import ElasticError
from healer.clock import Clock
from healer.retention import Retention, prune

SCHEMA_VERSION = 2
MAX_PENDING = 10_000
BUSY_S = 0.02
"""Nobody but a daemon writes; whoever else locks the file must not hold up a healing."""

_SCHEMA = """
CREATE TABLE entries (
    seq INTEGER PRIMARY KEY,
    wall REAL NOT NULL,
    monotonic REAL NOT NULL,
    kind TEXT NOT NULL,
    incident TEXT NOT NULL,
    body TEXT NOT NULL
) STRICT;
CREATE INDEX by_incident ON entries (incident, seq) WHERE incident != '';
CREATE INDEX by_kind ON entries (kind, seq);
"""
_SINCE_2 = """
CREATE INDEX loose ON entries (seq) WHERE incident = '';
CREATE TABLE requests (id TEXT NOT NULL UNIQUE, digest TEXT NOT NULL, status INTEGER NOT NULL, answer TEXT NOT NULL) STRICT;
CREATE TABLE outbox (
    id INTEGER PRIMARY KEY,
    wall REAL NOT NULL,
    receiver TEXT NOT NULL,
    notice TEXT NOT NULL,
    state TEXT NOT NULL,
    attempts INTEGER NOT NULL,
    due_wall REAL NOT NULL,
    error TEXT NOT NULL
) STRICT;
CREATE INDEX waiting ON outbox (receiver, id) WHERE state = 'waiting';
"""
# what version 1 wrote about ranks alone, in the form that tells of ranks, GPUs and hosts
_BODIES_2 = """
UPDATE entries SET body = json_set(json_remove(body, '$.verdict.rank'), '$.verdict.subject',
    json_set(json_extract(body, '$.verdict.rank'), '$.kind', 'rank'))
    WHERE kind = 'verdict' AND json_extract(body, '$.verdict.rank') IS NOT NULL;
UPDATE entries SET body = json_set(body, '$.subject.kind', 'rank')
    WHERE kind = 'evidence' AND json_extract(body, '$.subject.kind') IS NULL;
"""
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

    def __init__(self, connection: sqlite3.Connection, path: Path, clock: Clock, set_aside: Path | None) -> None:
        self.path = path
        self.set_aside = set_aside
        """Where a damaged predecessor was moved, or None."""
        self.error = ""
        """Why the last flush failed; empty when it did not."""
        self.errors = 0
        self.dropped = 0
        self.may_write: Callable[[], bool] = lambda: True
        """False: another daemon writes here now; `flush` keeps what it has."""
        self._connection, self._clock = connection, clock
        self._pending: deque[tuple[int, float, float, str, str, str]] = deque()
        row = connection.execute("SELECT coalesce(max(seq), 0), count(*) FROM entries").fetchone()
        self._next, self._written = int(row[0]) + 1, int(row[1])

    @classmethod
    def open(cls, path: Path, clock: Clock) -> "Journal":
        """Open or create. A damaged file is set aside, whole, as `<name>.corrupt-<time>`, and a fresh one begun. Raises
        ElasticError where the place cannot be written or a newer version wrote the file."""
        set_aside: Path | None = None
        try:
            connection = _connect(path)
        except sqlite3.DatabaseError as error:
            if isinstance(error, sqlite3.OperationalError) or not path.exists():
                raise ElasticError(f"{path}: the journal cannot be opened: {error}") from error
            set_aside = _set_aside(path, clock.wall())
            connection = _connect(path)
        return cls(connection, path, clock, set_aside)

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
        if not self._pending:
            return True
        if not self.may_write():
            self.error = "another daemon writes it"
            return False
        try:
            self._connection.execute("BEGIN IMMEDIATE")
            self._connection.executemany(_INSERT, self._pending)
            self._connection.execute("COMMIT")
        except sqlite3.Error as error:
            with contextlib.suppress(sqlite3.Error):
                self._connection.execute("ROLLBACK")
            self.error = str(error)
            self.errors += 1
            if isinstance(error, sqlite3.IntegrityError):
                self._renumber()
            return False
        self._written += len(self._pending)
        self._pending.clear()
        self.error = ""
        return True

    def _renumber(self) -> None:
        """A daemon that lost its lease wrote after this one had begun: these entries move behind, and the next flush works."""
        with contextlib.suppress(sqlite3.Error):
            (newest,) = self._connection.execute("SELECT max(seq) FROM entries").fetchone()
            by = max(0, int(newest) + 1 - self._pending[0][0])
            self._pending = deque((entry[0] + by, *entry[1:]) for entry in self._pending)
            self._next += by

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
        if not self.may_write():
            return False
        try:
            deleted = prune(self._connection, retention, open_incident)
        except sqlite3.Error as error:
            self.error = str(error)
            return False
        self._written -= deleted
        return deleted > 0

    def answered(self, request: str) -> Answer | None:
        """What was answered to a control call of this id; None: it is new."""
        row = self._connection.execute(
            "SELECT digest, status, answer FROM requests WHERE id = ?", (request,)
        ).fetchone()
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
    def wal_bytes(self) -> int:
        try:
            return Path(f"{self.path}-wal").stat().st_size
        except OSError:
            return 0

    def recent(self, kind: Kind, limit: int) -> list[Entry]:
        """The newest entries of a kind, newest first."""
        return recent(self._connection, kind, limit)

    def incidents(self, limit: int) -> list[Entry]:
        """All entries of the newest `limit` incidents, by sequence."""
        return incident_entries(self._connection, limit)

    def timeline(self, incident: str) -> list[Entry]:
        """The entries of one incident and the evidence that its verdicts name, by sequence; empty for an unknown one."""
        return timeline(self._connection, incident)

    def close(self) -> None:
        self.flush()
        self._connection.close()


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


def _connect(path: Path) -> sqlite3.Connection:
    """Raises sqlite3.DatabaseError on a damaged file, its subclass OperationalError where the place is at fault."""
    connection = sqlite3.connect(path, timeout=BUSY_S, isolation_level=None, cached_statements=16)
    try:
        (version,) = connection.execute("PRAGMA user_version").fetchone()
        if version > SCHEMA_VERSION:
            raise ElasticError(
                f"{path}: the journal has schema {version}, this version knows {SCHEMA_VERSION}; "
                "use the newer version, or move the file away"
            )
        if version == 0:
            # can be set only before the first table
            connection.execute("PRAGMA auto_vacuum=INCREMENTAL")
        connection.execute("PRAGMA journal_mode=WAL")
        connection.execute("PRAGMA wal_autocheckpoint=0")
        connection.execute("PRAGMA cache_size=-512")
        (verdict,) = connection.execute("PRAGMA quick_check(1)").fetchone()
        if verdict != "ok":
            raise sqlite3.DatabaseError(str(verdict))
        _migrate(connection, version)
        # NORMAL still waits for the disk in the first write after a checkpoint, which is often the first of an incident.
        # What a loss of power may cost is bounded by `harden`; the file itself is safe, since `checkpoint`, with a
        # connection of its own, syncs the log before the file and the file before the log is used again.
        connection.execute("PRAGMA synchronous=OFF")
        connection.execute("SELECT max(seq) FROM entries").fetchone()
    except BaseException:
        connection.close()
        raise
    return connection


def _migrate(connection: sqlite3.Connection, version: int) -> None:
    """From any older schema to this one, in one transaction: a daemon that dies within leaves the old one."""
    if version < SCHEMA_VERSION:
        steps = (_SCHEMA if version < 1 else _BODIES_2) + _SINCE_2
        connection.executescript(f"BEGIN IMMEDIATE; {steps} PRAGMA user_version={SCHEMA_VERSION}; COMMIT;")
    if version == 1:
        connection.execute("PRAGMA auto_vacuum=INCREMENTAL")
        connection.execute("VACUUM")


def _set_aside(path: Path, wall: float) -> Path:
    suffix = ".corrupt-" + time.strftime("%Y%m%dT%H%M%SZ", time.gmtime(wall))
    for part in ("", "-wal", "-shm"):
        source = Path(f"{path}{part}")
        if source.exists():
            source.rename(f"{path}{suffix}{part}")
    return Path(f"{path}{suffix}")
