import asyncio
import contextlib
import json
import sqlite3
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from healer.clock import SystemClock
from healer.deployment import eventually
from healer.journal import Journal
from healer.notice import About, Notice
from healer.notify import Notifier, Receiver
from healer.outbox import Outbox


class Hook(ThreadingHTTPServer):
    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.codes: list[int] = []
        """Answers to give next; then 200."""
        self.got: list[tuple[Any, dict[str, str]]] = []

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}/hook"


class _Handler(BaseHTTPRequestHandler):
    server: Hook

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        code = self.server.codes.pop(0) if self.server.codes else 200
        if code == 200:
            self.server.got.append((body, dict(self.headers)))
        self.send_response(code)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, *_: Any) -> None:
        pass


@pytest.fixture
def hook() -> Iterator[Hook]:
    server = Hook()
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield server
    server.shutdown()
    server.server_close()
    thread.join()


@pytest.fixture
def journal(tmp_path: Path) -> Iterator[Journal]:
    opened = Journal.open(tmp_path / "journal.db", SystemClock())
    yield opened
    opened.close()


class Wall:
    """Goes forward by itself whenever it is asked, so that no test waits for a pause."""

    def __init__(self) -> None:
        self.at = 1_700_000_000.0

    def __call__(self) -> float:
        self.at += 200.0
        return self.at


def notice(
    about: About = About.INCIDENT_OPENED, sentence: str = "rank 1.2 is dead", *, resolved: bool = False
) -> Notice:
    return Notice(
        about=about, deployment="prod", incident="inc-7", sentence=sentence, resolved=resolved, wall=1_700_000_000.0
    )


@contextlib.asynccontextmanager
async def running(journal: Journal, *receivers: Receiver, results: list[tuple[str, str]]) -> AsyncIterator[Notifier]:
    notifier = Notifier(receivers, lambda: journal.connection, lambda *result: results.append(result), wall=Wall())
    task = asyncio.create_task(notifier.run())
    try:
        yield notifier
    finally:
        task.cancel()
        await asyncio.wait([task])


async def until(condition: Callable[[], bool]) -> None:
    async def probe() -> bool | None:
        return condition() or None

    await eventually(probe, "the letters are where they should be", 20)


async def test_the_on_call_engineer_hears_of_an_incident_in_each_format(
    hook: Hook, journal: Journal, tmp_path: Path
) -> None:
    (tmp_path / "headers").write_text("X-Token: t0ken\n")
    (tmp_path / "url").write_text(hook.url + "\n")
    receivers = (
        Receiver(name="plain", url=hook.url, headers_file=str(tmp_path / "headers")),
        Receiver(name="chat", url_file=str(tmp_path / "url"), format="slack", template="$incident: $sentence"),
        Receiver(name="alerts", url=hook.url, format="alertmanager"),
    )
    results: list[tuple[str, str]] = []
    async with running(journal, *receivers, results=results) as notifier:
        notifier.tell(notice())
        notifier.tell(notice(About.INCIDENT_CLOSED, resolved=True))
        notifier.tell(notice(About.ACTED))  # nobody asked for these
        await until(lambda: len(hook.got) == 6)
    bodies = [body for body, _ in hook.got]
    plain = next(b for b in bodies if isinstance(b, dict) and b.get("about") == "incident-opened")
    assert (plain["deployment"], plain["incident"], plain["text"]) == ("prod", "inc-7", "[prod] rank 1.2 is dead")
    assert {"text": "inc-7: rank 1.2 is dead"} in bodies
    opened, closed = [b[0] for b in bodies if isinstance(b, list)]
    assert opened["labels"] == closed["labels"], "so that Alertmanager resolves the alert it knows"
    assert "endsAt" in closed
    assert "endsAt" not in opened
    assert any(headers.get("X-Token") == "t0ken" for _, headers in hook.got)


async def test_a_receiver_that_fails_is_tried_again_and_gets_its_letters_in_order(hook: Hook, journal: Journal) -> None:
    hook.codes += [503, 500]
    results: list[tuple[str, str]] = []
    async with running(journal, Receiver(name="a", url=hook.url), results=results) as notifier:
        notifier.tell(notice(sentence="first"))
        notifier.tell(notice(sentence="second"))
        await until(lambda: len(hook.got) == 2)
    assert [body["sentence"] for body, _ in hook.got] == ["first", "second"]
    assert results == [("a", "retried"), ("a", "retried"), ("a", "sent"), ("a", "sent")]


async def test_a_receiver_that_never_answers_leaves_dead_letters_and_holds_up_no_other(
    hook: Hook, journal: Journal
) -> None:
    results: list[tuple[str, str]] = []
    gone = Receiver(name="gone", url="http://127.0.0.1:9/secret-path", attempts=3, deadline_s=1)
    async with running(journal, gone, Receiver(name="good", url=hook.url), results=results) as notifier:
        notifier.tell(notice())
        await until(lambda: ("gone", "dead") in results and len(hook.got) == 1)
    outbox = Outbox(lambda: journal.connection)
    (dead,) = outbox.dead()
    assert (dead.receiver, dead.attempts) == ("gone", 3)
    assert "ConnectError" in dead.error
    assert "secret" not in dead.error


async def test_a_daemon_that_dies_before_sending_sends_after_its_restart(hook: Hook, journal: Journal) -> None:
    before = Notifier((Receiver(name="a", url=hook.url),), lambda: journal.connection)
    before.tell(notice(sentence="said by the one that died"))
    results: list[tuple[str, str]] = []
    async with running(journal, Receiver(name="a", url=hook.url), results=results):
        await until(lambda: len(hook.got) == 1)
    assert hook.got[0][0]["sentence"] == "said by the one that died"


async def test_letters_that_the_disk_does_not_take_are_sent_all_the_same_and_each_once(
    hook: Hook, journal: Journal
) -> None:
    results: list[tuple[str, str]] = []
    receiver = Receiver(name="a", url=hook.url)
    hook.codes += [503]
    async with running(journal, receiver, results=results) as notifier:
        notifier.tell(notice(sentence="before"))
        await until(lambda: results == [("a", "retried")])
        other = sqlite3.connect(journal.path, isolation_level=None)
        other.execute("BEGIN IMMEDIATE")
        notifier.tell(notice(sentence="while it is locked"))
        await until(lambda: len(hook.got) == 2)
        await notifier.drained()
        notifier.tell(notice(sentence="again"))
        await until(lambda: len(hook.got) == 3)
        other.execute("COMMIT")
        other.close()
        notifier.tell(notice(sentence="after"))
        await until(lambda: len(hook.got) == 4)
        # an answer is written down after the receiver has counted it
        await until(lambda: Outbox(lambda: journal.connection).next_due() is None)
    said = [body["sentence"] for body, _ in hook.got]
    assert sorted(said) == ["after", "again", "before", "while it is locked"]


async def test_letters_to_a_receiver_that_left_the_policy_do_not_wait_for_ever(hook: Hook, journal: Journal) -> None:
    Notifier((Receiver(name="old", url=hook.url),), lambda: journal.connection).tell(notice())
    outbox = Outbox(lambda: journal.connection)
    async with running(journal, Receiver(name="new", url=hook.url), results=[]):
        await until(lambda: len(outbox.dead()) == 1)
    assert "policy" in outbox.dead()[0].error


def test_an_unknown_field_in_a_template_is_named() -> None:
    assert (
        Receiver(name="a", url="http://x", template="$sentense").problems()[0].startswith("template: unknown sentense")
    )
    assert "exactly one" in Receiver(name="a").problems()[0]
