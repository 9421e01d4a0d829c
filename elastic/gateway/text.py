"""Tokens to text and back. The text given out never ends within a character, and never shows part of a stop string."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from tokenizers import Tokenizer

from elastic.errors import ElasticError

REPLACEMENT = "\ufffd"


def load_tokenizer(checkpoint: str | Path) -> Tokenizer:
    """CHECKPOINT/tokenizer.json. Raises ElasticError naming the file."""
    path = Path(checkpoint) / "tokenizer.json"
    if not path.is_file():
        raise ElasticError(f"{path}: no such file; the gateway needs the checkpoint's tokenizer")
    try:
        return Tokenizer.from_file(str(path))
    # the library raises bare Exception for a file that it cannot parse
    except Exception as error:
        raise ElasticError(f"{path}: not a tokenizer of the `tokenizers` library: {error}") from error


def read_eos_ids(checkpoint: str | Path) -> tuple[int, ...]:
    """The tokens that end an answer: generation_config.json, else config.json. Raises ElasticError naming the file."""
    for name in ("generation_config.json", "config.json"):
        path = Path(checkpoint) / name
        if not path.is_file():
            continue
        try:
            found = json.loads(path.read_text())
            eos = found.get("eos_token_id") if isinstance(found, dict) else None
        except (OSError, ValueError) as error:
            raise ElasticError(f"{path}: cannot be read as JSON: {error}") from error
        if eos is None:
            continue
        ids = eos if isinstance(eos, list) else [eos]
        if not all(isinstance(token, int) and not isinstance(token, bool) and token >= 0 for token in ids):
            raise ElasticError(f"{path}: eos_token_id is {eos!r}, expected a token id or a list of them")
        return tuple(ids)
    return ()


class Detokenizer:
    """Text of a growing list of tokens, each piece decoded with the tokens before it, since a token's text may depend
    on them. All pieces together are the text of all tokens."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._window: list[int] = []
        """Tokens of the last piece (context), then those not yet shown."""
        self._context = 0

    def add(self, token: int) -> str:
        """The text that this token settles; empty while a character is incomplete."""
        self._window.append(token)
        return self._take(final=False)

    def end(self) -> str:
        """What is left; an incomplete character becomes U+FFFD, as when all tokens are decoded at once."""
        return self._take(final=True)

    def _take(self, *, final: bool) -> str:
        window = self._window
        before = self._tokenizer.decode(window[: self._context])
        text = self._tokenizer.decode(window)
        # U+FFFD at the end is a character whose bytes have not all come
        if len(text) <= len(before) or (text.endswith(REPLACEMENT) and not final):
            return ""
        del window[: self._context]
        self._context = len(window)
        return text[len(before) :]


class StopScanner:
    """Finds stop strings in text that comes in pieces. The answer does not depend on how the text is cut: the stop
    string that is complete first wins; of those complete at the same place, the one that began first."""

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = tuple(stops)
        self._held = ""
        self.hit = False

    def add(self, text: str) -> str:
        """The text that is safe to show: none of it can belong to a stop string. After a hit, nothing more."""
        if self.hit or not text:
            return ""
        self._held += text
        found = [(at + len(stop), at) for stop in self._stops if (at := self._held.find(stop)) >= 0]
        if found:
            _, at = min(found)
            self.hit = True
            return self._cut(at)
        return self._cut(len(self._held) - self._partial())

    def end(self) -> str:
        """The text is over: what was held back was no stop string."""
        return "" if self.hit else self._cut(len(self._held))

    def _partial(self) -> int:
        """Length of the longest end of the held text that begins a stop string."""
        held = self._held
        longest = max((len(stop) for stop in self._stops), default=1) - 1
        for size in range(min(longest, len(held)), 0, -1):
            if any(len(stop) > size and stop.startswith(held[-size:]) for stop in self._stops):
                return size
        return 0

    def _cut(self, at: int) -> str:
        shown, self._held = self._held[:at], self._held[at:]
        return shown


class Piece(NamedTuple):
    text: str
    token_ids: tuple[int, ...]
    finish: str | None


class AnswerText:
    """The text of one answer as its tokens arrive."""

    def __init__(self, tokenizer: Tokenizer, stops: Sequence[str], stop_ids: Sequence[int]) -> None:
        self._detokenizer = Detokenizer(tokenizer)
        self._scanner = StopScanner(stops)
        self._stop_ids = frozenset(stop_ids)

    def feed(self, tokens: Sequence[int], finish: str | None) -> Piece:
        """Text for the next tokens; `finish` when they are the last. The piece's own finish is "stop" when a stop string
        is complete: the tokens behind it are not part of the answer."""
        shown: list[str] = []
        for count, token in enumerate(tokens, 1):
            if token in self._stop_ids:
                continue
            shown.append(self._scanner.add(self._detokenizer.add(token)))
            if self._scanner.hit:
                return Piece("".join(shown), tuple(tokens[:count]), "stop")
        if finish is not None:
            shown.append(self._scanner.add(self._detokenizer.end()))
            shown.append(self._scanner.end())
            if self._scanner.hit:
                finish = "stop"
        return Piece("".join(shown), tuple(tokens), finish)
