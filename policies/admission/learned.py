"""Pages that are likely enough to be used again, by what the eviction policy has learned."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

from msgspec import Meta

from policies.admission.protocol import AdmissionPolicy
from policies.parameters import Parameters

if TYPE_CHECKING:
    from policies.admission.protocol import Candidate


class LearnedParameters(Parameters, frozen=True):
    """Parameters of `learned`."""

    probability: Annotated[float, Meta(ge=0, le=1)] = 0.1
    """Least probability of another use; 0.2 halves the writes on conversations, and costs a
    sixth of the hits."""


class Learned(AdmissionPolicy):
    """A probability admits."""

    def __init__(self) -> None:
        """Start with the default parameters."""
        self.parameters = LearnedParameters()

    def admits(self, candidate: Candidate, now_s: float) -> bool:
        """Whether another use is likely enough."""
        return candidate.likelihood >= self.parameters.probability
