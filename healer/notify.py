"""Notifications: letters about incidents and decisions to webhooks, through an outbox in the journal's file.

A letter is written down before it is sent, so a daemon that dies sends it after its restart; a receiver may therefore get
one twice, with the same id. A receiver that does not answer is tried again with growing pauses; after its last attempt the
letter is dead, kept with the reason, and counted. Nothing here waits for a receiver in the supervisor's loop; letters that
the disk does not take are sent from memory.
"""

import asyncio
import contextlib
import importlib
import sqlite3
import string
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Literal

import msgspec

from elastic.errors import ElasticError
from healer.notice import About, Notice
from healer.outbox import Letter, Outbox

Format = Literal["json", "alertmanager", "slack"]

BACKOFF_S, BACKOFF_MAX_S = 1.0, 300.0
IDLE_S = 60.0
MAX_ANSWER_CHARS = 200


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


class Notifier:
    """`tell` from the supervisor's loop; `run` as a task in the same loop, awaited by whoever started it."""

    def __init__(
        self,
        receivers: tuple[Receiver, ...],
        connection: Callable[[], sqlite3.Connection],
        on_result: Callable[[str, str], None] = lambda receiver, result: None,
        *,
        wall: Callable[[], float] = time.time,
    ) -> None:
        """`connection`: of the journal that has the outbox. `on_result(receiver, "sent" | "retried" | "dead" | "lost")`, for
        metrics."""
        self._connection, self._on_result, self._wall = connection, on_result, wall
        self._wake, self._idle = asyncio.Event(), asyncio.Event()
        self._outbox: Outbox | None = None
        self.adopt(receivers)

    def adopt(self, receivers: tuple[Receiver, ...]) -> None:
        """Instead of those before; letters that wait for one that is gone are dead."""
        self._receivers: Mapping[str, Receiver] = {r.name: r for r in receivers}
        if receivers and self._outbox is None:
            self._outbox = Outbox(self._connection)
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
