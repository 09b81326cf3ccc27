"""What a deployment may set on the master's core, with the defaults of kvstore.limits."""

from __future__ import annotations

from collections.abc import Mapping
from math import inf
from typing import Final

import msgspec

from kvstore import limits
from kvstore.errors import ConfigError

GIVEN: Final = "given"
LEARNED: Final = "learned"
HOST: Final = "host"
WORKER: Final = "worker"
APART: Final = (HOST, WORKER)
"""What replicas of a page have to differ in."""
HINTS: Final = (GIVEN, LEARNED)
"""Whose hints the eviction policy hears: the callers' alone, or also what the pool learns."""


class Tunables(msgspec.Struct, frozen=True):
    """Times in seconds of the monotonic clock, fractions of a segment's capacity."""

    cluster: str = "kvharbor"
    master: str = ""
    """Name of this master."""
    where: tuple[str, ...] = ()
    """Its addresses for clients and workers."""
    lease_ttl_s: float = limits.LEASE_TTL_S
    page_ttl_s: float = limits.PAGE_TTL_S
    page_age_max_s: float = limits.PAGE_AGE_MAX_S
    heartbeat_interval_s: float = limits.HEARTBEAT_INTERVAL_S
    worker_lost_after_s: float = limits.WORKER_LOST_AFTER_S
    segment_forget_s: float = limits.SEGMENT_FORGET_S
    stale_read_max_s: float = limits.STALE_READ_MAX_S
    """How long lookups are answered, without lease, once this master's own lease is doubtful."""
    put_timeout_base_s: float = limits.PUT_TIMEOUT_BASE_S
    put_bytes_per_s_min: int = limits.PUT_BYTES_PER_S_MIN
    watermark_high: float = limits.WATERMARK_HIGH
    watermark_low: float = limits.WATERMARK_LOW
    pin_quota: float = limits.PIN_QUOTA
    watermark_demote: float = limits.WATERMARK_DEMOTE
    move_bytes_per_s: int = limits.MOVE_BYTES_PER_S
    promote_hits: int = limits.PROMOTE_HITS
    copy_bytes_per_s: int = limits.COPY_BYTES_PER_S
    replicas: int = limits.REPLICAS
    """Of pages for which nobody asked for more or fewer, as far as there are hosts."""
    replicas_apart: str = HOST
    repair_after_s: float = limits.REPAIR_AFTER_S
    rebalance: bool = False
    """Whether pages are moved to a worker that has come, until segments are filled alike."""
    metadata_bytes_per_s: int = limits.METADATA_BYTES_PER_S
    quarantine_fraction_max: float = limits.QUARANTINE_FRACTION_MAX
    eviction: str = "lrfu"
    eviction_parameters: Mapping[str, object] = {}
    nvme_admission: str = "budget"
    nvme_admission_parameters: Mapping[str, object] = {}
    placement: str = "local_first"
    placement_parameters: Mapping[str, object] = {}
    replication: str = "enforce"
    replication_parameters: Mapping[str, object] = {}
    erasure: str = "off"
    erasure_parameters: Mapping[str, object] = {}
    hints: str = GIVEN
    decode_occupancy_max: float = limits.DECODE_OCCUPANCY_MAX
    first_token_over: float = limits.FIRST_TOKEN_OVER
    staging_bytes: int = 0
    """Of staged pages of all tickets; 0: a quarter of the memory that can be read, or,
    where there is none, of the drives."""
    staging_s: float = limits.STAGING_S
    route_ahead: float = limits.ROUTE_AHEAD
    """A decode worker is chosen once computing the rest of a prompt takes no longer than so many
    times what moving its KV does; 0: once it is staged."""
    prefill_routing: str = "prefix_load"
    prefill_routing_parameters: Mapping[str, object] = {}
    decode_routing: str = "kv_aware"
    decode_routing_parameters: Mapping[str, object] = {}
    colocation: str = "break_even"
    colocation_parameters: Mapping[str, object] = {}
    roles: str = "enforce"
    roles_parameters: Mapping[str, object] = {}

    def put_timeout_s(self, put_bytes: int) -> float:
        """How long a put of `put_bytes` may go without progress before its extents are fenced."""
        return self.put_timeout_base_s + put_bytes / self.put_bytes_per_s_min

    def __post_init__(self) -> None:
        """Raise ConfigError where two settings contradict each other."""
        if not 0 < self.lease_ttl_s <= limits.LEASE_TTL_MAX_S:
            raise ConfigError(
                f"lease_ttl_s: got {self.lease_ttl_s}, want more than 0 and at most "
                f"{limits.LEASE_TTL_MAX_S}"
            )
        marks = self.watermark_demote, self.watermark_low, self.watermark_high
        if not 0 < marks[0] < marks[1] < marks[2] <= 1:
            raise ConfigError(
                f"watermark_demote, watermark_low, watermark_high: got {marks}, want them in this "
                "order, more than 0 and at most 1"
            )
        if self.promote_hits < 1:
            raise ConfigError(f"promote_hits: got {self.promote_hits}, want at least 1")
        for name in ("move_bytes_per_s", "copy_bytes_per_s", "metadata_bytes_per_s"):
            if getattr(self, name) <= 0:
                raise ConfigError(f"{name}: got {getattr(self, name)}, want more than 0")
        if not 0 < self.decode_occupancy_max <= 1:
            raise ConfigError(
                f"decode_occupancy_max: got {self.decode_occupancy_max}, want more than 0 and at "
                "most 1"
            )
        if not self.first_token_over > 0:
            raise ConfigError(f"first_token_over: got {self.first_token_over}, want more than 0")
        if self.staging_s <= 0 or self.staging_bytes < 0:
            raise ConfigError(
                f"staging_s, staging_bytes: got {self.staging_s}, {self.staging_bytes}, want more "
                "than 0, and 0 or more"
            )
        if not 0 <= self.route_ahead < inf:
            raise ConfigError(f"route_ahead: got {self.route_ahead}, want 0 or more")
        if self.stale_read_max_s < 0:
            raise ConfigError(f"stale_read_max_s: got {self.stale_read_max_s}, want 0 or more")
        if not 2 * self.heartbeat_interval_s < self.worker_lost_after_s:
            raise ConfigError(
                f"worker_lost_after_s: got {self.worker_lost_after_s}, want more than twice "
                f"heartbeat_interval_s ({self.heartbeat_interval_s})"
            )
