"""The schema of a policy file, `apiVersion: healer/v1`, `kind: Policy`. Keys are camelCase; durations carry units.

A policy is read once and never changed in place; two policies that say the same compare equal. The docstring below a field
is its description: `healer.policy.docs` and the JSON Schema take it from there.
"""

from healer.policy.schema.base import KeyPath, Model, Span, is_url, parse_duration, show_duration
from healer.policy.schema.bounds import Bounds, Breaker, FaultBudget, Maintenance, Schedule, SizeBounds
from healer.policy.schema.daemon import JournalKept, Lease, Notification
from healer.policy.schema.healing import ActionName, Deadlines, Healing, Match, Probation, Require, Rule, Rung
from healer.policy.schema.hooks import Hook
from healer.policy.schema.policy import Metadata, Policy, Spec
from healer.policy.schema.scaling import (
    Behavior,
    Direction,
    Fallback,
    Load,
    LoadRule,
    Predictive,
    Rate,
    Signal,
    TargetTracking,
    Threshold,
)
from healer.policy.schema.sensors import Detection, KernelLog, Nvml, NvmlIntervals, Sensors, Thresholds
from healer.policy.schema.target import LOOPBACK, Api, Gateway, SlotLabels, Target
from healer.policy.schema.vllm import Canary, VllmDeadlines, VllmHooks, VllmTarget

__all__ = [
    "LOOPBACK",
    "ActionName",
    "Api",
    "Behavior",
    "Bounds",
    "Breaker",
    "Canary",
    "Deadlines",
    "Detection",
    "Direction",
    "Fallback",
    "FaultBudget",
    "Gateway",
    "Healing",
    "Hook",
    "JournalKept",
    "KernelLog",
    "KeyPath",
    "Lease",
    "Load",
    "LoadRule",
    "Maintenance",
    "Match",
    "Metadata",
    "Model",
    "Notification",
    "Nvml",
    "NvmlIntervals",
    "Policy",
    "Predictive",
    "Probation",
    "Rate",
    "Require",
    "Rule",
    "Rung",
    "Schedule",
    "Sensors",
    "Signal",
    "SizeBounds",
    "SlotLabels",
    "Span",
    "Spec",
    "Target",
    "TargetTracking",
    "Threshold",
    "Thresholds",
    "VllmDeadlines",
    "VllmHooks",
    "VllmTarget",
    "is_url",
    "parse_duration",
    "show_duration",
]
