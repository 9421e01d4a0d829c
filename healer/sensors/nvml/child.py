"""One probe process: started, listened to, ended. Never blocks: its output is read as it comes, its end is noticed by the
event loop or by `ended`."""

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path

import msgspec

from healer.sensors.nvml import wire
from healer.sensors.nvml.config import EVENTS, NvmlConfig

_READ_BYTES = 1 << 16
_MAX_LINE_BYTES = 1 << 20

_BOOT = "import sys; sys.path.insert(0, {here!r}); sys.path.append({site!r}); from probe.main import main; main()"


def command(config: NvmlConfig) -> list[str]:
    """A bare interpreter (-I -S: no site-packages scan, no user settings): 14 MB with pynvml. Raises ImportError where
    pynvml is not installed."""
    found = find_spec("pynvml")
    if found is None or found.origin is None:
        raise ImportError("nvidia-ml-py is not installed")
    boot = _BOOT.format(here=str(Path(__file__).parent), site=str(Path(found.origin).parent))
    options = {
        "periods_s": {"fast": config.fast_s, "medium": config.medium_s, "slow": config.slow_s},
        "search_s": config.search_s,
        "events": EVENTS,
    }
    return [sys.executable, "-I", "-S", "-c", boot, msgspec.json.encode(options).decode()]


def child_environment(config: NvmlConfig) -> dict[str, str]:
    """NVML lists what CUDA_VISIBLE_DEVICES hides, so nothing is taken away from the daemon's environment."""
    found = {**os.environ, **config.environment}
    if config.library_dir is not None:
        before = found.get("LD_LIBRARY_PATH", "")
        found["LD_LIBRARY_PATH"] = f"{config.library_dir}:{before}" if before else str(config.library_dir)
    return found


class Child:
    """Must be made in a running event loop. Raises OSError or ImportError where it cannot be started."""

    def __init__(self, config: NvmlConfig, on_line: Callable[[wire.Line], None], on_end: Callable[[], None]) -> None:
        """`on_line` gets each line in the loop; `on_end` is called once, when the output has ended."""
        self._on_line, self._on_end = on_line, on_end
        self._process = subprocess.Popen(
            command(config),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env=child_environment(config),
            start_new_session=True,  # Ctrl-C at the daemon's terminal is the daemon's to handle
        )
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._in, self._out = self._process.stdin, self._process.stdout
        self.pid = self._process.pid
        self.garbled = 0
        self._rest = b""
        self._loop = asyncio.get_running_loop()
        os.set_blocking(self._out.fileno(), False)
        self._loop.add_reader(self._out.fileno(), self._readable)

    @property
    def ended(self) -> bool:
        """It has ended and is reaped."""
        return self._process.poll() is not None

    @property
    def end_reason(self) -> str:
        code = self._process.poll()
        if code is None:
            return "it still runs"
        return f"ended by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"

    def read(self) -> None:
        """Take in what has come, now: before the daemon judges how old the newest reading is."""
        if not self._out.closed:
            self._readable()

    async def wait(self, within_s: float) -> None:
        """Until it has ended, at most so long."""
        if self.ended:
            return
        gone, fd = asyncio.Event(), os.pidfd_open(self.pid)
        self._loop.add_reader(fd, gone.set)
        try:
            async with asyncio.timeout(within_s):
                await gone.wait()
        except TimeoutError:
            pass
        finally:
            self._loop.remove_reader(fd)
            os.close(fd)
            self._process.poll()

    def ask_to_end(self) -> None:
        """Its standard input ends: it closes NVML and goes."""
        if not self._in.closed:
            self._in.close()

    def kill(self) -> None:
        """SIGKILL. A process that is stuck in the driver does not end by it before the driver lets go."""
        if not self.ended:
            self._process.kill()

    def let_go(self) -> None:
        """Close the pipes and read no more; `ended` still tells when it is gone."""
        self.ask_to_end()
        if not self._out.closed:
            self._loop.remove_reader(self._out.fileno())
            self._out.close()

    def _readable(self) -> None:
        try:
            while chunk := os.read(self._out.fileno(), _READ_BYTES):
                *lines, self._rest = (self._rest + chunk).split(b"\n")
                for line in lines:
                    self._take(line)
                if self._out.closed:
                    return  # a line has led to the end of this process
                if len(self._rest) > _MAX_LINE_BYTES:
                    self.garbled, self._rest = self.garbled + 1, b""
        except BlockingIOError:
            return
        self.let_go()
        self._on_end()

    def _take(self, line: bytes) -> None:
        try:
            said = wire.decode(line)
        except (msgspec.MsgspecError, UnicodeDecodeError):
            self.garbled += 1
            return
        if not self._out.closed:
            self._on_line(said)
