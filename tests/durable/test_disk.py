"""A real daemon and real ranks on a disk that is full, read-only, slow or torn: serving and healing go on, the state says so,
and what was decided is written down as soon as it can be."""

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from elastic.client import Tokens, Traffic, random_prompts
from healer.deployment import Deployment, eventually
from healer.journal import Entry, exported, open_readonly
from tests.durable.disk import Disk, Mode
from tests.e2e.harness import assert_same, members, send

VOCAB, REQUESTS, ANSWER = 512, 6, 48
BASE = [0, 1, 2]
SLOW_S = 8.0
"""Of one fsync: far above what a healing takes, on a busy machine too."""


class DiskDeployment(Deployment):
    def __init__(self, checkpoint: Path) -> None:
        super().__init__(checkpoint, target={"ranks": 3, "maxRanks": 4})
        self.disk = Disk(self.root)

    def spawn(self, *more: str, write: bool = True) -> "subprocess.Popen[bytes]":
        if write:
            self.write_policy()
        with (self.root / "daemon.log").open("ab") as log:
            self.daemon = subprocess.Popen(
                [sys.executable, "-m", "healer.cli", "run", "--policy", str(self.policy), *more],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                env=os.environ | self.disk.environment,
            )
        return self.daemon

    def entries(self) -> list[Entry]:
        with contextlib.closing(open_readonly(self.run_dir / "journal.db")) as journal:
            return list(exported(journal))

    async def heals(self, slot: int, prompts: list[Tokens], want: list[Tokens]) -> dict[str, Any]:
        """SIGKILL a rank under traffic; returns the status once the group is whole again, whatever the journal is."""
        old = members(self)
        traffic = Traffic(self.gateway(), prompts, ANSWER)

        async def whole() -> dict[str, Any] | None:
            found: dict[str, Any] = await self.get("/status")
            group = found["group"]
            done = group["live"] == BASE and not group["sequence"] and found["incident"] is None
            return found if done and members(self).get(slot) not in (None, old[slot]) else None

        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(traffic.run())
            await traffic.reached(30)
            send(self, [slot], signal.SIGKILL)
            found = await eventually(whole, f"slot {slot} is replaced", 90)
        assert_same(traffic.answers, want)
        now = members(self)
        assert {s: m for s, m in now.items() if s != slot} == {s: m for s, m in old.items() if s != slot}
        return found

    async def is_ok(self) -> dict[str, Any]:
        async def ok() -> dict[str, Any] | None:
            found: dict[str, Any] = await self.get("/status")
            return found if found["state"] == "ok" else None

        return await eventually(ok, "the daemon is ok", 60)


@pytest.fixture(scope="module")
def deployment(tmp_path_factory: pytest.TempPathFactory) -> Iterator[DiskDeployment]:
    folder = tmp_path_factory.mktemp("model") / "tiny-moe"
    command = [sys.executable, "-m", "elastic.tools.make_checkpoint", str(folder), "--layers", "2"]
    subprocess.run([*command, "--vocab", str(VOCAB)], check=True, capture_output=True)
    made = DiskDeployment(folder)
    yield made
    made.end()


@pytest.fixture
async def traffic(deployment: DiskDeployment) -> tuple[list[Tokens], list[Tokens]]:
    """Prompts and their answers on a group that is well."""
    deployment.disk.is_(Mode.WELL)
    if deployment.daemon is None:
        await deployment.start(240)
    elif deployment.daemon.poll() is not None:
        deployment.spawn()
    await deployment.is_ok()
    prompts = random_prompts(REQUESTS, VOCAB, seed=3)
    answers = await Traffic(deployment.gateway(), prompts, ANSWER).run()
    assert [a.error for a in answers] == [None] * REQUESTS
    return prompts, [a.tokens for a in answers]


def assert_told(entries: list[Entry], before: int, *, acted: bool = True) -> None:
    """One incident after entry `before`, from its evidence to its end. Not `acted`: the daemon had written down no act when
    it died, so the next one found the loss as it is."""
    new = [e for e in entries if e.seq > before]
    assert [e.seq for e in entries] == sorted({e.seq for e in entries})
    kinds = {str(e.kind) for e in new if e.incident}
    assert {"decision", "outcome"} <= kinds, kinds
    events = [e.body.get("event") for e in new if e.incident]
    assert (events.count("incident-opened"), events.count("incident-closed")) == (1, 1)
    assert [e.body["step"] for e in new if e.kind == "action"] == ["replace"] * acted
    assert ("verdict" in kinds and any(e.kind == "evidence" for e in new)) or not acted


@pytest.mark.parametrize(
    ("mode", "why"), [(Mode.FULL, "full"), (Mode.READ_ONLY, "I/O error")], ids=["full", "read-only"]
)
async def test_a_disk_that_takes_nothing_more_holds_up_no_healing_and_loses_no_decision(
    deployment: DiskDeployment, traffic: tuple[list[Tokens], list[Tokens]], mode: Mode, why: str
) -> None:
    newest = deployment.entries()[-1].seq
    deployment.disk.is_(mode)
    found = await deployment.heals(1, *traffic)
    assert found["state"] == "degraded"
    assert "the journal cannot be written" in found["why"]
    assert why in found["journal"]["error"]
    assert found["journal"]["waiting"] > 0
    assert found["journal"]["dropped"] == 0
    assert deployment.disk.hits > 0
    assert deployment.entries()[-1].seq == newest, "nothing went to the disk"
    async with httpx.AsyncClient(trust_env=False, verify=False) as client:
        assert (await client.get(deployment.api() + "/healthz")).status_code == 200, "the group serves"
        # nothing may fail because the disk does
        assert (await client.get(deployment.api() + "/incidents")).status_code == 200
        paused = await client.post(deployment.api() + "/pause", json={}, headers={"Idempotency-Key": f"key-{mode}"})
        assert paused.status_code == 202
        assert (await client.post(deployment.api() + "/resume", json={})).status_code == 202
    deployment.disk.is_(Mode.WELL)
    found = await deployment.is_ok()
    assert (found["journal"]["error"], found["journal"]["waiting"]) == ("", 0)
    assert_told(deployment.entries(), newest)


@pytest.mark.slow
async def test_a_daemon_that_starts_on_a_full_disk_heals_and_writes_it_down_later(
    deployment: DiskDeployment, traffic: tuple[list[Tokens], list[Tokens]]
) -> None:
    newest, old = deployment.entries()[-1].seq, members(deployment)
    deployment.kill_daemon(signal.SIGTERM)
    deployment.disk.is_(Mode.FULL)
    deployment.spawn()
    await deployment.settled()
    assert members(deployment) == old
    found = await deployment.heals(2, *traffic)
    assert "the journal cannot be written" in found["why"]
    deployment.disk.is_(Mode.WELL)
    found = await deployment.is_ok()
    assert found["journal"]["waiting"] == 0
    assert_told(deployment.entries(), newest + 1)


async def test_survivors_are_released_and_cover_while_the_disk_takes_seconds_for_each_sync(
    deployment: DiskDeployment, traffic: tuple[list[Tokens], list[Tokens]]
) -> None:
    newest = deployment.entries()[-1].seq
    deployment.disk.is_(Mode.SLOW, delay_s=SLOW_S)
    await deployment.heals(1, *traffic)
    entries = [e for e in deployment.entries() if e.seq > newest]
    assert deployment.disk.hits > 0, "somebody waited for the disk: not the loop"
    (opened,) = [e for e in entries if e.body.get("event") == "incident-opened"]
    (loss,) = [
        e.body["report"] for e in entries if e.kind == "outcome" and e.body.get("report", {}).get("kind") == "loss"
    ]
    assert {"park", "commit", "resume"} <= {p["name"] for p in loss["phases"]}
    took_s = loss["ended"] - opened.body["incident"]["opened_at"]
    assert took_s < SLOW_S - 1, f"from the death to the first step of all survivors: {took_s:.3f} s"
    found = await deployment.get("/status")
    assert found["loop_age_s"] < SLOW_S / 2
    deployment.disk.is_(Mode.WELL)
    assert_told(deployment.entries(), newest)


async def test_a_write_that_a_loss_of_power_tears_costs_the_group_nothing(
    deployment: DiskDeployment, traffic: tuple[list[Tokens], list[Tokens]]
) -> None:
    newest, old = deployment.entries()[-1].seq, members(deployment)
    prompts, want = traffic
    under_way = Traffic(deployment.gateway(), prompts, ANSWER)
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(under_way.run())
        await under_way.reached(30)
        deployment.disk.is_(Mode.TORN)
        send(deployment, [1], signal.SIGKILL)
        assert deployment.daemon is not None
        assert await asyncio.to_thread(deployment.daemon.wait, 30) == -signal.SIGKILL
        deployment.spawn()
        await deployment.is_ok()
    assert_same(under_way.answers, want)
    now = members(deployment)
    assert now[1] != old[1]
    assert {s: now[s] for s in (0, 2)} == {s: old[s] for s in (0, 2)}
    entries = deployment.entries()
    assert newest in {e.seq for e in entries}, "what was written before is there"
    assert_told(entries, newest, acted=False)


@pytest.mark.slow
async def test_a_journal_that_is_cut_short_between_two_daemons_is_set_aside_and_the_group_goes_on(
    deployment: DiskDeployment, traffic: tuple[list[Tokens], list[Tokens]]
) -> None:
    old = members(deployment)
    deployment.kill_daemon(signal.SIGTERM)
    path = deployment.run_dir / "journal.db"
    os.truncate(path, path.stat().st_size * 2 // 3)
    began = time.monotonic()
    deployment.spawn()
    found = await deployment.is_ok()
    assert ".corrupt-" in found["journal"]["set_aside"], f"{time.monotonic() - began:.1f} s"
    assert members(deployment) == old
    await deployment.heals(2, *traffic)
    assert_told(deployment.entries(), 0)


@pytest.mark.slow
async def test_a_journal_that_somebody_removes_is_begun_anew_while_the_daemon_runs(
    deployment: DiskDeployment, traffic: tuple[list[Tokens], list[Tokens]]
) -> None:
    for part in ("", "-wal", "-shm"):
        (deployment.run_dir / f"journal.db{part}").unlink()

    async def again() -> bool | None:
        return True if (deployment.run_dir / "journal.db").exists() else None

    await eventually(again, "there is a journal again", 20)
    await deployment.is_ok()
    await deployment.heals(1, *traffic)
    assert_told(deployment.entries(), 0)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_group_whose_whole_run_directory_is_full_heals_and_is_taken_over(tmp_path: Path) -> None:
    unshare = ["unshare", "--user", "--map-root-user", "--mount"]
    if subprocess.run([*unshare, "true"], capture_output=True, check=False).returncode:
        pytest.skip("no user namespaces here, so no file system of its own size")
    model = tmp_path / "tiny-moe"
    command = [sys.executable, "-m", "elastic.tools.make_checkpoint", str(model), "--layers", "2"]
    subprocess.run([*command, "--vocab", str(VOCAB)], check=True, capture_output=True)
    log = tmp_path / "log"
    with log.open("wb") as file:
        # to a file: a pipe would stay open as long as any process that is left
        done = subprocess.run(
            [*unshare, sys.executable, "-m", "tests.durable.on_full_disk", str(model)],
            stdout=file,
            stderr=subprocess.STDOUT,
            cwd=Path(__file__).parents[2],
            check=False,
        )
    assert done.returncode == 0, log.read_text()[-4000:]
