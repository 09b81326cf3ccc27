"""What a replication policy decides: how many replicas more a run has while much of it is read."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

import msgspec

if TYPE_CHECKING:
    from policies.parameters import Parameters


class Load(msgspec.Struct, frozen=True, gc=False):
    """How much is read of a run of pages, and who can serve it."""

    read_bytes_per_s: float
    """Of all its pages and parts together, over the policy's window."""
    replicas: int
    """That it is to have however often it is read."""
    extra: int
    """That it is to have besides by now."""
    domains: int
    """Hosts (or workers) that lend: no more replicas count."""


class ReplicationPolicy(Protocol):
    """Says how many replicas more there should be. Pure: nothing of a run is remembered here."""

    parameters: Parameters
    """May be replaced by others of the same type at any time."""
    measures: bool
    """Whether reads are to be counted for it."""
    acts: bool
    """Whether what it says is done; else that is only counted."""

    @property
    def window_s(self) -> float:
        """Reads of so long ago count a third of those of now."""
        ...

    @property
    def quiet_bytes_per_s(self) -> float:
        """However few replicas a run has: none more are wanted while no more than this is read."""
        ...

    def extra(self, load: Load) -> int:
        """How many replicas more the run is to have from now on."""
        ...
