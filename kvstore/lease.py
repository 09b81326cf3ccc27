"""Arithmetic of leases on the monotonic clock; both sides of the margin in one place (I9)."""

from __future__ import annotations

from kvstore import limits


def holder_deadline_s(sent_at_s: float, ttl_s: float) -> float:
    """When a reader must stop: counted from before its request left, minus the margin."""
    return sent_at_s + ttl_s - limits.LEASE_MARGIN_S


def granter_release_s(granted_at_s: float, ttl_s: float) -> float:
    """From when the granter may reuse the extents: counted from the grant, plus the margin."""
    return granted_at_s + ttl_s + limits.LEASE_MARGIN_S


def inherited_release_s(began_at_s: float) -> float:
    """From when a leader may reuse what leaders before it may have leased.

    They may have gone on granting for as long as a leader's lease lasts: etcd can end one too
    early, and its holder learns of that only when it renews.
    """
    return granter_release_s(began_at_s + limits.LEADER_LEASE_S, limits.LEASE_TTL_MAX_S)
