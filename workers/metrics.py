"""What a worker counts about itself, and its Prometheus form. Owns the metrics' names.

Threads count in plain integers; families are made when somebody asks. No tenant, key or name of a
client becomes a label.
"""

from __future__ import annotations

from threading import Lock
from typing import TYPE_CHECKING, Final

import msgspec
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector

from kvstore.wire.messages.common import Outcome

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from prometheus_client.core import Metric

_NAMES: Final = {int(outcome): outcome.name.lower() for outcome in Outcome}
_OK: Final = int(Outcome.OK)


class Counts:
    """Bytes and pages since the start. Thread-safe."""

    def __init__(self) -> None:
        """Start at nothing."""
        self._mutex = Lock()
        self.pages: dict[str, int] = {}
        """Pages of pulls that ran, by outcome."""
        self.bytes_pulled = 0
        self.bytes_sent = 0

    def note_pull(self, outcomes: bytes, part_bytes: int) -> None:
        """Count one pull."""
        with self._mutex:
            for outcome in set(outcomes):
                name = _NAMES[outcome]
                pages = outcomes.count(outcome)
                self.pages[name] = self.pages.get(name, 0) + pages
                if outcome == _OK:
                    self.bytes_pulled += pages * part_bytes

    def note_sent(self, sent_bytes: int) -> None:
        """Count payload bytes that went out over a stream."""
        with self._mutex:
            self.bytes_sent += sent_bytes


class SegmentLook(msgspec.Struct, frozen=True):
    """One segment at one moment: extents by what their record says."""

    segment: str
    tier: str
    incarnation: int
    capacity_bytes: int
    reserved: int
    sealed: int
    removed: int


class Look(msgspec.Struct, frozen=True):
    """A worker at one moment, for people and programs."""

    worker: str
    cluster: str
    epoch: int
    serving: bool
    """A leader has taken the whole inventory."""
    fenced: bool
    """No leader was heard for T/2: nothing is pulled, reads go on."""
    sessions: int
    pulls_running: int
    requests_waiting: int
    held_extents: int
    seals_unreported: int
    bytes_pulled: int
    bytes_sent: int
    pages_pulled: dict[str, int]
    segments: tuple[SegmentLook, ...]


class WorkerCollector(Collector):
    """Makes the families from what `look` returns at the moment of the scrape."""

    def __init__(self, look: Callable[[], Look]) -> None:
        """Ask `look` at every scrape."""
        self._look = look

    def collect(self) -> Iterator[Metric]:
        """Every family of a worker."""
        look = self._look()
        gauges = {
            "epoch": ("Highest epoch seen.", look.epoch),
            "serving": ("1 while a leader has the whole inventory.", int(look.serving)),
            "fenced": ("1 while no leader was heard for T/2.", int(look.fenced)),
            "sessions": ("Open data connections.", look.sessions),
            "pulls_running": ("Pulls in progress.", look.pulls_running),
            "requests_waiting": ("Requests that wait for busy extents.", look.requests_waiting),
            "held_extents": ("Freed extents that a reader's lock holds.", look.held_extents),
            "seals_unreported": ("Reports that no leader answered.", look.seals_unreported),
        }
        for name, (text, value) in gauges.items():
            yield GaugeMetricFamily(f"kvharbor_worker_{name}", text, value=value)
        yield CounterMetricFamily(
            "kvharbor_worker_pulled_bytes", "Payload bytes sealed.", value=look.bytes_pulled
        )
        yield CounterMetricFamily(
            "kvharbor_worker_sent_bytes", "Payload bytes sent over streams.", value=look.bytes_sent
        )
        pages = CounterMetricFamily(
            "kvharbor_worker_pulled_pages", "Pages of pulls, by outcome.", labels=["outcome"]
        )
        for outcome, value in sorted(look.pages_pulled.items()):
            pages.add_metric([outcome], value)
        yield pages
        yield from _segments(look)


def _segments(look: Look) -> Iterator[Metric]:
    capacity = GaugeMetricFamily(
        "kvharbor_worker_segment_capacity_bytes", "What a segment can hold.",
        labels=["segment", "tier"],
    )  # fmt: skip
    extents = GaugeMetricFamily(
        "kvharbor_worker_segment_extents", "Extents by the state of their record.",
        labels=["segment", "tier", "state"],
    )  # fmt: skip
    for each in look.segments:
        capacity.add_metric([each.segment, each.tier], each.capacity_bytes)
        for state in ("reserved", "sealed", "removed"):
            extents.add_metric([each.segment, each.tier, state], getattr(each, state))
    yield capacity
    yield extents


def exposition(look: Callable[[], Look]) -> bytes:
    """The text that a Prometheus server scrapes."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(WorkerCollector(look))
    return generate_latest(registry)
