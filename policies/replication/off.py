"""No replicas but those that were asked for."""

from __future__ import annotations

from math import inf
from typing import TYPE_CHECKING

from policies.parameters import Parameters
from policies.replication.protocol import ReplicationPolicy

if TYPE_CHECKING:
    from policies.replication.protocol import Load


class Off(ReplicationPolicy):
    """Nothing is counted, and nothing is wanted."""

    window_s = inf
    quiet_bytes_per_s = inf

    def __init__(self) -> None:
        """There is nothing to set."""
        self.parameters = Parameters()
        self.measures = self.acts = False

    def extra(self, load: Load) -> int:
        """None."""
        return 0
