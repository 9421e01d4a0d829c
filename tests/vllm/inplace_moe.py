"""Runs ranks of the real tiny Mixture-of-Experts (inplace_worker_rank.py) and speaks to them from a test."""

import contextlib
import json
import os
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from tests.vllm import real

START_S, ANSWER_S = 600.0, 120.0
PYTHON = real.ENVIRONMENT / "venv/bin/python"
RANK = real.ROOT / "tests/vllm/inplace_worker_rank.py"

STORE = """
import sys
from torch.distributed import TCPStore
store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
print(store.port, flush=True)
sys.stdin.read()
"""

WEIGHTS = """
import json, sys, torch
from pathlib import Path
from safetensors.torch import save_file
folder = Path(sys.argv[1])
config = json.loads((folder / "config.json").read_text())
config["torch_dtype"] = "float32"
(folder / "config.json").write_text(json.dumps(config))
random = torch.Generator().manual_seed(3)
def rand(*shape, scale): return torch.randn(*shape, generator=random) * scale
hidden, inner, words, experts = (config[k] for k in ("hidden_size", "moe_intermediate_size", "vocab_size", "num_experts"))
head, heads, kv = (config[k] for k in ("head_dim", "num_attention_heads", "num_key_value_heads"))
found = {"model.embed_tokens.weight": rand(words, hidden, scale=1.0), "lm_head.weight": rand(words, hidden, scale=0.3)}
found["model.norm.weight"] = torch.ones(hidden)
for layer in range(config["num_hidden_layers"]):
    at = f"model.layers.{layer}."
    for name in ("input_layernorm", "post_attention_layernorm"):
        found[f"{at}{name}.weight"] = torch.ones(hidden)
    for name, rows in (("q", heads), ("k", kv), ("v", kv)):
        found[f"{at}self_attn.{name}_proj.weight"] = rand(rows * head, hidden, scale=0.15)
    found[f"{at}self_attn.o_proj.weight"] = rand(hidden, heads * head, scale=0.15)
    for name in ("q_norm", "k_norm"):
        found[f"{at}self_attn.{name}.weight"] = torch.ones(head)
    found[f"{at}mlp.gate.weight"] = rand(experts, hidden, scale=0.5)
    for expert in range(experts):
        for name, shape in (("gate_proj", (inner, hidden)), ("up_proj", (inner, hidden)), ("down_proj", (hidden, inner))):
            found[f"{at}mlp.experts.{expert}.{name}.weight"] = rand(*shape, scale=0.4)
save_file(found, str(folder / "model.safetensors"))
"""


def write_model(folder: Path) -> None:
    """The tiny model with weights of which every expert has its own, in float32."""
    from chaos.vllm_cpu import model

    model.write(folder)
    subprocess.run([str(PYTHON), "-c", WEIGHTS, str(folder)], check=True, timeout=120)


def environment(**more: str) -> dict[str, str]:
    return os.environ | {
        "PYTHONPATH": f"{real.ENVIRONMENT}/overlay033:{real.ROOT}",
        "HF_HUB_OFFLINE": "1",
        "TRANSFORMERS_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_PLUGINS": "none",
        "OMP_NUM_THREADS": "1",
        **more,
    }


@contextlib.contextmanager
def store() -> Iterator[int]:
    """Port of a store that no rank hosts."""
    process = subprocess.Popen(
        [str(PYTHON), "-c", STORE], stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment()
    )
    try:
        assert process.stdout is not None
        yield int(process.stdout.readline())
    finally:
        process.kill()
        process.wait(10)


class Nursery:
    """The process that ranks are forked from."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.modules = folder, list[str]()
        with (folder / "nursery.log").open("wb") as log:
            self.process = subprocess.Popen(
                [str(PYTHON), str(RANK)], stdin=subprocess.PIPE, stdout=log, stderr=log, env=environment()
            )
        self._made = 0

    def rank(self, model: Path, slot: int, size: int, port: int, **variables: str) -> "Rank":
        self._made += 1
        name = f"{self._made}-{slot}"
        path = Path(f"/tmp/healer-test-{os.getpid()}-{name}.sock")
        listening = socket.socket(socket.AF_UNIX)
        listening.bind(str(path))
        listening.listen()
        order = {"model": str(model), "slot": slot, "size": size, "port": port, "variables": variables}
        order |= {"socket": str(path), "log": str(self.folder / f"{name}.log"), "modules": self.modules}
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(order).encode() + b"\n")
        self.process.stdin.flush()
        return Rank(slot, listening, path, self.folder / f"{name}.log")

    def end(self) -> None:
        self.process.kill()
        self.process.wait(20)


class Rank:
    def __init__(self, slot: int, listening: socket.socket, path: Path, log: Path) -> None:
        self.slot, self._listening, self._path, self._log = slot, listening, path, log
        self.pid = 0
        self._channel: socket.socket | None = None

    def ready(self) -> dict[str, Any]:
        self._listening.settimeout(START_S)
        self._channel, _ = self._listening.accept()
        self._listening.close()
        self._path.unlink()
        self._lines = self._channel.makefile("rwb")
        found = self.answer(START_S)
        self.pid = int(found["pid"])
        return found

    def send(self, do: str, **given: Any) -> None:
        self._lines.write(json.dumps({"do": do, **given}).encode() + b"\n")
        self._lines.flush()

    def answer(self, deadline_s: float = ANSWER_S) -> dict[str, Any]:
        assert self._channel is not None
        self._channel.settimeout(deadline_s)
        line = self._lines.readline()
        assert line, f"rank {self.slot} has ended: {self._log.read_text()[-2000:]}"
        found: dict[str, Any] = json.loads(line)
        assert "error" not in found, f"rank {self.slot}: {found['error']}; {self._log.read_text()[-2000:]}"
        return found

    def kill(self) -> None:
        """The kernel has closed its sockets when this returns."""
        os.kill(self.pid, signal.SIGKILL)
        assert self._channel is not None
        self._channel.settimeout(20)
        assert self._lines.read() == b""

    def gone(self) -> None:
        """It ends by itself; the kernel has closed its sockets when this returns."""
        assert self._channel is not None
        self._channel.settimeout(ANSWER_S)
        assert self._lines.read() == b""

    def end(self) -> None:
        if self.pid:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGKILL)
        self._path.unlink(missing_ok=True)


class Group:
    """Ranks that step in lockstep."""

    def __init__(self, ranks: list[Rank]) -> None:
        self.ranks = {rank.slot: rank for rank in ranks}
        self.live = sorted(self.ranks)

    def all(self, do: str, **given: Any) -> dict[int, dict[str, Any]]:
        for slot in self.live:
            self.ranks[slot].send(do, **given)
        return {slot: self.ranks[slot].answer() for slot in self.live}

    def add(self, slot: int, name: str, prompt: list[int], tokens: int) -> None:
        self.ranks[slot].send("add", name=name, prompt=prompt, tokens=tokens)
        self.ranks[slot].answer()

    def rpc(self, method: str, *args: Any) -> dict[int, Any]:
        return {slot: answer["found"][0] for slot, answer in self.all("rpc", method=method, args=list(args)).items()}

    def kill(self, *slots: int) -> None:
        for slot in slots:
            self.ranks[slot].kill()
            self.live.remove(slot)

    def shrink(self, epoch: int, port: int, timeout_s: float = 20.0) -> dict[int, Any]:
        return self.rpc("healer_shrink", epoch, self.live, "127.0.0.1", port, timeout_s)


@contextlib.contextmanager
def group(nursery: Nursery, model: Path, size: int, port: int, **variables: str) -> Iterator[Group]:
    ranks = [nursery.rank(model, slot, size, port, **variables) for slot in range(size)]
    found = Group(ranks)
    try:
        for rank in ranks:
            rank.ready()
        yield found
    finally:
        for rank in {*ranks, *found.ranks.values()}:  # others may have joined
            rank.end()


def until_prepared(group: Group, deadline_s: float = START_S) -> None:
    """Wait for the survivors' threads. Raises AssertionError with what a preparation raised."""
    _until(group, lambda text: "still being prepared" in text, deadline_s)


def until_given_up(group: Group, deadline_s: float = ANSWER_S) -> None:
    with contextlib.suppress(AssertionError):
        _until(group, lambda text: "still being prepared" in text, deadline_s)


def _until(group: Group, goes_on: Callable[[str], bool], deadline_s: float) -> None:
    end = time.monotonic() + deadline_s
    for slot in group.live:
        while True:
            group.ranks[slot].send("rpc", method="healer_refill_prepared", args=[])
            try:
                group.ranks[slot].answer()
                break
            except AssertionError as error:
                if not goes_on(str(error)) or time.monotonic() > end:
                    raise
                time.sleep(0.2)
