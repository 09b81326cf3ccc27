"""Checkers of tickets: told of what gateways accept and masters answer, they raise at a lie.

Numbers are those of the invariants in ARCHITECTURE.md.
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Final

from kvstore import limits
from kvstore.wire.messages.hello import Done
from kvstore.wire.messages.reads import Located
from kvstore.wire.messages.tickets import (
    AwaitParts,
    AwaitRoute,
    CancelTicket,
    ClaimTicket,
    FinishTicket,
    LocateParts,
    OpenTicket,
    PartsSealed,
    RunAlone,
    ShedTicket,
    StageTicket,
    TicketClaimed,
    TicketInstalled,
    TicketOpened,
    TicketRouted,
)
from tests.simulation import master_view
from tests.simulation.pages import keys_of
from tests.simulation.pd_node import TAILS
from tests.simulation.pd_prompts import go_on

if TYPE_CHECKING:
    from kvstore.wire.messages.base import Message
    from tests.simulation.checks import Checks
    from tests.simulation.pd_gateway import PdGateway, Request
    from tests.simulation.sim_master import SimMaster

LATE_MAX_S: Final = 15.0
"""A request ends so long after its deadline at the most: the call and the wait under way then."""


class PdChecks:
    """What must be true of requests and of their tickets."""

    def __init__(self, checks: Checks) -> None:
        """Told of nothing yet."""
        self._checks = checks
        self._open: dict[str, tuple[PdGateway, int, Request]] = {}
        """By name: whose, in which of its lives."""
        self._accepted: Counter[str] = Counter()
        """Tokens of each request."""
        self._heard: dict[str, int] = {}
        """The last claim that each gateway listened to."""
        self._claims: dict[int, int] = {}
        """The highest of each ticket."""
        self._alone: set[int] = set()
        """Those of which one worker does all: its claim has no number."""
        self._tickets: dict[tuple[int, str], int] = {}
        """By epoch and request."""
        self._shed: dict[int, int] = {}
        """The claim by which each ticket was given up last."""
        self._has_ended = False
        """Whether the ticket of the last question had ended before."""
        self._pinned: dict[int, bytes] = {}
        """Keys of the pages that each staged ticket keeps in the pool."""

    # --- gateways -----------------------------------------------------------------------------

    def asked(self, gateway: PdGateway, request: Request) -> None:
        """A gateway has taken a request."""
        self._checks.world.counts["tickets: requests"] += 1
        life = self._checks.world.nodes[gateway.name].life
        self._open[request.name] = gateway, life, request

    def heard(self, request: Request, claim: int) -> None:
        """I40: nobody is listened to whose claim is older than another one that was heard."""
        highest = self._heard.setdefault(request.name, claim)
        if claim < highest:
            self._checks.fail("I40", f"{request.name}: {claim:#x} is heard after {highest:#x}")
        self._heard[request.name] = claim

    def accepted(self, request: Request, index: int, token: int) -> None:
        """I40: each token once, in order, and the right one."""
        expected = self._accepted[request.name]
        self._accepted[request.name] += 1
        if index != expected:
            self._checks.fail("I40", f"token {index} of {request.name} after {expected}")
        if token != go_on(request.prompt, (), index + 1)[index]:
            self._checks.fail("I40", f"token {index} of {request.name} is wrong: {token}")

    def ended(self, request: Request, end: str) -> None:
        """A request has come to an end."""
        world = self._checks.world
        world.note(f"request {request.name}: {end}")
        world.counts[f"tickets: {end}"] += 1
        gateway, _, _ = self._open.pop(request.name)
        status = world.nodes[gateway.name]
        if world.now > max(request.deadline_s, status.woken_s) + LATE_MAX_S:
            self._checks.fail(
                "I40", f"{request.name} ended {world.now - request.deadline_s} s late"
            )

    def left(self) -> list[str]:
        """Requests of living gateways that have not ended."""
        nodes = self._checks.world.nodes
        return [
            f"I18: request {name} has not ended"
            for name, (gateway, life, _) in self._open.items()
            if nodes[gateway.name].life == life
        ]

    # --- masters ------------------------------------------------------------------------------

    def begins_term(self) -> None:
        """A new master knows of no ticket before it is presented, and pins nothing."""
        for ticket in list(self._pinned):
            self._let_go(ticket)

    def master_hears(self, master: SimMaster, message: Message) -> None:
        """What ends the pins of a ticket, if it is heard."""
        if isinstance(message, TicketInstalled | FinishTicket | CancelTicket):
            self._has_ended = master_view.ticket(master, message.ticket) is None
            highest = self._claims.get(message.ticket, 0)
            if isinstance(message, CancelTicket) or message.token >= highest:
                self._let_go(message.ticket)

    def _let_go(self, ticket: int) -> None:
        for key in keys_of(self._pinned.pop(ticket, b"")):
            self._checks.history.pages[key].pins.pop(f"ticket/{ticket}", None)

    def _stays(self, master: SimMaster, ticket: int, keys: bytes) -> None:
        """I31: what was staged is neither evicted nor expires before the ticket's time is up."""
        found = master_view.ticket(master, ticket)
        if found is None or ticket >> 32 != master.epoch:
            return  # of one that was presented, some pages may have gone in between
        self._pinned[ticket] = keys
        until_s = min(found.deadline_s, found.ready_s + limits.STAGING_S)
        for key in keys_of(keys):
            self._checks.history.pages[key].pins[f"ticket/{ticket}"] = until_s

    def master_replies(self, master: SimMaster, asked: Message, reply: Message) -> None:
        """The answer of whoever leads."""
        match asked, reply:
            case OpenTicket(), TicketOpened():
                request = master.epoch, asked.request
                known = self._tickets.setdefault(request, reply.ticket)
                self._tickets[request] = reply.ticket
                if known != reply.ticket and master_view.ticket(master, known) is not None:
                    self._checks.fail("I42", f"{asked.request} has {known} and {reply.ticket}")
            case AwaitRoute(), TicketRouted():
                if 0 < reply.route <= asked.above:
                    self._checks.fail("I41", f"route {reply.route} after {asked.above} has failed")
            case StageTicket(), Done():
                self._stays(master, asked.ticket, asked.keys)
            case ClaimTicket(), TicketClaimed():
                highest = self._claims.get(asked.ticket, 0)
                if reply.token <= highest:
                    self._checks.fail("I40", f"claim {reply.token:#x} follows {highest:#x}")
                self._claims[asked.ticket] = reply.token
                self._alone.discard(asked.ticket)
            case RunAlone(), TicketOpened():
                self._alone.add(asked.ticket)
                self._let_go(asked.ticket)
            case ((TicketInstalled() | ShedTicket() | FinishTicket()), Done()):
                self._is_by_the_highest(asked)
            case ((AwaitParts() | LocateParts()), (PartsSealed() | Located())):
                self._is_by_the_highest(asked)

    def _is_by_the_highest(
        self,
        asked: TicketInstalled | ShedTicket | FinishTicket | AwaitParts | LocateParts,
    ) -> None:
        """I40: of two that have claimed a ticket, only the later one is heard.

        What was said in time may be repeated.
        """
        if not asked.token and asked.ticket in self._alone:
            return
        highest = self._claims.get(asked.ticket, 0)
        is_repeated = isinstance(asked, FinishTicket) and self._has_ended
        if isinstance(asked, ShedTicket):
            is_repeated = self._shed.get(asked.ticket) == asked.token
            self._shed[asked.ticket] = asked.token
        if asked.token < highest and not is_repeated:
            what = type(asked).__name__
            self._checks.fail("I40", f"{what} of {asked.token:#x} is heard after {highest:#x}")

    # --- rest ---------------------------------------------------------------------------------

    def at_rest(self, master: SimMaster) -> list[str]:
        """What tickets hold although no request is open; empty when all is well."""
        left = [f"I39: {each}" for each in master_view.held_by_tickets(master)]
        left += self.left()
        tails = [
            slot
            for segment in master_view.live_segments(master)
            for slot in master_view.slots(segment)
            if slot.namespace == master_view.ordinal(master, TAILS.id)
        ]
        if tails:
            left.append(f"I39: tails are left: {tails}")
        return left
