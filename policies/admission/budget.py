"""What the drive can bear: a token bucket of bytes, that grows choosy as it runs dry.

A drive of capacity C that stands W overwrites a day stands C * W / 86,400 bytes/s for all its
life. Data sheets count by the day, and so does the bucket: a drive that was idle takes a day's
writes as fast as they come, so that an empty one fills at once. Nine tenths of the bucket are for
any pages, the last for those whose probability of another use is at least the share of it that is
spent: under steady pressure the level settles there, where the most likely pages just use the
budget up. That part is as small as that needs, two hours and a half of writes: what is kept back
for likely pages before there is any pressure is lost if none comes. In the policy lab, an hour of
conversations that wants 3.3 times what its drive holds is served to 35.9 % (by `all` to 36.5 %),
and to 37.0 % with a drive that eight hours of it would fill.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Final

from msgspec import Meta

from policies.admission.protocol import AdmissionPolicy, Spent
from policies.parameters import Parameters

if TYPE_CHECKING:
    from policies.admission.protocol import Candidate

DAY_S: Final = 86_400.0
FOR_ANY: Final = 0.9
"""Share of the bucket that any pages may use."""


class BudgetParameters(Parameters, frozen=True):
    """Parameters of `budget`."""

    drive_writes_per_day: Annotated[float, Meta(ge=0.001, le=10_000)] = 3.0
    """Overwrites of the whole drive a day that it stands, as its data sheet says."""
    burst_s: Annotated[float, Meta(ge=1, le=86_400)] = DAY_S
    """Seconds of budget that may be spent at once."""


class Budget(AdmissionPolicy):
    """A token bucket in bytes."""

    def __init__(self) -> None:
        """Start with the default parameters, and nothing to write to."""
        self.parameters = BudgetParameters()
        self._capacity_bytes = 0
        self._spent_bytes = 0.0
        self._at_s: float | None = None
        """When so much was spent; None: the next question begins it."""

    @property
    def bytes_per_s(self) -> float:
        """What the drive stands."""
        return self._capacity_bytes * self.parameters.drive_writes_per_day / DAY_S

    def resize(self, capacity_bytes: int) -> None:
        """The budget is a share of it."""
        self._capacity_bytes = capacity_bytes

    def spent(self) -> Spent:
        """Noted to a hundredth of the bucket, at least to the writes of a minute."""
        rate = self.bytes_per_s
        return Spent(self._spent_bytes, rate * max(self.parameters.burst_s / 100, 60.0))

    def begin_with(self, spent_bytes: float) -> None:
        """So much was used up before."""
        self._spent_bytes, self._at_s = spent_bytes, None

    def admits(self, candidate: Candidate, now_s: float) -> bool:
        """Whether these pages are worth their part of what is left.

        Pinned ones are, and may overdraw it: others wait until that is made up for.
        """
        rate = self.bytes_per_s
        bucket_bytes = rate * self.parameters.burst_s
        since_s = 0.0 if self._at_s is None else now_s - self._at_s
        self._spent_bytes = max(0.0, self._spent_bytes - rate * since_s)
        self._at_s = now_s
        if not candidate.is_pinned:
            if self._spent_bytes + candidate.size_bytes > bucket_bytes:
                return False
            choosy_bytes = self._spent_bytes - FOR_ANY * bucket_bytes
            if choosy_bytes > candidate.likelihood * (1 - FOR_ANY) * bucket_bytes:
                return False
        return True

    def wrote(self, size_bytes: int) -> None:
        """So much is spent."""
        self._spent_bytes += size_bytes
