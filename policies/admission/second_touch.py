"""Pages that were used again: writes a quarter of what `all` does.

Right for documents, which are read many times; of conversations, most of which come back once, it
loses about as much as chance would at the same rate.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

from msgspec import Meta

from policies.admission.protocol import AdmissionPolicy
from policies.parameters import Parameters

if TYPE_CHECKING:
    from policies.admission.protocol import Candidate


class SecondTouchParameters(Parameters, frozen=True):
    """Parameters of `second-touch`."""

    touches: Annotated[int, Meta(ge=1, le=1000)] = 2
    """Uses from which on pages are admitted; the put is the first."""


class SecondTouch(AdmissionPolicy):
    """A number of uses admits."""

    def __init__(self) -> None:
        """Start with the default parameters."""
        self.parameters = SecondTouchParameters()

    def admits(self, candidate: Candidate, now_s: float) -> bool:
        """Whether there were enough uses, or a pin promises one."""
        return candidate.is_pinned or candidate.touches >= self.parameters.touches
