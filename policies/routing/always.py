"""Whoever can do both does both: no hand-over, to compare with, or where links are slow."""

from __future__ import annotations

from typing import TYPE_CHECKING

from policies.parameters import Parameters
from policies.routing.protocol import Alone, ColocationPolicy

if TYPE_CHECKING:
    from policies.routing.protocol import Case


class Always(ColocationPolicy):
    """One reason for all."""

    def __init__(self) -> None:
        """There is nothing to set."""
        self.parameters = Parameters()

    def alone(self, case: Case) -> Alone | None:
        """Because it is set so."""
        del case
        return Alone.ALWAYS
