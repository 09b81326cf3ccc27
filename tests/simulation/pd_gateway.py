"""A gateway of the simulation: takes requests from admission to the last token, come what may."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Final

from kvstore.client import tickets
from kvstore.client.ticket_holder import KEEP_EVERY_S, TicketHolder
from kvstore.client.tickets import TicketRequest
from kvstore.errors import (
    AccessDenied,
    Fenced,
    OutOfSpace,
    Throttled,
    Unavailable,
    UnknownTicket,
)
from tests.simulation.pages import WHOLE
from tests.simulation.pd_node import PdNode
from tests.simulation.pd_workers import ASK_S, Job
from tests.simulation.tasks import Signal, spawn, wait

if TYPE_CHECKING:
    from kvstore.client.tickets import HandOver
    from kvstore.wire.messages.tickets import TicketOpened
    from tests.simulation.tasks import Steps

THREADS: Final = 3
"""Requests that one gateway serves at a time."""
PREFILL_PATIENCE_S: Final = 6.0
STREAM_PATIENCE_S: Final = 2.0
PREFILLS_MAX: Final = 3
HANGS_UP: Final = 0.2
"""Chance that a request's caller goes, after whichever token."""
TOKENS_MIN: Final = 1
TOKENS_MAX: Final = 12
"""Of an answer."""
ENDS: Final = (Throttled, OutOfSpace, Fenced, UnknownTicket, AccessDenied)
"""What a request may fail with; its caller is told so."""


@dataclass
class Request:
    """One request, in its gateway's memory."""

    name: str
    prompt: tuple[int, ...]
    count: int
    wanted: int
    """Tokens until its caller hangs up; all of them where it stays."""
    deadline_s: float
    """A moment."""
    tokens: list[int] = field(default_factory=list)
    """Accepted, in order."""
    claim: int = 0
    """The highest seen."""
    news: Signal[HandOver | None] = field(default_factory=Signal)
    """Fired by whatever the workers say."""
    route: int = 0
    """The present one."""
    prefill: str = ""
    """Who computes its prompt."""
    alone: str = ""
    """Who does all of it; only that one is listened to."""
    has_given_up: bool = False
    """Whether its worker has said so."""
    has_shed: bool = False
    """Whether that one has put what others need to go on."""

    @property
    def is_whole(self) -> bool:
        """Whether the last token is there."""
        return len(self.tokens) >= self.count

    @property
    def is_over(self) -> bool:
        """Whether nobody waits for more."""
        return len(self.tokens) >= self.wanted


class PdGateway(PdNode):
    """Makes requests up, and serves them."""

    is_stopped = False

    def start(self) -> None:
        """Serve."""
        self.holder = TicketHolder(self.clock)
        self.requests: dict[int, Request] = {}
        """By ticket."""
        spawn(self.world, self.name, self._keep())
        for _ in range(THREADS):
            spawn(self.world, self.name, self._work())

    def _keep(self) -> Steps[None]:
        while True:
            try:
                refused = yield from self.run(self.holder.keep(timeout_s=ASK_S))
                self.world.counts["tickets: not wanted"] += len(refused)
            except Unavailable as error:
                self.world.note(f"{self.name} keeps nothing: {error!r}")
            yield KEEP_EVERY_S

    def _work(self) -> Steps[None]:
        yield from self.open_namespaces()
        while not self.is_stopped:
            yield self.random.uniform(0.0, 2 * THREADS / self.checks.options.tickets)
            if not self.is_stopped:
                yield from self.serve(self.random.choice((3.0, 8.0, 20.0)))

    def serve(self, left_s: float) -> Steps[str]:
        """One request; how it ended."""
        name = f"{self.name}/{self.world.nodes[self.name].life}/{self.next_number()}"
        prompt = self.fleet.prompts.draw(self.random)
        count = self.random.randint(TOKENS_MIN, TOKENS_MAX)
        wanted = self.random.randint(1, count) if self.random.random() < HANGS_UP else count
        request = Request(name, prompt, count, wanted, self.world.now + left_s)
        self.fleet.checks.asked(self, request)
        opened = yield from self._open(request, left_s)
        end = "throttled"
        if opened is not None:
            end = yield from self._carry(request, opened)
        self.fleet.checks.ended(request, end)
        return end

    # --- admission ----------------------------------------------------------------------------

    def _open(self, request: Request, left_s: float) -> Steps[TicketOpened | None]:
        """Ask again and again, until it is admitted or too late."""
        guess = self.random.choice((1, request.count, 40))
        wish = TicketRequest(
            self.namespace(WHOLE), request.name, self.namespace(WHOLE).chain(request.prompt),
            len(request.prompt), guess, 2.0, left_s,
        )  # fmt: skip
        while self.world.now < request.deadline_s:
            try:
                opened = yield from self.run(tickets.open_ticket(wish, timeout_s=ASK_S))
            except Throttled as error:
                self.world.counts[f"tickets: throttled for {error.reason}"] += 1
                yield min(error.retry_after_s, max(0.0, request.deadline_s - self.world.now))
            except (Unavailable, OutOfSpace):
                yield 0.1
            else:
                self.holder.hold(wish, opened)
                self.requests[opened.ticket] = request
                return opened
        return None

    def _carry(self, request: Request, opened: TicketOpened) -> Steps[str]:
        """Whatever happens, the ticket is given back, or left to its own deadline."""
        try:
            end = yield from self._serve(request, opened)
        except ENDS as error:
            end = error.code
        ticket = opened.ticket
        self.holder.drop(ticket)
        self.requests.pop(ticket, None)
        try:
            if end == "finished" and (request.claim or request.alone):
                claim = 0 if request.alone else request.claim
                yield from self.run(tickets.finish_ticket(ticket, claim, timeout_s=ASK_S))
            else:
                yield from self.run(tickets.cancel_ticket(ticket, timeout_s=ASK_S))
        except (Unavailable, Fenced, UnknownTicket) as error:
            self.world.note(f"{self.name} leaves ticket {ticket} behind: {error!r}")
        return end

    def _serve(self, request: Request, opened: TicketOpened) -> Steps[str]:
        if not (yield from self._prefilled(request, opened)):
            return "no prefill"
        above, ticket = 0, opened.ticket
        while not request.is_over:
            left_s = request.deadline_s - self.world.now
            if left_s <= 0:
                return "expired"
            try:
                plan = self.holder.await_route(ticket, above, timeout_s=min(left_s, ASK_S))
                routed = yield from self.run(plan)
            except Unavailable:
                continue
            if routed is not None:
                above = routed.route
                self.holder.note(ticket, worker=routed.decode)
                if (yield from self._stream(request, ticket, above, routed.decode)):
                    continue
                again = yield from self._alone(request, ticket, above)
                if again is not None and not (yield from self._prefilled(request, again)):
                    return "no prefill"
        return "finished" if request.is_whole else "cancelled"

    # --- prefill ------------------------------------------------------------------------------

    def _prefilled(self, request: Request, opened: TicketOpened) -> Steps[bool]:
        """Whether some prefill worker has done it."""
        for _ in range(PREFILLS_MAX):
            if (yield from self._begun(request, opened)):
                return True
            if self.world.now >= request.deadline_s:
                return False
            failing = tickets.fail_prefill(opened.ticket, opened.prefill, timeout_s=ASK_S)
            try:
                opened = yield from self.run(failing)
            except Unavailable:
                continue
            except Fenced:
                return True  # it is staged, and whoever claims it has the first token, too
            self.holder.note(opened.ticket, worker=opened.prefill)
        return False

    def _begun(self, request: Request, opened: TicketOpened) -> Steps[bool]:
        """Whether the worker that is named has done what it should."""
        worker, streamed = self.fleet.workers[opened.prefill], tuple(request.tokens)
        job = Job(self.name, opened.ticket, 0, request.prompt, streamed, request.count)
        request.news, request.has_given_up = Signal(), False
        request.prefill, request.alone = worker.name, opened.alone and worker.name
        if request.alone:
            request.route = 0
            self.post(worker.name, partial(worker.asked_alone, job))
            yield from self._listen(request, PREFILL_PATIENCE_S)
            return request.is_over
        self.post(worker.name, partial(worker.asked_prefill, job))
        if job.is_ahead:
            spawn(self.world, self.name, self._route_ahead(request, job))
        done = yield from wait(self.world, self.name, request.news, PREFILL_PATIENCE_S, None)
        request.prefill = ""
        if done is not None:
            self.holder.note(opened.ticket, done=done)
            self._accept(request, done.tokens)
        return done is not None

    def _alone(self, request: Request, ticket: int, route: int) -> Steps[TicketOpened | None]:
        """Who goes on with all of it, now that this route has failed; None: it is routed again."""
        while self.checks.options.both and self.world.now < request.deadline_s:
            try:
                opened = yield from self.run(tickets.run_alone(ticket, route, timeout_s=ASK_S))
            except (Fenced, UnknownTicket):  # a new master may have routed it, or not know it yet
                break
            except Unavailable:
                continue
            self.world.counts["tickets: to be gone on with alone"] += 1
            self.holder.runs_alone(ticket, opened.prefill)
            return opened
        return None

    def _route_ahead(self, request: Request, job: Job) -> Steps[None]:
        """Have who is chosen before the prompt is computed pull what there is."""
        plan = self.holder.await_route(job.ticket, 0, timeout_s=ASK_S)
        try:
            routed = yield from self.run(plan)
        except (*ENDS, Unavailable) as error:
            self.world.note(f"{self.name} routes {job.ticket} not ahead: {error!r}")
            return
        if routed is not None and routed.is_ahead and not request.tokens:
            self.world.counts["tickets: routed ahead"] += 1
            worker = self.fleet.workers[routed.decode]
            ahead = replace(job, route=routed.route)
            self.post(worker.name, partial(worker.asked_ahead, ahead))

    def prefilled(self, ticket: int, worker: str, done: HandOver | None) -> None:
        """A prefill worker says that it is done, or that it will not do it."""
        request = self.requests.get(ticket)
        if request is not None and request.prefill == worker:
            request.has_given_up = done is None
            request.news.fire(done)

    def heard_alone(self, ticket: int, worker: str, tokens: tuple[int, ...]) -> None:
        """A worker that does all of it has generated so far."""
        request = self.requests.get(ticket)
        if request is None or request.alone != worker:
            self.world.counts["tickets: tokens of others"] += 1
            return
        self._accept(request, tokens)
        request.news.fire(None)

    # --- decode -------------------------------------------------------------------------------

    def _stream(self, request: Request, ticket: int, route: int, decode: str) -> Steps[bool]:
        """As long as something comes from that route; whether it did not fail."""
        worker = self.fleet.workers[decode]
        streamed = tuple(request.tokens)
        job = Job(self.name, ticket, route, request.prompt, streamed, request.count)
        request.route, request.has_given_up, request.has_shed = route, False, False
        request.news, request.alone = Signal(), ""
        self.post(decode, partial(worker.asked, job))
        yield from self._listen(request, STREAM_PATIENCE_S)
        return request.is_over or request.has_shed

    def _listen(self, request: Request, patience_s: float) -> Steps[None]:
        """As long as something comes, at first within that time."""
        while not request.is_over and not request.has_given_up:
            known = len(request.tokens), request.claim
            yield from wait(self.world, self.name, request.news, patience_s, None)
            request.news, patience_s = Signal(), STREAM_PATIENCE_S
            if known == (len(request.tokens), request.claim):
                return

    def heard(self, ticket: int, claim: int, tokens: tuple[int, ...]) -> None:
        """A decode worker has generated so far."""
        request = self.requests.get(ticket)
        if request is None or not self.is_current(request, claim):
            self.world.counts["tickets: tokens of others"] += 1
            if request is not None:
                self.world.counts["tickets: tokens of older claims"] += 1
            return
        self.fleet.checks.heard(request, claim)
        request.claim = claim
        self.holder.note(ticket, token=claim)
        self._accept(request, tokens)
        request.news.fire(None)

    def is_current(self, request: Request, claim: int) -> bool:
        """Whether nobody has claimed the ticket after this claim, as far as the gateway knows."""
        return claim >= request.claim and not request.alone

    def given_up(self, ticket: int, route: int, shed: HandOver | None) -> None:
        """A decode worker does not go on."""
        request = self.requests.get(ticket)
        if request is None or request.route != route:
            return
        if shed is not None:
            self.holder.note(ticket, done=shed)
        request.has_given_up, request.has_shed = True, shed is not None
        request.news.fire(None)

    def _accept(self, request: Request, tokens: tuple[int, ...]) -> None:
        for index in range(len(request.tokens), min(len(tokens), request.count)):
            self.fleet.checks.accepted(request, index, tokens[index])
            request.tokens.append(tokens[index])
