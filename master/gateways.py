"""Gateways: who answers for which tickets, and since when one of them is away.

A gateway is known by the token of its connections, so that one that comes back is the same, and
another process another. What is away for too long is told of; must not know what becomes of its
tickets then.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import msgspec

from kvstore import limits
from kvstore.errors import InvariantBroken
from master.plans import OwnerKey
from master.wheel import NOWHERE, Wakeup, Wheel

if TYPE_CHECKING:
    from collections.abc import Container, Iterable

GRAIN_S: Final = 0.1


class Gateway(msgspec.Struct, eq=False):
    """One that has tickets."""

    key: OwnerKey
    tickets: dict[int, None] = {}
    """By id, oldest first."""
    bucket: int = NOWHERE


class Gateways:
    """All that have tickets."""

    def __init__(self, wakeup: Wakeup) -> None:
        """Start with none; `wakeup` hears of deadlines."""
        self.away: Wheel[Gateway] = Wheel(GRAIN_S, wakeup)
        """Those without any connection, by when they are given up."""
        self._by_key: dict[OwnerKey, Gateway] = {}
        self._of: dict[int, Gateway] = {}

    def answers_for(self, key: OwnerKey, ticket: int) -> None:
        """This one has the ticket from now on, whoever had it before."""
        self.drop(ticket)
        gateway = self._by_key.get(key)
        if gateway is None:
            gateway = self._by_key[key] = Gateway(key)
        gateway.tickets[ticket] = None
        self._of[ticket] = gateway

    def drop(self, ticket: int) -> None:
        """It has ended; no error where nobody had it."""
        gateway = self._of.pop(ticket, None)
        if gateway is None:
            return
        del gateway.tickets[ticket]
        if not gateway.tickets:
            self.away.discard(gateway)
            del self._by_key[gateway.key]

    def came(self, key: OwnerKey) -> None:
        """This peer is connected."""
        gateway = self._by_key.get(key)
        if gateway is not None:
            self.away.discard(gateway)

    def went(self, key: OwnerKey, now_s: float) -> None:
        """Its last connection has ended."""
        gateway = self._by_key.get(key)
        if gateway is not None:
            self.away.place(gateway, now_s + limits.GATEWAY_LOST_AFTER_S)

    def forgive_absence(self, now_s: float) -> None:
        """Until now nothing was done for those that came: who is away has all its time once more.

        It has looked for another master meanwhile.
        """
        for gateway in list(self.away):
            self.went(gateway.key, now_s)

    def check(self, tickets: Iterable[int], connected: Container[OwnerKey]) -> None:
        """I43: InvariantBroken unless these are had, by who is connected or is given up in time."""
        numbers = set(tickets)
        if self._of.keys() - numbers:
            raise InvariantBroken("I43: a gateway has a ticket that has ended")
        for number in numbers:
            gateway = self._of.get(number)
            if gateway is None or number not in gateway.tickets:
                raise InvariantBroken(f"I43: no gateway answers for ticket {number}")
            if (gateway.key in connected) != (gateway.bucket == NOWHERE):
                raise InvariantBroken(f"I43: the gateway of ticket {number} is away for ever")
