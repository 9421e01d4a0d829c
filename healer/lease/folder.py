"""The record in a folder: on one host, or on a file system that several hosts share.

No lock: a candidate that is frozen while it holds one would hold up all others. Each write makes a file whose name ends in
the record's beat, by `link`, which fails where the name exists and is atomic on NFS too; the highest beat is the record.
A writer that comes back after others have gone on may still make a file that is long out of date: it looks once more and
finds the higher one, so it has not written. Older files are removed by whoever writes.
"""

import contextlib
import os
import uuid
from pathlib import Path

import msgspec

from elastic.errors import ElasticError
from healer.lease import Record, Versioned

PREFIX = "lease-"


class FolderStore:
    """The version is the beat. A damaged record is an error, never "no record": its term must not be forgotten."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def __str__(self) -> str:
        return str(self.folder)

    def read(self, *, deadline_s: float) -> Versioned | None:
        for _ in range(10):
            beats = self._beats()
            if not beats:
                return None
            with contextlib.suppress(FileNotFoundError):  # replaced between the two calls
                return Versioned(self._decode(self._path(beats[-1])), str(beats[-1]))
        raise ElasticError(f"{self.folder}: the lease changes faster than it can be read")

    def replace(self, record: Record, version: str | None, *, deadline_s: float) -> bool:
        if record.beat != int(version or 0) + 1:
            raise ValueError(f"beat {record.beat} does not follow {version}")
        target = self._path(record.beat)
        part = self.folder / f".{uuid.uuid4().hex}.part"
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            with part.open("wb") as file:
                file.write(msgspec.json.encode(record))
                file.flush()
                os.fsync(file.fileno())
            try:
                os.link(part, target)
            except FileExistsError:
                return False
            finally:
                part.unlink()
            beats = self._beats()
            if beats[-1] != record.beat:
                target.unlink(missing_ok=True)
                return False
            for beat in beats[:-1]:
                self._path(beat).unlink(missing_ok=True)
        except OSError as error:
            raise ElasticError(f"{self.folder}: the lease cannot be written: {error.strerror}") from error
        return True

    def _path(self, beat: int) -> Path:
        return self.folder / f"{PREFIX}{beat:020d}"

    def _beats(self) -> list[int]:
        try:
            names = os.listdir(self.folder)
        except FileNotFoundError:
            return []
        except OSError as error:
            raise ElasticError(f"{self.folder}: the lease cannot be read: {error.strerror}") from error
        return sorted(int(n.removeprefix(PREFIX)) for n in names if n.startswith(PREFIX))

    def _decode(self, path: Path) -> Record:
        try:
            return msgspec.json.decode(path.read_bytes(), type=Record)
        except msgspec.MsgspecError as error:
            raise ElasticError(
                f"{path}: the lease is damaged ({error}); when no daemon runs anywhere, delete it"
            ) from error
        except FileNotFoundError:
            raise
        except OSError as error:
            raise ElasticError(f"{path}: the lease cannot be read: {error.strerror}") from error
