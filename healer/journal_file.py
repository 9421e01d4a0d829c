"""The journal's file: its tables, how it is opened, what is done with a damaged one, and what stands in where it cannot be
opened at all."""

import contextlib
import sqlite3
import time
from pathlib import Path
from typing import NamedTuple

from elastic.errors import ElasticError

SCHEMA_VERSION = 2
BUSY_S = 0.02
"""Nobody but a daemon writes; whoever else locks the file must not hold up a healing."""

FIRST_SCHEMA = """
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

Identity = tuple[tuple[int, int] | None, ...]
"""Device and inode of the file and of its log: what is written last is in the log alone."""


class Opened(NamedTuple):
    connection: sqlite3.Connection
    file: Identity | None
    """None: a stand-in in memory."""
    set_aside: Path | None
    """Where a damaged predecessor was moved."""


def open_file(path: Path, wall: float, *, damaged: bool = False) -> Opened:
    """Open or create. A damaged file, or one that is said to be so, is set aside whole and a fresh one begun. May be called
    in another thread than the one that uses the connection then. Raises ElasticError where a newer version wrote the file
    or the place is no file, sqlite3.OperationalError where the disk is at fault: full, read-only, locked, failing."""
    set_aside: Path | None = None
    if damaged and path.exists():
        set_aside = _set_aside(path, wall)
    try:
        connection = _connect(path)
    except sqlite3.DatabaseError as error:
        if path.is_dir():
            raise ElasticError(f"{path}: the journal cannot be opened: it is a folder") from error
        if not is_damage(error) or not path.exists():
            raise
        set_aside = _set_aside(path, wall)
        connection = _connect(path)
    return Opened(connection, identity(path), set_aside)


def stand_in(path: Path | None = None) -> Opened:
    """A journal in memory. `path`: of a file that cannot be written; what can be read of it is copied."""
    if path is not None:
        connection = _memory()
        with contextlib.suppress(sqlite3.Error), contextlib.closing(_reader(path)) as reader:
            reader.backup(connection)
            (version,) = connection.execute("PRAGMA user_version").fetchone()
            if version == SCHEMA_VERSION:
                connection.execute("SELECT max(seq) FROM entries").fetchone()
                return Opened(connection, None, None)
        connection.close()
    connection = _memory()
    migrate(connection, 0)
    return Opened(connection, None, None)


def move_letters_and_answers(old: sqlite3.Connection, new: sqlite3.Connection) -> None:
    """From a stand-in into the file: what was answered to calls, and letters that are not sent. Raises sqlite3.Error."""
    answers = old.execute("SELECT id, digest, status, answer FROM requests").fetchall()
    columns = "wall, receiver, notice, state, attempts, due_wall, error"
    letters = old.execute(f"SELECT {columns} FROM outbox WHERE state != 'sent' ORDER BY id").fetchall()
    new.execute("BEGIN IMMEDIATE")
    new.executemany("INSERT OR IGNORE INTO requests (id, digest, status, answer) VALUES (?, ?, ?, ?)", answers)
    # the stand-in may be a copy of this very file
    new.executemany(
        f"INSERT INTO outbox ({columns}) SELECT ?1, ?2, ?3, ?4, ?5, ?6, ?7 WHERE NOT EXISTS "
        "(SELECT 1 FROM outbox WHERE wall = ?1 AND receiver = ?2 AND notice = ?3)",
        letters,
    )
    new.execute("COMMIT")


def identity(path: Path) -> Identity:
    """None in it: there is no such file, or it cannot be seen."""
    return tuple(map(_inode, (path, Path(f"{path}-wal"))))


def _inode(path: Path) -> tuple[int, int] | None:
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_dev, found.st_ino


def is_damage(error: sqlite3.Error) -> bool:
    """Whether it speaks of what is in the file, and not of the disk, of another process or of one statement."""
    lacks = str(error).startswith("no such table") or "has no column named" in str(error)
    return type(error) is sqlite3.DatabaseError or (type(error) is sqlite3.OperationalError and lacks)


def migrate(connection: sqlite3.Connection, version: int) -> None:
    """From any older schema to this one, in one transaction: a daemon that dies within leaves the old one."""
    if version < SCHEMA_VERSION:
        steps = (FIRST_SCHEMA if version < 1 else _BODIES_2) + _SINCE_2
        connection.executescript(f"BEGIN IMMEDIATE; {steps} PRAGMA user_version={SCHEMA_VERSION}; COMMIT;")
    if version == 1:
        connection.execute("PRAGMA auto_vacuum=INCREMENTAL")
        connection.execute("VACUUM")


def _memory() -> sqlite3.Connection:
    return sqlite3.connect(":memory:", isolation_level=None)


def _reader(path: Path) -> sqlite3.Connection:
    """Of a file that may lie on a disk where nothing can be made."""
    wal = Path(f"{path}-wal")
    # without a log to read first, the file alone is whole
    alone = not wal.exists() or not wal.stat().st_size
    return sqlite3.connect(f"file:{path}?mode=ro{'&immutable=1' if alone else ''}", uri=True, timeout=BUSY_S)


def _connect(path: Path) -> sqlite3.Connection:
    """Raises sqlite3.DatabaseError on a damaged file, its subclass OperationalError where the place is at fault."""
    connection = sqlite3.connect(
        path, timeout=BUSY_S, isolation_level=None, cached_statements=16, check_same_thread=False
    )
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
        migrate(connection, version)
        # NORMAL still waits for the disk in the first write after a checkpoint, which is often the first of an incident.
        # What a loss of power may cost is bounded by `harden`; the file itself is safe, since `checkpoint`, with a
        # connection of its own, syncs the log before the file and the file before the log is used again.
        connection.execute("PRAGMA synchronous=OFF")
        connection.execute("SELECT max(seq) FROM entries").fetchone()
        # whether it can be written shows now, and not with the first entry of an incident
        connection.execute("BEGIN IMMEDIATE")
        connection.execute(f"PRAGMA user_version={SCHEMA_VERSION}")
        connection.execute("COMMIT")
    except BaseException:
        connection.close()
        raise
    return connection


def _set_aside(path: Path, wall: float) -> Path:
    suffix = ".corrupt-" + time.strftime("%Y%m%dT%H%M%SZ", time.gmtime(wall))
    try:
        for part in ("", "-wal", "-shm"):
            source = Path(f"{path}{part}")
            if source.exists():
                source.rename(f"{path}{suffix}{part}")
    except OSError as error:
        raise sqlite3.OperationalError(f"damaged, and cannot be set aside: {error.strerror}") from error
    return Path(f"{path}{suffix}")
