"""What a controller must remember across its own death: who holds which slot. Written before and after each launch.

The file is a hint, not the truth: after a restart the ranks are asked. It exists so that they can be found.
"""

from typing import IO

import msgspec

from elastic import lockfile
from elastic.config import GroupConfig
from elastic.errors import ElasticError
from elastic.launch.base import Launched
from elastic.paths import lock_path, read_json, state_path, state_path_of, states_by_term, write_json
from elastic.view import Member


class GatewayProcess(msgspec.Struct, frozen=True):
    """`gateway.json`, written by the gateway when it listens."""

    pid: int
    pid_start: int
    http: str


class GroupState(msgspec.Struct, frozen=True):
    """`group.json`, or `group.<term>.json` under a lease."""

    group: str
    epoch: int
    target: tuple[int, ...]
    members: tuple[Member, ...]
    """Every rank process that was started and not seen dead, in a view or not."""
    incarnations: dict[int, int]
    """The highest incarnation given to each slot, so that none is given twice."""


def load_state(config: GroupConfig) -> GroupState | None:
    """None when there is no file or it is damaged (then set aside): the ranks themselves are asked in any case."""
    path = state_path(config.root)
    if not path.exists():
        return None
    try:
        state = read_json(path, GroupState)
    except ElasticError:
        path.replace(path.with_suffix(".damaged"))
        return None
    return state if state.group == config.name else None


def save_state(config: GroupConfig, state: GroupState, term: int = 0) -> None:
    write_json(state_path_of(config.root, term), state)


def drop_older_states(config: GroupConfig, term: int) -> None:
    """Remove what controllers of lower terms wrote. One without a lease has the file lock instead, and the ranks have let it
    in: then whatever others wrote is out of date."""
    if term:
        state_path_of(config.root, 0).unlink(missing_ok=True)
    for other, path in states_by_term(config.root).items():
        if other < term or term == 0:
            path.unlink(missing_ok=True)


class ControllerLock:
    """One controller per run directory, held by a file lock that the kernel drops when the process ends."""

    def __init__(self, config: GroupConfig) -> None:
        self._path = lock_path(config.root)
        self._file: IO[str] | None = None

    def acquire(self) -> None:
        """Raises ElasticError naming the holder."""
        try:
            self._file = lockfile.claim(self._path)
        except lockfile.Held as held:
            raise ElasticError(f"{self._path}: another controller holds this group (pid {held.holder})") from None

    def release(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None


def launched(member: Member) -> Launched:
    return Launched(member.pid, member.pid_start)
