"""The host tier for a GPU's copy engines, with a driver that only notes what it is told."""

import ctypes
import multiprocessing
import os
import signal
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from elastic.errors import ElasticError
from elastic.rank import tier as tier_module
from elastic.rank.architecture import read_architecture
from elastic.rank.copies import MAX_RUN_BYTES, Copier, Run, piece, runs, share
from elastic.rank.device import CPU, Device
from elastic.rank.pinned import REGISTER_PORTABLE, REGISTER_READ_ONLY, map_pinned
from elastic.rank.tier import HostTier, build
from elastic.tools.make_checkpoint import Options, make_checkpoint

SMALL = Options(layers=2, experts=4, hidden=32, heads=2, kv_heads=2, head_dim=8, expert_intermediate=16)
WAIT_S = 30.0


class Driver:
    """`torch.cuda.cudart()` of a machine that locks pages or refuses."""

    def __init__(self, *refused: int) -> None:
        self.refused = refused
        self.calls: list[tuple[int, int]] = []

    def cudaHostRegister(self, address: int, size: int, flags: int) -> int:  # noqa: N802
        self.calls.append((size, flags))
        return 1 if flags in self.refused else 0

    def cudaGetErrorString(self, code: int) -> str:  # noqa: N802
        return f"refused ({code})"


class Gpu(Device):
    """A GPU whose memory is the host's."""

    is_gpu = True

    def bind(self) -> None: ...


GPU = Gpu(CPU.place, torch.float32)


@pytest.fixture
def built(tmp_path: Path) -> tuple[Path, Path]:
    folder = make_checkpoint(tmp_path / "model", SMALL)
    build(folder, tmp_path / "tier")
    return folder, tmp_path / "tier"


def use(monkeypatch: pytest.MonkeyPatch, driver: Driver) -> None:
    cuda = SimpleNamespace(cudart=lambda: driver)
    monkeypatch.setattr(tier_module, "torch", SimpleNamespace(**(vars(torch) | {"cuda": cuda})))


def test_pinned_weights_are_the_same_and_a_weight_taken_before_stays_good(
    built: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, path = built
    driver = Driver()
    use(monkeypatch, driver)
    arch = read_architecture(folder)
    tier, plain = HostTier.map(path, arch), HostTier.map(path, arch)
    early = tier.expert(1, 2)
    # a newer file under the same name is not what this object maps
    path.unlink()
    path.write_bytes(b"another file")
    tier.pin(GPU)
    tier.pin(GPU)
    assert tier.wait_pinned(WAIT_S)
    assert driver.calls == [(os.fstat(tier._descriptor).st_size, REGISTER_PORTABLE)]
    assert torch.equal(tier.dense(), plain.dense())
    for layer in range(2):
        for expert in range(4):
            for one, other in zip(tier.expert(layer, expert), plain.expert(layer, expert), strict=True):
                assert torch.equal(one, other)
                assert one.data_ptr() != other.data_ptr()
    assert torch.equal(early[0], tier.expert(1, 2)[0])


def test_where_pages_cannot_be_locked_the_tier_serves_as_before_and_says_why(
    built: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    folder, path = built
    use(monkeypatch, Driver(REGISTER_PORTABLE, REGISTER_PORTABLE | REGISTER_READ_ONLY))
    tier = HostTier.map(path, read_architecture(folder))
    before = tier.dense().data_ptr()
    tier.pin(GPU)
    assert not tier.wait_pinned(WAIT_S)
    assert tier.dense().data_ptr() == before
    assert "cudaHostRegister with flags 0x9: refused (1)" in capsys.readouterr().out


def test_a_file_of_somebody_else_is_locked_for_reading(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(bytes(8192))
    driver = Driver(REGISTER_PORTABLE)
    descriptor = os.open(tmp_path / "file", os.O_RDONLY)
    memory = map_pinned(descriptor, 8192, driver)
    assert len(memory) == 8192
    assert driver.calls[-1] == (8192, REGISTER_PORTABLE | REGISTER_READ_ONLY)
    with pytest.raises(ElasticError, match=r"flags 0x1: refused.*flags 0x9: refused"):
        map_pinned(descriptor, 8192, Driver(REGISTER_PORTABLE, REGISTER_PORTABLE | REGISTER_READ_ONLY))


def test_a_stray_write_to_a_pinned_weight_ends_the_writer(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(bytes(8192))
    writer = multiprocessing.get_context("spawn").Process(target=write_into, args=(str(tmp_path / "file"),))
    writer.start()
    writer.join(WAIT_S)
    assert writer.exitcode == -signal.SIGSEGV
    assert (tmp_path / "file").read_bytes() == bytes(8192)


def write_into(path: str) -> None:
    memory: Any = map_pinned(os.open(path, os.O_RDONLY), 8192, Driver())
    torch.frombuffer(memory, dtype=torch.uint8).fill_(1)


def test_without_a_gpu_nothing_is_pinned(built: tuple[Path, Path]) -> None:
    folder, path = built
    tier = HostTier.map(path, read_architecture(folder))
    tier.pin(CPU)
    assert not tier.wait_pinned(0.0)


@given(st.lists(st.integers(1, 40), min_size=1, max_size=12), st.integers(1, 5))
def test_streams_share_every_copy_about_evenly(sizes: list[int], parts: int) -> None:
    all_ = [Run(1000 * i, 0, size, 1, size, size) for i, size in enumerate(sizes)]
    shares = share(all_, parts)
    assert len(shares) == parts
    assert sorted(run for part in shares for run in part) == all_
    fair = sum(sizes) / parts + max(sizes)
    assert max(sum(run.size for run in part) for part in shares) <= fair


def test_a_copy_is_whole_when_the_call_returns() -> None:
    to, source = torch.zeros(4, 5), torch.rand(4, 5)
    Copier(torch.device("cpu")).run([piece(to, source)])
    assert torch.equal(to, source)


def test_tensors_that_are_no_single_piece_of_memory_are_refused() -> None:
    for to, source in (
        (torch.zeros(4, 5).t(), torch.zeros(5, 4)),
        (torch.zeros(4), torch.zeros(5)),
        (torch.zeros(4), torch.zeros(4, dtype=torch.float64)),
    ):
        with pytest.raises(ValueError, match="no copy in one piece"):
            piece(to, source)


@given(
    places=st.lists(st.integers(0, 60), min_size=1, max_size=30, unique=True),
    sources=st.data(),
    sizes=st.lists(st.sampled_from([1, 2, 3]), min_size=30, max_size=30),
)
def test_runs_of_copies_move_exactly_the_bytes_that_single_copies_would(
    places: list[int], sources: st.DataObject, sizes: list[int]
) -> None:
    froms = sources.draw(st.lists(st.integers(0, 60), min_size=len(places), max_size=len(places)))
    store, by_one, by_runs = torch.rand(64, 4), torch.zeros(64, 4), torch.zeros(64, 4)
    for target in (by_one, by_runs):
        pairs = [
            (target[to].view(-1)[:size], store[at].view(-1)[:size])
            for to, at, size in zip(places, froms, sizes, strict=False)
        ]
        if target is by_one:
            for to, source in pairs:
                to.copy_(source)
            continue
        for run in runs(piece(to, source) for to, source in pairs):
            for row in range(run.rows):
                ctypes.memmove(run.to + row * run.to_step, run.source + row * run.source_step, run.size)
    assert torch.equal(by_one, by_runs)


def test_the_tensors_of_neighbouring_experts_are_one_copy_and_no_copy_is_too_long_for_the_other_streams() -> None:
    tier, buffers = torch.zeros(64, 3, 1 << 18), torch.zeros(64, 1 << 18)  # a MiB each
    found = runs([piece(buffers[e], tier[e, 1]) for e in range(64)])
    assert [run.rows for run in found] == [MAX_RUN_BYTES >> 20] * (64 // (MAX_RUN_BYTES >> 20))
    assert {(run.to_step, run.source_step) for run in found} == {(1 << 20, 3 << 20)}


@pytest.mark.parametrize("size", [MAX_RUN_BYTES, MAX_RUN_BYTES + 1, 2 * MAX_RUN_BYTES, 3 * MAX_RUN_BYTES + 7])
def test_a_long_copy_is_cut_so_that_every_stream_has_work_and_no_byte_is_left_out(size: int) -> None:
    found = runs([(1 << 40, 1 << 41, size)])
    assert all(run.size <= MAX_RUN_BYTES and run.rows == 1 for run in found)
    assert [run.to - (1 << 40) for run in found] == [run.source - (1 << 41) for run in found]
    ends = [run.to + run.size for run in found]
    assert [run.to for run in found] == [1 << 40, *ends[:-1]]
    assert ends[-1] == (1 << 40) + size
