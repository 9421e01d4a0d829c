"""The letters that are to be sent: a table in the journal's file, and one in memory for what that file does not take.

A letter whose outcome cannot be written down is remembered here as settled, so that nobody gets it again and again while the
disk is full; a daemon that dies meanwhile sends it once more.
"""

import contextlib
import sqlite3
from collections.abc import Callable
from typing import Literal

import msgspec

from healer.journal_file import stand_in
from healer.notice import Notice

MAX_LETTERS = 10_000
KEEP_SENT = 200

State = Literal["waiting", "sent", "dead"]


class Letter(msgspec.Struct, frozen=True):
    id: int
    """Negative for one that is in memory only."""
    wall: float
    receiver: str
    notice: Notice
    state: State
    attempts: int
    due_wall: float
    error: str


class Outbox:
    """Used in one thread, the one that owns the connection."""

    def __init__(self, connection: Callable[[], sqlite3.Connection]) -> None:
        """`connection`: the journal's, asked for anew each time."""
        self._shelves = (_Shelf(connection, 1), _Shelf(_kept(), -1))

    def put(self, receiver: str, notice: Notice) -> bool:
        """False: it holds too many, and the letter is lost."""
        return any(shelf.put(receiver, notice) for shelf in self._shelves)

    def due(self, wall: float) -> list[Letter]:
        """The oldest letter of each receiver whose time has come: a receiver gets its letters in their order."""
        return [letter for shelf in self._shelves for letter in shelf.heads() if letter.due_wall <= wall]

    def next_due(self) -> float | None:
        return min((letter.due_wall for shelf in self._shelves for letter in shelf.heads()), default=None)

    def sent(self, letter: Letter) -> None:
        self._shelf(letter).settle(letter, "sent", letter.due_wall, "")

    def failed(self, letter: Letter, error: str, again_wall: float | None) -> None:
        """To be tried again at `again_wall`; None: never, it is dead."""
        state: State = "dead" if again_wall is None else "waiting"
        self._shelf(letter).settle(letter, state, again_wall or letter.due_wall, error)

    def dead(self) -> list[Letter]:
        return [letter for shelf in self._shelves for letter in shelf.select("WHERE state = 'dead' ORDER BY id")]

    def _shelf(self, letter: Letter) -> "_Shelf":
        return self._shelves[0 if letter.id > 0 else 1]


class _Shelf:
    """One table, which may fail to be read or written at any time."""

    def __init__(self, connection: Callable[[], sqlite3.Connection], sign: int) -> None:
        self._connection, self._sign = connection, sign
        self._unwritten: dict[int, Letter] = {}
        """What became of letters, as far as the table does not tell it."""

    def put(self, receiver: str, notice: Notice) -> bool:
        with contextlib.suppress(sqlite3.Error):
            connection = self._connection()
            (waiting,) = connection.execute("SELECT count(*) FROM outbox WHERE state = 'waiting'").fetchone()
            if waiting >= MAX_LETTERS:
                return False
            row = (notice.wall, receiver, msgspec.json.encode(notice).decode(), notice.wall)
            connection.execute(
                "INSERT INTO outbox (wall, receiver, notice, state, attempts, due_wall, error) "
                "VALUES (?, ?, ?, 'waiting', 0, ?, '')",
                row,
            )
            return True
        return False

    def heads(self) -> list[Letter]:
        """The oldest waiting letter of each receiver."""
        self._write()
        found: dict[str, Letter] = {}
        for letter in self.select("WHERE state = 'waiting' ORDER BY id" if self._unwritten else _HEADS):
            letter = self._unwritten.get(letter.id, letter)
            if letter.state == "waiting":
                found.setdefault(letter.receiver, letter)
        return list(found.values())

    def settle(self, letter: Letter, state: State, due_wall: float, error: str) -> None:
        self._unwritten[letter.id] = msgspec.structs.replace(
            letter, state=state, attempts=letter.attempts + 1, due_wall=due_wall, error=error
        )
        self._write()

    def select(self, where: str) -> list[Letter]:
        with contextlib.suppress(sqlite3.Error):
            query = f"SELECT id, wall, receiver, notice, state, attempts, due_wall, error FROM outbox {where}"
            return [
                Letter(self._sign * r[0], r[1], r[2], msgspec.json.decode(r[3], type=Notice), *r[4:])
                for r in self._connection().execute(query)
            ]
        return []

    def _write(self) -> None:
        with contextlib.suppress(sqlite3.Error):
            for letter in list(self._unwritten.values()):
                # by its content too: where the file was replaced, another letter has this number now
                row = (letter.state, letter.attempts, letter.due_wall, letter.error, abs(letter.id), letter.wall)
                self._connection().execute(
                    "UPDATE outbox SET state = ?, attempts = ?, due_wall = ?, error = ? WHERE id = ? AND wall = ?", row
                )
                del self._unwritten[letter.id]
                if letter.state == "sent":
                    self._connection().execute(
                        "DELETE FROM outbox WHERE state = 'sent' AND id <= "
                        "(SELECT max(id) FROM outbox WHERE state = 'sent') - ?",
                        (KEEP_SENT,),
                    )


_HEADS = "WHERE id IN (SELECT min(id) FROM outbox WHERE state = 'waiting' GROUP BY receiver) ORDER BY id"


def _kept() -> Callable[[], sqlite3.Connection]:
    """A table in memory, made when it is first needed."""
    made: list[sqlite3.Connection] = []

    def connection() -> sqlite3.Connection:
        if not made:
            made.append(stand_in().connection)
        return made[0]

    return connection
