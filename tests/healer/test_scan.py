"""`healer scan` and `healer sensors` as their users meet them, on whatever machine this is."""

import json
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest
from rich.console import Console

from healer.diagnosis import Cause, Confidence, Health, Verdict
from healer.evidence import Subject
from healer.scan import Scan
from healer.sensors import SensorCost, SensorState, SensorStatus
from healer.tables import show_scan, show_sensors
from tests.healer.stage import HOST, gpu

REPOSITORY = Path(__file__).parents[2]


def healer(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "healer.cli", *arguments]
    return subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, timeout=60, check=False)


def test_a_scan_says_plainly_what_is_unknown_and_its_exit_code_follows_its_health() -> None:
    done = healer("scan", "--json")
    found = json.loads(done.stdout)
    assert done.returncode == (0 if found["health"] == "healthy" else 3)
    assert bool(found["why"]) == (found["health"] != "healthy")
    assert {"nvml", "kernel-log"} <= {s["name"] for s in found["sensors"]}, "also where this host has nothing for it"
    if not found["gpus"]:
        assert found["health"] == "unknown"
    shown = healer("scan", "--deadline", "10")
    assert f"this host is {found['health']}" in shown.stdout
    assert max(map(len, shown.stdout.splitlines())) <= 100


def test_sensors_of_this_host_are_shown_without_a_daemon_and_a_missing_daemon_is_one_clear_error(
    tmp_path: Path,
) -> None:
    shown = healer("sensors")
    assert (shown.returncode, "SENSOR" in shown.stdout, "nvml" in shown.stdout) == (0, True, True)
    gone = healer("sensors", "--run-dir", str(tmp_path))
    assert gone.returncode == 1
    assert "no daemon runs here" in gone.stderr


def sensor(name: str, state: SensorState, why: str = "") -> SensorStatus:
    return SensorStatus(name, state, why, 0.31, 12345, SensorCost(12.5, 0.0021, 0.101))


def verdict(subject: Subject, health: Health, cause: Cause, text: str) -> Verdict:
    return Verdict(
        subject=subject, health=health, cause=cause, confidence=Confidence.NONE, evidence=(), since=0.0,
        sentence=f"{subject} {text}",
    )  # fmt: skip


def printed(show: object, found: object) -> str:
    out = Console(width=100, record=True, file=open("/dev/null", "w"), highlight=False)  # noqa: SIM115
    show(out, msgspec.to_builtins(found))  # type: ignore[operator]
    return out.export_text()


@pytest.mark.parametrize("long", [False, True])
def test_tables_of_sensors_and_scans_fit_100_columns_and_keep_every_word(long: bool) -> None:
    why = "library and driver are of different versions: an upgrade without a reboot" + " and more" * 9 * long
    sensors = (sensor("nvml", SensorState.BLIND, why), sensor("kernel-log", SensorState.OK))
    found = Scan(
        health=Health.UNHEALTHY,
        why=f"{gpu(1)} is lost: 15",
        gpus=(
            verdict(gpu(0), Health.HEALTHY, Cause.THERMAL, "is healthy, but its clocks are slowed down: hw-thermal"),
            verdict(gpu(1), Health.UNHEALTHY, Cause.GPU_LOST, "is lost: 15"),
        ),
        hosts=(verdict(HOST, Health.HEALTHY, Cause.NONE, "is healthy"),),
        sensors=sensors,
        evidence=(),
        took_s=0.4,
    )
    for text in (printed(show_scan, found), printed(show_sensors, sensors)):
        assert max(map(len, text.splitlines())) <= 100
        head = next(line for line in text.splitlines() if "WHY" in line)
        column = "".join(line[head.index("WHY") :] for line in text.splitlines()[text.splitlines().index(head) + 1 :])
        assert "".join(why.split()) in "".join(column.split())
        assert "12345" in text
    scan_text = printed(show_scan, found)
    assert "this host is unhealthy" in scan_text
    assert "its clocks are slowed down" in scan_text
    assert scan_text.count("is lost: 15") == 1, "said once"
