"""Requests that come at random moments whatever becomes of the ones before, and how each fared.

Times count from when a request was due, so that a service that holds up its clients does not look
faster. The same seed draws the same requests at the same moments of a faster or slower load.
"""

from __future__ import annotations

import asyncio
import json
import random
from dataclasses import dataclass, field
from statistics import median
from typing import TYPE_CHECKING, Any, Final

import aiohttp

from master.replay.serving_report import percentile

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

OK: Final = 200
TOO_MANY: Final = 429
GIVEN_UP_S: Final = 300.0
EVENT: Final = b"data: "


@dataclass(frozen=True)
class Request:
    """One prompt, and when it is sent."""

    at_s: float
    prompt: tuple[int, ...]
    new_tokens: int


@dataclass(frozen=True)
class Lengths:
    """Tokens of prompts and answers, and which tokens they are drawn from."""

    vocabulary: range
    document: int
    question: int
    answer: int
    documents: int
    """How many there are; 0: each request has one of its own."""


@dataclass
class Outcome:
    """How one request fared. Seconds since it was due."""

    request: Request
    status: int = 0
    """Of HTTP; 0: the connection broke."""
    reason: str = ""
    """Of what is no answer."""
    first_s: float = 0.0
    """Until the first token, or the refusal."""
    ended_s: float = 0.0
    pauses_s: list[float] = field(default_factory=list)
    """Between tokens that follow each other."""
    tokens: int = 0
    text: str = ""
    timings: dict[str, Any] = field(default_factory=dict)
    """As the gateway says them."""

    @property
    def is_complete(self) -> bool:
        """Whether every token came."""
        return self.tokens > 0 and not self.reason

    @property
    def token_s(self) -> float:
        """Mean time of each further token."""
        return (self.ended_s - self.first_s) / max(1, self.tokens - 1)


@dataclass(frozen=True)
class Objective:
    """What a user would call served."""

    first_s: float
    token_s: float

    def is_met(self, outcome: Outcome) -> bool:
        """Whether both are."""
        in_time = outcome.first_s <= self.first_s and outcome.token_s <= self.token_s
        return outcome.is_complete and in_time


@dataclass
class Served:
    """What came of one load, or of several of the same kind."""

    outcomes: list[Outcome]
    seconds: float
    cpu_s: float
    """Of all processes that took part but the one that asks."""

    @property
    def rate(self) -> float:
        """Whole answers a second."""
        return len(self.complete()) / self.seconds

    @classmethod
    def all_of(cls, loads: Sequence[Served]) -> Served:
        """These together."""
        outcomes = [each for load in loads for each in load.outcomes]
        seconds, cpu_s = sum(load.seconds for load in loads), sum(load.cpu_s for load in loads)
        return cls(outcomes, seconds, cpu_s)

    def complete(self) -> list[Outcome]:
        """Those that got all of their answer."""
        return [each for each in self.outcomes if each.is_complete]

    def refused(self) -> list[Outcome]:
        """Those that were told to come again."""
        return [each for each in self.outcomes if each.status == TOO_MANY]

    def failed(self) -> list[Outcome]:
        """Those that got neither."""
        return [o for o in self.outcomes if not o.is_complete and o.status != TOO_MANY]

    def first_s(self, percent: int) -> float:
        """Time to the first token."""
        return percentile([each.first_s for each in self.complete()], percent / 100)

    def token_s(self, percent: int) -> float:
        """Time of each further token."""
        return percentile([each.token_s for each in self.complete()], percent / 100)

    def second_s(self, percent: int) -> float:
        """From an answer's first token to its second: a hand-over lies between them."""
        firsts = [each.pauses_s[0] for each in self.complete() if each.pauses_s]
        return percentile(firsts, percent / 100)

    def handed_over_s(self) -> float:
        """Median time of what the gateway calls route and install."""
        return middle(each.timings["route_s"] + each.timings["install_s"] for each in self.moved())

    def moved(self) -> list[Outcome]:
        """Those whose answers went on at another worker."""
        return [each for each in self.complete() if each.timings["routes"]]

    def pause_s(self, percent: int) -> float:
        """Between two tokens that follow each other, over all answers."""
        return percentile([s for each in self.complete() for s in each.pauses_s], percent / 100)

    def met(self, objective: Objective) -> int:
        """Answers that meet it."""
        return sum(map(objective.is_met, self.outcomes))


def requests(seed: int, rate: float, count: int, lengths: Lengths) -> list[Request]:
    """So many requests, `rate` a second on average: a Poisson process."""
    draw = random.Random(seed)

    def tokens(number: int) -> tuple[int, ...]:
        return tuple(draw.choice(lengths.vocabulary) for _ in range(number))

    documents = [tokens(lengths.document) for _ in range(lengths.documents)]
    found, at_s = [], 0.0
    for _ in range(count):
        at_s += draw.expovariate(1.0)
        document = draw.choice(documents) if documents else tokens(lengths.document)
        prompt = (*document, *tokens(lengths.question))
        found.append(Request(at_s / rate, prompt, lengths.answer))
    return found


def middle(values: Iterable[float]) -> float:
    """The median; 0 of nothing."""
    return median(list(values) or [0.0])


def send(gateway: str, asked: Sequence[Request], in_flight: int = 0) -> list[Outcome]:
    """Ask a gateway; `in_flight`: not by the clock, but so many at any time."""
    return asyncio.run(_send(gateway, asked, in_flight))


async def _send(gateway: str, asked: Sequence[Request], in_flight: int) -> list[Outcome]:
    loop, room = asyncio.get_running_loop(), asyncio.Semaphore(in_flight or len(asked))
    timeout = aiohttp.ClientTimeout(total=GIVEN_UP_S)
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(timeout=timeout, connector=connector) as session:
        began_s = loop.time()

        async def one(request: Request) -> Outcome:
            due_s = began_s + request.at_s
            if not in_flight:
                await asyncio.sleep(due_s - loop.time())
            async with room:
                due_s = loop.time() if in_flight else due_s
                return await _ask(session, gateway, request, due_s)

        return list(await asyncio.gather(*map(one, asked)))


async def _ask(
    session: aiohttp.ClientSession, gateway: str, request: Request, due_s: float
) -> Outcome:
    loop, outcome = asyncio.get_running_loop(), Outcome(request)
    body = {
        "prompt": request.prompt, "max_tokens": request.new_tokens, "temperature": 0,
        "stream": True, "kvharbor_timings": True,
    }  # fmt: skip
    try:
        async with session.post(f"http://{gateway}/v1/completions", json=body) as response:
            outcome.status = response.status
            if response.status != OK:
                outcome.reason = (await response.json())["error"]["code"]
                return outcome
            at_s = 0.0
            async for line in response.content:
                if line.startswith(EVENT):
                    now_s = loop.time() - due_s
                    at_s = hear(outcome, line.removeprefix(EVENT).strip(), now_s, at_s)
    except (aiohttp.ClientError, TimeoutError) as error:
        outcome.reason = type(error).__name__
    finally:
        outcome.ended_s = loop.time() - due_s
        outcome.first_s = outcome.first_s or outcome.ended_s
    return outcome


def hear(outcome: Outcome, said: bytes, now_s: float, before_s: float) -> float:
    """Take in one event; when the latest token came."""
    if said == b"[DONE]":
        return before_s
    event = json.loads(said)
    if "error" in event:
        outcome.reason = event["error"]["code"]
        return before_s
    if "usage" in event:
        outcome.tokens = event["usage"]["completion_tokens"]
        outcome.timings = event["usage"]["kvharbor_timings"]
        return before_s
    text = event["choices"][0]["text"]
    if not text:
        return before_s
    outcome.text += text
    if before_s:
        outcome.pauses_s.append(now_s - before_s)
    else:
        outcome.first_s = now_s
    return now_s
