"""A policy file that changes under a running daemon, as a process."""

import asyncio
import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from healer.clock import SystemClock
from healer.policy.load import load_policy, parse_policy
from healer.reload import PolicyFile, fixed_changes
from tests.healer.support import POLICY
from tests.healer.test_daemon import SPEC, Daemon, wait
from tests.healer.test_policy_schema import FULL


@pytest.fixture(scope="module")
def daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Daemon]:
    found = Daemon(tmp_path_factory.mktemp("reload"))
    try:
        found.start("--log-format", "json")
        yield found
    finally:
        found.end()


def in_force(daemon: Daemon) -> dict[str, Any]:
    found: dict[str, Any] = daemon.get("/status").json()["policy_file"]
    return found


def write(daemon: Daemon, spec: str, base: str = POLICY) -> None:
    """As editors do: a new file, put in the place of the old one."""
    part = daemon.policy.with_suffix(".new")
    part.write_text(base + spec)
    part.replace(daemon.policy)


def hup(daemon: Daemon) -> None:
    assert daemon.process is not None
    daemon.process.send_signal(signal.SIGHUP)


def test_a_changed_file_is_taken_over_without_a_restart(daemon: Daemon) -> None:
    before = in_force(daemon)
    pids = [daemon.pid(slot) for slot in range(4)]
    write(daemon, SPEC.replace("minRanks: 2", "minRanks: 3"))
    after = wait(lambda: (now := in_force(daemon))["digest"] != before["digest"] and now, "the new policy is in force")
    assert (after["rejected"], after["loaded_wall"] > before["loaded_wall"]) == ("", True)
    refused = daemon.cli("scale", "2")
    assert (refused.returncode, "below spec.bounds.minRanks 3" in refused.stderr) == (1, True)
    assert [daemon.pid(slot) for slot in range(4)] == pids
    assert any("policy-loaded" in line for line in daemon.cli("export").stdout.splitlines())


@pytest.mark.parametrize(
    ("spec", "base", "why"),
    [
        (SPEC.replace("minRanks: 2", "minRanks: minus"), POLICY, "spec.bounds.minRanks"),
        (SPEC, POLICY.replace("maxRanks: 6", "maxRanks: 8"), "spec.target.maxRanks cannot change without a restart"),
        (
            SPEC.replace("heartbeatInterval: 20ms", "heartbeatInterval: 25ms"),
            POLICY,
            "spec.detection.heartbeatInterval",
        ),
        (SPEC, "apiVersion: [", "not valid YAML"),
    ],
)
def test_a_bad_or_too_large_change_is_rejected_and_the_last_good_policy_stays(
    daemon: Daemon, spec: str, base: str, why: str
) -> None:
    before, rejections = in_force(daemon), _metric(daemon)
    write(daemon, spec, base)
    hup(daemon)
    wait(lambda: why in in_force(daemon)["rejected"], f"rejected: {why}")
    now = in_force(daemon)
    assert (now["digest"], now["loaded_wall"]) == (before["digest"], before["loaded_wall"])
    assert daemon.is_ok()
    assert _metric(daemon) > rejections
    assert "policy in force" in daemon.cli("status").stdout
    entries = [json.loads(line)["body"] for line in daemon.cli("export").stdout.splitlines()]
    assert any(why in body["why"] for body in entries if body.get("event") == "policy-rejected")


def test_a_pause_and_a_dry_run_in_the_file_count_at_once_and_are_taken_back(daemon: Daemon) -> None:
    write(daemon, SPEC + "  pause: true\n")
    hup(daemon)
    wait(lambda: daemon.get("/status").json()["healing"]["paused"] == "spec.pause", "paused")
    assert "healer_paused 1.0" in daemon.get("/metrics").text
    os.kill(daemon.pid(2), signal.SIGKILL)
    wait(lambda: "spec.pause is set" in daemon.get("/status").json()["decision"], "it says that it does nothing")
    write(daemon, SPEC)
    hup(daemon)
    wait(daemon.is_ok, "healed once the pause is over")
    assert in_force(daemon)["rejected"] == ""


def test_a_file_that_becomes_a_pipe_is_rejected_and_holds_nothing_up(daemon: Daemon) -> None:
    daemon.policy.unlink()
    os.mkfifo(daemon.policy)
    hup(daemon)
    wait(lambda: "none that can be read again" in in_force(daemon)["rejected"], "rejected")
    daemon.policy.unlink()
    write(daemon, SPEC)
    hup(daemon)
    wait(lambda: in_force(daemon)["rejected"] == "", "the file is a file again")
    assert daemon.is_ok()


def test_a_daemon_that_began_as_a_dry_run_is_not_switched_to_acting(tmp_path: Path) -> None:
    path = tmp_path / "policy.yaml"
    path.write_text(POLICY + SPEC + "  dryRun: true\n")
    before = load_policy(path)
    path.write_text(POLICY + SPEC)
    loaded = load_policy(path)

    async def poll() -> object:
        watched = PolicyFile(path, before, SystemClock(), lambda _: loaded)
        watched.reload()
        watched.poll(1.0)
        await watched.close()
        return watched.poll(2.0)

    assert "spec.dryRun, since this daemon began as an observer" in str(asyncio.run(poll()))


def test_load_rules_come_and_go_with_the_file(daemon: Daemon) -> None:
    rules = (
        "  load: {signals: {w: {metric: waiting}}, rules: [{name: q, kind: targetTracking, signal: w, target: 4}]}\n"
    )
    write(daemon, SPEC + rules)
    hup(daemon)
    wait(lambda: (daemon.get("/status").json()["scaling"] or {}).get("sentence"), "the load rules decide")
    write(daemon, SPEC)
    hup(daemon)
    wait(lambda: daemon.get("/status").json()["scaling"] is None, "they are gone")
    assert daemon.is_ok()


def _metric(daemon: Daemon) -> float:
    lines = daemon.get("/metrics").text.splitlines()
    return float(next(line for line in lines if line.startswith("healer_policy_rejected_total ")).split()[1])


def test_every_key_that_cannot_change_is_named(tmp_path: Path) -> None:
    full, least = load_policy(FULL), parse_policy(POLICY, name="p", base=tmp_path)
    named = fixed_changes(least, full)
    for key in (
        "spec.target.spares",
        "spec.api.port",
        "spec.lease",
        "spec.sensors.nvml",
        "spec.healing.deadlines.prepare",
    ):
        assert key in named
    assert not any(key.startswith(("spec.bounds", "spec.load", "spec.hooks", "spec.journal")) for key in named)
    assert "spec.target.slotLabels" not in named
    assert fixed_changes(full, full) == []
