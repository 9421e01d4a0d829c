"""What the tests of `chaos.vllm_gpu` and `chaos.inplace_gpu` share: profiles without a GPU or vLLM, what the daemon makes of them,
and the arguments of a dry run over vLLM's own servers."""

import json
import sys
from pathlib import Path

import pytest

from chaos.vllm_gpu import profile as profiles
from chaos.vllm_gpu.profile import Profile
from healer.policy.load import parse_policy
from healer.policy.schema import VllmTarget
from healer.targets.vllm.deployment import read
from healer.targets.vllm.preflight import Deployment, check
from tests.vllm.real import ENVIRONMENT
from tests.vllm.stand import free_base

KNOWN_ERRORS = {
    "h200": [],
    # the stub workers exchange nothing, and vLLM does not ask which back end they stand for
    "cpu": ["fault tolerance does not work with the all2all backend allgather_reducescatter"],
}
"""Of the preflight, by kind of profile."""

needs_servers = pytest.mark.skipif(
    not (ENVIRONMENT / "overlay033").is_dir(), reason="VLLM_CPU names no environment; make vllm-env"
)


def profile_of(folder: Path, kind: str) -> Profile:
    if kind == "h200":
        return profiles.h200(folder, python=Path(sys.executable), site=folder / "packages", gpus=2)
    (folder / "overlay033").mkdir(exist_ok=True)
    return profiles.cpu(folder, folder)


def as_the_daemon_reads(profile: Profile, folder: Path) -> tuple[VllmTarget, Deployment]:
    document = {"apiVersion": "healer/v1", "kind": "Policy", "metadata": {"name": "p"}}
    text = json.dumps(document | {"spec": profile.policy(folder / "run")})
    policy = parse_policy(text, name="p", base=folder)
    target = policy.spec.target
    assert isinstance(target, VllmTarget)
    return target, read(policy, target)


def errors(deployment: Deployment) -> list[str]:
    return [finding.what for finding in check(deployment) if finding.level == "error"]


def dry_run(folder: Path, *, budget_s: int) -> list[str]:
    arguments = ["--profile", "cpu", "--vllm-cpu", str(ENVIRONMENT), "--budget", str(budget_s)]
    return [*arguments, "--base-port", str(free_base()), "--out", str(folder / "out"), "--work", str(folder / "work")]
