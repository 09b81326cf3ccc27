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
from workers.tiers.guarded_file import ServiceState

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from prometheus_client.core import Metric

    from kvstore.replica import Tier

_NAMES: Final = {int(outcome): outcome.name.lower() for outcome in Outcome}
_OK: Final = int(Outcome.OK)


class Counts:
    """Bytes and pages since the start. Thread-safe."""

    def __init__(self) -> None:
        """Start at nothing."""
        self._mutex = Lock()
        self.pages: dict[str, int] = {}
        """Pages of pulls that ran, by outcome."""
        self.moves: dict[str, int] = {}
        """Pages that were moved, by way: dram-nvme."""
        self.copies: dict[str, int] = {}
        """Pages that were to be copied from other workers, by outcome."""
        self.bytes_copied_in: dict[str, int] = {}
        """Read from other workers, by kind of transport."""
        self.bytes_copied_out = 0
        """Sent to other workers; what they read out of shared memory is not known here."""
        self.bytes_pulled = 0
        self.bytes_sent = 0

    def note_pull(self, outcomes: bytes, part_bytes: int) -> None:
        """Count one pull."""
        with self._mutex:
            _add(self.pages, outcomes)
            self.bytes_pulled += outcomes.count(_OK) * part_bytes

    def note_move(self, source: Tier, target: Tier, outcomes: bytes) -> None:
        """Count the pages of a move that arrived."""
        way, pages = f"{source}-{target}", outcomes.count(_OK)
        with self._mutex:
            self.moves[way] = self.moves.get(way, 0) + pages

    def note_copy(self, outcomes: bytes) -> None:
        """Count the pages of a copy from another worker."""
        with self._mutex:
            _add(self.copies, outcomes)

    def note_copied_in(self, kind: str, size_bytes: int) -> None:
        """Count payload bytes that were read from another worker."""
        with self._mutex:
            self.bytes_copied_in[kind] = self.bytes_copied_in.get(kind, 0) + size_bytes

    def note_sent(self, sent_bytes: int, *, is_copied: bool) -> None:
        """Count payload bytes that went out over a stream, to a client or to another worker."""
        with self._mutex:
            self.bytes_sent += sent_bytes
            self.bytes_copied_out += sent_bytes if is_copied else 0


def _add(pages: dict[str, int], outcomes: bytes) -> None:
    for outcome in set(outcomes):
        name = _NAMES[outcome]
        pages[name] = pages.get(name, 0) + outcomes.count(outcome)


class DiskLook(msgspec.Struct, frozen=True):
    """What a segment on a disk has done since the start; bytes are of parts as they are stored."""

    service: str
    """serving, read_only or failed."""
    reason: str
    """Why not everything is done."""
    is_direct: bool
    """Past the page cache."""
    errors: int
    parts_written: int
    bytes_written: int
    payload_bytes_written: int
    """Before encoding."""
    parts_read: int
    bytes_read: int
    misses: dict[str, int]
    """Parts that were asked for and not brought, by outcome."""


class StagingLook(msgspec.Struct, frozen=True):
    """Pages of disks asked for by readers of this host since the start, by what came of it."""

    capacity_bytes: int
    loaded: int
    found: int
    busy: int
    failed: int


class ScrubLook(msgspec.Struct, frozen=True):
    """What the scrubber has done in a segment since the start; bytes are of extents."""

    rounds: int
    """From the segment's beginning to its end."""
    extents: int
    bytes: int
    damaged: int
    unverified_s: float
    """No page was looked at longer ago, counted from the first round at the earliest."""


class SegmentLook(msgspec.Struct, frozen=True):
    """One segment at one moment: extents by what their record says."""

    segment: str
    tier: str
    incarnation: int
    capacity_bytes: int
    reserved: int
    sealed: int
    removed: int
    scrub: ScrubLook
    disk: DiskLook | None = None


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
    moves: dict[str, int]
    """Pages that were moved, by the tiers that they went from and to."""
    copies: dict[str, int]
    """Pages that were to be copied from other workers, by outcome."""
    bytes_copied_in: dict[str, int]
    """Read from other workers, by kind of transport."""
    bytes_copied_out: int
    """Sent to other workers over streams."""
    segments: tuple[SegmentLook, ...]
    staging: StagingLook | None = None


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
        yield CounterMetricFamily(
            "kvharbor_worker_copied_out_bytes", "Of those, sent to other workers.",
            value=look.bytes_copied_out,
        )  # fmt: skip
        yield from _labelled(look)
        yield from _segments(look)
        yield from _scrubs(look)
        yield from _disks(look)
        if look.staging is not None:
            yield from _staging(look.staging)


def _labelled(look: Look) -> Iterator[Metric]:
    families = {
        "pulled_pages": ("Pages of pulls, by outcome.", "outcome", look.pages_pulled),
        "moved_pages": ("Pages moved between tiers.", "way", look.moves),
        "copied_pages": (
            "Pages to be copied from other workers, by outcome.", "outcome", look.copies,
        ),
        "copied_in_bytes": (
            "Payload bytes read from other workers.", "transport", look.bytes_copied_in,
        ),
    }  # fmt: skip
    for name, (text, label, values) in families.items():
        family = CounterMetricFamily(f"kvharbor_worker_{name}", text, labels=[label])
        for value, count in sorted(values.items()):
            family.add_metric([value], count)
        yield family


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


def _scrubs(look: Look) -> Iterator[Metric]:
    families: dict[str, tuple[type[CounterMetricFamily | GaugeMetricFamily], str]] = {
        "rounds": (CounterMetricFamily, "Rounds of the scrubber through a segment."),
        "extents": (CounterMetricFamily, "Extents that it verified."),
        "bytes": (CounterMetricFamily, "Bytes of extents that it verified."),
        "damaged": (CounterMetricFamily, "Extents that it found damaged."),
        "unverified_s": (GaugeMetricFamily, "No page was verified longer ago."),
    }
    for name, (kind, text) in families.items():
        unit = name.replace("_s", "_seconds")
        family = kind(f"kvharbor_worker_scrub_{unit}", text, labels=["segment"])
        for each in look.segments:
            family.add_metric([each.segment], getattr(each.scrub, name))
        yield family


def _disks(look: Look) -> Iterator[Metric]:
    state = GaugeMetricFamily(
        "kvharbor_worker_disk_state", "1 for what a segment on a disk does now.",
        labels=["segment", "state"],
    )  # fmt: skip
    errors = CounterMetricFamily(
        "kvharbor_worker_disk_errors", "Calls of the system that failed.", labels=["segment"]
    )
    parts = CounterMetricFamily(
        "kvharbor_worker_disk_parts", "Parts written and read.", labels=["segment", "kind"]
    )
    stored = CounterMetricFamily(
        "kvharbor_worker_disk_bytes", "Bytes of parts as they are stored, written and read.",
        labels=["segment", "kind"],
    )  # fmt: skip
    payload = CounterMetricFamily(
        "kvharbor_worker_disk_payload_bytes", "Bytes of the parts written, before encoding.",
        labels=["segment"],
    )  # fmt: skip
    misses = CounterMetricFamily(
        "kvharbor_worker_disk_misses", "Parts asked for and not brought, by outcome.",
        labels=["segment", "outcome"],
    )  # fmt: skip
    for each in look.segments:
        if each.disk is None:
            continue
        disk, segment = each.disk, each.segment
        for name in ServiceState:
            state.add_metric([segment, name], int(disk.service == name))
        errors.add_metric([segment], disk.errors)
        parts.add_metric([segment, "written"], disk.parts_written)
        parts.add_metric([segment, "read"], disk.parts_read)
        stored.add_metric([segment, "written"], disk.bytes_written)
        stored.add_metric([segment, "read"], disk.bytes_read)
        payload.add_metric([segment], disk.payload_bytes_written)
        for outcome, value in sorted(disk.misses.items()):
            misses.add_metric([segment, outcome], value)
    yield from (state, errors, parts, stored, payload, misses)


def _staging(look: StagingLook) -> Iterator[Metric]:
    yield GaugeMetricFamily(
        "kvharbor_worker_staging_capacity_bytes", "Memory that stages pages of disks.",
        value=look.capacity_bytes,
    )  # fmt: skip
    pages = CounterMetricFamily(
        "kvharbor_worker_staged_pages", "Pages of disks asked for on this host, by result.",
        labels=["result"],
    )  # fmt: skip
    for result in ("loaded", "found", "busy", "failed"):
        pages.add_metric([result], getattr(look, result))
    yield pages


def exposition(look: Callable[[], Look]) -> bytes:
    """The text that a Prometheus server scrapes."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(WorkerCollector(look))
    return generate_latest(registry)
