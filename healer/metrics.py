"""Prometheus metrics of the daemon (`healer_*`) and of the group (`elastic_*`), in a registry of their own."""

from collections.abc import Callable, Iterator

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.exposition import generate_latest

from elastic.controller.records import GroupStatus, SequenceReport
from healer import __version__

_SECONDS = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0, 60.0)


class Metrics:
    """Counters are moved by the supervisor; what the group knows itself is read at each scrape."""

    content_type = "text/plain; version=0.0.4; charset=utf-8"

    def __init__(self, observe: Callable[[], GroupStatus], journal_entries: Callable[[], int]) -> None:
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
        registry.register(_GroupCollector(observe))

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


class _GroupCollector:
    def __init__(self, observe: Callable[[], GroupStatus]) -> None:
        self._observe = observe

    def describe(self) -> Iterator[Metric]:
        """Nothing: the group need not exist yet when the collector is registered."""
        return iter(())

    def collect(self) -> Iterator[Metric]:
        status = self._observe()
        for name, text, value in (
            ("elastic_live_ranks", "Ranks that serve.", len(status.live)),
            ("elastic_target_ranks", "Ranks that should serve.", len(status.target)),
            ("elastic_max_ranks", "Slots of the group.", status.max_ranks),
            ("elastic_epoch", "Membership epoch.", status.epoch),
            ("elastic_losses_survivable", "Ranks that can be lost, whichever, with room for every expert.",
             status.losses_survivable),
            ("elastic_uncovered_experts", "(layer, expert) pairs without a live copy.", status.uncovered),
        ):  # fmt: skip
            yield GaugeMetricFamily(name, text, value=value)
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
