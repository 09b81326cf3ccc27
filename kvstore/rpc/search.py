"""Which master to ask next, how long to wait for it, and when to pause. Pure but for the back-off.

In rounds: everybody who is known is asked once without a pause, whoever was named as the leader
first, whoever kept silent lately last. So two masters that name each other cost two questions
and then a pause, and one that hangs never eats the time that another could have answered in.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from kvstore import limits
from kvstore.errors import BadValue, DeadlineExceeded, NotLeader
from kvstore.rpc.address import parse_address
from kvstore.rpc.backoff import Backoff

if TYPE_CHECKING:
    from collections.abc import Sequence
    from random import Random

    from kvstore.errors import KVStoreError

NAMED_MAX: Final = 4
"""Addresses of one leader that are followed."""
SILENT_PATIENCE_S: Final = 0.25
"""For who did not greet at the last try: of a process that is stopped nothing else is to be
expected, and an election is over sooner than a second."""
PATIENT_AGAIN_ROUNDS: Final = 8
"""Rounds without success after which that is doubled, for masters that are all slow."""


class Search:
    """The state of one party that looks for the leader. Not thread-safe."""

    def __init__(self, addresses: Sequence[str], random: Random) -> None:
        """Check the addresses: BadValue."""
        if not addresses:
            raise BadValue("masters", addresses, "at least one address")
        for address in addresses:
            parse_address(address)
        self._configured = tuple(dict.fromkeys(addresses))
        self._backoff = Backoff(random)
        self._first = 0
        """Of the configured ones: it led when a leader was last found."""
        self._named: tuple[str, ...] = ()
        self._asked: set[str] = set()
        """In this round."""
        self._silent: set[str] = set()
        self._reasons: dict[str, str] = {}
        self._rounds = 0
        self.tries = 0
        """Since the last success."""

    @property
    def has_others(self) -> bool:
        """Whether more than one address is known."""
        return len(self._configured) > 1 or bool(self._named)

    def next(self) -> str:
        """The address to ask now."""
        order = self._order()
        return next((each for each in order if each not in self._asked), order[0])

    def others(self, address: str) -> list[str]:
        """Everybody else, in the order to ask them."""
        return [each for each in self._order() if each != address]

    def patience_s(self, address: str, left_s: float) -> float:
        """How much of the time left to wait for a greeting from there."""
        if not self.has_others:
            return left_s
        longest_s = limits.DIAL_PATIENCE_S
        if address in self._silent:
            doublings = self._rounds // PATIENT_AGAIN_ROUNDS
            longest_s = min(longest_s, SILENT_PATIENCE_S * (1 << min(doublings, 8)))
        unasked = sum(each not in self._asked for each in self._order())
        return min(longest_s, left_s / max(1, unasked))

    def greeted(self, address: str) -> None:
        """Somebody is there: whoever looks anew begins with it."""
        self._silent.discard(address)
        if address in self._configured:
            self._first = self._configured.index(address)

    def failed(self, address: str, error: KVStoreError) -> None:
        """Nobody is there, or not the leader; who that is may have been told."""
        self.refused(address, error)
        self._asked.add(address)
        if isinstance(error, DeadlineExceeded):
            self._silent.add(address)
        if isinstance(error, NotLeader):
            self._named = tuple(each for each in error.where if _is_address(each))[:NAMED_MAX]
            known = self._order()
            self._reasons = {k: v for k, v in self._reasons.items() if k in known}

    def refused(self, address: str, error: KVStoreError) -> None:
        """It could not do it now, but is to be asked again."""
        self.tries += 1
        self._reasons[address] = str(error)

    def next_s(self, wanted_s: float) -> float:
        """Seconds to wait before `next` is asked: none while somebody was not asked yet."""
        if any(each not in self._asked for each in self._order()):
            return 0.0
        self._asked.clear()
        self._rounds += 1
        return self.again_s(wanted_s)

    def again_s(self, wanted_s: float) -> float:
        """Seconds to wait before the same master is asked again, who asked for `wanted_s`."""
        return self._backoff.failed(wanted_s)

    def succeeded(self) -> None:
        """A leader answered."""
        self._backoff.succeeded()
        self._asked.clear()
        self._reasons.clear()
        self._rounds = self.tries = 0

    def why(self, last: KVStoreError) -> str:
        """What came of everybody who was asked, for people; `last` if nobody was."""
        told = [
            text if address in text else f"{address}: {text}"
            for address, text in self._reasons.items()
        ]
        return f"{'; '.join(told) or last} ({self.tries} tries)"

    def _order(self) -> list[str]:
        known = self._configured[self._first :] + self._configured[: self._first]
        return sorted(dict.fromkeys((*self._named, *known)), key=self._silent.__contains__)


def _is_address(text: str) -> bool:
    try:
        parse_address(text)
    except BadValue:
        return False
    return True
