"""The schema of a policy file, `apiVersion: healer/v1`, `kind: Policy`. Keys are camelCase; durations carry units.

A policy is read once and never changed in place; two policies that say the same compare equal.
"""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Literal, NamedTuple

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, ValidationInfo
from pydantic.alias_generators import to_camel

from elastic.config import MAX_RUN_DIR, GroupConfig
from healer.diagnosis import Cause, Limits

LOOPBACK = frozenset({"127.0.0.1", "::1", "localhost"})

_UNITS = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0}
_DURATION = re.compile(r"(\d+(?:\.\d+)?)(ms|s|m|h)")


def parse_duration(value: object) -> float:
    """Seconds of "100ms", "2s", "1.5m" or "1h". Raises ValueError that says what was expected."""
    match = _DURATION.fullmatch(value) if isinstance(value, str) else None
    if match is None or float(match[1]) == 0:
        raise ValueError(
            f'{value!r} is not a duration, expected a positive number with a unit, such as "100ms" or "2s"'
        )
    return float(match[1]) * _UNITS[match[2]]


def show_duration(seconds: float) -> str:
    return f"{seconds * 1000:g}ms" if seconds < 1 else f"{seconds:g}s"


def _absolute(value: str, info: ValidationInfo) -> str:
    if not value:
        raise ValueError("'' is empty, expected a path")
    base = Path((info.context or {}).get("base", "."))
    return str((base / Path(value).expanduser()).resolve())


Duration = Annotated[float, BeforeValidator(parse_duration)]
PathText = Annotated[str, AfterValidator(_absolute)]
"""Relative paths are relative to the policy file."""
Port = Annotated[int, Field(ge=0, le=65535)]
"""0: any free port."""


def _alias(name: str) -> str:
    return to_camel(name.removesuffix("_s"))


class Model(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, alias_generator=_alias)


class Metadata(Model):
    name: Annotated[str, Field(pattern=r"^[a-z0-9]([a-z0-9.-]{0,61}[a-z0-9])?$")]


class Gateway(Model):
    host: str = "127.0.0.1"
    port: Port = 8000
    max_queued: Annotated[int, Field(ge=1)] = 256
    model_name: str = ""
    """What clients call the model; empty: the name of the checkpoint folder."""


class Target(Model):
    """What is kept healthy: a group of the embedded executor."""

    kind: Literal["embedded"]
    checkpoint: PathText
    run_dir: PathText
    ranks: Annotated[int, Field(ge=1)]
    max_ranks: Annotated[int, Field(ge=1)]
    slots_per_rank: Annotated[int, Field(ge=1)]
    redundant_experts: Annotated[int, Field(ge=0)] = 0
    max_tokens: Annotated[int, Field(ge=4)] = 32
    max_seqs: Annotated[int, Field(ge=1)] = 16
    max_model_len: Annotated[int, Field(ge=2)] = 256
    ep_backend: Literal["shm", "nixl"] = "shm"
    ep_timeout_s: Duration = 30.0
    host_tier: bool = True
    gateway: Gateway = Field(default_factory=Gateway)


class Api(Model):
    host: str = "127.0.0.1"
    port: Port = 8470
    token_file: PathText | None = None
    """Where it is set, control calls need its content as a bearer token. Required when `host` is not loopback."""


class Detection(Model):
    heartbeat_interval_s: Duration = 0.2
    stall_after_s: Duration = 1.0
    """Silence counts after this, together with other evidence."""
    silent_after_s: Duration = 10.0
    """Silence or lack of progress counts by itself after this."""
    fault_window_s: Duration = 30.0
    """A rank's report of a peer's failure counts this long."""
    process_interval_s: Duration = 1.0
    """Between two scans of the ranks' processes; a suspicion is looked into at once."""


ActionName = Literal["replace", "scale-down", "human"]
CauseName = Literal["process-death", "stopped", "hang", "stuck", "agent-lost", "silent"]


class Match(Model):
    cause: Annotated[tuple[CauseName, ...], Field(strict=False, min_length=1)] | None = None
    """None matches every cause."""

    def fits(self, cause: Cause) -> bool:
        return self.cause is None or cause.value in self.cause


class Rule(Model):
    name: Annotated[str, Field(min_length=1)]
    match: Match = Field(default_factory=Match)
    actions: Annotated[tuple[ActionName, ...], Field(strict=False, min_length=1)]
    """The ladder: the next is taken when one is not allowed or has failed."""
    max_attempts: Annotated[int, Field(ge=1)] = 3
    """Replacements asked for before the next action; a slot that is live again starts anew."""
    backoff_s: Duration = 5.0
    """Before the second attempt; doubled for each further one."""


class Deadlines(Model):
    prepare_s: Duration = 60.0
    commit_s: Duration = 5.0


def _default_rules() -> tuple[Rule, ...]:
    return (Rule(name="any-fault", actions=("replace", "scale-down", "human")),)


class Healing(Model):
    rules: Annotated[tuple[Rule, ...], Field(strict=False)] = Field(default_factory=_default_rules)
    """The first that matches wins."""
    deadlines: Deadlines = Field(default_factory=Deadlines)

    def rule_for(self, cause: Cause) -> Rule | None:
        return next((rule for rule in self.rules if rule.match.fits(cause)), None)


class Bounds(Model):
    min_ranks: Annotated[int, Field(ge=1)] = 1
    """No action, and no request, goes below it. A death does, until its replacement is live."""


class Spec(Model):
    target: Target
    api: Api = Field(default_factory=Api)
    detection: Detection = Field(default_factory=Detection)
    healing: Healing = Field(default_factory=Healing)
    bounds: Bounds = Field(default_factory=Bounds)
    dry_run: bool = False
    """Observe, decide and record; act never."""


class Policy(Model):
    api_version: Literal["healer/v1"]
    kind: Literal["Policy"]
    metadata: Metadata
    spec: Spec

    @property
    def limits(self) -> Limits:
        detection = self.spec.detection
        return Limits(
            stall_after_s=detection.stall_after_s,
            silent_after_s=detection.silent_after_s,
            fault_window_s=detection.fault_window_s,
        )

    def group(self) -> GroupConfig:
        """The executor's configuration of `spec.target`. The caller checks it against the model: `GroupConfig.validate`."""
        target, deadlines = self.spec.target, self.spec.healing.deadlines
        return GroupConfig(
            name=self.metadata.name,
            run_dir=target.run_dir,
            checkpoint=target.checkpoint,
            ranks=target.ranks,
            max_ranks=target.max_ranks,
            slots_per_rank=target.slots_per_rank,
            redundant_experts=target.redundant_experts,
            max_tokens=target.max_tokens,
            max_seqs=target.max_seqs,
            max_model_len=target.max_model_len,
            capture_sizes=capture_sizes(target.max_tokens),
            ep_backend=target.ep_backend,
            ep_timeout_s=target.ep_timeout_s,
            host_tier=target.host_tier,
            heartbeat_s=self.spec.detection.heartbeat_interval_s,
            prepare_deadline_s=deadlines.prepare_s,
            commit_deadline_s=deadlines.commit_s,
            gateway_host=target.gateway.host,
            gateway_port=target.gateway.port,
            gateway_max_queued=target.gateway.max_queued,
            model_name=target.gateway.model_name,
        )


def capture_sizes(max_tokens: int) -> tuple[int, ...]:
    """Powers of two from 4, and the limit itself."""
    sizes = [4]
    while sizes[-1] * 2 < max_tokens:
        sizes.append(sizes[-1] * 2)
    return (*sizes, max_tokens) if max_tokens > 4 else (4,)


KeyPath = tuple[str | int, ...]
"""Where in the file: keys and list indices."""


class Contradiction(NamedTuple):
    """Values that are each valid and do not fit each other."""

    path: KeyPath
    """The place to change."""
    other: KeyPath
    """What it does not fit."""
    text: str
    """What is wrong and what was expected."""


def contradictions(policy: Policy) -> Iterator[Contradiction]:
    spec = policy.spec
    target, detection, gateway = spec.target, spec.detection, spec.target.gateway
    stall, ep, commit = detection.stall_after_s, target.ep_timeout_s, spec.healing.deadlines.commit_s
    ranks, ep_path = ("spec", "target", "ranks"), ("spec", "target", "epTimeout")
    stall_path = ("spec", "detection", "stallAfter")
    if target.ranks > target.max_ranks:
        text = f"{target.ranks} is above maxRanks, expected at most {target.max_ranks}"
        yield Contradiction(ranks, ("spec", "target", "maxRanks"), text)
    if spec.bounds.min_ranks > target.ranks:
        text = f"{spec.bounds.min_ranks} is above target.ranks, expected at most {target.ranks}"
        yield Contradiction(("spec", "bounds", "minRanks"), ranks, text)
    if len(target.run_dir) > MAX_RUN_DIR:
        text = f"has {len(target.run_dir)} characters, expected at most {MAX_RUN_DIR} (Unix sockets lie below it)"
        yield Contradiction(("spec", "target", "runDir"), (), f"{target.run_dir} {text}")
    least = 5 * detection.heartbeat_interval_s
    if stall < least:
        text = f"{show_duration(stall)} is too short, expected at least 5 x heartbeatInterval = {show_duration(least)}"
        yield Contradiction(stall_path, ("spec", "detection", "heartbeatInterval"), text)
    if detection.silent_after_s < 2 * stall:
        silent, least = show_duration(detection.silent_after_s), 2 * stall
        text = f"{silent} is too short, expected at least 2 x stallAfter = {show_duration(least)}"
        yield Contradiction(("spec", "detection", "silentAfter"), stall_path, text)
    for path, seconds in ((stall_path, stall), (("spec", "healing", "deadlines", "commit"), commit)):
        if seconds >= ep:
            # later than that, the ranks would already have masked each other
            text = f"{show_duration(seconds)} is not below target.epTimeout, expected less than {show_duration(ep)}"
            yield Contradiction(path, ep_path, text)
    if spec.api.host not in LOOPBACK and spec.api.token_file is None:
        text = f"{spec.api.host!r} is not loopback, expected api.tokenFile beside it, or 127.0.0.1, ::1 or localhost"
        yield Contradiction(("spec", "api", "host"), ("spec", "api", "tokenFile"), text)
    if spec.api.port and (spec.api.host, spec.api.port) == (gateway.host, gateway.port):
        text = f"{spec.api.port} is also target.gateway.port, expected another"
        yield Contradiction(("spec", "api", "port"), ("spec", "target", "gateway", "port"), text)
    names = [rule.name for rule in spec.healing.rules]
    for index, rule in enumerate(spec.healing.rules):
        place: KeyPath = ("spec", "healing", "rules", index)
        if rule.name in names[:index]:
            text = f"{rule.name!r} is used twice, expected a name of its own"
            yield Contradiction((*place, "name"), (), text)
        shown = ", ".join(rule.actions)
        if len(set(rule.actions)) < len(rule.actions):
            text = f"{shown}: an action is repeated, expected each once (see maxAttempts)"
            yield Contradiction((*place, "actions"), (), text)
        if "human" in rule.actions[:-1]:
            yield Contradiction((*place, "actions"), (), f"{shown}: nothing follows 'human', expected it last")
