"""Which rank is on which GPU, however the numbers move. Case numbers: docs/diagnosis.md."""

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elastic.process import start_time
from healer.evidence import GpuRef
from healer.identity import Board, IdentityMap, normal_pci
from tests.healer.support import member, rank


def gpu(number: int) -> GpuRef:
    return GpuRef(f"GPU-{number:08x}-aaaa", f"0000:{0x10 + number:02x}:00.0")


def boards(*present: int, arch: int = 9) -> list[Board]:
    """As NVML lists them: its numbers have no gaps."""
    return [Board(gpu=gpu(number), index=index, arch=arch) for index, number in enumerate(present)]


class Host:
    """A /proc in which processes have an environment and a parent."""

    def __init__(self, folder: Path) -> None:
        self.proc = folder

    def process(self, pid: int, parent: int = 1, command: tuple[str, ...] = (), **environment: str) -> None:
        (self.proc / str(pid)).mkdir()
        text = "\0".join(f"{key}={value}" for key, value in environment.items())
        (self.proc / str(pid) / "environ").write_text(text + "\0")
        (self.proc / str(pid) / "cmdline").write_text("".join(word + "\0" for word in command))
        (self.proc / str(pid) / "stat").write_text(f"{pid} (a (b) c) S {parent} 1 1\n")


@pytest.fixture
def host(tmp_path: Path) -> Host:
    return Host(tmp_path)


def identities(host: Host, *, visible: dict[int, str], present: tuple[int, ...] = tuple(range(8))) -> IdentityMap:
    """One rank for each entry, with this CUDA_VISIBLE_DEVICES."""
    for slot, devices in visible.items():
        host.process(100 + slot, CUDA_VISIBLE_DEVICES=devices)
    found = IdentityMap(host.proc)
    found.listed(boards(*present))
    found.watch([member(slot, 100 + slot) for slot in visible])
    return found


def test_case_33_losing_gpu_3_of_8_moves_no_rank_to_another_gpu(host: Host) -> None:
    permuted = {0: "7", 1: "3", 2: "5", 3: "0", 4: "6", 5: "1", 6: "4", 7: "2"}
    found = identities(host, visible=permuted)
    before = {slot: found.gpu_of(rank(slot)) for slot in permuted}
    assert before == {slot: gpu(int(device)) for slot, device in permuted.items()}
    found.listed(boards(0, 1, 2, 4, 5, 6, 7))
    assert {slot: found.gpu_of(rank(slot)) for slot in permuted} == before
    assert found.ranks_on(gpu(3)) == (rank(1),), "the lost GPU is still known by name"
    assert found.by_pci("PCI:0000:13:00") == gpu(3)


def test_a_replacement_that_is_started_after_the_loss_counts_the_gpus_that_are_left(host: Host) -> None:
    found = identities(host, visible={0: "4"})
    found.listed(boards(0, 1, 2, 4, 5, 6, 7))
    host.process(200, CUDA_VISIBLE_DEVICES="4")
    found.watch([member(0, 100), member(1, 200)])
    assert found.gpu_of(rank(0)) == gpu(4)
    assert found.gpu_of(rank(1)) == gpu(5)


def test_nvmls_own_order_does_not_matter(host: Host) -> None:
    host.process(100, CUDA_VISIBLE_DEVICES="1")
    found = IdentityMap(host.proc)
    found.listed(boards(2, 0, 1))
    found.watch([member(0, 100)])
    assert found.gpu_of(rank(0)) == gpu(1), "CUDA counts by address"


@pytest.mark.parametrize("name", ["GPU-00000005-aaaa", "GPU-00000005", " GPU-00000005 "])
def test_a_gpu_is_named_by_its_uuid_or_the_beginning_of_it(host: Host, name: str) -> None:
    assert identities(host, visible={0: name}).gpu_of(rank(0)) == gpu(5)


@pytest.mark.parametrize("name", ["GPU-0000000", "GPU-99", "9", "", "x", "-1"])
def test_a_name_that_fits_none_or_several_is_not_guessed(host: Host, name: str) -> None:
    assert identities(host, visible={0: name}).gpu_of(rank(0)) is None


def test_case_27_a_mig_device_counts_as_the_gpu_it_is_on(host: Host) -> None:
    host.process(100, CUDA_VISIBLE_DEVICES="MIG-1111-2222")
    host.process(101, CUDA_VISIBLE_DEVICES="MIG-GPU-00000002-aaaa/3/0")
    found = IdentityMap(host.proc)
    found.listed([Board(gpu=gpu(1), index=0, mig=("MIG-1111-2222",)), Board(gpu=gpu(2), index=1)])
    found.watch([member(0, 100), member(1, 101)])
    assert found.gpu_of(rank(0)) == gpu(1)
    assert found.gpu_of(rank(1)) == gpu(2)


def test_where_a_process_has_its_memory_overrules_what_its_environment_says(host: Host) -> None:
    found = identities(host, visible={0: "0"})
    found.processes(gpu(6).uuid, [100])
    assert found.gpu_of(rank(0)) == gpu(6)
    assert found.identity(rank(0)).how == "processes"


def test_a_rank_that_has_died_is_still_known_to_have_been_on_its_gpu(host: Host) -> None:
    host.process(100)
    found = IdentityMap(host.proc)
    found.listed(boards(0, 1))
    found.watch([member(0, 100)])
    found.processes(gpu(1).uuid, [100])
    found.processes(gpu(1).uuid, [])
    assert found.gpu_of(rank(0)) == gpu(1)
    found.watch([member(0, 300, incarnation=1)])
    assert found.gpus_of(rank(0, 1)) == (), "its successor may be elsewhere"


def test_a_child_of_a_rank_counts_for_the_rank(host: Host) -> None:
    found = identities(host, visible={0: "0"})
    host.process(500, parent=100)
    host.process(501, parent=500)
    found.processes(gpu(2).uuid, [501])
    assert found.gpu_of(rank(0)) == gpu(2)


def test_when_a_rank_is_gone_nobody_elses_processes_are_looked_at_again(host: Host) -> None:
    found = identities(host, visible={0: "0", 1: "0"})
    host.process(500, parent=100)
    host.process(501, parent=101)
    found.processes(gpu(0).uuid, [500, 501])
    (host.proc / "500" / "stat").unlink()  # whoever looks again does not find its parent
    found.watch([member(0, 100)])
    assert found.strangers(gpu(0).uuid) == {501}


def test_a_process_that_was_nobodys_is_looked_at_again_when_a_rank_comes(host: Host) -> None:
    found = identities(host, visible={0: "0"})
    host.process(500, parent=101)
    found.processes(gpu(0).uuid, [100, 500])
    assert found.strangers(gpu(0).uuid) == {500}
    host.process(101, CUDA_VISIBLE_DEVICES="0")
    found.watch([member(0, 100), member(1, 101)])
    assert not found.strangers(gpu(0).uuid)


def test_gpus_of_different_kinds_have_no_order_that_is_known(host: Host) -> None:
    host.process(100, CUDA_VISIBLE_DEVICES="1")
    host.process(101, CUDA_VISIBLE_DEVICES="1", CUDA_DEVICE_ORDER="PCI_BUS_ID")
    found = IdentityMap(host.proc)
    found.listed([*boards(0, arch=9), *boards(1, arch=7)])
    found.watch([member(0, 100), member(1, 101)])
    assert found.gpu_of(rank(0)) is None
    assert found.gpu_of(rank(1)) == gpu(1)


def test_a_rank_that_may_use_several_gpus_is_on_none_in_particular(host: Host) -> None:
    found = identities(host, visible={0: "2,3"})
    assert found.gpu_of(rank(0)) is None
    assert found.gpus_of(rank(0)) == (gpu(2), gpu(3))
    assert found.ranks_on(gpu(3)) == (rank(0),)


def test_a_rank_without_any_gpu_is_on_none(host: Host) -> None:
    host.process(100)
    found = IdentityMap(host.proc)
    found.listed(boards(0, 1))
    found.watch([member(0, 100)])
    assert found.gpus_of(rank(0)) == ()
    assert found.identity(rank(0)).how == ""


def test_the_gpu_of_a_line_in_the_kernel_log_is_found_before_and_after_nvml_names_it(host: Host) -> None:
    found = IdentityMap(host.proc)
    assert found.by_pci("0000:11:00") == GpuRef("", "0000:11:00.0")
    host.process(100, CUDA_VISIBLE_DEVICES="1")
    found.listed(boards(0, 1))
    found.watch([member(0, 100)])
    assert found.ranks_on(GpuRef("", "0000:11:00.0")) == (rank(0),)


def test_a_stranger_is_told_only_on_a_gpu_of_ours(host: Host) -> None:
    found = identities(host, visible={0: "0"})
    found.processes(gpu(0).uuid, [100, 900])
    found.processes(gpu(1).uuid, [901])
    assert found.strangers(gpu(0).uuid) == {900}
    assert found.strangers(gpu(1).uuid) == frozenset()


def test_a_rank_that_boots_and_a_spare_are_no_strangers(host: Host) -> None:
    host.process(100, CUDA_VISIBLE_DEVICES="0")
    found = IdentityMap(host.proc, group="/run/healer/a")
    found.listed(boards(0))
    found.watch([member(0, 100)])
    rank_of = ("python", "-m", "elastic.rank", "--run-dir")
    host.process(900, command=(*rank_of, "/run/healer/a", "--slot", "1"))
    host.process(901, parent=900)
    host.process(902, command=(*rank_of, "/run/healer/b", "--slot", "1"))
    host.process(903, parent=os.getpid())
    host.process(904, command=("python", "train.py"))
    found.processes(gpu(0).uuid, [100, 900, 901, 902, 903, 904])
    assert found.strangers(gpu(0).uuid) == {902, 904}


@pytest.mark.parametrize(
    "text", ["PCI:0000:1b:00", "0000:1b:00.0", "00000000:1B:00.0", "1b:00.0", "0000:1B:00", " 1b:00 "]
)
def test_an_address_is_the_same_however_it_is_written(text: str) -> None:
    assert normal_pci(text) == "0000:1b:00.0"


@given(st.text(max_size=30))
def test_what_is_no_address_is_refused_and_never_misread(text: str) -> None:
    try:
        found = normal_pci(text)
    except ValueError as error:
        assert "PCI address" in str(error)  # noqa: PT017
    else:
        assert normal_pci(found) == found


@pytest.fixture
def process() -> Iterator[subprocess.Popen[bytes]]:
    env = {**os.environ, "CUDA_VISIBLE_DEVICES": "GPU-00000003-aaaa"}
    made = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE, env=env)
    yield made
    made.kill()
    made.wait()


def test_a_rank_that_started_without_its_gpus_has_those_that_its_owner_knows_of(host: Host) -> None:
    host.process(100, CUDA_VISIBLE_DEVICES="1")
    host.process(101)
    host.process(102, CUDA_VISIBLE_DEVICES="1")
    found = IdentityMap(host.proc, visible={0: "3", 1: "2"}.get)  # type: ignore[arg-type]
    found.listed([Board(gpu=gpu(number), index=number) for number in range(4)])
    found.watch([member(0, 100), member(1, 101), member(2, 102)])
    # a rank of an earlier policy runs where it was started
    assert [found.gpu_of(rank(slot)) for slot in (0, 1, 2)] == [gpu(1), gpu(2), gpu(1)]


def test_a_real_process_is_placed_by_its_real_environment(process: subprocess.Popen[bytes]) -> None:
    found = IdentityMap()
    found.watch([member(0, process.pid, start_time(process.pid))])
    found.listed(boards(0, 1, 2, 3))
    assert found.gpu_of(rank(0)) == gpu(3)
