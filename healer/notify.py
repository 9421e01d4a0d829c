"""Notifications: letters about incidents and decisions to webhooks, through an outbox in the journal's file.

A letter is written down before it is sent, so a daemon that dies sends it after its restart; a receiver may therefore get
one twice, with the same id. A receiver that does not answer is tried again with growing pauses; after its last attempt the
letter is dead, kept with the reason, and counted. Nothing here waits for a receiver in the supervisor's loop, and a full
outbox or an unwritable one loses letters, never a healing.
"""

import asyncio
import contextlib
import importlib
import sqlite3
import string
import time
from collections.abc import Callable, Mapping
from enum import StrEnum
from pathlib import Path
from typing import Any, Literal

import msgspec

from elastic.errors import ElasticError

Format = Literal["json", "alertmanager", "slack"]

MAX_LETTERS = 10_000
KEEP_SENT = 200
BACKOFF_S, BACKOFF_MAX_S = 1.0, 300.0
IDLE_S = 60.0
MAX_ANSWER_CHARS = 200


class About(StrEnum):
    """What a notice is about; receivers choose."""

    INCIDENT_OPENED = "incident-opened"
    INCIDENT_CLOSED = "incident-closed"
    HUMAN_NEEDED = "human-needed"
    ACTED = "acted"
    BREAKER_OPENED = "breaker-opened"
    QUARANTINED = "quarantined"
    POLICY_REJECTED = "policy-rejected"
    LEASE_LOST = "lease-lost"


class Notice(msgspec.Struct, frozen=True, kw_only=True):
    """One thing to tell. Holds no secrets: it is kept in the journal."""

    about: About
    deployment: str
    incident: str = ""
    cause: str = ""
    slots: tuple[int, ...] = ()
    sentence: str
    resolved: bool = False
    """True: what an earlier notice of the same incident told is over."""
    wall: float


class Receiver(msgspec.Struct, frozen=True, kw_only=True):
    name: str
    url: str = ""
    url_file: str = ""
    """Instead of `url`, where the address itself is a secret (Slack's are)."""
    format: Format = "json"
    about: tuple[About, ...] = (About.INCIDENT_OPENED, About.INCIDENT_CLOSED, About.HUMAN_NEEDED, About.BREAKER_OPENED)
    template: str = "[$deployment] $sentence"
    """Of the text, for the formats that have one: `string.Template` over the notice's fields."""
    headers_file: str = ""
    """Lines "Name: value" that are sent along; for tokens."""
    deadline_s: float = 5.0
    attempts: int = 8

    def problems(self) -> list[str]:
        found = []
        if bool(self.url) == bool(self.url_file):
            found.append("expected exactly one of url and urlFile")
        unknown = set(_fields(self.template)) - set(Notice.__struct_fields__)
        if unknown:
            known = ", ".join(Notice.__struct_fields__)
            found.append(f"template: unknown {', '.join(sorted(unknown))}, expected some of {known}")
        return found


class Letter(msgspec.Struct, frozen=True):
    id: int
    wall: float
    receiver: str
    notice: Notice
    state: Literal["waiting", "sent", "dead"]
    attempts: int
    due_wall: float
    error: str


class Outbox:
    """The letters, in the journal's file (`healer.journal` makes the table), over a connection of its own. Used in one thread."""

    def __init__(self, path: Path) -> None:
        self._connection = sqlite3.connect(path, timeout=0.2, isolation_level=None)
        self._connection.execute("PRAGMA synchronous=OFF")

    def put(self, receiver: str, notice: Notice) -> bool:
        """False: the outbox is full or cannot be written; the letter is lost."""
        with contextlib.suppress(sqlite3.Error):
            (waiting,) = self._connection.execute("SELECT count(*) FROM outbox WHERE state = 'waiting'").fetchone()
            if waiting >= MAX_LETTERS:
                return False
            row = (notice.wall, receiver, msgspec.json.encode(notice).decode(), notice.wall)
            self._connection.execute(
                "INSERT INTO outbox (wall, receiver, notice, state, attempts, due_wall, error) "
                "VALUES (?, ?, ?, 'waiting', 0, ?, '')",
                row,
            )
            return True
        return False

    def due(self, wall: float) -> list[Letter]:
        """The oldest letter of each receiver whose time has come: a receiver gets its letters in their order."""
        return self._select(
            "WHERE id IN (SELECT min(id) FROM outbox WHERE state = 'waiting' GROUP BY receiver) AND due_wall <= ?", wall
        )

    def next_due(self) -> float | None:
        query = (
            "SELECT min(due_wall) FROM outbox WHERE id IN "
            "(SELECT min(id) FROM outbox WHERE state = 'waiting' GROUP BY receiver)"
        )
        found = self._connection.execute(query).fetchone()[0]
        return None if found is None else float(found)

    def sent(self, letter: Letter) -> None:
        self._settle(letter, "sent", letter.due_wall, "")
        with contextlib.suppress(sqlite3.Error):
            self._connection.execute(
                "DELETE FROM outbox WHERE state = 'sent' AND id <= "
                "(SELECT max(id) FROM outbox WHERE state = 'sent') - ?",
                (KEEP_SENT,),
            )

    def failed(self, letter: Letter, error: str, again_wall: float | None) -> None:
        """To be tried again at `again_wall`; None: never, it is dead."""
        self._settle(letter, "dead" if again_wall is None else "waiting", again_wall or letter.due_wall, error)

    def dead(self) -> list[Letter]:
        return self._select("WHERE state = 'dead'")

    def close(self) -> None:
        self._connection.close()

    def _settle(self, letter: Letter, state: str, due_wall: float, error: str) -> None:
        with contextlib.suppress(sqlite3.Error):
            self._connection.execute(
                "UPDATE outbox SET state = ?, attempts = attempts + 1, due_wall = ?, error = ? WHERE id = ?",
                (state, due_wall, error, letter.id),
            )

    def _select(self, where: str, *arguments: object) -> list[Letter]:
        query = f"SELECT id, wall, receiver, notice, state, attempts, due_wall, error FROM outbox {where} ORDER BY id"
        return [
            Letter(r[0], r[1], r[2], msgspec.json.decode(r[3], type=Notice), *r[4:])
            for r in self._connection.execute(query, arguments)
        ]


class Notifier:
    """`tell` from the supervisor's loop; `run` as a task in the same loop, awaited by whoever started it."""

    def __init__(
        self,
        receivers: tuple[Receiver, ...],
        path: Path,
        on_result: Callable[[str, str], None] = lambda receiver, result: None,
        *,
        wall: Callable[[], float] = time.time,
    ) -> None:
        """`on_result(receiver, "sent" | "retried" | "dead" | "lost")`, for metrics."""
        self._path, self._on_result, self._wall = path, on_result, wall
        self._wake, self._idle = asyncio.Event(), asyncio.Event()
        self._outbox: Outbox | None = None
        self.adopt(receivers)

    def adopt(self, receivers: tuple[Receiver, ...]) -> None:
        """Instead of those before; letters that wait for one that is gone are dead."""
        self._receivers: Mapping[str, Receiver] = {r.name: r for r in receivers}
        if receivers and self._outbox is None:
            self._outbox = Outbox(self._path)
        self._wake.set()

    def tell(self, notice: Notice) -> None:
        """Returns at once: the letters are written down, and sent in the background."""
        for receiver in self._receivers.values():
            if notice.about in receiver.about and self._outbox is not None:
                if not self._outbox.put(receiver.name, notice):
                    self._on_result(receiver.name, "lost")
                self._idle.clear()
                self._wake.set()

    async def drained(self) -> None:
        """Until nothing is due."""
        if self._outbox is not None:
            await self._idle.wait()

    async def run(self) -> None:
        """Until cancelled."""
        while self._outbox is None:
            self._wake.clear()
            await self._wake.wait()
        # in a thread, since it takes 0.2 s that no healing should wait for
        await asyncio.to_thread(importlib.import_module, "httpx")
        try:
            while True:
                self._wake.clear()
                async with asyncio.TaskGroup() as tasks:
                    for letter in self._outbox.due(self._wall()):
                        tasks.create_task(self._send(self._outbox, letter))
                due = self._outbox.next_due()
                if due is None or due > self._wall():
                    self._idle.set()
                pause_s = IDLE_S if due is None else min(IDLE_S, max(0.0, due - self._wall()))
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(pause_s):
                        await self._wake.wait()
        finally:
            self._outbox.close()

    async def _send(self, outbox: Outbox, letter: Letter) -> None:
        receiver = self._receivers.get(letter.receiver)
        if receiver is None:
            outbox.failed(letter, "no receiver of this name in the policy any more", None)
            return
        error = await post(receiver, letter)
        if not error:
            outbox.sent(letter)
            self._on_result(receiver.name, "sent")
            return
        attempts = letter.attempts + 1
        dead = attempts >= receiver.attempts
        pause_s = min(BACKOFF_MAX_S, BACKOFF_S * 2.0**letter.attempts)
        outbox.failed(letter, error, None if dead else self._wall() + pause_s)
        self._on_result(receiver.name, "dead" if dead else "retried")


async def post(receiver: Receiver, letter: Letter) -> str:
    """Send one letter. Returns why it did not arrive, without the address where that is a secret; empty: it did."""
    import httpx

    try:
        url = receiver.url or Path(receiver.url_file).read_text().strip()
        headers = _headers(receiver)
    except OSError as error:
        return f"{error.filename}: {error.strerror}"
    except ElasticError as error:
        return str(error)
    try:
        async with httpx.AsyncClient(timeout=receiver.deadline_s) as client, asyncio.timeout(receiver.deadline_s):
            answer = await client.post(url, json=body(receiver, letter), headers=headers)
    except (httpx.HTTPError, httpx.InvalidURL, OSError, TimeoutError) as error:
        return f"no answer: {type(error).__name__}"
    return "" if answer.is_success else f"status {answer.status_code}: {answer.text[:MAX_ANSWER_CHARS]}"


def body(receiver: Receiver, letter: Letter) -> Any:
    """What is posted, by the receiver's format."""
    notice = letter.notice
    if receiver.format == "slack":
        return {"text": _text(receiver, notice)}
    if receiver.format == "alertmanager":
        # API v2: labels identify an alert, so those of its end must equal those of its begin
        about = About.INCIDENT_OPENED if notice.about == About.INCIDENT_CLOSED else notice.about
        labels = {"alertname": f"healer-{about}", "deployment": notice.deployment, "incident": notice.incident}
        alert: dict[str, Any] = {
            "labels": {k: v for k, v in labels.items() if v},
            "annotations": {"summary": _text(receiver, notice), "cause": notice.cause},
            "startsAt": _time(notice.wall),
        }
        if notice.resolved:
            alert["endsAt"] = _time(notice.wall)
        return [alert]
    return {"id": letter.id} | msgspec.to_builtins(notice) | {"text": _text(receiver, notice)}


def _text(receiver: Receiver, notice: Notice) -> str:
    return string.Template(receiver.template).safe_substitute(msgspec.to_builtins(notice))


def _fields(template: str) -> list[str]:
    return string.Template(template).get_identifiers()


def _headers(receiver: Receiver) -> dict[str, str]:
    if not receiver.headers_file:
        return {}
    found = {}
    for number, line in enumerate(Path(receiver.headers_file).read_text().splitlines(), 1):
        name, colon, value = line.partition(":")
        if line.strip() and not colon:
            raise ElasticError(f'{receiver.headers_file}:{number}: expected "Name: value"')
        if line.strip():
            found[name.strip()] = value.strip()
    return found


def _time(wall: float) -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(wall))
