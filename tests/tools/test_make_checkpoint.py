import json
from dataclasses import replace
from pathlib import Path

import pytest
from safetensors import safe_open
from tokenizers import Tokenizer

from elastic.errors import ElasticError
from elastic.rank.architecture import read_architecture
from elastic.tools.make_checkpoint import Options, main, make_checkpoint

TINY = Options(layers=2, experts=4, hidden=16, heads=2, kv_heads=1, head_dim=8, expert_intermediate=8, vocab=300)


def files(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_the_same_options_give_the_same_bytes_and_another_seed_other_weights(tmp_path: Path) -> None:
    first, again, other = (
        make_checkpoint(tmp_path / name, replace(TINY, seed=seed)) for name, seed in (("a", 1), ("b", 1), ("c", 2))
    )
    assert files(first) == files(again)
    shard = "model-00001-of-00002.safetensors"
    assert files(first)[shard] != files(other)[shard]


@pytest.mark.parametrize("shards", [1, 3])
def test_the_shards_hold_every_published_name_in_its_shape(tmp_path: Path, shards: int) -> None:
    folder = make_checkpoint(tmp_path / "c", replace(TINY, dense_layers=1, shards=shards))
    arch = read_architecture(folder)
    wanted = dict(arch.dense_shapes())
    for expert in range(arch.experts):
        gate, up, down = arch.expert_names(0, expert)
        wanted |= {gate: (8, 16), up: (8, 16), down: (16, 8)}
    found: dict[str, tuple[int, ...]] = {}
    for path in folder.glob("*.safetensors"):
        with safe_open(path, "pt") as file:
            found |= {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118
    assert found == wanted
    index = folder / "model.safetensors.index.json"
    assert index.exists() == (shards > 1)
    if shards > 1:
        assert json.loads(index.read_text())["weight_map"].keys() == wanted.keys()


@pytest.mark.parametrize("vocab", [256, 512, 3000])
def test_every_token_is_text_and_text_comes_back(tmp_path: Path, vocab: int) -> None:
    tokenizer = Tokenizer.from_file(str(make_checkpoint(tmp_path / "c", replace(TINY, vocab=vocab)) / "tokenizer.json"))
    assert tokenizer.get_vocab_size() == vocab
    text = "A rank dies; naïve users — 漢字 too — notice nothing.\n\tEnd"
    assert tokenizer.decode(tokenizer.encode(text).ids) == text
    assert all(tokenizer.decode([i]) for i in range(vocab))


def test_answers_run_to_their_length_unless_an_end_token_is_asked_for(tmp_path: Path) -> None:
    assert read_architecture(make_checkpoint(tmp_path / "a", TINY)).eos_ids == ()
    assert read_architecture(make_checkpoint(tmp_path / "b", replace(TINY, eos=7))).eos_ids == (7,)


def test_contradictory_options_are_all_named_and_nothing_is_written(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    bad = ["--vocab", "10", "--kv-heads", "3", "--top-k", "17", "--layers", "0", "--eos", "10", "--head-dim", "7"]
    assert main([str(tmp_path / "c"), *bad]) == 1
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    for option in ("vocab", "heads", "top_k", "layers", "eos", "head_dim"):
        assert f"{option}: " in error
    assert list(tmp_path.iterdir()) == []


def test_a_folder_with_files_is_never_overwritten(tmp_path: Path) -> None:
    (tmp_path / "notes").write_text("mine")
    with pytest.raises(ElasticError, match="is not empty"):
        make_checkpoint(tmp_path, TINY)
    assert files(tmp_path) == {"notes": b"mine"}


def test_a_path_that_cannot_be_written_is_one_clear_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ElasticError, match="cannot be written"):
        make_checkpoint(tmp_path / "file" / "c", TINY)
