"""What a daemon does where healer's plugin is not beside vLLM after all: a start must not wait for it."""

import os
import time
from pathlib import Path

import pytest

from elastic.errors import ElasticError
from elastic.vllm.records import GuardState
from healer.policy.load import parse_policy
from healer.policy.schema import VllmTarget
from healer.targets.vllm import commands
from healer.targets.vllm.in_place import UP_S, InPlace, verdict
from healer.targets.vllm.processes import Processes
from tests.vllm.stand import POLICY


def command(path: Path, *lines: str) -> Path:
    path.write_text("\n".join(("#!/bin/sh", *lines)))
    path.chmod(0o755)
    return path


async def test_a_coordination_process_that_ends_at_once_is_not_waited_for(tmp_path: Path) -> None:
    python = command(tmp_path / "python", "echo 'ModuleNotFoundError: no such module' >&2", "exit 1")
    found = InPlace(tmp_path, str(python), Processes(tmp_path), host="127.0.0.1", env=dict(os.environ))
    began = time.monotonic()
    with pytest.raises(ElasticError, match="no such module"):
        await found.up()
    assert time.monotonic() - began < UP_S / 2


async def test_a_plugin_in_the_folder_of_the_daemon_is_not_beside_vllm(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A daemon that was started in a checkout of healer: the ranks run elsewhere."""
    (tmp_path / "elastic").mkdir()
    monkeypatch.chdir(tmp_path)
    python = command(tmp_path / "python", 'test -d elastic && echo \'{"parts": {}, "plugins": []}\'')
    (tmp_path / "vllm").write_text(f"#!{python}\n")
    (tmp_path / "vllm").chmod(0o755)
    target = parse_policy(POLICY.format(folder=tmp_path, ranks=2, port=9000), name="p", base=tmp_path).spec.target
    assert isinstance(target, VllmTarget)
    assert (await verdict(target, commands.arguments(target))).state == GuardState.STOCK
