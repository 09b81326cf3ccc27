"""So many replicas that each serves no more of a run than a share of what its port carries.

By bytes a second, not by reads or by rank: a port is full by bytes, and a page that is read often
costs nobody anything while it is small. A replica stays until the others could serve its reads
with room to spare (hysteresis), so that a load at the edge of one does not make and drop it in
turns: from when it is made until it is dropped the load has to fall by that factor.

`observe` and `enforce` are this rule; what it says is only counted by the one, and done by the
other.
"""

from __future__ import annotations

from math import ceil
from typing import TYPE_CHECKING, Annotated

from msgspec import Meta

from policies.parameters import Parameters
from policies.replication.protocol import ReplicationPolicy

if TYPE_CHECKING:
    from policies.replication.protocol import Load


class ReadRateParameters(Parameters, frozen=True):
    """Parameters of `observe` and `enforce`."""

    window_s: Annotated[float, Meta(ge=1, le=3600)] = 60.0
    """Reads of so long ago count a third of those of now."""
    port_bytes_per_s: Annotated[float, Meta(ge=1, le=1e12)] = 3e9
    """That a host can send: those of a port of 25 Gbit/s."""
    port_share: Annotated[float, Meta(ge=0.001, le=1)] = 0.5
    """Of that, what reads of one run may take before others are to serve it as well."""
    hysteresis: Annotated[float, Meta(ge=0.05, le=0.95)] = 0.5
    """Share of the load that made a replica wanted, below which it is no more."""
    extra_max: Annotated[int, Meta(ge=1, le=15)] = 2
    """Replicas that a run gets besides those that were asked for."""


class ReadRate(ReplicationPolicy):
    """Replicas in proportion to what is read."""

    def __init__(self, *, acts: bool) -> None:
        """Start with the default parameters."""
        self.parameters = ReadRateParameters()
        self.measures = True
        self.acts = acts

    @property
    def window_s(self) -> float:
        """As set."""
        return self.parameters.window_s

    @property
    def quiet_bytes_per_s(self) -> float:
        """What one replica may serve."""
        return self.parameters.port_bytes_per_s * self.parameters.port_share

    def extra(self, load: Load) -> int:
        """As many as the load needs; those that there are stay until it needs far fewer."""
        served = self.quiet_bytes_per_s
        needed = ceil(load.read_bytes_per_s / served) - load.replicas
        kept = ceil(load.read_bytes_per_s / (served * self.parameters.hysteresis)) - load.replicas
        most = min(self.parameters.extra_max, load.domains - load.replicas)
        return max(0, min(most, max(needed, min(load.extra, kept))))
