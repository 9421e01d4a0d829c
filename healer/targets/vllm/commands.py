"""The command line and environment of one rank's `vllm serve`. Pure."""

import json
from collections.abc import Mapping

from elastic.errors import ElasticError
from healer.policy.schema import VllmTarget
from healer.targets.vllm.arguments import Arguments

HOST = "127.0.0.1"
JOINER = "VLLM_ELASTIC_EP_SCALE_UP_LAUNCH"
"""Set for a rank that joins a running group (vLLM's envs.py)."""
VISIBLE, KEY = "CUDA_VISIBLE_DEVICES", "VLLM_API_KEY"
OWN = (
    "host",
    "port",
    "data-parallel-size",
    "data-parallel-size-local",
    "data-parallel-rank",
    "data-parallel-start-rank",
    "data-parallel-address",
    "data-parallel-rpc-port",
    "data-parallel-external-lb",
    "headless",
)
"""Options that healer sets, or that contradict it: refused among the user's arguments."""


def arguments(target: VllmTarget) -> Arguments:
    """The user's own, read. Raises ElasticError naming the option that is healer's."""
    found = Arguments.parse((*((target.model,) if target.model else ()), *target.args))
    for name in OWN:
        if name in found.options:
            raise ElasticError(f"spec.target.args: --{name} is set by healer; remove it")
    return found


def model_name(target: VllmTarget) -> str:
    """What clients call the model."""
    return arguments(target).text("served-model-name", target.model)


def url_of(target: VllmTarget, slot: int) -> str:
    return target.urls[slot] if target.urls else f"http://{HOST}:{target.base_port + slot}"


def redundancy(experts: int | None, redundant: int, gpus: int) -> int:
    """Redundant experts for a launch on so many GPUs: vLLM wants all expert slots to divide by them."""
    return redundant if experts is None else redundant + -(experts + redundant) % gpus


def command(
    target: VllmTarget, *, slot: int, dp_rank: int, size: int, rpc_port: int, redundant: int | None = None
) -> list[str]:
    """`size`: DP ranks that the group has, or is to have once this one has joined. `redundant`: redundant experts, where they
    are others than the user's."""
    return [
        # healer's questions would fill the log
        *(target.executable, "serve", target.model, *_args(target, redundant), "--disable-uvicorn-access-log"),
        *("--host", HOST, "--port", str(target.base_port + slot)),
        *("--data-parallel-size", str(size), "--data-parallel-rank", str(dp_rank)),
        *("--data-parallel-address", HOST, "--data-parallel-rpc-port", str(rpc_port)),
    ]


def _args(target: VllmTarget, redundant: int | None) -> list[str]:
    """The user's, with another number of redundant experts. vLLM does not merge two forms of one option: the whole is written
    anew."""
    if redundant is None:
        return list(target.args)
    kept, rest = list[str](), list(target.args)
    while rest:
        word = rest.pop(0)
        if not word.replace("_", "-").startswith("--eplb-config"):
            kept.append(word)
        elif "=" not in word and rest:
            rest.pop(0)
    config = arguments(target).config("eplb-config") | {"num_redundant_experts": redundant}
    return [*kept, f"--eplb-config={json.dumps(config)}"]


def spare_environment(target: VllmTarget, base: Mapping[str, str], variables: Mapping[str, str]) -> dict[str, str]:
    """Of a process that may become the rank of any slot: it sees every GPU, and knows no key. `base`: of the daemon; `variables`:
    further ones of every rank."""
    found = {**base, "PYTHONUNBUFFERED": "1", **target.env, **variables}
    for name in (JOINER, KEY, *((VISIBLE,) if target.gpus else ())):
        found.pop(name, None)
    return found


def environment(target: VllmTarget, base: Mapping[str, str], *, slot: int, joins: bool, api_key: str) -> dict[str, str]:
    """`base`: of the daemon."""
    found = {**base, "PYTHONUNBUFFERED": "1", **target.env}
    found.pop(JOINER, None)
    if joins:
        found[JOINER] = "1"
    if gpus := target.visible_of(slot):
        found[VISIBLE] = gpus
    if api_key:
        # not on the command line, which every user of the host can read
        found[KEY] = api_key
    return found
