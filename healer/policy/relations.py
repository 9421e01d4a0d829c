"""Values of a policy that are each valid and do not fit each other: errors, found when the file is loaded.

Each function is about one part of the policy. Load rules have a module of their own, `load_relations`.
"""

import math
from collections.abc import Iterator
from itertools import chain

from elastic.config import MAX_RUN_DIR
from healer.diagnosis import Cause
from healer.policy.bounds import gpus_used
from healer.policy.conflict import Contradiction, repeated
from healer.policy.daemon_relations import daemon_relations
from healer.policy.expressions import HEALING_VARIABLES, ExpressionError, check
from healer.policy.load_relations import load_relations
from healer.policy.schema import LOOPBACK, Hook, KeyPath, Policy, Rule, Target, is_url, show_duration
from healer.policy.time_relations import time_relations
from healer.policy.vllm_relations import vllm_relations

LEAST_NVML_DEADLINE_S = 0.2
"""Honest NVML calls were seen to stall for 101 ms on an H200."""

SECRET_WORDS = ("authorization", "cookie", "token", "secret", "password", "passwd", "api-key", "apikey", "api_key")

HARMLESS = frozenset({"hook", "human"})
"""Actions that change nothing about a rank, unless the hook is destructive."""


def contradictions(policy: Policy) -> Iterator[Contradiction]:
    """All of them, in no particular order."""
    return chain(
        _sizes(policy),
        _group(policy),
        _timing(policy),
        _addresses(policy),
        _rules(policy),
        _hooks(policy),
        load_relations(policy),
        time_relations(policy),
        daemon_relations(policy),
        vllm_relations(policy),
    )


def _sizes(policy: Policy) -> Iterator[Contradiction]:
    target, bounds = policy.spec.target, policy.spec.bounds
    ranks: KeyPath = ("spec", "target", "ranks")
    most: KeyPath = ("spec", "target", "maxRanks")

    def bound(key: str, value: object, text: str, other: KeyPath = ranks) -> Contradiction:
        return Contradiction(("spec", "bounds", key), other, f"{value} {text}")

    if target.ranks > target.max_ranks:
        yield Contradiction(ranks, most, f"{target.ranks} is above maxRanks, expected at most {target.max_ranks}")
    if bounds.min_ranks > target.ranks:
        yield bound("minRanks", bounds.min_ranks, f"is above target.ranks, expected at most {target.ranks}")
    if bounds.max_ranks is not None:
        if bounds.max_ranks > target.max_ranks:
            text = f"is above target.maxRanks, expected at most {target.max_ranks}"
            yield bound("maxRanks", bounds.max_ranks, text, most)
        if bounds.max_ranks < target.ranks:
            yield bound("maxRanks", bounds.max_ranks, f"is below target.ranks, expected at least {target.ranks}")
    gpus = gpus_used(policy, range(target.ranks))
    if bounds.max_gpus is not None and bounds.max_gpus < gpus:
        text = f"is below the {gpus} GPUs that target.ranks take at start, expected at least that"
        yield bound("maxGpus", bounds.max_gpus, text)
    if bounds.divisibility > 1 and target.ranks % bounds.divisibility:
        text = f"does not divide target.ranks {target.ranks}, expected a divisor of it"
        yield bound("divisibility", bounds.divisibility, text)
    if bounds.redundancy_floor >= target.ranks:
        text = f"losses leave none of {target.ranks} ranks, expected at most {target.ranks - 1}"
        yield bound("redundancyFloor", bounds.redundancy_floor, text)
    if bounds.max_unavailable is not None and bounds.max_unavailable > target.max_ranks:
        text = f"is above target.maxRanks, expected at most {target.max_ranks}"
        yield bound("maxUnavailable", bounds.max_unavailable, text, most)
    budget = bounds.budget_rank_hours_per_day
    if budget is not None and budget < 24 * bounds.min_ranks:
        text = f"does not pay for bounds.minRanks, expected at least 24 x {bounds.min_ranks} = {24 * bounds.min_ranks}"
        yield bound("budgetRankHoursPerDay", f"{budget:g}", text, ("spec", "bounds", "minRanks"))


def _group(policy: Policy) -> Iterator[Contradiction]:
    target = policy.spec.target
    for index, entry in enumerate(target.slot_labels):
        for number, span in enumerate(entry.slots):
            if span.last >= target.max_ranks:
                text = f"{span} is not below maxRanks, expected slots from 0 to {target.max_ranks - 1}"
                where = ("spec", "target", "slotLabels", index, "slots", number)
                yield Contradiction(where, ("spec", "target", "maxRanks"), text)
    if not isinstance(target, Target):
        return
    if len(target.run_dir) > MAX_RUN_DIR:
        text = f"has {len(target.run_dir)} characters, expected at most {MAX_RUN_DIR} (Unix sockets lie below it)"
        yield Contradiction(("spec", "target", "runDir"), (), f"{target.run_dir} {text}")
    sizes, place = target.capture_sizes, ("spec", "target", "captureSizes")
    if sizes and (list(sizes) != sorted(set(sizes)) or sizes[-1] != target.max_tokens):
        text = f"{', '.join(map(str, sizes))}: expected ascending numbers that end in maxTokens {target.max_tokens}"
        yield Contradiction(place, ("spec", "target", "maxTokens"), text)
    for key, values in (("gpus", target.gpus), ("spareGpus", target.spare_gpus)):
        if values and target.ep_backend != "nixl-ep":
            text = f"needs GPUs, expected epBackend: nixl-ep instead of {target.ep_backend}"
            yield Contradiction(("spec", "target", key), ("spec", "target", "epBackend"), text)
    if target.spare_gpus and not target.spares:
        text = "is for spares, of which there are none; expected target.spares above 0"
        yield Contradiction(("spec", "target", "spareGpus"), ("spec", "target", "spares"), text)


def _timing(policy: Policy) -> Iterator[Contradiction]:
    spec = policy.spec
    detection = spec.detection
    # vLLM's own timeout of an exchange is NIXL's, which nothing sets; its commits are not the executor's
    ep = spec.target.ep_timeout_s if isinstance(spec.target, Target) else math.inf
    stall, silent, commit = detection.stall_after_s, detection.silent_after_s, spec.healing.deadlines.commit_s
    stall_path: KeyPath = ("spec", "detection", "stallAfter")
    least = 5 * detection.heartbeat_interval_s
    if stall < least:
        text = f"{show_duration(stall)} is too short, expected at least 5 x heartbeatInterval = {show_duration(least)}"
        yield Contradiction(stall_path, ("spec", "detection", "heartbeatInterval"), text)
    if silent < 2 * stall:
        text = f"{show_duration(silent)} is too short, expected at least 2 x stallAfter = {show_duration(2 * stall)}"
        yield Contradiction(("spec", "detection", "silentAfter"), stall_path, text)
    for path, seconds in ((stall_path, stall), (("spec", "healing", "deadlines", "commit"), commit)):
        if seconds >= ep:
            # later than that, the ranks would already have masked each other
            text = f"{show_duration(seconds)} is not below target.epTimeout, expected less than {show_duration(ep)}"
            yield Contradiction(path, ("spec", "target", "epTimeout"), text)
    nvml = spec.sensors.nvml
    place = ("spec", "sensors", "nvml")
    if nvml.deadline_s < LEAST_NVML_DEADLINE_S:
        text = (
            f"{show_duration(nvml.deadline_s)} is too short, expected at least {show_duration(LEAST_NVML_DEADLINE_S)}"
        )
        yield Contradiction((*place, "deadline"), (), text)
    interval = nvml.interval
    for slower, faster, seconds, least in (
        ("medium", "fast", interval.medium_s, interval.fast_s),
        ("slow", "medium", interval.slow_s, interval.medium_s),
    ):
        if seconds < least:
            text = f"{show_duration(seconds)} is below {faster}, expected at least {show_duration(least)}"
            yield Contradiction((*place, "interval", slower), (*place, "interval", faster), text)


def _addresses(policy: Policy) -> Iterator[Contradiction]:
    api, gateway = policy.spec.api, policy.spec.target.gateway
    if api.host not in LOOPBACK and api.token_file is None:
        text = f"{api.host!r} is not loopback, expected api.tokenFile beside it, or 127.0.0.1, ::1 or localhost"
        yield Contradiction(("spec", "api", "host"), ("spec", "api", "tokenFile"), text)
    if api.port and (api.host, api.port) == (gateway.host, gateway.port):
        text = f"{api.port} is also target.gateway.port, expected another"
        yield Contradiction(("spec", "api", "port"), ("spec", "target", "gateway", "port"), text)


def _rules(policy: Policy) -> Iterator[Contradiction]:
    rules = policy.spec.healing.rules
    yield from repeated([rule.name for rule in rules], ("spec", "healing", "rules"))
    for index, rule in enumerate(rules):
        place: KeyPath = ("spec", "healing", "rules", index)
        yield from _match(policy, rule, place)
        yield from _ladder(policy, rule, place)


def _match(policy: Policy, rule: Rule, place: KeyPath) -> Iterator[Contradiction]:
    match, require, target = rule.match, rule.require, policy.spec.target
    if match.when is not None:
        try:
            check(match.when, {name: example for name, (example, _) in HEALING_VARIABLES.items()})
        except ExpressionError as error:
            yield Contradiction((*place, "match", "when"), (), str(error), error.at)
    for number, span in enumerate(match.slot or ()):
        if span.last >= target.max_ranks:
            text = f"{span} is not below target.maxRanks, expected slots from 0 to {target.max_ranks - 1}"
            yield Contradiction((*place, "match", "slot", number), ("spec", "target", "maxRanks"), text)
    if require.sources > require.evidence > 1:
        text = f"{require.sources} sources give more than {require.evidence} pieces of evidence, expected at most that"
        yield Contradiction((*place, "require", "sources"), (*place, "require", "evidence"), text)
    there = sources_there_are(policy)
    if require.sources > there:
        text = f"{require.sources} is above the {there} sources that this group has, expected at most {there}"
        yield Contradiction((*place, "require", "sources"), ("spec", "sensors"), text)


def sources_there_are(policy: Policy) -> int:
    """Heartbeats, liveness and processes always; NVML and the kernel log where they are on; each peer of a rank."""
    sensors = policy.spec.sensors
    return 3 + sensors.nvml.enabled + sensors.kernel_log.enabled + policy.spec.target.max_ranks - 1


def _ladder(policy: Policy, rule: Rule, place: KeyPath) -> Iterator[Contradiction]:
    hooks, shown, ladder = policy.spec.hooks, ", ".join(rule.actions), (*place, "actions")
    plain = [name for name in rule.actions if name != "hook"]
    if len(set(plain)) < len(plain):
        yield Contradiction(ladder, (), f"{shown}: an action is repeated, expected each once (see maxAttempts)")
    if "human" in rule.actions[:-1]:
        yield Contradiction(ladder, (), f"{shown}: nothing follows 'human', expected it last")
    acting = set(rule.match.verdict) != {"unhealthy"}
    # running the step again touches no rank
    harmless = HARMLESS | {"retry"} if rule.match.cause == (Cause.MUTUAL_WAIT,) else HARMLESS
    for index, rung in enumerate(rule.ladder):
        here = (*ladder, index)
        if rung.action == "hook" and rung.hook is None:
            yield Contradiction(here, (), "names no hook, expected {hook: NAME} with a key of spec.hooks")
        if rung.action != "hook" and rung.hook is not None:
            text = f"names hook {rung.hook!r} beside action {rung.action}, expected one of the two"
            yield Contradiction((*here, "hook"), (*here, "action"), text)
        if rung.action == "hook" and rung.hook is not None and rung.hook not in hooks:
            known = ", ".join(sorted(hooks)) or "none there yet"
            text = f"{rung.hook!r} is not in spec.hooks, expected one of: {known}"
            yield Contradiction((*here, "hook"), ("spec", "hooks"), text)
        destructive = rung.action == "hook" and rung.hook in hooks and hooks[rung.hook].destructive
        if acting and (rung.action not in harmless or destructive):
            text = "answers a rank that is not known to be sick, expected match.verdict [unhealthy], or only human and hooks that destroy nothing, and retry where match.cause is [mutual-wait]"
            yield Contradiction(here, (*place, "match", "verdict"), text)
        if rung.action == "human" and (rung.max_attempts or rung.backoff_s or rung.deadline_s):
            yield Contradiction(here, (), "gives 'human' attempts or times, expected the name alone")


def _hooks(policy: Policy) -> Iterator[Contradiction]:
    for name, hook in policy.spec.hooks.items():
        yield from _hook(hook, ("spec", "hooks", name))


def _hook(hook: Hook, place: KeyPath) -> Iterator[Contradiction]:
    web = hook.kind == "webhook"
    if web and not is_url(hook.url):
        text = f"{hook.url!r} is no address, expected one that begins with http:// or https://"
        yield Contradiction((*place, "url"), (*place, "kind"), text)
    if not web and not hook.command:
        yield Contradiction((*place, "command"), (*place, "kind"), f"is missing, which kind {hook.kind} needs")
    for key, given in (
        ("command", web and hook.command),
        ("env", web and hook.env),
        ("envFiles", web and hook.env_files),
        ("url", not web and hook.url),
        ("headers", not web and hook.headers),
        ("headerFiles", not web and hook.header_files),
    ):
        if given:
            yield Contradiction((*place, key), (*place, "kind"), f"is not for kind {hook.kind}, expected it away")
    for key, instead, names in (("env", "envFiles", hook.env), ("headers", "headerFiles", hook.headers)):
        for one in names:
            if any(word in one.lower() for word in SECRET_WORDS):
                text = f"looks like a secret, expected {instead} with a file that holds it"
                yield Contradiction((*place, key, one), (), text)
    for one in sorted(hook.env.keys() & hook.env_files.keys()):
        yield Contradiction((*place, "envFiles", one), (*place, "env", one), "is also in env, expected it once")
    for one in sorted(hook.headers.keys() & hook.header_files.keys()):
        yield Contradiction(
            (*place, "headerFiles", one), (*place, "headers", one), "is also in headers, expected it once"
        )
