"""Standard output of a process that must not fail because nobody can take its words: a full disk, a reader that has gone."""

import io
import sys


class _Forgiving(io.FileIO):
    """Loses what cannot be written."""

    def write(self, data: object) -> int:
        try:
            return super().write(data) or 0  # type: ignore[arg-type]
        except OSError:
            return len(memoryview(data))  # type: ignore[arg-type]


def forgive_output() -> None:
    """For the life of this process, from its start: stdout and stderr raise no OSError any more."""
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        raw = _Forgiving(stream.fileno(), "w", closefd=False)
        setattr(
            sys,
            name,
            io.TextIOWrapper(
                io.BufferedWriter(raw),
                encoding="utf-8",
                errors="backslashreplace",
                line_buffering=True,
                write_through=True,
            ),
        )
