"""The role of an inference worker: which it has, and how it gives one up for another or for good.

Who has both desks may be asked by the master to change between prefill and decode. It then takes
nothing new, hands over the answers that run and computes the prompts that wait, as one that ends
would, and joins again. Must not know what either desk does.
"""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING, Final, Protocol

from msgspec import structs

if TYPE_CHECKING:
    from kvstore.wire.messages.tickets import JoinFleet
    from workers.serve_member import Membership

PREFILL: Final = "prefill"
DECODE: Final = "decode"
LOOK_EVERY_S: Final = 0.05
"""At the prompts that are still to be computed."""

LOG: Final = logging.getLogger(__name__)


class Computing(Protocol):
    """What is needed of a prefill desk."""

    queued_tokens: int


class Generating(Protocol):
    """What is needed of a decode desk."""

    is_draining: bool

    async def shed(self) -> None:
        """Hand everything that runs over to other workers."""
        ...


def in_role(wish: JoinFleet, role: str) -> JoinFleet:
    """The same worker in that role: who only computes prompts holds no tokens of answers."""
    if role == PREFILL:
        return structs.replace(wish, role=role, capacity_tokens=0, batch_max=0)
    return structs.replace(wish, role=role)


class Roles:
    """The present role of one worker."""

    def __init__(
        self, wish: JoinFleet, prefill: Computing | None, decode: Generating | None
    ) -> None:
        """Begin in the role of `wish`, which says what the worker holds where it generates."""
        self._wish = wish
        self._prefill = prefill
        self._decode = decode
        self.role = wish.role
        self.is_draining = False
        """It takes nothing new."""

    async def follow(self, membership: Membership) -> None:
        """Change whenever the master asks for it, until cancelled."""
        while True:
            role = await membership.asked()
            if role == self.role:  # asked before it had changed, heard after that
                continue
            LOG.info("changing from %s to %s", self.role, role)
            await self.hand_over(membership)
            await self._computed()
            self.role, self.is_draining = role, False
            if self._decode is not None:
                self._decode.is_draining = role == PREFILL
            await membership.change(in_role(self._wish, role))

    async def _computed(self) -> None:
        """Until no prompt waits."""
        desk = self._prefill
        while desk is not None and desk.queued_tokens:  # noqa: ASYNC110 -- a count, not an event
            await asyncio.sleep(LOOK_EVERY_S)

    async def hand_over(self, membership: Membership) -> None:
        """Take nothing new, and have others go on with the answers that run."""
        self.is_draining = True
        if self._decode is not None:
            self._decode.is_draining = True
        await membership.beat_if_heard()
        if self._decode is not None:
            await self._decode.shed()
