"""A policy's vLLM deployment, as the preflight looks at it: the arguments with healer's own, the model's experts, what is
installed."""

import json
import os
import shutil
import subprocess
from pathlib import Path

from healer.policy.schema import Policy, VllmTarget
from healer.targets.vllm import commands
from healer.targets.vllm.arguments import Arguments
from healer.targets.vllm.preflight import Deployment

ASK_S = 20.0
EXPERT_KEYS = ("num_experts", "n_routed_experts", "num_local_experts")
"""Of config.json, by model family."""
_PROBE = """
import importlib.metadata as found
for name in ("vllm", "nixl"):
    try:
        print(name, found.version(name))
    except found.PackageNotFoundError:
        pass
"""


def read(policy: Policy, target: VllmTarget) -> Deployment:
    """Raises ElasticError for an option that healer sets itself."""
    arguments = commands.arguments(target)
    launched = target.mode == "launch"
    if launched:
        arguments = Arguments(arguments.model, arguments.options | {"host": commands.HOST})
    versions = installed(target) if launched else {}
    return Deployment(
        arguments=arguments,
        environment=os.environ | target.env if launched else target.env,
        ranks=target.ranks,
        min_ranks=policy.spec.bounds.min_ranks,
        max_ranks=policy.max_ranks,
        experts=experts(target),
        vllm=versions.get("vllm"),
        nixl=versions.get("nixl"),
        external=target.load_balancing == "external",
        settle_s=target.deadlines.settle_s,
        stall_after_s=policy.spec.detection.stall_after_s,
        no_command=target.executable if launched and shutil.which(target.executable) is None else "",
        no_model=target.model if launched and _is_absent_folder(target.model) else "",
    )


def _is_absent_folder(model: str) -> bool:
    return model.startswith(("/", "./", "../", "~")) and not Path(model).expanduser().exists()


def experts(target: VllmTarget) -> int | None:
    """Logical experts of a layer; None: neither in the policy nor in a folder on this machine."""
    if target.experts is not None:
        return target.experts
    try:
        config = json.loads(Path(target.model, "config.json").read_text(encoding="utf-8")) if target.model else {}
    except (OSError, ValueError):
        return None
    if isinstance(config, dict):
        config = config.get("text_config", config)
    found = [config[key] for key in EXPERT_KEYS if isinstance(config, dict) and isinstance(config.get(key), int)]
    return found[0] if found else None


def installed(target: VllmTarget) -> dict[str, str]:
    """Versions by distribution, from the interpreter that the command runs with; empty where that cannot be told."""
    command = shutil.which(target.executable)
    try:
        with open(command or "", "rb") as file:
            first = file.readline(1024)
    except OSError:
        return {}
    interpreter = first.removeprefix(b"#!").decode(errors="replace").split()
    if not first.startswith(b"#!") or not interpreter:
        return {}
    try:
        done = subprocess.run(
            [interpreter[0], "-c", _PROBE],
            env={**os.environ, **target.env},
            capture_output=True,
            text=True,
            timeout=ASK_S,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return {}
    pairs = (line.split() for line in done.stdout.splitlines())
    return {pair[0]: pair[1] for pair in pairs if len(pair) == 2}
