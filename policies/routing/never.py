"""Every request is handed over; where nobody could take it, it waits or is turned away."""

from __future__ import annotations

from typing import TYPE_CHECKING

from policies.parameters import Parameters
from policies.routing.protocol import ColocationPolicy

if TYPE_CHECKING:
    from policies.routing.protocol import Alone, Case


class Never(ColocationPolicy):
    """No reason counts."""

    def __init__(self) -> None:
        """There is nothing to set."""
        self.parameters = Parameters()

    def alone(self, case: Case) -> Alone | None:
        """For none."""
        del case
        return None
