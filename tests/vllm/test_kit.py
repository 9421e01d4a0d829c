"""The parts of chaos/vllm_cpu that can be run without vLLM."""

import importlib.util
import os
import re
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

from chaos.vllm_cpu import model
from tests.vllm import real

MAKE = real.ROOT / "chaos/vllm_cpu/make.sh"
NO_DOWNLOAD = 75


def stub() -> Any:
    spec = importlib.util.spec_from_file_location("stub_under_test", real.STUB / "vllm_stub_worker.py")
    assert spec is not None
    assert spec.loader is not None
    found = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(found)
    return found


def test_a_continued_request_gets_the_tokens_that_an_undisturbed_one_gets() -> None:
    prompt, token = [7, 8, 9, 10, 11], stub().token
    whole = [token(prompt, len(prompt) + at) for at in range(8)]
    first = whole[:3]
    continued = [token([*prompt, *first], len(prompt) + 3 + at) for at in range(5)]
    assert [*first, *continued] == whole
    assert whole == [real.token(prompt, len(prompt) + at) for at in range(8)]


def test_a_forked_engine_does_not_keep_the_port_on_which_its_parent_listens() -> None:
    script = """
import os, signal, socket, sys
sys.path.insert(0, sys.argv[1])
import vllm_stub_worker
os.register_at_fork(after_in_child=vllm_stub_worker.let_go_of_listeners)
here = socket.create_server(("127.0.0.1", 0))
mine, other = socket.socketpair()
child = os.fork()
if not child:
    other.send(b"up")
    signal.pause()
assert mine.recv(2) == b"up"
port = here.getsockname()[1]
here.close()
socket.create_server(("127.0.0.1", port)).close()
os.kill(child, signal.SIGKILL)
"""
    done = subprocess.run([sys.executable, "-c", script, str(real.STUB)], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr


def test_a_fault_of_the_exchange_is_met_by_all_ranks_or_by_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VLLM_STUB_FAULT_DIR", str(tmp_path))
    found, met = stub(), list[int]()

    def step(rank: int) -> None:
        try:
            found.fault_together(rank, 2)
        except RuntimeError:
            met.append(rank)

    step(0)
    assert met == []
    armed = tmp_path / "raise_step_together"
    armed.touch()
    step(0)  # the other does not come
    assert met == []

    def together() -> None:
        threads = [threading.Thread(target=step, args=(rank,)) for rank in (0, 1)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(10)

    together()
    assert sorted(met) == [0, 1]
    together()  # of a retry that comes before it is disarmed
    assert sorted(met) == [0, 1]
    armed.touch()
    together()
    assert sorted(met) == [0, 0, 1, 1]


def test_the_tiny_model_has_a_tokenizer_of_its_own(tmp_path: Path) -> None:
    from tokenizers import Tokenizer

    model.write(tmp_path / "m")
    text = "two Äpfel"
    tokenizer = Tokenizer.from_file(str(tmp_path / "m/tokenizer.json"))
    assert tokenizer.decode(tokenizer.encode(text).ids) == text
    assert (tmp_path / "m/config.json").exists()


def test_every_plugin_that_the_recipe_names_is_there_and_can_be_registered() -> None:
    named = re.findall(r"(\w+):(\w+)", re.search(r"for plugin in (.*); do", MAKE.read_text())[1])  # type: ignore[index]
    assert len(named) == 2
    for module, folder in named:
        text = (MAKE.parent / "plugins" / folder / f"{module}.py").read_text()
        assert "\ndef register() -> None:" in text


def test_the_recipe_says_how_it_is_called_and_is_sound_shell() -> None:
    assert subprocess.run(["bash", "-n", MAKE], check=False).returncode == 0
    done = subprocess.run(["bash", MAKE], capture_output=True, text=True, check=False)
    assert done.returncode != 0
    assert "usage: make.sh DEST" in done.stderr


@pytest.mark.slow
def test_a_download_that_fails_is_told_from_a_recipe_that_does_not_work(tmp_path: Path) -> None:
    nothing = os.environ | {"SHARE": sys.prefix, "PIP_NO_INDEX": "1", "PIP_FIND_LINKS": str(tmp_path)}
    done = subprocess.run(["bash", MAKE, tmp_path / "e"], env=nothing, capture_output=True, text=True, check=False)
    assert done.returncode == NO_DOWNLOAD, done.stderr
    assert not (tmp_path / "e/.ready").exists()
    wrong = nothing | {"SHARE": str(tmp_path)}
    done = subprocess.run(["bash", MAKE, tmp_path / "e"], env=wrong, capture_output=True, text=True, check=False)
    assert done.returncode not in (0, NO_DOWNLOAD)
