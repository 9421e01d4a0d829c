"""Hooks: commands and URLs of the site that a rule of the policy calls. Each call has a deadline, its output is captured, no
shell reads the command, and what comes from secret files is never logged.
"""

import asyncio
import contextlib
import os
import signal
import time
from collections.abc import Callable, Mapping
from pathlib import Path

import msgspec

from elastic import process
from healer.policy.schema import Hook

OUTPUT_CHARS = 2000
"""Kept of the output: its end, where errors stand."""
KILL_AFTER_S = 2.0
"""Between the request to end a command and SIGKILL."""
_PASSED_ON = ("PATH", "HOME")
_SHORTEST_SECRET = 4
"""Shorter contents are no secrets, and masking them would garble the output."""


class HookFacts(msgspec.Struct, frozen=True, kw_only=True):
    """What a hook is told, as HEALER_* variables or as JSON."""

    hook: str
    slot: int
    rule: str
    cause: str
    incident: str = ""
    host: str = ""
    gpu_uuid: str = ""
    gpu_pci: str = ""
    xid: int = 0
    """0: none."""
    sentence: str = ""


class HookResult(msgspec.Struct, frozen=True):
    ok: bool
    text: str
    """Exit code or status, and the end of the output."""
    took_s: float


class HookRunner:
    """Owned by the supervisor's loop: at most one call for each slot at a time; `close` ends those that run."""

    def __init__(self, hooks: Mapping[str, Hook], on_end: Callable[[HookFacts, HookResult], None]) -> None:
        """`on_end` is called in the loop, once for each call that was started and not cut off by `close`."""
        self.hooks, self._on_end = hooks, on_end
        self._running: dict[int, asyncio.Task[None]] = {}

    def start(self, facts: HookFacts) -> None:
        """Begin a call; returns at once. A call that runs for the same slot is ended first, and reports no end."""
        earlier = self._running.pop(facts.slot, None)
        if earlier is not None:
            earlier.cancel()
        task = asyncio.get_running_loop().create_task(self._run(facts), name=f"hook {facts.hook} slot {facts.slot}")
        self._running[facts.slot] = task

    async def close(self) -> None:
        tasks, self._running = list(self._running.values()), {}
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks, timeout=KILL_AFTER_S + 1.0)

    async def _run(self, facts: HookFacts) -> None:
        result = await call(self.hooks.get(facts.hook), facts)
        if self._running.get(facts.slot) is asyncio.current_task():
            del self._running[facts.slot]
            self._on_end(facts, result)


async def call(hook: Hook | None, facts: HookFacts) -> HookResult:
    """Run one hook to its end. Raises nothing but CancelledError, and then its command has been ended."""
    began = time.monotonic()
    if hook is None:
        return HookResult(False, f"there is no hook {facts.hook}", 0.0)
    secrets: list[str] = []
    try:
        async with asyncio.timeout(hook.deadline_s):
            ok, text = await (_post(hook, facts, secrets) if hook.kind == "webhook" else _exec(hook, facts, secrets))
    except TimeoutError:
        ok, text = False, f"took longer than {hook.deadline_s:g} s and was ended"
    except (OSError, ValueError) as error:
        ok, text = False, f"cannot be called: {error}"
    for secret in secrets:
        text = text.replace(secret, "***")
    return HookResult(ok, text[-OUTPUT_CHARS:], time.monotonic() - began)


def _read(files: Mapping[str, str], secrets: list[str]) -> dict[str, str]:
    """Contents by name, without the line end. Raises OSError or ValueError that names the file and not its content."""
    found = {}
    for name, path in files.items():
        try:
            found[name] = Path(path).read_text(encoding="utf-8").rstrip("\r\n")
        except UnicodeDecodeError:
            raise ValueError(f"{path} is not UTF-8 text") from None
        if len(found[name]) >= _SHORTEST_SECRET:
            secrets.append(found[name])
    return found


async def _exec(hook: Hook, facts: HookFacts, secrets: list[str]) -> tuple[bool, str]:
    told = {f"HEALER_{name.upper()}": str(value) for name, value in msgspec.structs.asdict(facts).items()}
    kept = {name: os.environ[name] for name in _PASSED_ON if name in os.environ}
    child = await asyncio.create_subprocess_exec(
        *process.ordinary(hook.command),
        env={**kept, **hook.env, **_read(hook.env_files, secrets), **told},
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
        start_new_session=True,
    )
    output = bytearray()
    try:
        assert child.stdout is not None
        while chunk := await child.stdout.read(65536):
            output += chunk
            del output[: -8 * OUTPUT_CHARS]
        code = await child.wait()
    except BaseException:
        await asyncio.shield(_end(child))
        raise
    shown = output.decode(errors="replace").strip()
    return code == 0, f"exit code {code}{f': {shown}' if shown else ''}"


async def _end(child: asyncio.subprocess.Process) -> None:
    """The command and its children: asked to end, then killed."""
    for signum in (signal.SIGTERM, signal.SIGKILL):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(child.pid, signum)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(KILL_AFTER_S):
                await child.wait()
            if signum == signal.SIGTERM:
                continue  # the command has ended, but a child of it may not have
            return


async def _post(hook: Hook, facts: HookFacts, secrets: list[str]) -> tuple[bool, str]:
    import httpx  # 0.2 s that a policy without webhooks saves

    headers = {**hook.headers, **_read(hook.header_files, secrets)}
    try:
        async with httpx.AsyncClient(timeout=hook.deadline_s) as client:
            answer = await client.post(hook.url, json=msgspec.structs.asdict(facts), headers=headers)
    except httpx.HTTPError as error:
        return False, f"{type(error).__name__}: {error}"
    return answer.is_success, f"status {answer.status_code}: {answer.text[-OUTPUT_CHARS:].strip()}"
