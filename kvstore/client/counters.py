"""What a store counts of its own calls."""

from __future__ import annotations

import msgspec


class ClientCounters(msgspec.Struct, frozen=True):
    """Counts since the store was made; all zero where nothing is hedged."""

    hedgeable_reads: int = 0
    """Of a few bytes, from a worker of another host, while another has a replica as well."""
    hedges: int = 0
    """Reads that were sent to that other worker, too, because the first one was late."""
    hedges_won: int = 0
    """Hedges that delivered first."""
    hedges_withheld: int = 0
    """Late reads that were not hedged, because too many were already, or are under way."""
