"""Offers and wishes of routing policies, by what matters in a test."""

from __future__ import annotations

from msgspec.structs import replace

from policies.routing.protocol import DecodeOffer, Place, PrefillOffer, Wish

TOKEN_BYTES = 1000
STEP_S = 0.02
LINK_BYTES_PER_S = 1e6
"""So a thousand tokens take a second."""

WISH = Wish(
    tokens=1000, new_tokens=100, bytes_total=1000 * TOKEN_BYTES, ready_s=10.0, deadline_s=20.0,
    place=Place("h0", "r0", "z0"),
)  # fmt: skip
DECODE = DecodeOffer(
    worker="d0", host="h1", rack="r1", zone="z1", free_tokens=100_000, capacity_tokens=100_000,
    running=0, batch_max=32, step_s=STEP_S, link_bytes_per_s=LINK_BYTES_PER_S,
)  # fmt: skip
PREFILL = PrefillOffer(
    worker="p0", host="h1", rack="r1", zone="z1", prefix_tokens=0, queued_tokens=0,
    tokens_per_s=1000.0, link_bytes_per_s=LINK_BYTES_PER_S,
)  # fmt: skip


def wish(**changes: object) -> Wish:
    """Of a thousand tokens, a megabyte, on host h0 since second 10."""
    return replace(WISH, **changes)


def decode(worker: str, **changes: object) -> DecodeOffer:
    """An empty worker far away."""
    return replace(DECODE, worker=worker, **changes)


def prefill(worker: str, **changes: object) -> PrefillOffer:
    """An idle worker far away, of a thousand tokens a second."""
    return replace(PREFILL, worker=worker, **changes)
