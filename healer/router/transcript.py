"""The answer so far: what the ranks gave, what the client was shown, and where another rank takes it up. Pure.

Text may lag behind tokens. vLLM holds back as many characters as could begin a stop string, and the bytes of a character
that is not whole. The client is shown text up to the end of a token only, so that there is always a number of tokens that
stands for exactly the text it has; a continuation begins there, and what was generated beyond it is generated again.
"""

from collections.abc import Sequence
from typing import NamedTuple

INCOMPLETE = "\ufffd"
"""What an incomplete character decodes to."""


class Diverged(Exception):
    """A continuation gave other tokens than those that the client already has."""


class Piece(NamedTuple):
    """What the client is shown next."""

    text: str
    token_ids: tuple[int, ...]


class Transcript:
    """`stops`: the request's stop strings; `stops_shown`: whether the answer includes them. `ids_shown`: the client asked
    for token ids."""

    def __init__(self, *, stops: Sequence[str] = (), stops_shown: bool = False, ids_shown: bool = False) -> None:
        self.prompt: list[int] | None = None
        self.tokens: list[int] = []
        """Of all ranks, each continued by the next."""
        self.untracked = False
        """Text came without the tokens that it stands for."""
        self._lag = max((len(stop) for stop in stops), default=1) - 1
        self._held = 0 if stops_shown else self._lag
        """Characters that vLLM holds back, once it has more than that."""
        self._ids_shown = ids_shown
        self._pending = ""
        """Text that came and was not shown."""
        self._base = 0
        """Length of the text when the present rank began."""
        self._came = 0
        """Length of the text that came from the present rank."""
        self._marks: list[tuple[int, int]] = []
        """Numbers of tokens and of characters that belong together, those not yet shown."""
        self._shown_chars = 0
        self._at = 0
        """Tokens that stand for the shown text."""
        self._ids_out = 0
        """Token ids that the client has."""
        self._overlap: Sequence[int] = ()
        """The tokens of the ranks before, to compare with."""

    @property
    def shown_chars(self) -> int:
        return self._shown_chars

    @property
    def at(self) -> int:
        return self._at

    def feed(self, text: str, token_ids: Sequence[int], *, final: bool = False) -> Piece:
        """Take what a rank gave; returns what the client may now have. `final`: nothing more comes.

        Raises Diverged."""
        if text and not token_ids and not final:
            self.untracked = True
        self._take_ids(token_ids)
        self._pending += text
        self._came += len(text)
        if final:
            return self._show(len(self.tokens), self._base + self._came)
        if not self._held or self._came:
            total = self._base + self._came + self._held
            self._marks.append((len(self.tokens), total))
            safe = total - self._lag
            reached = None
            while self._marks and self._marks[0][1] <= safe:
                reached = self._marks.pop(0)
            if reached is not None:
                return self._show(*reached)
        return Piece("", ())

    def _take_ids(self, token_ids: Sequence[int]) -> None:
        known = self._ids_out if self._ids_shown else 0
        for token in token_ids:
            at = len(self.tokens)
            if at < known and self._overlap[at] != token:
                raise Diverged(f"token {at} is {token}, the client has {self._overlap[at]}")
            self.tokens.append(token)

    def _show(self, tokens: int, chars: int) -> Piece:
        size = chars - self._shown_chars
        text, self._pending = self._pending[:size], self._pending[size:]
        ids = tuple(self.tokens[self._ids_out : tokens])
        self._shown_chars, self._at = chars, tokens
        self._ids_out = max(self._ids_out, tokens)
        return Piece(text, ids)

    def resume(self, tokens: int) -> None:
        """The next rank begins behind that many tokens, which stand for the shown text: `at`, or fewer by those that had
        no text (see `tail`)."""
        if not 0 <= tokens <= self._at:
            raise ValueError(f"{tokens} of {self._at} tokens")
        if self._ids_shown and len(self.tokens) >= self._ids_out:
            self._overlap = tuple(self.tokens[: self._ids_out])
        del self.tokens[tokens:]
        self._at = tokens
        self._pending, self._marks = "", []
        self._base, self._came = self._shown_chars, 0

    def restart(self) -> None:
        """All that came is void; the client has none of it."""
        self.prompt, self.untracked = None, False
        self.tokens, self._overlap, self._ids_out = [], (), 0
        self._shown_chars = 0
        self.resume(0)

    def tail(self, tokens: int, size: int) -> list[int]:
        """The last tokens before a place where one could resume, of the prompt too, to be decoded: the place is good if
        they do not end within a character, else one token earlier may be."""
        return [*(self.prompt or ()), *self.tokens[:tokens]][-size:]
