"""Nothing: a tier that only keeps what it has."""

from __future__ import annotations

from typing import TYPE_CHECKING

from policies.admission.protocol import AdmissionPolicy
from policies.parameters import Parameters

if TYPE_CHECKING:
    from policies.admission.protocol import Candidate


class Nothing(AdmissionPolicy):
    """Every page is refused."""

    def __init__(self) -> None:
        """There is nothing to set."""
        self.parameters = Parameters()

    def admits(self, candidate: Candidate, now_s: float) -> bool:
        """Never."""
        return False
