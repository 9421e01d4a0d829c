"""Prometheus metrics of the daemon (`healer_*`) and of the group (`elastic_*`), in a registry of their own."""

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Protocol, get_args

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.exposition import generate_latest

from elastic.controller.records import Outcome, SequenceKind, SequenceReport
from healer import __version__
from healer.diagnosis import Cause, Health
from healer.evidence import Evidence, GpuRef, RankRef, Subject, What
from healer.policy.decide import Reason, Step
from healer.sensors import SensorState

if TYPE_CHECKING:
    from healer.status import DaemonStatus

_SECONDS = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0, 60.0)


class Observed(Protocol):
    """What the metrics read at each scrape."""

    def status(self) -> "DaemonStatus": ...


class Metrics:
    """Counters are moved by the supervisor; what the group knows itself is read at each scrape."""

    content_type = "text/plain; version=0.0.4; charset=utf-8"

    def __init__(self, daemon: Observed, journal_entries: Callable[[], int]) -> None:
        registry = self._registry = CollectorRegistry()
        build = Gauge("healer_build_info", "Always 1; the version is a label.", ["version"], registry=registry)
        build.labels(__version__).set(1)
        self.incidents = Counter(
            "healer_incidents", "Incidents opened, by the cause that opened them.", ["cause"], registry=registry
        )
        self.incident_open = Gauge("healer_incident_open", "1 while an incident is open.", registry=registry)
        self.decisions = Counter(
            "healer_decisions", "Decisions by step and reason.", ["step", "reason"], registry=registry
        )
        self.evidence = Counter(
            "healer_evidence", "Evidence by source and kind.", ["source", "what"], registry=registry
        )
        self.reaction = Histogram(
            "healer_reaction_seconds",
            "From the evidence that condemned a rank to the order that releases the others.",
            buckets=(0.0002, 0.0005, *_SECONDS),
            registry=registry,
        )
        self.loop_late = Histogram(
            "healer_loop_late_seconds",
            "By how much the supervisor's loop woke too late.",
            buckets=_SECONDS,
            registry=registry,
        )
        self.errors = Counter("healer_errors", "Failures of the daemon itself, by place.", ["where"], registry=registry)
        self.policy_rejected = Counter(
            "healer_policy_rejected", "Changed policy files that were rejected.", registry=registry
        )
        self._notifications = Counter(
            "healer_notifications",
            "Letters by receiver and what became of them: sent, retried, dead, or lost (no room to keep it).",
            ["receiver", "result"],
            registry=registry,
        )
        entries = Gauge("healer_journal_entries", "Entries in the journal.", registry=registry)
        entries.set_function(journal_entries)
        self._sequences = Counter(
            "elastic_sequences", "Finished sequences by kind and outcome.", ["kind", "outcome"], registry=registry
        )
        self._pause = Histogram(
            "elastic_pause_seconds",
            "Longest gap between two committed steps on a survivor, per reconfiguration.",
            ["kind"],
            buckets=_SECONDS,
            registry=registry,
        )
        self._phases = Histogram(
            "elastic_phase_seconds", "Time spent in each phase.", ["kind", "phase"], buckets=_SECONDS, registry=registry
        )
        self._moved = Counter(
            "elastic_moved_bytes", "Weights moved, by the source they came from.", ["source"], registry=registry
        )
        self._xids = Counter(
            "healer_xids", "XIDs seen, by GPU, code and source.", ["gpu", "code", "source"], registry=registry
        )
        self._xid_seen = Gauge(
            "healer_xid_last_seen_seconds",
            "When the newest XID was seen, in seconds since the epoch.",
            ["gpu", "code"],
            registry=registry,
        )
        self._name_labels()
        registry.register(_GroupCollector(daemon))
        registry.register(_HealthCollector(daemon))

    def _name_labels(self) -> None:
        """Series that exist from the start, at 0: a rate over one that appears with its first event misses that event."""
        for cause in Cause:
            self.incidents.labels(cause)
        for reason in Reason:
            self.decisions.labels(Step.HUMAN, reason)
        for where in ("event", "round", "journal", "sensor"):
            self.errors.labels(where)
        for kind in get_args(SequenceKind):
            self._pause.labels(kind)
            for outcome in get_args(Outcome):
                self._sequences.labels(kind, outcome)
        for source in ("peer", "host", "disk"):
            self._moved.labels(source)

    def saw(self, evidence: Evidence) -> None:
        self.evidence.labels(evidence.source, evidence.what).inc()
        if evidence.what == What.XID:
            gpu, code = label_of(evidence.subject), str(evidence.value)
            self._xids.labels(gpu, code, evidence.source).inc()
            self._xid_seen.labels(gpu, code).set(evidence.wall)

    def notified(self, receiver: str, result: str) -> None:
        self._notifications.labels(receiver, result).inc()

    def sequence_ended(self, report: SequenceReport) -> None:
        self._sequences.labels(report.kind, report.outcome).inc()
        for pause_s in report.pause_s.values():
            self._pause.labels(report.kind).observe(pause_s)
        for phase in report.phases:
            # "capture 3" is the capture on slot 3; the slot would make a label without bound
            self._phases.labels(report.kind, phase.name.split()[0]).observe(phase.seconds)
        for loaded in report.loaded.values():
            for name, source in (("peer", loaded.peer), ("host", loaded.host), ("disk", loaded.disk)):
                self._moved.labels(name).inc(source.bytes)

    def render(self) -> bytes:
        return generate_latest(self._registry)


def label_of(subject: Subject) -> str:
    """A subject as a label: the slot, the GPU's UUID (or its address, while that is all that is known), the host's name."""
    if isinstance(subject, RankRef):
        return str(subject.slot)
    return subject.uuid or subject.pci if isinstance(subject, GpuRef) else subject.name


class _HealthCollector:
    """What the daemon thinks of each rank, GPU and host, and how its sensors are."""

    def __init__(self, daemon: Observed) -> None:
        self._daemon = daemon

    def describe(self) -> Iterator[Metric]:
        """Nothing: the group need not exist yet when the collector is registered."""
        return iter(())

    def collect(self) -> Iterator[Metric]:
        status = self._daemon.status()
        health = GaugeMetricFamily(
            "healer_health", "1 for the health that the subject is in, 0 for the others.",
            labels=["kind", "subject", "health"],
        )  # fmt: skip
        for kind, verdicts in (("rank", status.verdicts), ("gpu", status.gpus), ("host", status.hosts)):
            for verdict in verdicts:
                for state in Health:
                    health.add_metric([kind, label_of(verdict.subject), state], float(verdict.health == state))
        yield health
        up = GaugeMetricFamily(
            "healer_sensor_up", "1 while the sensor sees; 0 when it is blind or silent.", labels=["sensor"]
        )
        age = GaugeMetricFamily(
            "healer_sensor_age_seconds", "Since the sensor's last reading that worked.", labels=["sensor"]
        )
        cpu = CounterMetricFamily("healer_sensor_cpu_seconds", "Processor time of the sensor.", labels=["sensor"])
        readings = CounterMetricFamily("healer_sensor_readings", "Readings that worked.", labels=["sensor"])
        for sensor in status.sensors:
            if sensor.state == SensorState.OFF:
                continue
            up.add_metric([sensor.name], float(sensor.state not in (SensorState.BLIND, SensorState.SILENT)))
            age.add_metric([sensor.name], sensor.age_s)
            cpu.add_metric([sensor.name], sensor.cost.cpu_s)
            readings.add_metric([sensor.name], sensor.readings)
        yield from (up, age, cpu, readings)
        healing = status.healing
        for name, text, value in (
            (
                "healer_paused",
                "1 while healing is paused, by the policy or by an operator.",
                float(bool(healing.paused)),
            ),
            ("healer_breaker_open", "1 while the circuit breaker is open.", float(bool(healing.breaker))),
            ("healer_quarantined_slots", "Slots in quarantine.", float(len(healing.quarantined))),
            ("healer_lease_held", "1 while this daemon may act; always, where there is no lease.", float(status.acts)),
        ):
            yield GaugeMetricFamily(name, text, value=value)
        text = "Log lines that stderr did not take in time, and that are lost."
        yield CounterMetricFamily("healer_log_lines_dropped", text, value=status.log_dropped)
        if status.scaling is not None:
            level = GaugeMetricFamily("healer_load_signal", "Load over the group, by signal.", labels=["signal"])
            for signal, reading in status.scaling.signals.items():
                level.add_metric([signal], reading)
            missing = GaugeMetricFamily("healer_load_signal_missing", "1: nobody told in time.", labels=["signal"])
            for name in status.scaling.missing:
                missing.add_metric([name], 1.0)
            yield from (level, missing)
            text = "Ranks that the load rules want, before windows, rates and bounds."
            yield GaugeMetricFamily("healer_load_wanted_ranks", text, value=status.scaling.wanted)


class _GroupCollector:
    def __init__(self, daemon: Observed) -> None:
        self._daemon = daemon

    def describe(self) -> Iterator[Metric]:
        """Nothing: the group need not exist yet when the collector is registered."""
        return iter(())

    def collect(self) -> Iterator[Metric]:
        found = self._daemon.status()
        status = found.group
        for name, text, value in (
            ("elastic_live_ranks", "Ranks that serve.", len(found.live)),
            ("elastic_target_ranks", "Ranks that should serve.", len(status.target)),
            ("elastic_max_ranks", "Slots of the group.", status.max_ranks),
            ("elastic_epoch", "Membership epoch.", status.epoch),
            ("elastic_losses_survivable", "Ranks that can be lost, whichever, with room for every expert.",
             status.losses_survivable),
            ("elastic_uncovered_experts", "(layer, expert) pairs without a live copy.", status.uncovered),
        ):  # fmt: skip
            yield GaugeMetricFamily(name, text, value=value)
        if status.losses_without_load is not None:
            text = "Ranks that can be lost, whichever, with every expert still live on another: covering loads nothing."
            yield GaugeMetricFamily("healer_redundancy_losses", text, value=status.losses_without_load)
        gauges = {
            "waiting": GaugeMetricFamily(
                "elastic_waiting_requests", "Requests that wait for a place.", labels=["slot"]
            ),
            "running": GaugeMetricFamily("elastic_running_requests", "Requests in the batch.", labels=["slot"]),
        }
        counters = {
            name: CounterMetricFamily(f"elastic_{name}", text, labels=["slot", "incarnation"])
            for name, text in (
                ("captures", "Step graphs captured; a survivor's does not move."),
                ("replays", "Step graphs replayed."),
                ("address_changes", "Graph-facing tensors that moved; always 0."),
                ("discarded_steps", "Steps thrown away, because a peer failed in them, and run again."),
                ("tokens", "Tokens of committed steps."),
            )
        }
        for slot in status.slots:
            if slot.member is None:
                continue
            for name, gauge in gauges.items():
                gauge.add_metric([str(slot.slot)], getattr(slot, name))
            for name, counter in counters.items():
                labels = [str(slot.slot), str(slot.member.incarnation)]
                counter.add_metric(labels, getattr(slot.counters, name))
        yield from gauges.values()
        yield from counters.values()
