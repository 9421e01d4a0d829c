"""healer over vLLM 0.33.0's own servers with stub workers: every process, signal and endpoint is real, the GPU's work is not.

One deployment for all tests, since its start takes a minute or more; each test leaves a healthy group of two.
"""

import asyncio
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from healer.targets.vllm.records import Part
from tests.vllm.real import ENVIRONMENT, Clients, Deployment, deployed

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.timeout(2400),
    pytest.mark.skipif(
        not (ENVIRONMENT / "overlay033").is_dir(), reason="VLLM_CPU names no environment; make vllm-env"
    ),
]


@pytest.fixture(scope="module")
def group(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Deployment]:
    with deployed(tmp_path_factory.mktemp("vllm")) as found:
        yield found


async def healed(group: Deployment, before: dict[int, int], *, ranks: int = 2) -> float:
    """Seconds until every rank is another incarnation than before, and all is well."""
    began = time.monotonic()

    def anew(found: dict) -> bool:  # type: ignore[type-arg]
        members = [slot["member"] for slot in found["group"]["slots"] if slot["member"]]
        now = {member["slot"]: member["incarnation"] for member in members}
        return found["state"] == "ok" and len(now) == ranks and all(now[s] > before.get(s, -1) for s in now)

    await asyncio.to_thread(group.until, anew)
    group.scaled = False
    return time.monotonic() - began


async def served(group: Deployment) -> Clients:
    return Clients((await asyncio.to_thread(group.status))["serving"])


def nothing_lost(clients: Clients) -> None:
    print(f"right {clients.right}, longest wait {clients.longest_s:.1f} s")
    assert (clients.errors, clients.wrong) == ([], [])
    assert clients.right > 0


async def test_scaling_to_three_and_back_under_load_loses_no_token(group: Deployment) -> None:
    before = group.incarnations()
    async with (await served(group)).running() as clients:
        for ranks in (3, 2):
            began = time.monotonic()
            await asyncio.to_thread(group.scale, ranks)
            await asyncio.to_thread(group.healthy, ranks)
            print(f"scaled to {ranks} in {time.monotonic() - began:.1f} s")
    nothing_lost(clients)
    assert group.incarnations() == before, "who stayed was started anew"


async def test_a_killed_engine_is_healed_and_no_client_sees_it(group: Deployment) -> None:
    before = group.incarnations()
    async with (await served(group)).running() as clients:
        await asyncio.sleep(2.0)
        group.kill(1, Part.ENGINE)
        print(f"healed in {await healed(group, before):.1f} s")
    nothing_lost(clients)


async def test_a_transient_fault_is_retried_without_a_restart(group: Deployment) -> None:
    if group.scaled:
        before = group.incarnations()
        group.kill(1, Part.ENGINE)
        await healed(group, before)
    before, pids = group.incarnations(), [group.pid(slot, Part.ENGINE) for slot in (0, 1)]
    async with (await served(group)).running() as clients:
        await asyncio.sleep(2.0)
        armed = group.fault("raise_step_together")
        while not all((group.folder / f"faults/arrived_{slot}").exists() for slot in (0, 1)):  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        await asyncio.sleep(0.3)
        armed.unlink()
        print(f"healed in {await healed(group, before):.1f} s")
    nothing_lost(clients)
    assert pids == [group.pid(slot, Part.ENGINE) for slot in (0, 1)]


PARTS = [(slot, part) for slot in (0, 1) for part in (Part.API, Part.ENGINE, Part.WORKER)] + [(0, Part.COORDINATOR)]


@pytest.mark.slow
@pytest.mark.parametrize(("slot", "part"), PARTS, ids=str)
async def test_a_killed_part_of_any_rank_is_healed_and_no_client_sees_it(
    group: Deployment, slot: int, part: Part
) -> None:
    before = group.incarnations()
    async with (await served(group)).running() as clients:
        await asyncio.sleep(2.0)
        group.kill(slot, part)
        print(f"{part} {slot} healed in {await healed(group, before):.1f} s")
    nothing_lost(clients)


@pytest.mark.slow
@pytest.mark.parametrize(("slot", "part"), [(0, Part.API), (1, Part.WORKER), (0, Part.COORDINATOR)], ids=str)
async def test_an_idle_group_notices_a_death_that_vllm_does_not_tell(group: Deployment, slot: int, part: Part) -> None:
    before = group.incarnations()
    group.kill(slot, part)
    print(f"healed in {await healed(group, before):.1f} s")


@pytest.mark.slow
@pytest.mark.parametrize(("slot", "part"), PARTS[:-1], ids=str)
async def test_a_stopped_process_is_found_while_health_stays_200(group: Deployment, slot: int, part: Part) -> None:
    before = group.incarnations()
    async with (await served(group)).running() as clients:
        await asyncio.sleep(2.0)
        stopped = group.kill(slot, part, signal.SIGSTOP)
        print(f"{part} {slot} healed in {await healed(group, before):.1f} s")
    nothing_lost(clients)
    assert not Path(f"/proc/{stopped}").exists(), "it was left behind"


@pytest.mark.slow
async def test_four_ranks_and_back_to_two(group: Deployment) -> None:
    before = group.incarnations()
    async with (await served(group)).running() as clients:
        for ranks in (3, 4, 2):
            await asyncio.to_thread(group.scale, ranks)
            await asyncio.to_thread(group.healthy, ranks)
    nothing_lost(clients)
    assert group.incarnations() == before, "who stayed was started anew"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("fault", "rank"),
    [
        ("raise", "prepare_reconfiguration_rank0"),
        ("raise", "prepare_reconfiguration_rank1"),
        ("hang", "prepare_reconfiguration_rank1"),
        ("raise", "prepare_new_worker_rank2"),
        ("raise", "warmup_new_worker_rank2"),
        ("raise", "commit_scale_up_rank0"),
        ("raise", "commit_scale_up_rank1"),
        ("hang", "commit_scale_up_rank1"),
        ("raise", "commit_scale_up_rank2"),
    ],
    ids=str,
)
async def test_a_fault_within_growing_ends_in_a_healthy_group_of_the_wanted_size(
    group: Deployment, fault: str, rank: str
) -> None:
    before = group.incarnations()
    armed = group.fault(f"{fault}_eep_{rank}")
    async with (await served(group)).running() as clients:
        await asyncio.to_thread(group.scale, 3)
        try:
            # a fault that only a joiner meets may be over with the joiner, and the others go on as they are
            await asyncio.to_thread(group.healthy, 3)
        finally:
            armed.unlink(missing_ok=True)
        print(f"{fault} {rank}: {before} became {group.incarnations()}")
        await asyncio.to_thread(group.scale, 2)
        await asyncio.to_thread(group.healthy, 2)
    nothing_lost(clients)


@pytest.mark.slow
@pytest.mark.parametrize("fault", ["raise", "hang"])
async def test_a_fault_within_shrinking_ends_in_a_healthy_group_of_the_wanted_size(
    group: Deployment, fault: str
) -> None:
    await asyncio.to_thread(group.scale, 3)
    await asyncio.to_thread(group.healthy, 3)
    armed = group.fault(f"{fault}_eep_commit_scale_down_rank1")
    async with (await served(group)).running() as clients:
        await asyncio.to_thread(group.scale, 2)
        try:
            await asyncio.to_thread(group.healthy, 2)
        finally:
            armed.unlink(missing_ok=True)
    nothing_lost(clients)


@pytest.mark.slow
async def test_a_joiner_that_is_killed_while_the_group_prepares_leaves_no_group_that_waits_for_it(
    group: Deployment,
) -> None:
    armed = group.fault("hang_eep_prepare_new_worker_rank2")
    async with (await served(group)).running() as clients:
        for _ in range(3):
            await asyncio.to_thread(group.scale, 3)
            await asyncio.to_thread(group.until, lambda found: group.phase() == "preparing" or group.sound(found, 3))
            if group.phase() == "preparing":
                break
            # seen: a port that vLLM had found free was another process's a moment later, and the group was restarted with three
            await asyncio.to_thread(group.scale, 2)
            await asyncio.to_thread(group.healthy, 2)
        group.kill(2, Part.ENGINE)
        armed.unlink()
        await asyncio.to_thread(group.healthy, 3)
        await asyncio.to_thread(group.scale, 2)
        await asyncio.to_thread(group.healthy, 2)
    nothing_lost(clients)


async def test_the_daemon_may_die_and_the_next_one_takes_over(group: Deployment) -> None:
    before = group.incarnations()
    async with (await served(group)).running() as clients:
        os.kill(group.daemon.pid, signal.SIGKILL)
        group.daemon.wait(10)
        group.daemon = group.run()
        await asyncio.to_thread(group.healthy, 2)
    nothing_lost(clients)
    assert group.incarnations() == before
