"""A fleet of decode workers in made-up time, to see what becomes of what a policy decides.

The time of a step grows with a worker's load; each host's port carries one transfer after the other
in either direction. Requests are served in the policy's order until one finds no room.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from policies.routing.protocol import DecodeOffer, DecodePolicy, Place, Wish

if TYPE_CHECKING:
    from random import Random

HOSTS = 4
CAPACITY_TOKENS = 16_000
BATCH_MAX = 8
STEP_S = 0.02
LINK_BYTES_PER_S = 2e6
TOKEN_BYTES = 1000


@dataclass(frozen=True)
class Request:
    """What a policy sees of it, and which prefix it begins with."""

    wish: Wish
    prefix: int


@dataclass(frozen=True)
class Served:
    """What became of a request."""

    request: Request
    worker: str
    routed_s: float
    first_s: float
    done_s: float
    load: float
    same_prefix: int
    """Requests with its prefix that ran there already."""


@dataclass
class Port:
    """Of a host, one direction: busy until then."""

    free_s: float = 0.0

    def ahead_bytes(self, now_s: float) -> int:
        """Still to be carried."""
        return round(max(0.0, self.free_s - now_s) * LINK_BYTES_PER_S)


@dataclass
class Worker:
    """One a host."""

    name: str
    host: str
    step_s: float
    running: list[Served] = field(default_factory=list)
    port: Port = field(default_factory=Port)

    def free_tokens(self) -> int:
        """As the master counts them: what is expected counts as used."""
        used = sum(each.request.wish.tokens + each.request.wish.new_tokens for each in self.running)
        return CAPACITY_TOKENS - used

    def load(self) -> float:
        """As policies count it."""
        return max(1 - self.free_tokens() / CAPACITY_TOKENS, len(self.running) / BATCH_MAX)


class Fleet:
    """Workers of various speeds, and the ports that prefill sends from."""

    def __init__(self, dice: Random) -> None:
        """Empty."""
        self.workers = [
            Worker(f"d{at}", f"h{at}", STEP_S * dice.uniform(0.8, 1.5)) for at in range(HOSTS)
        ]
        self.sources = {f"h{at}": Port() for at in range(HOSTS)}
        self.now_s = 0.0

    def serve(self, policy: DecodePolicy, requests: list[Request]) -> list[Served]:
        """All of them, in the order in which they were routed."""
        coming = sorted(requests, key=lambda r: r.wish.ready_s)
        waiting: list[Request] = []
        served: list[Served] = []
        while coming or waiting:
            while coming and coming[0].wish.ready_s <= self.now_s:
                waiting.append(coming.pop(0))
            served += self._route(policy, waiting)
            ends = [each.done_s for worker in self.workers for each in worker.running]
            self.now_s = min(ends + [each.wish.ready_s for each in coming[:1]])
            for worker in self.workers:
                worker.running = [r for r in worker.running if r.done_s > self.now_s]
        return served

    def _route(self, policy: DecodePolicy, waiting: list[Request]) -> list[Served]:
        routed: list[Request] = []
        served: list[Served] = []
        for at in policy.order([each.wish for each in waiting], self.now_s):
            request = waiting[at]
            offers = self._offers(request)
            chosen = policy.choose(request.wish, offers, self.now_s)
            if chosen is None:
                assert not offers
                break
            served.append(self._place(request, offers[chosen]))
            routed.append(request)
        waiting[:] = [each for each in waiting if each not in routed]
        return served

    def _offers(self, request: Request) -> list[DecodeOffer]:
        wish, now_s = request.wish, self.now_s
        return [
            DecodeOffer(
                worker.name, worker.host, "r", "z", worker.free_tokens(), CAPACITY_TOKENS,
                len(worker.running), BATCH_MAX, worker.step_s * (1 + worker.load()),
                prefix_tokens=wish.tokens if worker.host == wish.place.host else 0,
                same_prefix=sum(r.request.prefix == request.prefix for r in worker.running),
                link_bytes=worker.port.ahead_bytes(now_s), link_bytes_per_s=LINK_BYTES_PER_S,
                source_link_bytes=self.sources[wish.place.host].ahead_bytes(now_s),
            )
            for worker in self.workers
            if worker.free_tokens() >= wish.tokens + wish.new_tokens
            and len(worker.running) < BATCH_MAX
        ]  # fmt: skip

    def _place(self, request: Request, offer: DecodeOffer) -> Served:
        worker = next(each for each in self.workers if each.name == offer.worker)
        wish, there_s = request.wish, self.now_s
        if worker.host != wish.place.host:
            ports = worker.port, self.sources[wish.place.host]
            there_s = max(there_s, *(port.free_s for port in ports))
            there_s += wish.bytes_total / LINK_BYTES_PER_S
            for port in ports:
                port.free_s = there_s
        step_s = worker.step_s * (1 + worker.load())
        done_s = there_s + step_s * wish.new_tokens
        served = Served(
            request, worker.name, self.now_s, there_s + step_s, done_s, worker.load(),
            offer.same_prefix,
        )  # fmt: skip
        worker.running.append(served)
        return served


def requests(dice: Random, count: int, per_s: float) -> list[Request]:
    """That many, at random; as many in each second, of few prefixes; most answers are short."""
    found: list[Request] = []
    ready_s = 0.0
    for _ in range(count):
        ready_s += dice.expovariate(per_s)
        tokens, host = dice.randint(200, 2000), dice.randrange(HOSTS)
        new_tokens = min(2000, 10 + int(dice.expovariate(1 / 150)))
        wish = Wish(
            tokens, new_tokens, tokens * TOKEN_BYTES, ready_s, ready_s + dice.uniform(0.5, 4.0),
            Place(f"h{host}", "r", "z"),
        )  # fmt: skip
        found.append(Request(wish, dice.randrange(5)))
    return found
