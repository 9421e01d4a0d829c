"""Whatever is wrong with the input: one clear error that names the place, a non-zero exit, and nothing left running."""

import json
import shutil
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from healer.deployment import Deployment

Spoil = Callable[[dict[str, Any]], None]


def run(deployment: Deployment, spoil: Spoil | None = None) -> str:
    """Run the daemon to its end; returns what it printed."""
    if spoil is not None:
        deployment.write_policy()
        policy = json.loads(deployment.policy.read_text())
        spoil(policy)
        deployment.policy.write_text(json.dumps(policy, indent=1))
    daemon = deployment.spawn(write=spoil is None)
    assert daemon.wait(90) not in (0, None)
    return deployment.log()


def assert_one_clear_error(deployment: Deployment, log: str, *words: str) -> None:
    assert "Traceback" not in log
    for word in words:
        assert word in log, f"{word!r} is not in:\n{log}"
    assert deployment.processes() == []


@pytest.mark.parametrize(
    ("key", "value", "words"),
    [
        ("rankz", 4, ["policy.yaml:", "spec.target.rankz"]),
        ("ranks", "four", ["policy.yaml:", "spec.target.ranks"]),
        ("slotsPerRank", -8, ["policy.yaml:", "spec.target.slotsPerRank"]),
        ("ranks", 7, ["policy.yaml:", "maxRanks"]),
        ("slotsPerRank", 3, ["policy.yaml:", "spec.target.slotsPerRank", "16 experts"]),
        ("slotsPerRank", 17, ["policy.yaml:", "spec.target.slotsPerRank", "16 experts"]),
        ("maxModelLen", 4096, ["policy.yaml:", "spec.target.maxModelLen", "1024 positions"]),
        ("checkpoint", "/nowhere/model", ["/nowhere/model"]),
    ],
)
def test_a_wrong_policy(deployment: Deployment, key: str, value: object, words: list[str]) -> None:
    def spoil(policy: dict[str, Any]) -> None:
        policy["spec"]["target"][key] = value

    assert_one_clear_error(deployment, run(deployment, spoil), *words)


@pytest.fixture
def copied(checkpoint: Path, tmp_path: Path) -> Path:
    folder = tmp_path / "model"
    shutil.copytree(checkpoint, folder)
    return folder


@pytest.mark.parametrize("host_tier", [True, False])
def test_a_checkpoint_with_a_missing_tensor(copied: Path, host_tier: bool) -> None:
    name = "model.layers.1.mlp.experts.3.up_proj.weight"
    index_file = copied / "model.safetensors.index.json"
    index = json.loads(index_file.read_text())
    shard = copied / index["weight_map"].pop(name)
    index_file.write_text(json.dumps(index))
    tensors = load_file(shard)
    del tensors[name]
    save_file(tensors, shard)
    deployment = Deployment(copied, target={"hostTier": host_tier})
    try:
        assert_one_clear_error(deployment, run(deployment), name)
    finally:
        deployment.end()


def test_a_checkpoint_with_a_torn_shard(copied: Path) -> None:
    shard = sorted(copied.glob("*.safetensors"))[0]
    shard.write_bytes(shard.read_bytes()[:-1000])
    deployment = Deployment(copied)
    try:
        assert_one_clear_error(deployment, run(deployment), shard.name)
    finally:
        deployment.end()


@pytest.mark.parametrize("who", ["gateway", "api"])
def test_a_port_in_use(checkpoint: Path, who: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        if who == "gateway":
            deployment = Deployment(checkpoint, target={"gateway": {"port": port}})
        else:
            deployment = Deployment(checkpoint, spec={"api": {"port": port}})
        try:
            assert_one_clear_error(deployment, run(deployment), str(port))
        finally:
            deployment.end()


def test_a_rank_that_dies_at_every_start(checkpoint: Path) -> None:
    # more memory than any machine has: the allocation fails in each rank, whenever it is tried
    deployment = Deployment(checkpoint, target={"maxSeqs": 10**6})
    try:
        assert_one_clear_error(deployment, run(deployment), "could not be formed", "slot")
    finally:
        deployment.end()
