"""One piece of work at a time: what comes meanwhile waits until it is done, and nothing that fails gets out."""

import contextlib
from collections import deque
from collections.abc import Callable, Iterator
from typing import Generic, TypeVar

T = TypeVar("T")


class Turns(Generic[T]):
    """Owned by one loop."""

    def __init__(
        self, handle: Callable[[T], None], on_error: Callable[[T, Exception], None], after: Callable[[], None]
    ) -> None:
        """`handle`: does what an event asks for; `on_error`: told what it raised; `after`: called when all is done."""
        self._handle, self._on_error, self._after = handle, on_error, after
        self._waiting: deque[T] = deque()
        self._busy = False

    def take(self, event: T) -> None:
        """Handle it now, or, from within a piece of work, when that is done. Never raises."""
        self._waiting.append(event)
        if not self._busy:
            with self.alone():
                pass

    @contextlib.contextmanager
    def alone(self) -> Iterator[None]:
        """A piece of work; then the events that came meanwhile."""
        outer, self._busy = self._busy, True
        try:
            yield
        finally:
            while self._waiting and not outer:
                event = self._waiting.popleft()
                try:
                    self._handle(event)
                except Exception as error:
                    self._on_error(event, error)
            self._busy = outer
            if not outer:
                self._after()
