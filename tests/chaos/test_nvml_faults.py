"""`healer-chaos fake-nvml` and `inject nvml`, as a person uses them, on a sensor that runs."""

import subprocess
import sys
from pathlib import Path

import pytest

from chaos.fake_nvml import Script, build, environment, uuid_of
from healer.clock import SystemClock
from healer.evidence import Severity, What
from healer.sensors.nvml import NvmlConfig, NvmlSensor
from tests.healer.nvml_rig import QUICK, NvmlRig, library


def chaos(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-m", "chaos.cli", *arguments], capture_output=True, text=True, timeout=60)


async def test_a_fault_that_is_injected_is_seen_and_healed_again(tmp_path: Path) -> None:
    async with NvmlRig(tmp_path, gpus=2) as rig:
        await rig.ready()
        done = chaos(
            "inject", "nvml", "recovery-action", "--value", "2", "--gpu", "1", "--script", str(rig.script.path)
        )
        assert done.returncode == 0, done.stderr
        (seen,) = await rig.sees(What.RECOVERY_ACTION, 1)
        assert seen.value == 2
        undo = done.stdout.split("undo: healer-chaos ")[1].split()
        assert chaos(*undo).returncode == 0
        assert (await rig.sees(What.RECOVERY_ACTION, 1, times=2))[1].severity is Severity.INFO


@pytest.mark.parametrize(
    ("fault", "what"),
    [
        ("xid", What.XID),
        ("lost", What.GPU_LOST),
        ("unlisted", What.GPU_LOST),
        ("reset-required", What.RESET_REQUIRED),
        ("hang", What.SENSOR_SILENT),
        ("ecc-correctable", What.ECC_CORRECTABLE),
        ("nvlink-down", What.NVLINK_DOWN),
    ],
)
async def test_each_fault_looks_like_what_it_is_called(tmp_path: Path, fault: str, what: What) -> None:
    async with NvmlRig(tmp_path, gpus=3) as rig:
        await rig.ready()
        assert chaos("inject", "nvml", fault, "--gpu", "1", "--script", str(rig.script.path)).returncode == 0
        assert (await rig.sees(what, 1))[0].subject


def test_the_stand_in_is_built_as_its_command_says(tmp_path: Path) -> None:
    done = chaos("fake-nvml", str(tmp_path), "--gpus", "3")
    assert done.returncode == 0, done.stderr
    variables = dict(line.split()[1].split("=", 1) for line in done.stdout.splitlines() if "export " in line)
    code = "import pynvml as n; n.nvmlInit(); print(n.nvmlDeviceGetUUID(n.nvmlDeviceGetHandleByIndex(2)))"
    asked = subprocess.run([sys.executable, "-c", code], env=variables, capture_output=True, text=True, check=True)
    assert asked.stdout.strip() == uuid_of(2)


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (("explode", "--gpu", "0"), 2, "is none of"),
        (("xid", "--gpu", "9"), 1, "has the GPUs 0 to 1, no 9"),
        (("xid", "--gpu", "0", "--script", "/nowhere/script"), 1, "/nowhere/script: no script"),
    ],
)
def test_a_fault_that_cannot_be_played_is_refused_with_the_reason(
    tmp_path: Path, arguments: tuple[str, ...], code: int, words: str
) -> None:
    script = Script.healthy(tmp_path / "script", 2)
    where = () if "--script" in arguments else ("--script", str(script.path))
    done = chaos("inject", "nvml", *arguments, *where)
    assert done.returncode == code
    assert words in " ".join((done.stdout + done.stderr).replace("│", " ").split())


def test_the_library_is_compiled_once(tmp_path: Path) -> None:
    first = build(tmp_path)
    stamp = next(first.iterdir()).stat().st_mtime_ns
    assert build(tmp_path) == first
    assert next(first.iterdir()).stat().st_mtime_ns == stamp


async def test_the_sensor_takes_its_library_from_the_folder_that_it_is_given(tmp_path: Path) -> None:
    script = Script.healthy(tmp_path / "script", 1)
    config = NvmlConfig(**QUICK, library_dir=library(), environment=environment(script.path))
    sensor = NvmlSensor(SystemClock(), config, root=tmp_path)
    sensor.start(lambda: None)
    await sensor.stop()
    assert sensor.starts == 1
