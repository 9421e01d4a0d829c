"""Checkpoint and host tier: what is missing or torn is said before anything is loaded."""

import json
import multiprocessing
import os
import resource
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from elastic.errors import ElasticError
from elastic.rank.architecture import Architecture, Arena, read_architecture
from elastic.rank.checkpoint import Checkpoint
from elastic.rank.tier import HEADER_BYTES, HostTier, build
from elastic.tools.make_checkpoint import Options, make_checkpoint
from tests.rank.weight_ranks import WAIT_S, until

EXPERT = "model.layers.1.mlp.experts.3.up_proj.weight"
OPTIONS = Options(layers=2, experts=4, hidden=32, expert_intermediate=16)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return make_checkpoint(tmp_path / "model", OPTIONS)


def _edit(folder: Path, change: Callable[[dict[str, torch.Tensor]], object]) -> Path:
    """Change the tensors of the shard that holds EXPERT; returns the shard."""
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    shard: Path = folder / index["weight_map"][EXPERT]
    tensors = load_file(shard)
    change(tensors)
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, shard)
    return shard


def _all(folder: Path) -> dict[str, torch.Tensor]:
    return {name: t for shard in folder.glob("*.safetensors") for name, t in load_file(shard).items()}


def _expert(source: Checkpoint, arch: Architecture, layer: int, expert: int) -> tuple[torch.Tensor, torch.Tensor]:
    w13 = torch.zeros(2 * arch.expert_intermediate, arch.hidden)
    w2 = torch.zeros(arch.hidden, arch.expert_intermediate)
    source.load_expert(layer, expert, w13, w2)
    return w13, w2


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_every_weight_is_the_one_on_disk_in_shards_or_in_one_file(folder: Path, dtype: torch.dtype) -> None:
    tensors = {name: tensor.to(dtype) for name, tensor in _all(folder).items()}
    arch = read_architecture(folder)
    if dtype is not torch.float32:
        for shard in folder.glob("model*"):
            shard.unlink()
        save_file(tensors, folder / "model.safetensors")
    source = Checkpoint(folder, arch)
    arena = Arena(arch.dense_shapes())
    source.load_dense(arena)
    for name, view in arena.views.items():
        assert torch.equal(view, tensors[name].float()), name
    gate, up, down = arch.expert_names(1, 3)
    w13, w2 = _expert(source, arch, 1, 3)
    assert torch.equal(w13, torch.cat([tensors[gate], tensors[up]]).float())
    assert torch.equal(w2, tensors[down].float())


def test_a_missing_tensor_is_named_at_open_with_its_file_and_purpose(folder: Path) -> None:
    shard = _edit(folder, lambda tensors: tensors.pop(EXPERT))
    with pytest.raises(
        ElasticError, match=rf"{EXPERT} is missing from {shard.name} \(needed for expert 3 of layer 1\)"
    ):
        Checkpoint(folder, read_architecture(folder))


def test_a_tensor_that_the_index_forgets_is_named(folder: Path) -> None:
    path = folder / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    del index["weight_map"]["model.norm.weight"]
    path.write_text(json.dumps(index))
    with pytest.raises(
        ElasticError, match=r"model\.norm\.weight is missing from .*index\.json \(needed for every rank\)"
    ):
        Checkpoint(folder, read_architecture(folder))


def test_a_tensor_of_another_shape_or_type_is_named(folder: Path) -> None:
    _edit(folder, lambda tensors: tensors.update({EXPERT: torch.zeros(5, 32)}))
    with pytest.raises(ElasticError, match=rf"{EXPERT}.*\[5, 32\], config.json says \[16, 32\]"):
        Checkpoint(folder, read_architecture(folder))
    _edit(folder, lambda tensors: tensors.update({EXPERT: torch.zeros(16, 32, dtype=torch.int8)}))
    with pytest.raises(ElasticError, match=rf"{EXPERT}.*type I8"):
        Checkpoint(folder, read_architecture(folder))


@pytest.mark.parametrize("left", [0, 5, 200, -1])
def test_a_shard_that_is_cut_short_is_named(folder: Path, left: int) -> None:
    shard = _edit(folder, lambda tensors: None)
    os.truncate(shard, left if left >= 0 else shard.stat().st_size + left)
    with pytest.raises(ElasticError, match=rf"{shard.name} is torn"):
        Checkpoint(folder, read_architecture(folder))


def test_a_missing_shard_a_broken_index_and_an_empty_folder_are_told_apart(folder: Path) -> None:
    arch = read_architecture(folder)
    shard = _edit(folder, lambda tensors: None)
    shard.unlink()
    with pytest.raises(ElasticError, match=rf"{shard.name} is missing"):
        Checkpoint(folder, arch)
    (folder / "model.safetensors.index.json").write_text("{")
    with pytest.raises(ElasticError, match="no readable weight_map"):
        Checkpoint(folder, arch)
    (folder / "model.safetensors.index.json").unlink()
    with pytest.raises(ElasticError, match=r"neither model.safetensors nor"):
        Checkpoint(folder, arch)


def test_the_tier_holds_every_weight_and_cannot_be_written(folder: Path, tmp_path: Path) -> None:
    built = build(folder, tmp_path / "tier")
    arch = read_architecture(folder)
    source, tier = Checkpoint(folder, arch), HostTier.map(tmp_path / "tier", arch)
    assert tier.fingerprint == source.fingerprint == built.fingerprint
    arena = Arena(arch.dense_shapes())
    source.load_dense(arena)
    assert torch.equal(tier.dense(), arena.flat)
    for layer in range(2):
        for expert in range(4):
            for mapped, read in zip(tier.expert(layer, expert), _expert(source, arch, layer, expert), strict=True):
                assert torch.equal(mapped, read)
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith("tier")] == ["tier"]
    assert _exit_code_of_a_write(tmp_path / "tier", folder) == -signal.SIGSEGV


def _exit_code_of_a_write(tier: Path, folder: Path) -> int | None:
    writer = multiprocessing.get_context("spawn").Process(target=_write_into, args=(tier, folder))
    writer.start()
    writer.join(WAIT_S)
    return writer.exitcode


def _write_into(tier: Path, folder: Path) -> None:
    HostTier.map(tier, read_architecture(folder)).dense().fill_(0)


def test_a_second_build_does_nothing_and_a_changed_checkpoint_is_built_again(folder: Path, tmp_path: Path) -> None:
    path, arch = tmp_path / "tier", read_architecture(folder)
    assert build(folder, path).built
    assert not build(folder, path).built
    mapped_before = HostTier.map(path, arch)
    old = mapped_before.expert(1, 3)[0].clone()
    _edit(folder, lambda tensors: tensors[EXPERT].add_(1))
    assert build(folder, path).built
    assert torch.equal(mapped_before.expert(1, 3)[0], old), "what a rank has mapped must not change under it"
    assert not torch.equal(HostTier.map(path, arch).expert(1, 3)[0], old)


def test_a_torn_foreign_or_absent_tier_is_refused_and_said_so(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path, arch = tmp_path / "tier", read_architecture(folder)
    with pytest.raises(ElasticError, match="no such file"):
        HostTier.map(path, arch)
    build(folder, path)
    other = read_architecture(make_checkpoint(tmp_path / "other", Options(layers=1, experts=4, hidden=32)))
    with pytest.raises(ElasticError, match="another model"):
        HostTier.map(path, other)
    path.chmod(0o644)
    for size, words in ((path.stat().st_size - 1, "torn"), (HEADER_BYTES, "torn"), (100, "torn"), (0, "torn")):
        os.truncate(path, size)
        with pytest.raises(ElasticError, match=words):
            HostTier.map(path, arch)
    path.write_bytes(b"x" * 2 * HEADER_BYTES)
    with pytest.raises(ElasticError, match="not a host tier"):
        HostTier.map(path, arch)
    assert HostTier.open(path, arch) is None
    assert "not a host tier" in capsys.readouterr().out
    assert build(folder, path).built


def _builder(*arguments: object, limit: int = resource.RLIM_INFINITY) -> subprocess.Popen[str]:
    """`limit`: no file may grow beyond it, as on a full file system."""
    command = [sys.executable, "-m", "elastic.rank.tier", "build", *map(str, arguments)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    resource.prlimit(process.pid, resource.RLIMIT_FSIZE, (limit, limit))
    return process


def test_two_builders_at_once_make_one_tier(folder: Path, tmp_path: Path) -> None:
    builders = [_builder(folder, tmp_path / "tier") for _ in range(2)]
    answers = [json.loads(builder.communicate(timeout=WAIT_S)[0]) for builder in builders]
    assert sorted(answer["built"] for answer in answers) == [False, True]
    assert HostTier.map(tmp_path / "tier", read_architecture(folder)).fingerprint == answers[0]["fingerprint"]


def test_a_builder_killed_half_way_leaves_nothing_that_passes_for_a_tier(tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path / "model", Options(layers=4, experts=16, hidden=256, expert_intermediate=128))
    path, part = tmp_path / "tier", tmp_path / "tier.part"
    builder = _builder(folder, path)
    until(lambda: part.exists() and part.stat().st_size > 0, "the builder has begun")
    builder.kill()
    builder.communicate(timeout=WAIT_S)
    whole = path.exists()
    assert part.exists() != whole
    assert build(folder, path).built != whole
    assert not part.exists()
    HostTier.map(path, read_architecture(folder))


def test_a_bad_checkpoint_or_path_ends_the_builder_with_one_line(folder: Path, tmp_path: Path) -> None:
    _edit(folder, lambda tensors: tensors.pop(EXPERT))
    for arguments, words in (
        ((folder, tmp_path / "tier"), EXPERT),
        ((tmp_path / "absent", tmp_path / "tier"), "config.json: no such file"),
    ):
        builder = _builder(*arguments)
        out, errors = builder.communicate(timeout=WAIT_S)
        assert builder.returncode == 1
        assert out == ""
        assert errors.startswith("error: ")
        assert errors.count("\n") == 1
        assert words in errors
    assert not list(tmp_path.glob("tier*"))


def test_a_tier_that_does_not_fit_is_an_error_and_leaves_nothing(folder: Path, tmp_path: Path) -> None:
    builder = _builder(folder, tmp_path / "tier", limit=10_000)
    _, errors = builder.communicate(timeout=WAIT_S)
    assert builder.returncode == 1
    assert "cannot be written: File too large" in errors
    assert not list(tmp_path.glob("tier*"))
