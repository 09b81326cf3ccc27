"""Section [master] of the configuration, and what of it the core is told."""

from __future__ import annotations

import os
from math import inf
from pathlib import Path
from typing import Final

import msgspec

from kvstore import limits
from kvstore.config import default_data_dir
from kvstore.config_values import Numbers, Seconds, SecondsOrInf, SizeBytes
from kvstore.errors import BadValue
from kvstore.require import require_ttl
from kvstore.rpc.address import TcpAddress, socket_path
from master.metadata import ETCD, KINDS, SQLITE
from master.tunables import APART, GIVEN, HINTS, HOST, Tunables
from policies import registry

ANYWHERE: Final = ("0.0.0.0", "::")


def _data_dir() -> Path:
    return default_data_dir(os.environ)


class MasterConfig(msgspec.Struct, frozen=True):
    """Where a master listens and keeps its metadata, and the rhythm of the cluster."""

    data_dir: Path = msgspec.field(default_factory=_data_dir)
    listen: TcpAddress = TcpAddress("127.0.0.1", limits.MASTER_PORT)
    unix: Path | None = Path("master.sock")
    """Unix socket for workers and clients of this host, whom it saves half of a round trip: they
    go over to it by themselves. Below the data folder unless it begins with a slash."""
    admin: TcpAddress | None = TcpAddress("127.0.0.1", limits.MASTER_ADMIN_PORT)
    """Serves /health, /status and /metrics over HTTP, without authentication."""
    name: str = ""
    """Of this master among others of the cluster; its first address where none is given."""
    advertise: tuple[TcpAddress, ...] = ()
    """Where clients and workers are told to find this master; `listen` where none is given."""
    metadata: str = SQLITE
    """sqlite: in the data folder, for a master that is alone; etcd: see section [etcd]."""
    lease_ttl_s: Seconds = Seconds(limits.LEASE_TTL_S)
    page_ttl_s: SecondsOrInf = SecondsOrInf(limits.PAGE_TTL_S)
    page_age_max_s: SecondsOrInf = SecondsOrInf(limits.PAGE_AGE_MAX_S)
    heartbeat_interval_s: Seconds = Seconds(limits.HEARTBEAT_INTERVAL_S)
    worker_lost_after_s: Seconds = Seconds(limits.WORKER_LOST_AFTER_S)
    segment_forget_s: Seconds = Seconds(limits.SEGMENT_FORGET_S)
    stale_read_max_s: float = limits.STALE_READ_MAX_S
    """How long lookups are answered, for copying reads, while it is unknown who leads; 0: not."""
    watermark_high: float = limits.WATERMARK_HIGH
    watermark_low: float = limits.WATERMARK_LOW
    watermark_demote: float = limits.WATERMARK_DEMOTE
    """Shares of a segment: making room begins and ends, copies to a drive are made ahead of it."""
    pin_quota: float = limits.PIN_QUOTA
    """Share of the pool's bytes that one tenant may pin hard."""
    move_bytes_per_s: SizeBytes = SizeBytes(limits.MOVE_BYTES_PER_S)
    """Between the tiers of one worker."""
    copy_bytes_per_s: SizeBytes = SizeBytes(limits.COPY_BYTES_PER_S)
    """Copied to one worker, and from one, by others."""
    replicas: int = limits.REPLICAS
    """Of a page for which neither its put nor its namespace says otherwise, as far as there are
    hosts."""
    replicas_apart: str = HOST
    """What replicas of a page have to differ in: host, or worker."""
    repair_after_s: float = limits.REPAIR_AFTER_S
    """How long a lost worker may come back before its replicas are made anew."""
    rebalance: bool = False
    """Whether a worker that comes is given pages of others; without it new pages fill it, since
    it gets up to twice its share, and nothing is copied that would soon have been evicted."""
    metadata_bytes_per_s: SizeBytes = SizeBytes(limits.METADATA_BYTES_PER_S)
    """Written of what the directory holds; beyond it that is written later."""
    promote_hits: int = limits.PROMOTE_HITS
    """Leases on pages that lie on a drive only, after which they are copied to memory."""
    eviction: str = "lrfu"
    eviction_parameters: Numbers = Numbers({})
    """Those of the policy that are not to have their defaults."""
    nvme_admission: str = "budget"
    """Which pages are worth a write to a drive."""
    nvme_admission_parameters: Numbers = Numbers({})
    placement: str = "local_first"
    """Where pages and their replicas are put: local_first (the writer's host, unless that is much
    fuller), two_choices or most_free."""
    placement_parameters: Numbers = Numbers({})
    replication: str = "enforce"
    """Whether what is read much gets more replicas: off, observe (only count how many) or
    enforce."""
    replication_parameters: Numbers = Numbers({})
    erasure: str = "off"
    """How cold pages on drives are kept: off (by replicas), or reed-solomon (in stripes)."""
    erasure_parameters: Numbers = Numbers({})
    decode_occupancy_max: float = limits.DECODE_OCCUPANCY_MAX
    """Share of the KV tokens of a fleet's decode workers that requests are admitted for."""
    first_token_over: float = limits.FIRST_TOKEN_OVER
    """Of what a request wishes for its first token, what prompts before it may take. Less is
    admitted while the slowest hundredth of first tokens take longer."""
    staging_bytes: SizeBytes = SizeBytes(0)
    """Of pages that wait for a decode worker; 0: a quarter of the memory that workers lend, or,
    where they lend none, of their drives."""
    staging_s: Seconds = Seconds(limits.STAGING_S)
    """How long they wait for one."""
    route_ahead: float = limits.ROUTE_AHEAD
    """One is chosen already while a prompt is being computed, once the rest takes no longer than so
    many times what moving its KV does; 0: never."""
    prefill_routing: str = "prefix_load"
    """Who computes a prompt: prefix_load or least_queued."""
    prefill_routing_parameters: Numbers = Numbers({})
    decode_routing: str = "kv_aware"
    """Who goes on from its KV: kv_aware, least_loaded, same_prefix, shortest_first, deadline_aware
    or transfer_balance."""
    decode_routing_parameters: Numbers = Numbers({})
    colocation: str = "break_even"
    """Whether one worker does both: break_even, never or always."""
    colocation_parameters: Numbers = Numbers({})
    roles: str = "enforce"
    """Whether workers that offer it change between prefill and decode: off, observe or enforce."""
    roles_parameters: Numbers = Numbers({})
    hints: str = GIVEN
    """given: what callers say of a chain's future; learned: also what the master sees itself."""

    def __post_init__(self) -> None:
        """Raise BadValue where a bound is passed or two values contradict each other."""
        self.unix_path()
        if self.metadata not in KINDS:
            raise BadValue("metadata", self.metadata, f"one of {', '.join(KINDS)}")
        if self.metadata == ETCD and self.listen.host in ANYWHERE and not self.advertise:
            want = f"addresses, since {self.listen} is none that others can dial"
            raise BadValue("advertise", [], want)
        if self.lease_ttl_s > limits.LEASE_TTL_MAX_S:
            raise BadValue("lease_ttl_s", self.lease_ttl_s, f"at most {limits.LEASE_TTL_MAX_S}")
        if self.lease_ttl_s <= limits.LEASE_MARGIN_S:
            raise BadValue("lease_ttl_s", self.lease_ttl_s, f"more than {limits.LEASE_MARGIN_S}")
        require_ttl("page_ttl_s", self.page_ttl_s)
        if not 2 * self.heartbeat_interval_s < self.worker_lost_after_s:
            least = f"more than twice heartbeat_interval_s ({self.heartbeat_interval_s})"
            raise BadValue("worker_lost_after_s", self.worker_lost_after_s, least)
        if self.stale_read_max_s < 0:
            raise BadValue("stale_read_max_s", self.stale_read_max_s, "0 or more")
        if not 0 < self.watermark_high <= 1:
            raise BadValue("watermark_high", self.watermark_high, "more than 0, at most 1")
        if not 0 < self.watermark_low < self.watermark_high:
            most = f"more than 0, less than watermark_high ({self.watermark_high})"
            raise BadValue("watermark_low", self.watermark_low, most)
        if not 0 < self.watermark_demote < self.watermark_low:
            most = f"more than 0, less than watermark_low ({self.watermark_low})"
            raise BadValue("watermark_demote", self.watermark_demote, most)
        if self.promote_hits < 1:
            raise BadValue("promote_hits", self.promote_hits, "at least 1")
        if not 1 <= self.replicas <= limits.REPLICAS_MAX:
            raise BadValue("replicas", self.replicas, f"1 to {limits.REPLICAS_MAX}")
        if self.replicas_apart not in APART:
            raise BadValue("replicas_apart", self.replicas_apart, f"one of {', '.join(APART)}")
        if self.repair_after_s < 0:
            raise BadValue("repair_after_s", self.repair_after_s, "0 or more")
        if not 0 <= self.pin_quota <= 1:
            raise BadValue("pin_quota", self.pin_quota, "0 to 1")
        registry.eviction(self.eviction, self.eviction_parameters)
        if self.nvme_admission not in registry.ADMISSION:
            known = ", ".join(sorted(registry.ADMISSION))
            raise BadValue("nvme_admission", self.nvme_admission, f"one of {known}")
        registry.admission(self.nvme_admission, self.nvme_admission_parameters)
        registry.placement(self.placement, self.placement_parameters)
        registry.replication(self.replication, self.replication_parameters)
        registry.erasure(self.erasure, self.erasure_parameters)
        registry.prefill_routing(self.prefill_routing, self.prefill_routing_parameters)
        registry.decode_routing(self.decode_routing, self.decode_routing_parameters)
        registry.colocation(self.colocation, self.colocation_parameters)
        registry.roles(self.roles, self.roles_parameters)
        if not 0 < self.decode_occupancy_max <= 1:
            most = "more than 0, at most 1"
            raise BadValue("decode_occupancy_max", self.decode_occupancy_max, most)
        if not 0 <= self.route_ahead < inf:
            raise BadValue("route_ahead", self.route_ahead, "0 or a finite number above")
        if not self.first_token_over > 0:
            raise BadValue("first_token_over", self.first_token_over, "more than 0")
        if self.hints not in HINTS:
            raise BadValue("hints", self.hints, f"one of {', '.join(HINTS)}")

    def unix_path(self) -> Path | None:
        """Where the Unix socket is; BadValue where none can be."""
        return None if self.unix is None else socket_path("unix", self.data_dir, self.unix)

    def tunables(self, cluster: str, master: str = "", where: tuple[str, ...] = ()) -> Tunables:
        """What the core of a master of `cluster` is told: of this name, at these addresses."""
        return Tunables(
            cluster=cluster,
            master=master,
            where=where,
            lease_ttl_s=self.lease_ttl_s,
            page_ttl_s=self.page_ttl_s,
            page_age_max_s=self.page_age_max_s,
            heartbeat_interval_s=self.heartbeat_interval_s,
            worker_lost_after_s=self.worker_lost_after_s,
            segment_forget_s=self.segment_forget_s,
            stale_read_max_s=self.stale_read_max_s,
            watermark_high=self.watermark_high,
            watermark_low=self.watermark_low,
            pin_quota=self.pin_quota,
            watermark_demote=self.watermark_demote,
            move_bytes_per_s=self.move_bytes_per_s,
            copy_bytes_per_s=self.copy_bytes_per_s,
            replicas=self.replicas,
            replicas_apart=self.replicas_apart,
            repair_after_s=self.repair_after_s,
            rebalance=self.rebalance,
            metadata_bytes_per_s=self.metadata_bytes_per_s,
            promote_hits=self.promote_hits,
            eviction=self.eviction,
            eviction_parameters=self.eviction_parameters,
            nvme_admission=self.nvme_admission,
            nvme_admission_parameters=self.nvme_admission_parameters,
            placement=self.placement,
            placement_parameters=self.placement_parameters,
            replication=self.replication,
            replication_parameters=self.replication_parameters,
            erasure=self.erasure,
            erasure_parameters=self.erasure_parameters,
            hints=self.hints,
            decode_occupancy_max=self.decode_occupancy_max,
            first_token_over=self.first_token_over,
            staging_bytes=self.staging_bytes,
            staging_s=self.staging_s,
            route_ahead=self.route_ahead,
            prefill_routing=self.prefill_routing,
            prefill_routing_parameters=self.prefill_routing_parameters,
            decode_routing=self.decode_routing,
            decode_routing_parameters=self.decode_routing_parameters,
            colocation=self.colocation,
            colocation_parameters=self.colocation_parameters,
            roles=self.roles,
            roles_parameters=self.roles_parameters,
        )
