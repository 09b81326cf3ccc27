"""Clients of a gateway: they ask for one stream after the other, and note what came of each.

Questions follow from a seed. Who is told to come later (429) does so, as a good client; who is
refused otherwise, or whose stream ends early, has a failed answer.
"""

from __future__ import annotations

import http.client
import itertools
import json
import random
import threading
import time
from contextlib import closing
from typing import TYPE_CHECKING, Final

import msgspec

from workers.drills.processes import until

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from typing import Self

QUESTIONS: Final = 24
"""After so many they are asked again."""
CHATS: Final = 3
"""Beginnings that questions share, so that the pool has prefixes to find."""
LONG_EVERY: Final = 6
LONG_TOKENS: Final = 240
PAUSE_S: Final = 0.25
"""Between an answer and its client's next question."""
SILENCE_S: Final = 120.0
LIMIT_S: Final = 120.0
"""For whatever a drill waits for."""
LATER: Final = 429
DONE: Final = b"[DONE]"


class Question(msgspec.Struct, frozen=True):
    """One prompt, and how its answer is sampled."""

    prompt: str
    max_tokens: int
    temperature: float
    top_p: float
    seed: int


class Target(msgspec.Struct, frozen=True):
    """A gateway, and the model behind it."""

    gateway: str
    model: str


class Asked(msgspec.Struct):
    """What came of one question. Seconds are of the monotonic clock."""

    question: Question
    target: Target
    tried_s: float
    """When it was asked last: who was refused asks again."""
    refusals: int = 0
    first_s: float | None = None
    last_s: float = 0.0
    stall_s: float = 0.0
    """Longest time between two pieces."""
    text: str = ""
    prefills: int = 0
    routes: int = 0
    is_finished: bool = False
    trouble: str = ""
    """Why it has failed."""

    @property
    def is_streaming(self) -> bool:
        """Whether it has begun, and not ended."""
        return self.first_s is not None and not self.has_ended

    @property
    def has_ended(self) -> bool:
        """Whether nothing comes any more."""
        return self.is_finished or bool(self.trouble)

    def hear(self, piece: str) -> None:
        """A piece of the text has come."""
        now_s = time.monotonic()
        if self.first_s is None:
            self.first_s = now_s
        else:
            self.stall_s = max(self.stall_s, now_s - self.last_s)
        self.last_s = now_s
        self.text += piece


def question(seed: int, number: int) -> Question:
    """The one of that number. Every LONG_EVERY-th has a long answer, every second is sampled."""
    rng = random.Random(f"{seed}/{number}")
    chat = f"chat {number % CHATS}: " + " ".join(str(i * (number % CHATS + 3)) for i in range(40))
    tail = " ".join(str(rng.randrange(1000)) for _ in range(rng.randrange(4, 60)))
    tokens = LONG_TOKENS if number % LONG_EVERY == 0 else rng.randrange(24, 72)
    sampling = (0.8, 0.9) if number % 2 else (0.0, 1.0)
    return Question(f"{chat} {tail}", tokens, *sampling, rng.randrange(1 << 31))


class Load:
    """A context manager: clients ask inside of it. What they asked last is answered at its end."""

    def __init__(self, target: Target, seed: int, clients: int) -> None:
        """Ask nothing yet."""
        self.target = target
        """Of new questions."""
        self._seed = seed
        self._numbers = itertools.count()
        self._stopping = threading.Event()
        self._lock = threading.Lock()
        self._asked: list[Asked] = []
        self._threads = [threading.Thread(target=self._ask_on) for _ in range(clients)]

    def __enter__(self) -> Self:
        for each in self._threads:
            each.start()
        return self

    def __exit__(self, *_: object) -> None:
        """Ask nothing new, and wait for what comes; who still waits to ask again gives up."""
        self._stopping.set()
        for each in self._threads:
            each.join()

    def all(self) -> list[Asked]:
        """Everything, in the order in which it was asked."""
        with self._lock:
            return list(self._asked)

    def streaming(self) -> list[Asked]:
        """Answers under way, once there is one."""
        until("an answer is under way", self._streaming, LIMIT_S)
        return self._streaming()

    def refusals(self) -> int:
        """How often somebody was told to come later."""
        return sum(each.refusals for each in self.all())

    def settle(self, count: int) -> None:
        """Until so many more have been answered than now."""
        before = self._finished()
        until("more is answered", lambda: self._finished() >= before + count, LIMIT_S)

    def await_ended(self, those: Iterable[Asked]) -> None:
        """Until these have ended, well or not."""
        left = list(those)
        until("those under way end", lambda: all(each.has_ended for each in left), LIMIT_S)

    def recovery_s(self, since_s: float) -> float:
        """How long after that moment the first token came that was asked for after it."""

        def firsts() -> list[float]:
            return [
                each.first_s
                for each in self.all()
                if each.first_s is not None and each.tried_s >= since_s
            ]

        until("what is asked now is answered", firsts, LIMIT_S)
        return min(firsts()) - since_s

    def await_so(self, what: str, is_so: Callable[[], object]) -> None:
        """Until something else is so, under load."""
        until(what, is_so, LIMIT_S)

    def _streaming(self) -> list[Asked]:
        return [each for each in self.all() if each.is_streaming]

    def _finished(self) -> int:
        return sum(each.is_finished for each in self.all())

    def _ask_on(self) -> None:
        while not self._stopping.is_set():
            with self._lock:
                number = next(self._numbers)
                wish = question(self._seed, number % QUESTIONS)
                asked = Asked(wish, self.target, time.monotonic())
                self._asked.append(asked)
            while (later_s := ask(asked)) is not None:
                asked.refusals += 1
                if self._stopping.wait(later_s):
                    break
                asked.target, asked.tried_s = self.target, time.monotonic()
            self._stopping.wait(PAUSE_S)


def ask(asked: Asked) -> float | None:
    """Ask once, and listen to the end; seconds after which to ask again where it is refused."""
    try:
        with closing(http.client.HTTPConnection(asked.target.gateway, timeout=SILENCE_S)) as link:
            link.request("POST", "/v1/completions", json.dumps(_body(asked.question)))
            response = link.getresponse()
            if response.status == LATER:
                return float(response.headers["Retry-After"])
            if response.status != http.client.OK:
                asked.trouble = f"{response.status}: {response.read().decode(errors='replace')}"
                return None
            _listen(asked, response)
    except (OSError, http.client.HTTPException, LookupError, TypeError, ValueError) as error:
        # Also what is no gateway's answer: nobody hears of a client that has died of it.
        asked.trouble = f"{type(error).__name__}: {error}"
    return None


def _listen(asked: Asked, response: http.client.HTTPResponse) -> None:
    for line in response:
        data = line.removeprefix(b"data: ").strip()
        if data == DONE:
            asked.is_finished = True
            return
        if not data:
            continue
        event = json.loads(data)
        if "error" in event:
            asked.trouble = str(event["error"]["message"])
            return
        for choice in event["choices"]:
            asked.hear(choice["text"])
        timings = event.get("usage", {}).get("kvharbor_timings", {})
        asked.prefills, asked.routes = timings.get("prefills", 0), timings.get("routes", 0)
    asked.trouble = "the stream ended without [DONE]"


def _body(wish: Question) -> dict[str, object]:
    return {**msgspec.structs.asdict(wish), "stream": True, "kvharbor_timings": True}
