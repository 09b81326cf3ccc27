"""Inference workers of the simulation: they join a fleet, and do what gateways ask.

One computes prompts, generates, or both; two of three may be asked to change.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Final

from kvstore.client import tickets
from kvstore.client.descriptor import check_descriptor
from kvstore.errors import Fenced, OutOfSpace, Unavailable, UnknownTicket
from kvstore.wire.messages.tickets import FleetBeat, JoinFleet, Running
from tests.simulation.pages import WHOLE
from tests.simulation.pd_node import PdNode
from tests.simulation.pd_prompts import go_on
from tests.simulation.tasks import spawn

if TYPE_CHECKING:
    from kvstore.client.tickets import HandOver, Member
    from kvstore.page import PageChain
    from kvstore.wire.messages.tickets import TicketClaimed
    from tests.simulation.pd_fleet import PdFleet
    from tests.simulation.pd_gateway import PdGateway
    from tests.simulation.simulation import Simulation
    from tests.simulation.tasks import Steps

ASK_S: Final = 2.0
CAPACITY_TOKENS: Final = 400
BATCH_MAX: Final = 3
SHEDS: Final = 0.1
"""Chance, at a token, that a decode worker gives a ticket up."""
REFUSES: Final = 0.4
"""Chance that a decode worker does not take a ticket, where another one could do all of it."""
REFUSED: Final = (Unavailable, OutOfSpace, Fenced, UnknownTicket)
"""Why a worker does not do what it was asked."""


@dataclass(frozen=True)
class Job:
    """What a gateway sends."""

    gateway: str
    ticket: int
    route: int
    prompt: tuple[int, ...]
    streamed: tuple[int, ...]
    count: int
    """Tokens of the whole answer."""

    @property
    def is_ahead(self) -> bool:
        """Whether it is handed over while its prompt is being computed: every third ticket."""
        return self.ticket % 3 == 0


@dataclass
class Row:
    """A ticket that a worker has claimed, or runs alone."""

    token: int
    """Of its claim; 0: it runs it alone."""
    tokens: int


class PdMember(PdNode):
    """A member of the fleet, that changes its role where it is asked to."""

    def __init__(self, simulation: Simulation, name: str, fleet: PdFleet, role: str) -> None:
        """Not started."""
        super().__init__(simulation, name, fleet)
        self._first_role = role
        self.role = role
        self.member: Member | None = None
        self.running: dict[int, Row] = {}
        self.computing: dict[int, int] = {}
        """Tokens of prompts, by ticket."""
        self.wanted_role = ""
        """That it is about to have; empty: none other."""

    def start(self) -> None:
        """Join, and beat."""
        self.member, self.running, self.computing = None, {}, {}
        self.role, self.wanted_role = self._first_role, ""
        spawn(self.world, self.name, self._live())

    def gateway(self, job: Job) -> PdGateway:
        """Who asked."""
        return self.fleet.gateways[job.gateway]

    def _live(self) -> Steps[None]:
        yield from self.open_namespaces()
        while True:
            try:
                if self.member is None:
                    self.member = yield from self.run(
                        tickets.join_fleet(self._wish(), timeout_s=ASK_S)
                    )
                    self.world.counts[f"tickets: {self.role} joined"] += 1
                yield from self._beat(self.member)
                if self.wanted_role and not self.running and not self.computing:
                    yield from self._change(self.member)
                    continue
                yield self.member.beat_every_s
            except Fenced:
                self.member = None  # the first beat after joining tells which tickets are lost
            except Unavailable:
                yield 0.1

    def _change(self, member: Member) -> Steps[None]:
        """Leave, and come back as what was asked for."""
        self.member, self.role, self.wanted_role = None, self.wanted_role, ""
        self.world.counts[f"tickets: changed to {self.role}"] += 1
        yield from self.run(tickets.leave_fleet(member, timeout_s=ASK_S))
        yield self.random.uniform(0.0, 1.0)

    def _wish(self) -> JoinFleet:
        decodes = self.role != "prefill"
        return JoinFleet(
            WHOLE.id, self.name, self.role, f"{self.name}:1", self.host, "", "",
            CAPACITY_TOKENS if decodes else 0, BATCH_MAX if decodes else 0,
            switches=self.checks.options.roles and self.role != "both",
        )  # fmt: skip

    def _beat(self, member: Member) -> Steps[None]:
        running = tuple(Running(t, row.token, row.tokens) for t, row in self.running.items())
        message = FleetBeat(
            WHOLE.id, self.name, member.life, sum(self.computing.values()), 0.0, 0.0, 0.0, 0.0,
            running, bool(self.wanted_role),
        )  # fmt: skip
        noted = yield from self.run(tickets.beat(message, timeout_s=ASK_S))
        self.wanted_role = noted.role or self.wanted_role
        for ticket in noted.fenced:
            self.running.pop(ticket, None)


class PdPrefill(PdMember):
    """Computes prompts."""

    def asked_prefill(self, job: Job) -> None:
        """A gateway has sent a prompt."""
        spawn(self.world, self.name, self._prefill(job))

    def _prefill(self, job: Job) -> Steps[None]:
        done: HandOver | None = None
        if self.member is not None and self.role != "decode":
            self.computing[job.ticket] = len(job.prompt)
            try:
                done = yield from self._stage(job, self.member)
            except REFUSED as error:
                self.world.note(f"{self.name} does not prefill {job.ticket}: {error!r}")
            self.computing.pop(job.ticket, None)
        self.post(job.gateway, partial(self.gateway(job).prefilled, job.ticket, self.name, done))

    def _stage(self, job: Job, member: Member) -> Steps[HandOver]:
        yield from self.run(tickets.begin_prefill(job.ticket, member, timeout_s=ASK_S))
        chain = self.namespace(WHOLE).chain(job.prompt)
        known = yield from self.bring(chain)
        if job.is_ahead:
            yield from self._begin_ahead(job, member, chain)
        yield self.random.uniform(0.0, 0.1) * (1 + len(chain) - known)
        done = yield from self.hand_over(job.ticket, job.prompt, go_on(job.prompt, (), 1))
        yield from self.run(tickets.stage_ticket(job.ticket, member, done, timeout_s=ASK_S))
        self.world.counts["tickets: staged"] += 1
        return done

    def _begin_ahead(self, job: Job, member: Member, chain: PageChain) -> Steps[None]:
        """Hand over half of it, while the rest is computed."""
        left = len(job.prompt)
        yield from self.run(tickets.begin_prefill(job.ticket, member, left, timeout_s=ASK_S))
        yield self.random.uniform(0.0, 0.3)
        yield from self.keep(chain.slice(0, (len(chain) + 1) // 2))


class PdDecode(PdMember):
    """Installs tickets and generates."""

    @property
    def takes_tickets(self) -> bool:
        """Whether it has room, and stays as it is."""
        is_willing = not (self.checks.options.both and self.world.chance(REFUSES))
        has_room = self.role != "prefill" and len(self.running) < BATCH_MAX
        return is_willing and has_room and not self.wanted_role

    def asked(self, job: Job) -> None:
        """A gateway has sent a ticket."""
        spawn(self.world, self.name, self._decode(job))

    def asked_ahead(self, job: Job) -> None:
        """A gateway has sent a ticket whose prompt is being computed."""
        spawn(self.world, self.name, self._pull_ahead(job))

    def _pull_ahead(self, job: Job) -> Steps[None]:
        try:
            if self.member is not None and job.ticket not in self.running:
                yield from self._pulled_ahead(job, self.member)
        except REFUSED as error:
            self.world.note(f"{self.name} pulls {job.ticket} no further: {error!r}")

    def _pulled_ahead(self, job: Job, member: Member) -> Steps[None]:
        """Nothing is kept of it: what follows is what matters, and who may read what."""
        claim = tickets.claim_ticket(job.ticket, job.route, member, is_ahead=True, timeout_s=ASK_S)
        claimed = yield from self.run(claim)
        check_descriptor(claimed, WHOLE, job.prompt, is_ahead=True)
        row = self.running[job.ticket] = Row(claimed.token, 0)
        have, is_staged = 0, False
        try:
            while not is_staged:
                asking = tickets.await_parts(job.ticket, claimed.token, (have,), timeout_s=ASK_S)
                sealed = yield from self.run(asking)
                is_staged, (pages,) = sealed.is_staged, sealed.pages
                if pages > have:
                    came = yield from self.bring_ahead(claimed, job.ticket, have, pages)
                    self.world.counts["tickets: pages pulled ahead"] += came
                    have += came
                    is_staged |= have < pages
        finally:
            if self.running.get(job.ticket) is row:
                del self.running[job.ticket]

    def _decode(self, job: Job) -> Steps[None]:
        shed: HandOver | None = None
        if self.member is not None and self.takes_tickets:
            try:
                shed = yield from self._claimed(job, self.member)
                if shed is None:
                    return  # the last token says so, and nothing overtakes it
            except REFUSED as error:
                self.world.note(f"{self.name} does not decode {job.ticket}: {error!r}")
        self.post(job.gateway, partial(self.gateway(job).given_up, job.ticket, job.route, shed))

    def _claimed(self, job: Job, member: Member) -> Steps[HandOver | None]:
        claim = tickets.claim_ticket(job.ticket, job.route, member, timeout_s=ASK_S)
        claimed = yield from self.run(claim)
        behind = check_descriptor(claimed, WHOLE, job.prompt, job.streamed)
        row = self.running[job.ticket] = Row(claimed.token, len(job.prompt))
        try:
            yield from self._install(job, claimed, behind)
            return (yield from self._generate(job, claimed, row))
        finally:
            if self.running.get(job.ticket) is row:
                del self.running[job.ticket]

    def _install(self, job: Job, claimed: TicketClaimed, behind: int) -> Steps[None]:
        """Pull; what does not come is computed again."""
        generated = claimed.tokens[:-1]
        pages = len(claimed.keys) // 32
        chain = self.namespace(WHOLE).chain([*job.prompt, *generated]).slice(0, pages)
        missed = pages - (yield from self.bring(chain))
        if behind:
            missed += not (yield from self.bring_tail(claimed.tail))
        self.world.counts["tickets: computed again"] += missed
        yield missed * self.random.uniform(0.0, 0.1)
        install = tickets.install_ticket(job.ticket, claimed.token, timeout_s=ASK_S)
        yield from self.run(install)
        self.world.counts["tickets: installed"] += 1

    def _generate(self, job: Job, claimed: TicketClaimed, row: Row) -> Steps[HandOver | None]:
        """Stream to the end; what was handed over, where that is given up before."""
        tokens = max(claimed.tokens, job.streamed, key=len)
        while True:
            row.tokens = len(job.prompt) + len(tokens)
            if self.running.get(job.ticket) is not row:
                raise Fenced(f"ticket {job.ticket}")
            is_last = len(tokens) >= job.count
            heard = partial(self.gateway(job).heard, job.ticket, claimed.token, tokens)
            self.post(job.gateway, heard)
            if is_last:
                yield from self.run(tickets.finish_ticket(job.ticket, claimed.token))
                return None
            if self.wanted_role or self.world.chance(SHEDS):
                return (yield from self._shed(job, claimed.token, tokens))
            yield self.random.uniform(0.01, 0.3)
            tokens = go_on(job.prompt, tokens, len(tokens) + 1)

    def _shed(self, job: Job, token: int, tokens: tuple[int, ...]) -> Steps[HandOver]:
        done = yield from self.hand_over(job.ticket, job.prompt, tokens)
        yield from self.run(tickets.shed_ticket(job.ticket, token, done, timeout_s=ASK_S))
        self.world.counts["tickets: shed"] += 1
        return done


class PdWorker(PdPrefill, PdDecode):
    """Does what its role is; of role both also all of a request."""

    def asked_alone(self, job: Job) -> None:
        """A gateway has sent a prompt that is not to be handed over."""
        spawn(self.world, self.name, self._alone(job))

    def _alone(self, job: Job) -> Steps[None]:
        try:
            if self.member is not None:
                yield from self._whole(job, self.member)
                return
        except REFUSED as error:
            self.world.note(f"{self.name} does not do all of {job.ticket}: {error!r}")
        self.post(job.gateway, partial(self.gateway(job).prefilled, job.ticket, self.name, None))

    def _whole(self, job: Job, member: Member) -> Steps[None]:
        """The gateway says when it is over."""
        yield from self.run(tickets.begin_prefill(job.ticket, member, timeout_s=ASK_S))
        row = self.running[job.ticket] = Row(0, len(job.prompt))
        try:
            chain = self.namespace(WHOLE).chain(job.prompt)
            known = yield from self.bring(chain)
            yield self.random.uniform(0.0, 0.1) * (1 + len(chain) - known)
            tokens = job.streamed
            while True:
                if self.running.get(job.ticket) is not row:
                    raise Fenced(f"ticket {job.ticket}")
                tokens = go_on(job.prompt, tokens, len(tokens) + 1)
                row.tokens = len(job.prompt) + len(tokens)
                heard = partial(self.gateway(job).heard_alone, job.ticket, self.name, tokens)
                self.post(job.gateway, heard)
                if len(tokens) >= job.count:
                    self.world.counts["tickets: done alone"] += 1
                    return
                yield self.random.uniform(0.01, 0.3)
        finally:
            if self.running.get(job.ticket) is row:
                del self.running[job.ticket]
