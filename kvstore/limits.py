"""The bounds and defaults that peers, users and operators meet, with the relations between them.

A queue, table, message or wait without a bound is a defect; those of one module alone are
constants at its head. The same table stands in ARCHITECTURE.md, and a test compares the two.
"""

from __future__ import annotations

from typing import Final

KIB: Final = 1024
MIB: Final = 1024 * KIB

# Time, in seconds of the monotonic clock.
LEASE_TTL_S: Final = 10.0
LEASE_TTL_MAX_S: Final = 10.0
LEASE_MARGIN_S: Final = 0.5
STAGING_LEASE_S: Final = 2.0
PUT_TIMEOUT_BASE_S: Final = 5.0
PUT_BYTES_PER_S_MIN: Final = 100_000_000
HEARTBEAT_INTERVAL_S: Final = 0.5
WORKER_LOST_AFTER_S: Final = 3.0
PAGE_TTL_S: Final = 1800.0
PAGE_TTL_MIN_S: Final = 1.0
PAGE_TTL_MAX_S: Final = 7 * 86400.0
PAGE_AGE_MAX_S: Final = 86400.0
SEGMENT_FORGET_S: Final = 7 * 86400.0
LEADER_LEASE_S: Final = 2.0
LEADER_MARGIN_S: Final = 0.2
LEADER_POLL_S: Final = 0.2
LEAVE_TIMEOUT_S: Final = LEADER_LEASE_S + LEASE_TTL_MAX_S + LEASE_MARGIN_S + 1.0
STALE_READ_MAX_S: Final = 300.0
REPAIR_AFTER_S: Final = 15.0
CALL_TIMEOUT_S: Final = 10.0
CALL_TIMEOUT_MAX_S: Final = 600.0
HELLO_TIMEOUT_S: Final = 5.0
SEND_STALL_MAX_S: Final = 10.0
READ_STALL_MAX_S: Final = 1.0
RECONNECT_DELAY_MIN_S: Final = 0.02
RECONNECT_DELAY_MAX_S: Final = 0.2
RETRY_AFTER_MAX_S: Final = 2.0
DIAL_PATIENCE_S: Final = 1.0
CALL_PATIENCE_S: Final = 0.5

FLEET_BEAT_S: Final = 0.5
FLEET_LOST_AFTER_S: Final = 3.0
STAGING_S: Final = 30.0
ROUTE_AHEAD: Final = 1.0
TICKET_S_MAX: Final = 3600.0
TICKET_GRACE_S: Final = 3.0
GATEWAY_LOST_AFTER_S: Final = 3.0

# Pages, parts, space.
PAGE_TOKENS: Final = 64
REPLICAS: Final = 2
REPLICAS_MAX: Final = 16
CHUNK_BYTES: Final = 64 * MIB
CHUNK_EXTENTS_MAX: Final = 4096
EXTENT_ALIGN_BYTES: Final = 4 * KIB
BATCH_PAGES_MAX: Final = 4096
RUN_PAGES_MAX: Final = 256
PARTS_MAX: Final = 1024
SHARDS_MAX: Final = 32
TOKENS_PER_PAGE_MAX: Final = 65_535
PIN_QUOTA: Final = 0.25
DECODE_OCCUPANCY_MAX: Final = 0.8
FIRST_TOKEN_OVER: Final = 1.5
WATERMARK_HIGH: Final = 0.95
WATERMARK_LOW: Final = 0.93
WATERMARK_DEMOTE: Final = 0.7
MOVE_BYTES_PER_S: Final = 500_000_000
SCRUB_BYTES_PER_S: Final = 8 * MIB
COPY_BYTES_PER_S: Final = 250_000_000
METADATA_BYTES_PER_S: Final = 2_000_000
PROMOTE_HITS: Final = 2
QUARANTINE_FRACTION_MAX: Final = 0.25
PULL_TRIES_MAX: Final = 3

# Messages, sessions, queues.
FRAME_BYTES_MAX: Final = 8 * MIB
HELLO_BYTES_MAX: Final = 4 * KIB
NAME_BYTES_MAX: Final = 512
REQUESTS_IN_FLIGHT_MAX: Final = 1024
SEND_QUEUE_BYTES_MAX: Final = 4 * FRAME_BYTES_MAX
SESSIONS_MAX: Final = 4096
GREETINGS_MAX: Final = 256
DESCRIPTORS_SENT_MAX: Final = 253
"""With one message: the kernel's SCM_MAX_FD."""
DESCRIPTORS_WAITING_MAX: Final = 256
WAITING_PUTS_MAX: Final = 4096
IDEMPOTENT_REPLIES_MAX: Final = 4096
EVENT_RING_ENTRIES: Final = 10_000
BUFFERS_PER_SESSION_MAX: Final = 256
SUSPECTS_MAX: Final = 1024
TOMBSTONES_MAX: Final = 65_536
NAMESPACES_MAX: Final = 65_536
PINS_MAX: Final = 4096
PINNED_PAGES_MAX: Final = 65_536
RELOCATIONS_MAX: Final = 64
TICKETS_MAX: Final = 65_536
TICKETS_LISTED_MAX: Final = 1024
TICKET_PAGES_MAX: Final = 1_048_576
TICKET_TOKENS_MAX: Final = 1_048_576
OVERGROWN_TOKENS: Final = 64
"""More is expected of an answer that is longer than was expected."""
FLEET_WORKERS_MAX: Final = 4096
FLEET_RUNNING_MAX: Final = 4096
FLEET_ADAPTERS_MAX: Final = 1024

# Ports.
MASTER_PORT: Final = 7700
MASTER_ADMIN_PORT: Final = 7701
WORKER_PORT: Final = 7710
WORKER_ADMIN_PORT: Final = 7711
GATEWAY_PORT: Final = 7720

assert LEASE_TTL_S <= LEASE_TTL_MAX_S
assert LEASE_MARGIN_S < LEASE_TTL_S
# A leader renews every quarter: one answer may be late or lost.
assert LEADER_MARGIN_S < LEADER_LEASE_S / 4
# Whoever waits for a master that hangs looks for the next one before that can have been elected.
assert CALL_PATIENCE_S < LEADER_LEASE_S
# A worker fences itself after half of this: one lost heartbeat must not be enough.
assert 2 * HEARTBEAT_INTERVAL_S < WORKER_LOST_AFTER_S / 2
# One late beat of an inference worker does not cost it its requests.
assert 2 * FLEET_BEAT_S < FLEET_LOST_AFTER_S
# Who presents tickets looks for a new master at least twice within the grace.
assert LEASE_MARGIN_S < TICKET_GRACE_S
assert WATERMARK_DEMOTE < WATERMARK_LOW < WATERMARK_HIGH <= 1.0
# A record and a packed location of every page of the largest batch fit one frame.
assert BATCH_PAGES_MAX * 256 <= FRAME_BYTES_MAX
assert CHUNK_BYTES % (4 * EXTENT_ALIGN_BYTES) == 0


def put_timeout_s(put_bytes: int) -> float:
    """How long a put of `put_bytes` may go without progress before its extents are fenced."""
    return PUT_TIMEOUT_BASE_S + put_bytes / PUT_BYTES_PER_S_MIN
