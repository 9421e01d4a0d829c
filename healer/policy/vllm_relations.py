"""Values of a policy for a vLLM deployment that are each valid and do not fit each other."""

from collections.abc import Iterator

from healer.policy.conflict import Contradiction
from healer.policy.schema import KeyPath, Policy, VllmTarget, is_url, show_duration

LEAST_RANKS = 2
"""vLLM's client asserts more than one engine, and one rank has no all2all manager (v1/engine/core_client.py)."""
LAST_PORT = 65535
SHARES_GPUS = "NCCL_MULTI_RANK_GPU_ENABLE"
"""NCCL's own variable: without it, two ranks of a communicator may not have the same GPU."""


def vllm_relations(policy: Policy) -> Iterator[Contradiction]:
    """Nothing for another target."""
    target = policy.spec.target
    if isinstance(target, VllmTarget):
        yield from _bounds(policy)
        yield from (_launched(target) if target.mode == "launch" else _attached(policy, target))
        yield from _addresses(policy, target)
        yield from _ladders(policy)


def _place(*keys: str | int) -> KeyPath:
    return ("spec", "target", *keys)


def _bounds(policy: Policy) -> Iterator[Contradiction]:
    least = policy.spec.bounds.min_ranks
    if least < LEAST_RANKS:
        text = f"{least} is too few: vLLM cannot scale to a single rank, expected at least {LEAST_RANKS}"
        yield Contradiction(("spec", "bounds", "minRanks"), _place("kind"), text)
    for name, signal in policy.spec.load.signals.items():
        if signal.source == "gateway" and signal.metric == "kvUse":
            text = "kvUse is not told by vLLM's ranks this way, expected the metric vllm:kv_cache_usage_perc"
            yield Contradiction(("spec", "load", "signals", name, "metric"), _place("kind"), text)


def _ladders(policy: Policy) -> Iterator[Contradiction]:
    if "rules" not in policy.spec.healing.model_fields_set:
        return  # the retry among them is for mutual waits, which vLLM's ranks do not report
    for index, rule in enumerate(policy.spec.healing.rules):
        for number, action in enumerate(rule.actions):
            if action == "retry":
                text = "retry is not for vLLM, which cannot drop a step and run it again (replace tries its own retry first)"
                text += ", expected it away"
                yield Contradiction(("spec", "healing", "rules", index, "actions", number), _place("kind"), text)


def _launched(target: VllmTarget) -> Iterator[Contradiction]:
    if target.load_balancing == "internal":
        text = "internal load balancing is for servers that run already, expected mode: attach beside it"
        yield Contradiction(_place("loadBalancing"), _place("mode"), text)
    if not target.model:
        yield Contradiction(_place("model"), _place("mode"), "is missing, expected the model that vllm serve loads")
    if target.urls:
        yield Contradiction(_place("urls"), _place("mode"), "are for mode: attach, expected none beside mode: launch")
    needed = target.max_ranks * target.gpus_per_rank
    if target.gpus and len(target.gpus) < needed:
        text = (
            f"{len(target.gpus)} GPUs are too few, expected {target.gpus_per_rank} for each of {target.max_ranks} slots"
        )
        yield Contradiction(_place("gpus"), _place("maxRanks"), text)
    if len(set(target.gpus)) < len(target.gpus) and target.env.get(SHARES_GPUS) != "1":
        text = f'names a GPU twice, expected each once, or {SHARES_GPUS}: "1" in spec.target.env'
        yield Contradiction(_place("gpus"), (), text)
    last = target.base_port + target.max_ranks - 1
    if last > LAST_PORT:
        text = f"{target.base_port} leaves no port for slot {target.max_ranks - 1}, expected at most "
        yield Contradiction(_place("basePort"), _place("maxRanks"), f"{text}{LAST_PORT - target.max_ranks + 1}")


def _attached(policy: Policy, target: VllmTarget) -> Iterator[Contradiction]:
    internal = target.load_balancing == "internal"
    needed = 1 if internal else target.max_ranks
    if len(target.urls) != needed:
        text = f"{len(target.urls)} are named, expected {'the one server' if internal else f'one for each of {needed} slots'}"
        yield Contradiction(_place("urls"), _place("mode"), text)
    for index, url in enumerate(target.urls):
        if not is_url(url):
            yield Contradiction(_place("urls", index), (), f"{url!r} is no URL, expected http://HOST:PORT")
    for key, name in (("start", target.hooks.start), ("stop", target.hooks.stop), ("restart", target.hooks.restart)):
        if name is not None and name not in policy.spec.hooks:
            text = (
                f"{name!r} is no hook, expected one of {', '.join(policy.spec.hooks) or 'spec.hooks, which is empty'}"
            )
            yield Contradiction(_place("hooks", key), ("spec", "hooks"), text)
    if (target.hooks.start is None) != (target.hooks.stop is None):
        text = "has only one of start and stop, expected both or none: a rank that cannot be ended cannot be replaced"
        yield Contradiction(_place("hooks"), (), text)


def _addresses(policy: Policy, target: VllmTarget) -> Iterator[Contradiction]:
    used = range(target.base_port, target.base_port + target.max_ranks) if target.mode == "launch" else ()
    for path, port in (
        (("spec", "api", "port"), policy.spec.api.port),
        (_place("gateway", "port"), target.gateway.port),
    ):
        if port in used:
            text = f"{port} is the port of slot {port - target.base_port}, expected one outside {target.base_port} to {target.base_port + target.max_ranks - 1}"
            yield Contradiction(path, _place("basePort"), text)
    limits, recovery = target.deadlines, policy.spec.detection.silent_after_s
    if limits.stall_s < recovery:
        text = f"{show_duration(limits.stall_s)} is below detection.silentAfter, expected at least "
        yield Contradiction(
            _place("deadlines", "stall"), ("spec", "detection", "silentAfter"), f"{text}{show_duration(recovery)}"
        )
