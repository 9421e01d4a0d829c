"""Two daemons, controllers or gateways must never own one directory; one that is restarted must not be refused."""

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from elastic import lockfile
from elastic.lockfile import Held

HOLDER = """
import sys, pathlib
from elastic import lockfile
file = lockfile.claim(pathlib.Path(sys.argv[1]))
print("held", flush=True)
sys.stdin.read()
"""


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "a.lock"


@pytest.fixture
def holder(path: Path) -> Iterator["subprocess.Popen[str]"]:
    command = [sys.executable, "-c", HOLDER, str(path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "held\n"
        yield process
        process.kill()


def test_a_second_owner_is_refused_and_told_who_the_first_is(path: Path, holder: "subprocess.Popen[str]") -> None:
    with pytest.raises(Held, match=f"pid {holder.pid}") as refused:
        lockfile.claim(path)
    assert refused.value.holder == str(holder.pid)


async def test_whoever_restarts_a_killed_owner_at_once_is_not_refused(
    path: Path, holder: "subprocess.Popen[str]"
) -> None:
    claiming = asyncio.create_task(asyncio.to_thread(lockfile.claim, path))
    asyncio.get_running_loop().call_later(lockfile.PATIENCE_S / 4, holder.send_signal, signal.SIGKILL)
    with await claiming:
        assert path.read_text() == str(os.getpid())
