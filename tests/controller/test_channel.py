"""A channel's deadlines: they measure the other side, never a stand-still of this one."""

import asyncio
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from elastic.channel import Channel
from elastic.errors import Retryable
from elastic.protocol import Done, Hello, Query, encode


@contextmanager
def peer(path: Path, serve: Callable[[socket.socket], None]) -> Iterator[None]:
    """Somebody else, with a thread of its own: it goes on while our loop stands."""
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(path))
        listener.listen()

        def run() -> None:
            connection, _ = listener.accept()
            with connection:
                serve(connection)

        thread = threading.Thread(target=run, daemon=True)
        thread.start()
        yield
        thread.join(10)


async def test_an_answer_that_came_while_this_process_was_stopped_counts(tmp_path: Path) -> None:
    asked, answered = threading.Event(), threading.Event()

    def serve(connection: socket.socket) -> None:
        connection.recv(4096)
        asked.set()
        connection.sendall(encode(Done(id=1)))
        answered.set()
        connection.recv(1)

    with peer(tmp_path / "s", serve):
        channel = await Channel.open(str(tmp_path / "s"), Hello(role="controller", group="g"), "peer", deadline_s=5)
        channel.start()
        # the command goes out with the stop: by the end of it, the answer is there and the deadline has passed
        call = asyncio.create_task(channel.call(Query(id=1), Done, deadline_s=0.3))
        await asyncio.sleep(0)
        assert asked.wait(5)
        assert answered.wait(5)
        time.sleep(0.6)  # noqa: ASYNC251 (the stand-still itself)
        assert await call == Done(id=1)
        await channel.aclose()


async def test_a_peer_that_says_nothing_is_given_up_at_the_deadline(tmp_path: Path) -> None:
    def serve(connection: socket.socket) -> None:
        while connection.recv(4096):
            pass

    with peer(tmp_path / "s", serve):
        channel = await Channel.open(str(tmp_path / "s"), Hello(role="controller", group="g"), "peer", deadline_s=5)
        channel.start()
        with pytest.raises(Retryable, match=r"peer: no answer to Query within 0\.3 s"):
            await channel.call(Query(id=1), Done, deadline_s=0.3)
        await channel.aclose()
