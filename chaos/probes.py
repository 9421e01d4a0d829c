"""Looks at a deployment from outside, as an operator's monitoring does: at the start, during and at the end of a run."""

import asyncio
import time
from collections.abc import Sequence

import httpx

from chaos.records import ProbeResult
from chaos.scenario import Probe
from healer.deployment import Deployment

LOOK_S = 5.0


async def look(probe: Probe, deployment: Deployment) -> ProbeResult:
    """Never raises."""
    at = time.monotonic()
    ok, found = await (_command(probe) if probe.command else _http(probe, deployment))
    return ProbeResult(name=probe.name, mode=probe.mode, at=at, ok=ok, found=found[:300])


async def watch(probes: Sequence[Probe], deployment: Deployment, found: list[ProbeResult]) -> None:
    """Until it is cancelled."""
    async with asyncio.TaskGroup() as tasks:
        for probe in probes:
            tasks.create_task(_again(probe, deployment, found))


async def _again(probe: Probe, deployment: Deployment, found: list[ProbeResult]) -> None:
    while True:
        found.append(await look(probe, deployment))
        await asyncio.sleep(probe.every_s)


async def _http(probe: Probe, deployment: Deployment) -> tuple[bool, str]:
    try:
        base = deployment.gateway() if probe.of == "gateway" else deployment.api()
        async with httpx.AsyncClient(trust_env=False, verify=False, timeout=LOOK_S) as client:
            answer = await client.get(base + probe.path)
    except (httpx.HTTPError, OSError, ValueError) as error:
        return False, f"no answer: {error!r}"
    if answer.status_code != probe.status:
        return False, f"status {answer.status_code}: {answer.text}"
    if probe.contains not in answer.text:
        return False, f"without {probe.contains!r}: {answer.text}"
    return True, f"status {answer.status_code}"


async def _command(probe: Probe) -> tuple[bool, str]:
    try:
        child = await asyncio.create_subprocess_exec(
            *probe.command,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
        )
    except OSError as error:
        return False, str(error)
    try:
        async with asyncio.timeout(LOOK_S):
            output, _ = await child.communicate()
    except TimeoutError:
        child.kill()
        await child.wait()
        return False, f"took longer than {LOOK_S:g} s"
    return child.returncode == 0, f"exit code {child.returncode}: {output.decode(errors='replace').strip()}"
