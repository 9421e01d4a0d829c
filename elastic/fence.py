"""The fence between controllers: who was elected later shuts out everybody who was elected before.

A lease in a store says which controller may act, and its *term* grows with every change of holder. A holder that was frozen
beyond its time does not know that it lost the lease, so the processes that it commands compare terms themselves: each
remembers the highest term that it has seen, for as long as it lives.
"""

import asyncio
import contextlib

from elastic.protocol import Hello, Refused, encode

NO_ID = 0
"""Of a `Refused` that answers no command: it refuses the connection."""

PARTING_S = 5.0
"""How long a refused controller has to read why."""


class Controllers:
    """The controllers that are connected to one process. Owned by the loop that serves them."""

    def __init__(self) -> None:
        self.term = 0
        """The highest seen. 0: no controller has had a lease."""
        self._terms: dict[asyncio.StreamWriter, int] = {}
        self._observers: set[asyncio.StreamWriter] = set()

    def __contains__(self, writer: object) -> bool:
        """False for a connection that was superseded: what it still sends, or has sent, counts for nothing."""
        return writer in self._terms

    def __bool__(self) -> bool:
        return bool(self._terms)

    def writers(self) -> list[asyncio.StreamWriter]:
        """Who is told of what happens: the controllers, and those who only observe."""
        return [*self._terms, *self._observers]

    def observe(self, writer: asyncio.StreamWriter) -> None:
        """Somebody who gives no orders: of no term, and superseded by nobody."""
        self._observers.add(writer)

    def observed_by(self, writer: asyncio.StreamWriter) -> bool:
        return writer in self._observers

    def term_of(self, writer: asyncio.StreamWriter) -> int:
        return self._terms[writer]

    def admit(self, hello: Hello, writer: asyncio.StreamWriter) -> str:
        """Take a controller in, and part with all of lower terms first: they are told why, and count for nothing any more; two
        of the same term stand side by side. Returns why it is refused, which it has been told (see `part`); empty: it is
        not."""
        if hello.term < self.term:
            why = f"term {hello.term} is over: a controller of term {self.term} has taken this group"
            _say_why(writer, why)
            return why
        for other, term in list(self._terms.items()):
            if term < hello.term:
                why = f"term {term} is over: a controller of term {hello.term} has taken this group"
                del self._terms[other]
                _say_why(other, why)
        self.term = hello.term
        self._terms[writer] = hello.term
        return ""

    def discard(self, writer: asyncio.StreamWriter) -> None:
        self._terms.pop(writer, None)
        self._observers.discard(writer)


async def part(reader: asyncio.StreamReader) -> None:
    """Wait until a refused controller has hung up. Were the connection closed here, with a command on its way, the other side
    would see a broken pipe before the reason, and take this process for one that does not answer."""
    with contextlib.suppress(TimeoutError, OSError):
        async with asyncio.timeout(PARTING_S):
            while await reader.read(65536):
                pass


def _say_why(writer: asyncio.StreamWriter, why: str) -> None:
    writer.write(encode(Refused(id=NO_ID, epoch=0, why=why)))
    if writer.can_write_eof():
        # only this direction: see `part`
        writer.write_eof()
