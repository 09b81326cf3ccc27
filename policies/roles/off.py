"""Workers keep the role that they were started in."""

from __future__ import annotations

from math import inf
from typing import TYPE_CHECKING

from policies.parameters import Parameters
from policies.roles.protocol import RolesPolicy

if TYPE_CHECKING:
    from policies.roles.protocol import Crew, Want


class Off(RolesPolicy):
    """Nothing is looked at, and nothing is wanted."""

    lasting_s = inf

    def __init__(self) -> None:
        """There is nothing to set."""
        self.parameters = Parameters()
        self.measures = self.acts = False

    def wanted(self, crew: Crew) -> Want | None:
        """Nothing."""
        del crew
        return None
