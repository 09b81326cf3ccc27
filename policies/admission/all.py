"""Everything: the rule of DRAM, to which only full pages come at all."""

from __future__ import annotations

from typing import TYPE_CHECKING

from policies.admission.protocol import AdmissionPolicy
from policies.parameters import Parameters

if TYPE_CHECKING:
    from policies.admission.protocol import Candidate


class All(AdmissionPolicy):
    """No page is refused."""

    def __init__(self) -> None:
        """There is nothing to set."""
        self.parameters = Parameters()

    def admits(self, candidate: Candidate, now_s: float) -> bool:
        """Always."""
        return True
