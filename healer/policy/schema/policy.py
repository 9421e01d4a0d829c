"""The policy as a whole."""

from typing import Annotated, Literal

from pydantic import Field

from elastic.config import GroupConfig
from elastic.errors import ElasticError
from healer.diagnosis import Limits
from healer.policy.schema.base import Listed, Model, Name
from healer.policy.schema.bounds import Bounds, Schedule
from healer.policy.schema.daemon import JournalKept, Lease, Notification
from healer.policy.schema.healing import Healing
from healer.policy.schema.hooks import Hook
from healer.policy.schema.scaling import Load
from healer.policy.schema.sensors import Detection, Sensors
from healer.policy.schema.target import Api, Target
from healer.policy.schema.vllm import VllmTarget

NAME_PATTERN = r"^[a-z0-9]([a-z0-9.-]{0,61}[a-z0-9])?$"


class Metadata(Model):
    """Who it is."""

    name: Annotated[str, Field(pattern=NAME_PATTERN)]
    """Of the policy and its group: lower-case letters, digits, '-' and '.'."""


class Spec(Model):
    """What is kept, by which rules."""

    target: Annotated[Target | VllmTarget, Field(discriminator="kind")]
    """The group that is kept healthy."""
    api: Api = Field(default_factory=Api)
    detection: Detection = Field(default_factory=Detection)
    sensors: Sensors = Field(default_factory=Sensors)
    healing: Healing = Field(default_factory=Healing)
    hooks: dict[Name, Hook] = Field(default_factory=dict)
    """Commands and URLs, by name, for rules to call."""
    load: Load = Field(default_factory=Load)
    schedules: Annotated[tuple[Schedule, ...], Listed, Field(max_length=100)] = ()
    """Bounds for certain times."""
    bounds: Bounds = Field(default_factory=Bounds)
    lease: Lease | None = None
    """Absent: one daemon, alone, kept so by a file lock in the run directory."""
    journal: JournalKept = Field(default_factory=JournalKept)
    notifications: Annotated[tuple[Notification, ...], Listed, Field(max_length=100)] = ()
    """Who is told of incidents, of what needs a human, and of what happens to the daemon itself."""
    dry_run: bool = False
    """Observe, decide and record; act never, not even when asked."""
    pause: bool = False
    """Observe and report; decide nothing. What operators ask for is still done."""


class Policy(Model):
    """A policy file."""

    api_version: Literal["healer/v1"]
    """The version of this schema."""
    kind: Literal["Policy"]
    """What the file is."""
    metadata: Metadata
    spec: Spec

    @property
    def limits(self) -> Limits:
        detection = self.spec.detection
        return Limits(
            stall_after_s=detection.stall_after_s,
            silent_after_s=detection.silent_after_s,
            fault_window_s=detection.fault_window_s,
            quorum_window_s=detection.quorum_window_s,
            blame_before_s=detection.blame_before_s,
            blame_after_s=detection.blame_after_s,
            answer_after_s=detection.answer_after_s,
            settle_after_s=detection.settle_after_s,
            probation_s=detection.probation_s,
        )

    @property
    def max_ranks(self) -> int:
        """The greatest size that spec.bounds allows."""
        target, bounds = self.spec.target, self.spec.bounds
        return target.max_ranks if bounds.max_ranks is None else bounds.max_ranks

    def group(self) -> GroupConfig:
        """The executor's configuration of `spec.target`. The caller checks it against the model: `GroupConfig.validate`.
        Raises ElasticError for a target of another kind."""
        target, deadlines = self.spec.target, self.spec.healing.deadlines
        if not isinstance(target, Target):
            raise ElasticError(f"spec.target.kind {target.kind}: the embedded executor does not run it")
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
            capture_sizes=target.capture_sizes,
            ep_backend=target.ep_backend,
            gpus=target.gpus,
            spares=target.spares,
            pin_cores=target.pin_cores,
            spare_gpus=target.spare_gpus,
            ep_timeout_s=target.ep_timeout_s,
            early_release=target.early_release,
            fault_injection=target.fault_injection,
            host_tier=target.host_tier,
            heartbeat_s=self.spec.detection.heartbeat_interval_s,
            prepare_deadline_s=deadlines.prepare_s,
            commit_deadline_s=deadlines.commit_s,
            gateway_host=target.gateway.host,
            gateway_port=target.gateway.port,
            gateway_max_queued=target.gateway.max_queued,
            model_name=target.gateway.model_name,
        )
