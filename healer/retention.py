"""How long the journal remembers: whole incidents, newest first, and the newest entries that belong to none.

Pruning works in small batches, so that one never holds up a flush for longer than a millisecond or two, and gives the room
back to the file system. What belongs to an open incident is never touched, however old.
"""

import sqlite3

import msgspec

BATCH_ROWS = 500
BATCH_PAGES = 64


class Retention(msgspec.Struct, frozen=True, kw_only=True):
    incidents: int = 1000
    """Incidents kept, each with all its entries."""
    entries: int = 50_000
    """Entries kept that belong to no incident. One takes about 300 bytes."""
    requests: int = 10_000
    """Answers kept for control calls that are sent again under the same id."""


def prune(connection: sqlite3.Connection, retention: Retention, open_incident: str) -> int:
    """Delete one batch of what is too old. Returns the number of rows deleted; 0: nothing is too old. Raises sqlite3.Error,
    with nothing deleted."""
    connection.execute("BEGIN IMMEDIATE")
    try:
        deleted = _incident(connection, retention, open_incident) + _loose(connection, retention)
        deleted += connection.execute(
            "DELETE FROM requests WHERE rowid <= (SELECT max(rowid) FROM requests) - ?", (retention.requests,)
        ).rowcount
        connection.execute("COMMIT")
    except sqlite3.Error:
        connection.execute("ROLLBACK")
        raise
    if deleted:
        connection.execute(f"PRAGMA incremental_vacuum({BATCH_PAGES})").fetchall()
    return deleted


def _incident(connection: sqlite3.Connection, retention: Retention, open_incident: str) -> int:
    """The oldest incident beyond the number kept, a batch of its entries."""
    ids = [
        str(incident)
        for (incident,) in connection.execute(
            "SELECT incident FROM entries WHERE incident != '' GROUP BY incident ORDER BY min(seq)"
        )
    ]
    for incident in ids[: max(0, len(ids) - retention.incidents)]:
        if incident != open_incident:
            query = "DELETE FROM entries WHERE seq IN (SELECT seq FROM entries WHERE incident = ? ORDER BY seq LIMIT ?)"
            return connection.execute(query, (incident, BATCH_ROWS)).rowcount
    return 0


def _loose(connection: sqlite3.Connection, retention: Retention) -> int:
    (count,) = connection.execute("SELECT count(*) FROM entries WHERE incident = ''").fetchone()
    excess = min(BATCH_ROWS, count - retention.entries)
    if excess <= 0:
        return 0
    query = "DELETE FROM entries WHERE seq IN (SELECT seq FROM entries WHERE incident = '' ORDER BY seq LIMIT ?)"
    return connection.execute(query, (excess,)).rowcount
