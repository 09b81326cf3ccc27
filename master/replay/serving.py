"""Serves a trace of requests by modelled workers, through the master's own state machine.

Gateways and workers do what real ones do, message by message, where prompts are handed over at
their end: only the time that computing, steps and links take is made up (master.replay.engines).
Hand-over layer by layer is made up, too: the decode worker is chosen at the end, and has pulled by
then what links carried while the prompt was computed. Virtual time, no randomness: the same
requests and the same fleet give the same report.

**Sizes.** The master sees a byte a token here (VirtualPool), and links that are slower in the same
proportion, so that all that it estimates in seconds is as it would be. The unfinished page of a
prompt is no object of the pool, but is moved with the others. What is pulled comes from the host of
whoever computed it last, behind what that one sends and the puller gets already.
"""

from __future__ import annotations

from functools import partial
from heapq import heappop, heappush
from typing import TYPE_CHECKING, Final

import msgspec

from kvstore import limits
from kvstore.ids import KEY_BYTES
from kvstore.request_trace import Trace
from kvstore.wire.messages import tickets as wire
from kvstore.wire.messages.hello import Done, Failure
from master.fleets import BOTH, DECODE, PREFILL
from master.replay.engines import Engine, FleetShape, Prompt, Row
from master.replay.passage import Request, Worker
from master.replay.pool import ENGINE, NOTHING, Setting, VirtualPool
from master.replay.serving_report import RoleSwitch, Served, ServingReport, Slo, Throttle

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from kvstore.wire.messages.base import Message

DEADLINE_S: Final = 600.0
TOKEN: Final = 1
"""Every token of an answer: nobody looks at which."""
OWN_PAGES: Final = 1 << 40
"""Numbers of pages that no two requests share begin here."""


class Demand(msgspec.Struct, frozen=True):
    """Requests, and how those who make them behave."""

    trace: Trace
    slo: Slo = Slo()
    patience_s: float = 0.0
    """Who is throttled comes again when it is told to, for so long after its arrival."""
    reuse: bool = True
    """Whether equal prompts have equal pages; else no two have one in common."""


def replay_serving(
    demand: Demand, shape: FleetShape, changed: Mapping[str, object] = NOTHING
) -> ServingReport:
    """Serve all requests, from an empty pool on. `changed`: tunables of the master."""
    return _Serving(demand, shape, changed).run()


class _Serving:
    """One replay."""

    def __init__(self, demand: Demand, shape: FleetShape, changed: Mapping[str, object]) -> None:
        self._demand, self._shape = demand, shape
        roles = [PREFILL] * shape.prefills + [DECODE] * shape.decodes + [BOTH] * shape.both
        page_tokens = demand.trace.page_tokens
        staging_bytes = shape.pool_pages * len(roles) * page_tokens // 4
        own = {"replicas": 1, "replication": "off", "staging_bytes": staging_bytes}
        setting = Setting(shape.pool_pages, workers=len(roles))
        self._pool = VirtualPool(setting, page_tokens, {**own, **changed})
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._event = 0
        self._awaited: dict[int, Request] = {}
        """By the number of what was asked."""
        self._under_way = len(demand.trace.requests)
        self._workers: dict[str, Worker] = {}
        self._switches: list[RoleSwitch] = []
        for number, role in enumerate(roles):
            worker = Worker(f"{role}-{number}", role, number, Engine(shape, self._after))
            self._workers[worker.name] = worker
            self._join(worker)
            self._beat_on(worker)

    def run(self) -> ServingReport:
        """Until every request has ended."""
        served = [Served(request) for request in self._demand.trace.requests]
        for number, each in enumerate(served):
            request = Request(number, each, *self._prompt(number, each))
            self._at(each.request.at_s, partial(self._arrive, request))
        pool = self._pool
        while self._under_way:
            due_s = self._events[0][0]
            if pool.next_s() <= due_s:
                pool.advance(pool.next_s())
            else:
                pool.advance(due_s)
                heappop(self._events)[2]()
            self._hear()
        return ServingReport(served, self._switches, dict(pool.master.core.counters))

    def _prompt(self, number: int, served: Served) -> tuple[tuple[int, ...], bytes]:
        pages = self._demand.trace.full_pages(served.request)
        if not self._demand.reuse:
            first = OWN_PAGES + number * limits.BATCH_PAGES_MAX
            pages = tuple(range(first, first + len(pages)))
        return pages, self._pool.packed(pages)

    def _at(self, at_s: float, call: Callable[[], None]) -> None:
        self._event += 1
        heappush(self._events, (at_s, self._event, call))

    def _after(self, seconds: float, call: Callable[[], None]) -> None:
        self._at(self._pool.now_s + seconds, call)

    def _ask(self, message: Message) -> Message:
        return self._pool.ask(ENGINE, message)

    # Gateways.

    def _arrive(self, request: Request) -> None:
        served, demand, pool = request.served, self._demand, self._pool
        wish = wire.OpenTicket(
            pool.namespace, f"request {request.number}", request.keys, served.request.tokens,
            request.left, demand.slo.ttft_s, DEADLINE_S,
        )  # fmt: skip
        reply = self._ask(wish)
        if not isinstance(reply, wire.Throttled):
            self._opened(request, reply)
            return
        passed_s = pool.now_s - served.request.at_s
        served.throttles.append(Throttle(passed_s, reply.reason))
        if passed_s + reply.retry_after_s > demand.patience_s:
            self._end(request, "throttled")
        else:
            self._after(reply.retry_after_s, partial(self._arrive, request))

    def _opened(self, request: Request, reply: Message) -> None:
        """A prefill worker was named, or nobody is left."""
        if not isinstance(reply, wire.TicketOpened):
            self._end(request, _failure(reply))
            return
        request.ticket = reply.ticket
        request.prefix_pages = reply.prefix_tokens // self._demand.trace.page_tokens
        request.served.reused_tokens = reply.prefix_tokens
        request.served.alone = reply.alone
        worker = self._workers[reply.prefill]
        self._after(self._shape.rtt_s, partial(self._compute, request, worker))

    def _end(self, request: Request, failure: str = "") -> None:
        self._under_way -= 1
        if failure:
            request.served.failure = failure
        else:
            request.served.done_s = self._pool.now_s + self._shape.rtt_s

    def _await_route(self, request: Request) -> None:
        message = wire.AwaitRoute(request.ticket, request.route, limits.CALL_TIMEOUT_MAX_S)
        self._awaited[self._pool.post(ENGINE, message)] = request

    def _hear(self) -> None:
        """Answers that were held back."""
        replies = self._pool.replies
        for session, number in [key for key in replies if key[1] in self._awaited]:
            request, reply = self._awaited.pop(number), replies.pop((session, number))
            if isinstance(reply, wire.TicketRouted) and reply.route:
                request.route = reply.route
                request.served.routes += 1
                call = partial(self._claim, request, self._workers[reply.decode])
                self._after(self._shape.rtt_s, call)
            elif isinstance(reply, wire.TicketRouted):
                self._await_route(request)
            else:
                self._end(request, _failure(reply))

    # Prefill.

    def _compute(self, request: Request, worker: Worker) -> None:
        begin = wire.BeginPrefill(request.ticket, worker.name, worker.life)
        if isinstance(self._ask(begin), Failure):
            failed = wire.FailPrefill(request.ticket, worker.name)
            self._opened(request, self._ask(failed))
            return
        if request.served.alone:
            worker.rows[request] = None
        pages = request.pages[: request.prefix_pages]
        prefix_tokens = len(pages) * self._demand.trace.page_tokens
        pull_s = self._pull_s(request, worker, prefix_tokens - self._local_tokens(pages, worker))
        fresh_tokens = request.tokens - prefix_tokens
        request.computed_s = pull_s + fresh_tokens / self._shape.tokens_per_s
        done = partial(self._computed, request, worker)
        worker.engine.compute(Prompt(fresh_tokens, pull_s, done))

    def _computed(self, request: Request, worker: Worker) -> None:
        """Put what is new, and hand over, or go on."""
        stored = self._put(request, worker)
        request.source, request.generated = worker, 1
        request.served.first_s = self._pool.now_s + self._shape.rtt_s
        if request.served.alone:
            self._generate(request, worker)
            return
        message = wire.StageTicket(
            request.ticket, worker.name, worker.life, request.keys[: stored * KEY_BYTES],
            wire.TailRef(), (TOKEN,),
        )  # fmt: skip
        reply = self._ask(message)
        if isinstance(reply, Failure):
            self._end(request, reply.code)
        elif request.left:
            self._await_route(request)
        else:
            self._ask(wire.CancelTicket(request.ticket))
            self._end(request)

    def _put(self, request: Request, worker: Worker) -> int:
        """How many of its pages the pool has then."""
        known, pages = request.prefix_pages, request.pages
        above = pages[known - 1] if known else None
        writer = self._pool.engine(worker.number)
        return known + self._pool.put(pages[known:], above, writer=writer)

    def _local_tokens(self, pages: tuple[int, ...], worker: Worker) -> int:
        """Of these pages, what lies on the worker's host."""
        host, count = f"host-{worker.number}", 0
        for found in self._pool.located(pages, reader=self._pool.engine(worker.number)):
            for run in found.runs:
                is_local = any(found.segments[copy.segment].host == host for copy in run.copies)
                count += run.count * is_local
        return count * self._demand.trace.page_tokens

    def _pull_s(self, request: Request, worker: Worker, tokens: int) -> float:
        """How long a free link takes for so much of its KV."""
        size_bytes = tokens * self._shape.token_bytes
        request.served.moved_bytes += size_bytes
        return size_bytes / self._shape.link_bytes_per_s

    # Decode.

    def _claim(self, request: Request, worker: Worker) -> None:
        claim = wire.ClaimTicket(request.ticket, request.route, worker.name, worker.life)
        claimed = None if worker.is_draining else self._ask(claim)
        if not isinstance(claimed, wire.TicketClaimed):
            self._await_route(request)
            return
        request.token = claimed.token
        worker.rows[request] = None
        source, now_s = request.source, self._pool.now_s
        assert source is not None, request.ticket
        missing = len(request.keys) - len(claimed.keys)
        missing_tokens = missing // KEY_BYTES * self._demand.trace.page_tokens
        tokens = request.tokens - missing_tokens
        local = tokens if source is worker else self._local_tokens(request.pages, worker)
        pull_s = self._pull_s(request, worker, max(0, tokens - local))
        there_s = now_s
        if pull_s:
            wanted_s = now_s - request.computed_s if self._shape.layerwise else now_s
            begins_s = max(wanted_s, source.sends_until_s, worker.gets_until_s)
            source.sends_until_s = worker.gets_until_s = begins_s + pull_s
            there_s = max(now_s, begins_s + pull_s)
        request.computed_s = 0.0
        request.served.install_s += there_s + self._shape.rtt_s - now_s
        call = partial(self._installed, request, worker, claimed.token, missing_tokens)
        self._at(there_s + self._shape.rtt_s, call)

    def _installed(self, request: Request, worker: Worker, token: int, missing_tokens: int) -> None:
        if request not in worker.rows or request.token != token:
            return  # it was given to somebody else meanwhile
        if missing_tokens:
            again = partial(self._installed, request, worker, token, 0)
            worker.engine.compute(Prompt(missing_tokens, 0.0, again))
            return
        self._ask(wire.TicketInstalled(request.ticket, request.token))
        self._generate(request, worker)

    def _generate(self, request: Request, worker: Worker) -> None:
        if not request.left:
            self._finished(request, worker)
            return
        done = partial(self._finished, request, worker)
        row = worker.rows[request] = Row(request.tokens, request.left, done)
        worker.engine.generate(row)

    def _finished(self, request: Request, worker: Worker) -> None:
        del worker.rows[request]
        self._ask(wire.FinishTicket(request.ticket, request.token))
        self._end(request)

    # The fleet.

    def _join(self, worker: Worker) -> None:
        shape, decodes = self._shape, worker.role != PREFILL
        place = f"{worker.name}:1", f"host-{worker.number}", "", ""
        wish = wire.JoinFleet(
            self._pool.namespace, worker.name, worker.role, *place,
            shape.capacity_tokens if decodes else 0, shape.batch_max if decodes else 0, (),
            shape.switches,
        )  # fmt: skip
        joined = self._ask(wish)
        assert isinstance(joined, wire.FleetJoined), joined
        worker.life = joined.life

    def _beat_on(self, worker: Worker) -> None:
        """Now, and from now on, for as long as it is a member."""
        if worker.life:
            self._beat(worker)
            if worker.is_draining and not worker.rows and not worker.engine.prompts:
                self._leave(worker)
        self._after(limits.FLEET_BEAT_S, partial(self._beat_on, worker))

    def _beat(self, worker: Worker) -> None:
        shape, engine = self._shape, worker.engine
        running = tuple(
            wire.Running(
                request.ticket, request.token,
                request.tokens + (0 if row is None else engine.generated(row)),
            )
            for request, row in worker.rows.items()
        )  # fmt: skip
        noted = self._ask(
            wire.FleetBeat(
                self._pool.namespace, worker.name, worker.life, engine.queued_tokens,
                shape.tokens_per_s, engine.step_s, shape.link_bytes_per_s / shape.token_bytes,
                shape.rtt_s, running, worker.is_draining,
            )
        )  # fmt: skip
        assert isinstance(noted, wire.FleetNoted), noted
        for request in [each for each in worker.rows if each.ticket in noted.fenced]:
            row = worker.rows.pop(request)
            if row is not None:
                engine.take_out(row)
            self._end(request, "expired")
        if noted.role and not worker.is_draining:
            self._drain(worker)

    def _drain(self, worker: Worker) -> None:
        """Hand over what has been generated; prompts are computed to the end."""
        worker.is_draining = True
        self._beat(worker)
        for request, row in list(worker.rows.items()):
            del worker.rows[request]
            if row is not None:
                request.generated += worker.engine.take_out(row)
                tokens = (TOKEN,) * request.generated
                shed = wire.ShedTicket(
                    request.ticket, request.token, request.keys, wire.TailRef(), tokens
                )
                assert isinstance(self._ask(shed), Done), request
                request.source = worker
            self._await_route(request)

    def _leave(self, worker: Worker) -> None:
        leave = wire.LeaveFleet(self._pool.namespace, worker.name, worker.life)
        assert isinstance(self._ask(leave), Done), worker.name
        worker.life, worker.is_draining = 0, False
        worker.role = PREFILL if worker.role == DECODE else DECODE
        self._after(self._shape.switch_s, partial(self._rejoin, worker))

    def _rejoin(self, worker: Worker) -> None:
        self._join(worker)
        self._beat(worker)
        self._switches.append(RoleSwitch(self._pool.now_s, worker.name, worker.role))


def _failure(reply: Message) -> str:
    return reply.code if isinstance(reply, Failure) else "throttled"
