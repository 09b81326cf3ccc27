"""What an admission policy decides: whether pages on their way out of a tier enter the next one."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, Protocol

import msgspec

if TYPE_CHECKING:
    from policies.parameters import Parameters

USED_AGAIN_PROBABILITY: Final = 0.6
USED_ONCE_PROBABILITY: Final = 0.25
"""Of pages of which nothing but the number of uses is known: a quarter of all pages of
conversations are used twice, and more than half of those once more."""


class Candidate(msgspec.Struct, frozen=True, gc=False):
    """Pages of one run that could be written now. They are full pages: no others have a key."""

    size_bytes: int
    touches: int
    """Uses, as far as they are remembered; the put is the first."""
    reuse_probability: float | None = None
    """What the eviction policy believes, where it has an opinion."""

    @property
    def likelihood(self) -> float:
        """Probability of another use: the policy's, else what the number of uses tells."""
        if self.reuse_probability is not None:
            return self.reuse_probability
        return USED_AGAIN_PROBABILITY if self.touches >= 2 else USED_ONCE_PROBABILITY


class AdmissionPolicy(Protocol):
    """Admits or refuses; who is refused may ask again at another time. One tier, one policy."""

    parameters: Parameters
    """May be replaced by others of the same type at any time."""

    def admits(self, candidate: Candidate, now_s: float) -> bool:
        """Whether the pages are to be written; if so the caller does write them."""
        ...

    def resize(self, capacity_bytes: int) -> None:
        """So much the tier holds."""
        return
