"""What a master counts about itself, and its Prometheus form. Owns the metrics' names.

The shell counts in plain integers; Prometheus families are made when somebody asks, from those
and from one Status. No tenant, key or name of a client becomes a label.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import msgspec
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.registry import Collector

from kvstore.standing import IN_DOUBT, Standing

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from prometheus_client.core import Metric

    from kvstore.wire.messages.reads import (
        PinTotals,
        ReplicaTotals,
        Status,
        StripeTotals,
        TicketTotals,
    )

LAG_BOUNDS_S: Final = (0.001, 0.005, 0.01, 0.05, 0.1, 1.0)
"""Invariant I27: nothing in the loop over 50 ms."""
SEGMENT_STATES: Final = ("free", "reserved", "sealed", "retired", "quarantined")


class Tally(msgspec.Struct, gc=False):
    """How often something was done and how long that took in all."""

    count: int = 0
    seconds: float = 0.0


class LagHistogram:
    """How late the event loop ran what was due."""

    def __init__(self) -> None:
        """Start without observations."""
        self._counts = [0] * (len(LAG_BOUNDS_S) + 1)
        self.sum_s = 0.0
        self.worst_s = 0.0

    def note(self, lag_s: float) -> None:
        """Add one observation."""
        lag_s = max(0.0, lag_s)
        place = sum(lag_s > bound for bound in LAG_BOUNDS_S)
        self._counts[place] += 1
        self.sum_s += lag_s
        self.worst_s = max(self.worst_s, lag_s)

    def cumulative(self) -> list[tuple[str, float]]:
        """(upper bound, observations up to it), as Prometheus wants them."""
        total = 0
        found: list[tuple[str, float]] = []
        for bound, count in zip((*LAG_BOUNDS_S, float("inf")), self._counts, strict=True):
            total += count
            found.append(("+Inf" if bound == float("inf") else repr(bound), total))
        return found


class ShellCounts:
    """What the shell counts beside the core's own counters."""

    def __init__(self) -> None:
        """Start at nothing."""
        self.requests: dict[str, Tally] = {}
        """By message type; the time is that of the core and of sending."""
        self.commands_failed = 0
        self.lag = LagHistogram()
        self.persist_pending = 0
        self.persist_writes = 0
        self.persist_failures = 0
        self.is_persisting = True
        self.terms = 0
        self.renewals_failed = 0
        self.lease_left_s = 0.0

    def note_request(self, kind: str, seconds: float) -> None:
        """Count one request that was handled in `seconds`."""
        tally = self.requests.get(kind)
        if tally is None:
            tally = self.requests[kind] = Tally()
        tally.count += 1
        tally.seconds += seconds


class MasterCollector(Collector):
    """Makes the families from what `look` returns at the moment of the scrape."""

    def __init__(self, look: Callable[[], tuple[Status, ShellCounts]]) -> None:
        """Ask `look` at every scrape."""
        self._look = look

    def collect(self) -> Iterator[Metric]:
        """Every family of a master."""
        status, counts = self._look()
        yield from _standing(status, counts)
        yield from _pool(status)
        yield from _segments(status)
        yield from _tiers(status)
        yield from _pins(status.pins)
        yield from _stripes(status.stripes)
        yield from _replicas(status.replicas)
        yield from _tickets(status.tickets)
        yield from _metadata(status, counts)
        yield from _shell(counts)


def exposition(look: Callable[[], tuple[Status, ShellCounts]]) -> bytes:
    """The text that a Prometheus server scrapes."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(MasterCollector(look))
    return generate_latest(registry)


def _standing(status: Status, counts: ShellCounts) -> Iterator[Metric]:
    standing = GaugeMetricFamily(
        "kvharbor_master_standing", "1 for what this master is.", labels=["standing"]
    )
    for each in (*Standing, IN_DOUBT):
        standing.add_metric([str(each)], each == status.standing)
    yield standing
    yield GaugeMetricFamily(
        "kvharbor_master_lease_seconds",
        "Until its lease may end; negative once it is in doubt, or is none.",
        value=counts.lease_left_s,
    )
    yield CounterMetricFamily(
        "kvharbor_master_terms", "How often this process won.", value=counts.terms
    )
    yield CounterMetricFamily(
        "kvharbor_master_renewals_failed",
        "Renewals of the lease that were refused or not answered.",
        value=counts.renewals_failed,
    )


def _gauges(prefix: str, gauges: Mapping[str, tuple[str, float]]) -> Iterator[Metric]:
    for name, (text, value) in gauges.items():
        yield GaugeMetricFamily(prefix + name, text, value=value)


def _pool(status: Status) -> Iterator[Metric]:
    gauges = {
        "epoch": ("Leadership number of this master.", status.epoch),
        "uptime_seconds": ("Time since this master's start.", status.uptime_s),
        "pages": ("Pages in the directory.", status.pages),
        "runs": ("Runs that hold them.", status.runs),
        "namespaces": ("Namespaces known.", status.namespaces),
        "sessions": ("Open sessions.", status.sessions),
        "open_plans": ("Put plans in progress.", status.open_plans),
    }
    yield from _gauges("kvharbor_master_", gauges)
    workers = GaugeMetricFamily("kvharbor_workers", "Workers by state.", labels=["state"])
    for state in ("joining", "live", "draining", "drained", "lost", "left"):
        count = sum(worker.state == state for worker in status.workers)
        workers.add_metric([state], count)
    yield workers
    counters = CounterMetricFamily(
        "kvharbor_master_events", "What the core counted, by kind.", labels=["kind"]
    )
    for kind, value in sorted(status.counters.items()):
        counters.add_metric([kind], value)
    yield counters


def _segments(status: Status) -> Iterator[Metric]:
    labels = ["segment", "worker", "tier"]
    capacity = GaugeMetricFamily(
        "kvharbor_segment_capacity_bytes", "What a segment can hold.", labels=labels
    )
    held = GaugeMetricFamily(
        "kvharbor_segment_bytes", "Bytes of a segment by state.", labels=[*labels, "state"]
    )
    for segment in status.segments:
        names = [segment.segment, segment.worker, segment.tier]
        capacity.add_metric(names, segment.capacity_bytes)
        for state in SEGMENT_STATES:
            held.add_metric([*names, state], getattr(segment, f"{state}_bytes"))
    yield capacity
    yield held


def _tiers(status: Status) -> Iterator[Metric]:
    extents = GaugeMetricFamily(
        "kvharbor_tier_extents", "Parts of pages that a tier holds.", labels=["tier"]
    )
    kinds = {
        "hits": "Pages for which nothing slower had to be read.",
        "copies_evicted": "Copies that went while their pages stayed.",
        "moved_pages": "Parts of pages brought here from another tier.",
        "moved_bytes": "Bytes of those parts.",
        "stored_bytes": "Bytes of the extents that they were put into.",
    }
    for each in status.tiers:
        extents.add_metric([each.tier], each.extents)
    yield extents
    for name, text in kinds.items():
        family = CounterMetricFamily(f"kvharbor_tier_{name}", text, labels=["tier"])
        for each in status.tiers:
            family.add_metric([each.tier], getattr(each, name))
        yield family


def _pins(pins: PinTotals) -> Iterator[Metric]:
    yield GaugeMetricFamily("kvharbor_pins", "Pins that have not ended.", value=pins.pins)
    yield GaugeMetricFamily(
        "kvharbor_pinned_pages", "Pages that they name, by owner.", value=pins.pages
    )
    held = GaugeMetricFamily(
        "kvharbor_pinned_bytes",
        "Bytes that pins hold: soft of the pages named, hard also of those above them.",
        labels=["kind"],
    )
    held.add_metric(["soft"], pins.soft_bytes)
    held.add_metric(["hard"], pins.hard_bytes)
    yield held


def _stripes(totals: StripeTotals) -> Iterator[Metric]:
    gauges = {
        "stripes": ("Stripes of cold pages.", totals.stripes),
        "stripes_waiting": ("Stripes that lack a shard, or may.", totals.waiting),
        "parity_bytes": ("Parity of all stripes together.", totals.parity_bytes),
    }
    yield from _gauges("kvharbor_", gauges)


def _replicas(totals: ReplicaTotals) -> Iterator[Metric]:
    pages = GaugeMetricFamily(
        "kvharbor_replica_pages",
        "Readable pages by their replicas, when last counted.",
        labels=["replicas"],
    )
    ready = GaugeMetricFamily(
        "kvharbor_repair_ready",
        "Chains to be copied, by the replicas of their scarcest page.",
        labels=["replicas"],
    )
    for family, counts in ((pages, totals.by_got), (ready, totals.ready)):
        for number, count in enumerate(counts, 1):
            family.add_metric([str(number)], count)
        yield family
    gauges = {
        "replica_pages_lacking": ("Pages that lack replicas, when last counted.", totals.lacking),
        "replica_pages_without_host": ("Pages lacking some, on all hosts.", totals.without_host),
        "replica_pages_thinned": ("Pages lacking some until used.", totals.thinned),
        "replicas_counted_seconds": ("Since replicas were counted, or -1.", totals.counted_ago_s),
        "repair_waiting": ("Chains that wait for time, host, room or lane.", totals.waiting),
        "hot_runs": ("Runs of pages that are read much.", totals.hot_runs),
        "replicas_for_heat": ("Replicas that are wanted because of reads.", totals.for_heat),
    }
    yield from _gauges("kvharbor_", gauges)


def _tickets(totals: TicketTotals) -> Iterator[Metric]:
    families = {
        "tickets": ("Requests between prefill and decode, by state.", totals.by_state),
        "fleet_workers": ("Inference workers, by state.", totals.workers),
    }
    for name, (text, counts) in families.items():
        family = GaugeMetricFamily(f"kvharbor_{name}", text, labels=["state"])
        for state, count in sorted(counts.items()):
            family.add_metric([state], count)
        yield family
    gauges = {
        "ticket_credit_tokens": ("KV tokens promised to requests.", totals.credit_tokens),
        "ticket_capacity_tokens": ("Those that decode workers hold.", totals.capacity_tokens),
        "staged_bytes": ("Pages that wait for a decode worker.", totals.staged_bytes),
        "staging_budget_bytes": ("Most that may wait.", totals.staging_budget_bytes),
        "ticket_admitted_share": ("Of the waiting that is admitted.", totals.admitted_share),
    }
    yield from _gauges("kvharbor_", gauges)


def _metadata(status: Status, counts: ShellCounts) -> Iterator[Metric]:
    stored = status.stored
    gauges = {
        "chunks": ("Chunks that the metadata store holds a value of.", stored.chunks),
        "chunks_dirty": ("Chunks whose value is to be written anew.", stored.dirty),
        "behind_seconds": ("How long the longest of them has been due.", stored.behind_s),
        "failing": ("1 while the metadata store takes no writes.", not counts.is_persisting),
    }
    yield from _gauges("kvharbor_metadata_", gauges)
    counters = {
        "rows_written": ("Rows of chunks that were written.", "chunk_rows_written"),
        "bytes_written": ("Bytes of the values that they were in.", "chunk_bytes_written"),
        "values_set_aside": ("Values that were damaged.", "values_set_aside"),
    }
    for name, (text, counter) in counters.items():
        value = status.counters.get(counter, 0)
        yield CounterMetricFamily(f"kvharbor_metadata_{name}", text, value=value)


def _shell(counts: ShellCounts) -> Iterator[Metric]:
    requests = CounterMetricFamily(
        "kvharbor_master_requests", "Requests handled.", labels=["message"]
    )
    seconds = CounterMetricFamily(
        "kvharbor_master_request_seconds", "Time spent handling them.", labels=["message"]
    )
    for kind, tally in sorted(counts.requests.items()):
        requests.add_metric([kind], tally.count)
        seconds.add_metric([kind], tally.seconds)
    yield requests
    yield seconds
    yield CounterMetricFamily(
        "kvharbor_master_commands_failed",
        "Commands that a worker did not carry out.",
        value=counts.commands_failed,
    )
    lag = HistogramMetricFamily(
        "kvharbor_master_loop_lag_seconds", "How late the event loop ran what was due."
    )
    lag.add_metric([], counts.lag.cumulative(), counts.lag.sum_s)
    yield lag
    yield GaugeMetricFamily(
        "kvharbor_master_persist_pending", "Durable writes waiting.", value=counts.persist_pending
    )
    yield CounterMetricFamily(
        "kvharbor_master_persist_writes", "Durable writes done.", value=counts.persist_writes
    )
    yield CounterMetricFamily(
        "kvharbor_master_persist_failures", "Tries to write that failed.",
        value=counts.persist_failures,
    )  # fmt: skip
