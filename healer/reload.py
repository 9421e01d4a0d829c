"""A policy file that changes while the daemon runs: what of it can be taken over without a restart, and what cannot.

A file that is wrong, or that changes what a running group cannot change, is rejected as a whole; the last good policy stays.
"""

import asyncio
import hashlib
from collections.abc import Callable
from pathlib import Path

import msgspec

from elastic.errors import ElasticError
from healer.clock import Clock
from healer.policy.schema import Model, Policy

POLL_S = 2.0
"""Between two looks at the file."""

FIXED = (
    ("metadata", "name"),
    ("spec", "target"),
    ("spec", "api"),
    ("spec", "lease"),
    ("spec", "sensors"),
    ("spec", "healing", "deadlines"),
    ("spec", "detection", "heartbeat_interval_s"),
)
"""What sizes the group, or is bound when the daemon starts. The labels of slots may change."""


class PolicyStatus(msgspec.Struct, frozen=True, kw_only=True):
    """Which policy is in force."""

    path: str
    """Empty: it did not come from a file."""
    digest: str
    """Of the file's bytes, to compare hosts with: blake2b, 16 hexadecimal digits."""
    loaded_wall: float
    rejected_wall: float | None = None
    """When a later file was rejected; None: none was, or a good one has come since."""
    rejected: str = ""
    """Why it was."""


class PolicyFile:
    """Owned by the supervisor's loop. The file is read in a thread: a large one takes longer than a round may."""

    def __init__(
        self, path: Path | None, policy: Policy, clock: Clock, load: Callable[[Path], Policy] | None = None
    ) -> None:
        """`load` raises ElasticError; by default it is `healer.policy.load.load_policy`."""
        self._path, self._policy, self._clock, self._load = path, policy, clock, load or _load
        self._stamp = _stamp(path)
        self._next = clock.monotonic() + POLL_S
        self._reading: asyncio.Task[tuple[Policy, str]] | None = None
        self._observes = policy.spec.dry_run
        self.status = PolicyStatus(path=str(path or ""), digest=_digest(path), loaded_wall=clock.wall())

    def reload(self) -> None:
        """Read the file as soon as possible, changed or not."""
        self._stamp, self._next = None, 0.0

    def poll(self, now: float) -> Policy | str | None:
        """Called in each round. A new policy that is to be taken over now; a text: why a file was just rejected; None:
        nothing new."""
        if self._reading is not None:
            return self._finished() if self._reading.done() else None
        if self._path is None or now < self._next:
            return None
        self._next = now + POLL_S
        stamp = _stamp(self._path)
        if stamp != self._stamp:
            self._stamp = stamp
            self._reading = asyncio.create_task(asyncio.to_thread(self._read, self._path), name="policy")
        return None

    async def close(self) -> None:
        if self._reading is not None:
            await asyncio.wait([self._reading])

    def _read(self, path: Path) -> tuple[Policy, str]:
        if not path.is_file():
            # a pipe would be waited for, for ever
            raise ElasticError(f"{path}: no such file, or none that can be read again")
        # the digest first: where the file changes in between, the next look finds it changed again
        digest = _digest(path)
        return self._load(path), digest

    def _finished(self) -> Policy | str | None:
        reading, self._reading = self._reading, None
        assert reading is not None
        try:
            policy, digest = reading.result()
            kept = fixed_changes(self._policy, policy)
            if self._observes and not policy.spec.dry_run:
                kept.append("spec.dryRun, since this daemon began as an observer,")
            if kept:
                raise ElasticError(f"{self._path}: {', '.join(kept)} cannot change without a restart of the daemon")
        except Exception as error:  # whatever the file does to its reader, the policy in force stays
            self.status = msgspec.structs.replace(
                self.status, rejected_wall=self._clock.wall(), rejected=str(error) or repr(error)
            )
            return self.status.rejected
        same, self._policy = policy == self._policy, policy
        loaded_wall = self.status.loaded_wall if same else self._clock.wall()
        self.status = PolicyStatus(path=self.status.path, digest=digest, loaded_wall=loaded_wall)
        return None if same else policy


def fixed_changes(old: Policy, new: Policy) -> list[str]:
    """The keys, as in the file, that differ and cannot be taken over by a running daemon."""
    found: list[str] = []
    for path in FIXED:
        before, after = _at(old, path), _at(new, path)
        if isinstance(before, Model) and type(before) is type(after):
            found += _differences(before, after, _key(type(old), path))
        elif before != after:
            found.append(_key(type(old), path))
    return found


def _differences(before: Model, after: object, place: str) -> list[str]:
    return [
        f"{place}.{info.alias}"
        for name, info in type(before).model_fields.items()
        if name != "slot_labels" and getattr(before, name) != getattr(after, name)
    ]


def _at(policy: Policy, path: tuple[str, ...]) -> object:
    found: object = policy
    for name in path:
        found = getattr(found, name)
    return found


def _key(model: type[Model], path: tuple[str, ...]) -> str:
    """As it stands in the file."""
    shown = []
    for name in path:
        info = model.model_fields[name]
        shown.append(info.alias or name)
        if isinstance(info.annotation, type) and issubclass(info.annotation, Model):
            model = info.annotation
    return ".".join(shown)


def _load(path: Path) -> Policy:
    from healer.policy.load import load_policy

    return load_policy(path)


def _stamp(path: Path | None) -> tuple[int, ...] | None:
    """Changes with the file. An editor that writes a new file beside and renames it changes the inode; permissions that are
    given back change only the time of the last change of the inode."""
    try:
        found = path.stat() if path is not None else None
    except OSError:
        return (0,)
    return (found.st_ino, found.st_mtime_ns, found.st_ctime_ns, found.st_size) if found is not None else None


def _digest(path: Path | None) -> str:
    try:
        readable = path is not None and path.is_file()
        return hashlib.blake2b(path.read_bytes(), digest_size=8).hexdigest() if path is not None and readable else ""
    except OSError:
        return ""
