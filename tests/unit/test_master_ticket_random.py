"""Anything may happen in any order, and whoever dies: in the end nothing is held of any ticket."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from kvstore.wire.messages import tickets as wire
from kvstore.wire.messages.hello import Failure
from master.tickets import TicketState
from master.tunables import Tunables
from tests.unit.master_rig import chain
from tests.unit.ticket_rig import Fleet

if TYPE_CHECKING:
    from kvstore.wire.messages.base import Message
    from master.tickets import Ticket

NAMES = st.sampled_from(["p1", "b1", "d1", "d2"])
ROLES = {"p1": "prefill", "b1": "both", "d1": "decode", "d2": "decode"}
NUMBERS = st.integers(0, 7)
REFUSALS = {
    "fenced", "access_denied", "unknown_ticket", "bad_value", "out_of_space",
}  # fmt: skip


class TicketMachine(RuleBasedStateMachine):
    """Peers say whatever they like, true or not, of whichever ticket."""

    def __init__(self) -> None:
        super().__init__()
        self.fleet = Fleet(Tunables(cluster="test", replicas=1, staging_bytes=12 * 4096))
        self.fleet.rig.engine = self.fleet.rig.open("engine", "tenant", "engine", b"engine")
        for name in ROLES:
            self.join(name, 2000)
        self.tokens: list[int] = [0]
        self.routes: list[int] = [0]
        for seed in range(3):
            self.say(self.fleet.wish(seed, 2, 50, deadline_s=20.0))

    def say(self, message: Message) -> Message | None:
        """Ask; a refusal has to be one that a peer can understand."""
        reply = self.fleet.rig.ask(self.fleet.rig.engine, message)
        if isinstance(reply, Failure):
            assert reply.code in REFUSALS, (message, reply)
        return reply

    def ticket(self, number: int) -> int:
        """One of those that have not ended, or, seldom, one that never was."""
        known = [*(ticket.id for ticket in self.fleet.rig.master.core.tickets.all()), 5]
        return known[number % len(known)]

    @rule(name=NAMES, capacity=st.sampled_from([600, 2000]))
    def join_again(self, name: str, capacity: int) -> None:
        self.join(name, capacity)

    def join(self, name: str, capacity: int, role: str = "") -> None:
        """Or change what it can hold."""
        role = role or ROLES[name]
        self.fleet.join(name, role, capacity=capacity, batch=3, switches=role != "both")

    @rule(name=NAMES, role=st.sampled_from(["prefill", "decode"]), says_so=st.booleans())
    def change_role(self, name: str, role: str, *, says_so: bool) -> None:
        if says_so:
            self.leave(name)
        self.join(name, 2000, role)

    @rule(name=NAMES)
    def leave(self, name: str) -> None:
        life = self.fleet.lives[name]
        self.say(wire.LeaveFleet(self.fleet.space.id, name, life))

    @rule(name=NAMES, number=NUMBERS, tokens=st.integers(0, 3000), draining=st.booleans())
    def beat(self, name: str, number: int, tokens: int, *, draining: bool) -> None:
        row = self.ticket(number), self.tokens[-1 - number % len(self.tokens)], tokens
        self.say(self.fleet.beat_message(name, row, draining=draining))

    @rule(seed=st.integers(0, 3), pages=st.integers(0, 4), behind=st.integers(1, 100))
    def open(self, seed: int, pages: int, behind: int) -> None:
        wish = self.fleet.wish(seed, pages, 50, behind=behind, deadline_s=20.0)
        self.say(wish)

    @rule(number=NUMBERS, name=NAMES, left=st.sampled_from([0, 1, 5000]))
    def begin(self, number: int, name: str, left: int) -> None:
        life = self.fleet.lives[name]
        self.say(wire.BeginPrefill(self.ticket(number), name, life, left))

    @rule(number=NUMBERS, name=NAMES, has_tail=st.booleans())
    def stage(self, number: int, name: str, *, has_tail: bool) -> None:
        found = self.fleet.rig.master.core.tickets.find(self.ticket(number))
        keys = b"" if found is None else found.wish.keys
        tail = self.tail(number) if has_tail else wire.TailRef()
        life = self.fleet.lives[name]
        self.say(wire.StageTicket(self.ticket(number), name, life, keys, tail, (7,)))

    @rule(number=NUMBERS, name=NAMES)
    def fail_prefill(self, number: int, name: str) -> None:
        if number >= 5:
            self.say(wire.FailPrefill(self.ticket(number), name))

    @rule(number=NUMBERS)
    def run_alone(self, number: int) -> None:
        found = self.fleet.rig.master.core.tickets.find(self.ticket(number))
        self.say(wire.RunAlone(self.ticket(number), 0 if found is None else found.route))

    @rule(number=NUMBERS, failed=st.booleans(), timeout_s=st.sampled_from([0.0, 1.0]))
    def route(self, number: int, timeout_s: float, *, failed: bool) -> None:
        found = self.fleet.rig.master.core.tickets.find(self.ticket(number))
        above = found.route if failed and found is not None else 0
        reply = self.say(wire.AwaitRoute(self.ticket(number), above, timeout_s))
        if isinstance(reply, wire.TicketRouted):
            self.routes.append(reply.route)

    @rule(number=NUMBERS, steps=st.integers(1, 5))
    def go_on(self, number: int, steps: int) -> None:
        """The next steps of a ticket, by whoever has to take them."""
        ticket = self.ticket(number)
        for _ in range(steps):
            found = self.fleet.rig.master.core.tickets.find(ticket)
            step = None if found is None else self.next_step(found)
            if step is None:
                self.fleet.rig.tick()
            elif isinstance(reply := self.say(step), wire.TicketClaimed):
                self.tokens.append(reply.token)

    @rule(number=NUMBERS, steps=st.integers(2, 5))
    def go_on_further(self, number: int, steps: int) -> None:
        self.go_on(number, steps)

    def tail(self, seed: int) -> wire.TailRef:
        """The object of that seed, whether it is there or not."""
        return wire.TailRef(self.fleet.tails.id, chain(seed, 1), 4096)

    def next_step(self, ticket: Ticket) -> Message | None:
        """What is said next; None where the master has to route it."""
        lives = self.fleet.lives
        match ticket.state:
            case TicketState.OPENED:
                return wire.BeginPrefill(ticket.id, ticket.prefill, lives[ticket.prefill])
            case TicketState.PREFILLING if not ticket.alone and ticket.id % 2:
                name = ticket.prefill
                if not ticket.is_nearly_done:
                    return wire.BeginPrefill(ticket.id, name, lives[name], 1)
                return None
            case TicketState.ROUTED_AHEAD if ticket.slot is not None:
                name = ticket.slot.name
                return wire.ClaimTicket(ticket.id, ticket.route, name, lives[name], True)
            case TicketState.CLAIMED_AHEAD if ticket.parts_wait is None:
                return wire.AwaitParts(ticket.id, ticket.token, (0,), 1.0)
            case TicketState.PREFILLING | TicketState.CLAIMED_AHEAD if not ticket.alone:
                own = ticket.id, ticket.prefill, lives[ticket.prefill]
                return wire.StageTicket(*own, ticket.wish.keys, self.tail(0), (7,))
            case TicketState.ROUTED if ticket.slot is not None:
                name = ticket.slot.name
                return wire.ClaimTicket(ticket.id, ticket.route, name, lives[name])
            case TicketState.CLAIMED:
                return wire.TicketInstalled(ticket.id, ticket.token)
            case TicketState.INSTALLED if ticket.id % 2 and not ticket.shed_token:
                left = ticket.wish.keys, self.tail(1), (*ticket.tokens, 9)
                return wire.ShedTicket(ticket.id, ticket.token, *left)
            case TicketState.INSTALLED | TicketState.PREFILLING:
                return wire.FinishTicket(ticket.id, ticket.token)
        return None

    @rule(number=NUMBERS, name=NAMES, is_ahead=st.booleans())
    def claim(self, number: int, name: str, *, is_ahead: bool) -> None:
        life, route = self.fleet.lives[name], self.routes[-1 - number % len(self.routes)]
        self.say(wire.ClaimTicket(self.ticket(number), route, name, life, is_ahead))

    @rule(number=NUMBERS, other=NUMBERS, is_own=st.booleans())
    def await_parts(self, number: int, other: int, *, is_own: bool) -> None:
        found = self.fleet.rig.master.core.tickets.find(self.ticket(number))
        token = self.tokens[-1 - other % len(self.tokens)]
        if is_own and found is not None:
            token = found.token
        self.say(wire.AwaitParts(self.ticket(number), token, (other % 2,), 1.0))

    @rule(number=NUMBERS, other=NUMBERS, kind=st.sampled_from(["installed", "finish", "shed"]))
    def speak_with_token(self, number: int, other: int, kind: str) -> None:
        ticket, token = self.ticket(number), self.tokens[-1 - other % len(self.tokens)]
        found = self.fleet.rig.master.core.tickets.find(ticket)
        if found is not None and other >= 3:
            token = found.token
        if kind == "installed":
            self.say(wire.TicketInstalled(ticket, token))
        elif kind == "finish":
            self.say(wire.FinishTicket(ticket, token))
        elif found is not None:
            left = found.wish.keys, self.tail(other), (*found.tokens, 9)
            self.say(wire.ShedTicket(ticket, token, *left))

    @rule(number=NUMBERS)
    def cancel(self, number: int) -> None:
        if number < 5:  # else few get far
            return
        self.say(wire.CancelTicket(self.ticket(number)))

    @rule(seconds=st.sampled_from([0.0, 0.1, 0.5, 4.0]), names=st.sets(NAMES))
    def wait(self, seconds: float, names: set[str]) -> None:
        """So long nobody says anything, then those beat."""
        self.fleet.rig.pass_time(seconds)
        self.fleet.rig.settle()
        for name in sorted(names):
            self.say(self.fleet.beat_message(name, link=5e4))

    @rule(seconds=st.sampled_from([0.0, 0.5, 5.0]))
    def lose_the_gateway(self, seconds: float) -> None:
        """Whose connection ends, and who comes back."""
        rig = self.fleet.rig
        rig.close(rig.engine)
        rig.pass_time(seconds)
        rig.engine = rig.open("engine", "tenant", "engine", b"engine")

    @rule(seed=st.integers(0, 3))
    def put_tail(self, seed: int) -> None:
        if self.fleet.tails.probe(chain(seed, 1)) == b"\0":
            self.fleet.put_tail(seed)

    @invariant()
    def the_state_agrees_with_itself(self) -> None:
        self.fleet.rig.master.check_invariants()

    def teardown(self) -> None:
        rig = self.fleet.rig
        rig.close(rig.engine)
        rig.pass_time(60.0, step_s=1.0)
        self.fleet.assert_nothing_held()
        assert not list(rig.master.core.tickets.fleets)


TestTickets = TicketMachine.TestCase
TestTickets.settings = settings(max_examples=40, stateful_step_count=50, deadline=None)
