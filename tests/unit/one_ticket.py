"""A master that has one ticket, for desks of decode workers."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from kvstore.client.steps import Ask
from kvstore.wire.messages import tickets as wire
from kvstore.wire.messages.hello import Done

if TYPE_CHECKING:
    from kvstore.client.steps import Steps
    from kvstore.errors import KVStoreError
    from kvstore.wire.messages.base import Message


class OneTicket:
    """Who claims the ticket is told this of it; remembers what it is asked."""

    def __init__(self, claimed: wire.TicketClaimed) -> None:
        """Refuse nothing yet."""
        self._claimed = claimed
        self.asked: list[Message] = []
        self.refusals: dict[type[Message], KVStoreError] = {}

    def carry_out(self, plan: Steps[Any]) -> Any:  # noqa: ANN401 -- whatever the plan returns
        """Answer a plan's one question."""
        try:
            step = next(plan)
            assert isinstance(step, Ask)
            plan.send(self._answer(step.message))
        except StopIteration as stop:
            return stop.value
        raise AssertionError("one question each")

    def _answer(self, message: Message) -> Message:
        self.asked.append(message)
        if type(message) in self.refusals:
            raise self.refusals[type(message)]
        return self._claimed if isinstance(message, wire.ClaimTicket) else Done()

    @property
    def kinds(self) -> list[str]:
        """What it was asked, in order."""
        return [type(each).__name__ for each in self.asked]
