"""What the commands that measure share: their end, the model that they make, the group that they end, the file that they write."""

import asyncio
import subprocess
import sys
import time
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import msgspec

from elastic.errors import ElasticError
from healer.deployment import Deployment
from healer.interrupt import Interrupted, run_to_its_end


def run_command(begin: Callable[[], Coroutine[Any, Any, int]]) -> int:
    """The exit code that the coroutine returns. An expected error, also one of `begin` itself, is one line and code 1; after a
    signal, which lets the coroutine end in order, the code is 128 and its number."""
    try:
        return run_to_its_end(begin())
    except Interrupted as interrupted:
        print(interrupted, file=sys.stderr)
        return interrupted.exit_code
    except (ElasticError, OSError, subprocess.SubprocessError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1


async def make_model(folder: Path, vocabulary: int) -> None:
    """A small random checkpoint. Raises CalledProcessError."""
    command = (sys.executable, "-m", "elastic.tools.make_checkpoint", str(folder), "--vocab", str(vocabulary))
    await asyncio.to_thread(subprocess.run, command, check=True, capture_output=True)


def end(deployment: Deployment, *, keep: bool) -> None:
    """End all of it; what is kept is named."""
    deployment.end(keep=keep)
    if keep:
        print(f"logs, journal and policy are kept in {deployment.root}", file=sys.stderr)


def utc_now() -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())


def write_json(path: Path, record: msgspec.Struct) -> None:
    """Indented; its folder is made where it is missing. Raises OSError."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(msgspec.json.format(msgspec.json.encode(record)) + b"\n")
