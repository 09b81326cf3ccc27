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
    is_pinned: bool = False
    """Somebody has said that they are to stay in the pool: to be taken by every policy that takes
    anything."""

    @property
    def likelihood(self) -> float:
        """Probability of another use: a pin's, the policy's, else what the number of uses tells."""
        if self.is_pinned:
            return 1.0
        if self.reuse_probability is not None:
            return self.reuse_probability
        return USED_AGAIN_PROBABILITY if self.touches >= 2 else USED_ONCE_PROBABILITY


class Spent(msgspec.Struct, frozen=True, gc=False):
    """Bytes of a budget that are used up now, and how far off a note of that may be."""

    size_bytes: float
    grain_bytes: float


class AdmissionPolicy(Protocol):
    """Admits or refuses; who is refused may ask again at another time. One tier, one policy."""

    parameters: Parameters
    """May be replaced by others of the same type at any time."""

    def admits(self, candidate: Candidate, now_s: float) -> bool:
        """Whether the pages are to be written, as many of them as find room."""
        ...

    def wrote(self, size_bytes: int) -> None:
        """So much of what was just admitted is on its way."""
        return

    def resize(self, capacity_bytes: int) -> None:
        """So much the tier holds."""
        return

    def spent(self) -> Spent:
        """What is used up of a budget of writes, where there is one."""
        return Spent(0.0, 0.0)

    def begin_with(self, spent_bytes: float) -> None:
        """Of a budget, so much was used up before; its time begins with the next question."""
        return
