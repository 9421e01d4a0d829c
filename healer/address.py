"""Where a daemon is found: the files in the run directory that say which process listens where.

The daemon that acts is in `healer.json`. Standbys, which do not touch what another one owns, are in `standby-<pid>.json`. A
dry run, which may stand beside all of them, has a folder of its own in the run directory, with its address and its journal.
"""

import contextlib
from collections.abc import Iterator
from pathlib import Path

import msgspec

from elastic import process
from elastic.errors import ElasticError
from elastic.paths import read_json, write_json


class DaemonAddress(msgspec.Struct, frozen=True):
    """There while a daemon runs: how the other commands find it."""

    pid: int
    pid_start: int
    http: str
    policy: str
    token_file: str
    """Empty where none is needed."""
    version: str
    started_wall: float

    @property
    def alive(self) -> bool:
        return process.is_alive(self.pid, self.pid_start)


def home(run_dir: Path, *, dry_run: bool) -> Path:
    """Where a daemon keeps what is its own."""
    return run_dir / "dry-run" if dry_run else run_dir


def journal_path(run_dir: Path) -> Path:
    return run_dir / "journal.db"


def address_path(run_dir: Path) -> Path:
    return run_dir / "healer.json"


def standby_path(run_dir: Path, pid: int) -> Path:
    return run_dir / f"standby-{pid}.json"


def read_acting(run_dir: Path) -> DaemonAddress | None:
    """Of the daemon that acts, as far as it is known here."""
    found = _read(address_path(run_dir))
    return found if found is not None and found.alive else None


def read_address(run_dir: Path) -> DaemonAddress | None:
    """Of the daemon that acts, else of a standby; None where no daemon runs."""
    for path in (address_path(run_dir), *sorted(run_dir.glob("standby-*.json"))):
        found = _read(path)
        if found is not None and found.alive:
            return found
    return None


@contextlib.contextmanager
def published(path: Path, address: DaemonAddress) -> Iterator[str]:
    """The address stands there meanwhile; it is removed only where nobody else has written his own over it. Gives why it could
    not be written (a full disk); empty: it was. Who is told so may `publish` it later."""
    why = publish(path, address)
    try:
        yield why
    finally:
        found = _read(path)
        if found is not None and (found.pid, found.pid_start) == (address.pid, address.pid_start):
            path.unlink(missing_ok=True)


def publish(path: Path, address: DaemonAddress) -> str:
    """Returns why it cannot be written; empty: it was."""
    try:
        write_json(path, address)
    except OSError as error:
        return f"{path}: {error.strerror}"
    return ""


def _read(path: Path) -> DaemonAddress | None:
    with contextlib.suppress(ElasticError):
        return read_json(path, DaemonAddress)
    return None
