"""Made-up traces of chats, for when no recorded one is at hand: the same seed, the same trace.

Sessions come at random, begin with one of a few shared system prompts, and go on with a probability
that grows with every turn; a turn appends the last answer and a new message to the prompt. The
numbers are round ones near those of published traces of chat services. What policies reach on such
a trace tells whether they work, not how well they do elsewhere.
"""

from __future__ import annotations

import random
from heapq import heappop, heappush
from itertools import count
from math import log
from typing import TYPE_CHECKING, Final

from msgspec.structs import replace

from kvstore.request_trace import TRACE_PAGE_TOKENS, Trace, TraceRequest

if TYPE_CHECKING:
    from collections.abc import Iterator

SYSTEM_PROMPTS: Final = 12
"""The n-th most frequent is used 1/n as often as the first."""
SYSTEM_TOKENS: Final = (200, 3000)
"""Shortest and longest."""
OPENING_TOKENS: Final = 3000.0
"""Median of the first message, which often carries a document; spread 1.2 in log form."""
MESSAGE_TOKENS: Final = 500.0
ANSWER_TOKENS: Final = 350.0
TOKENS_MAX: Final = 128_000
"""Of a prompt: the session ends there."""
THINK_S: Final = 100.0
"""Median time between two turns; spread 0.9 in log form."""
GOES_ON: Final = (0.35, 0.42, 0.52, 0.62, 0.7)
"""Probability that another turn follows the first, second, …; the last one for all others."""


class Chat:
    """One session: the prompt so far."""

    def __init__(self, system: list[int], system_tokens: int, page_tokens: int) -> None:
        """Begin with the full pages of a system prompt of so many tokens."""
        self.turns = 0
        self.tokens = system_tokens
        self._pages = list(system)
        self._page_tokens = page_tokens

    def request(self, at_s: float, message_tokens: int, fresh: Iterator[int]) -> TraceRequest:
        """The prompt with one message more. Pages that it adds take their numbers from `fresh`.

        A partial last page is another page once it is full, as its tokens are others.
        """
        self.turns += 1
        self.tokens += message_tokens
        whole, rest = divmod(self.tokens, self._page_tokens)
        self._pages += [next(fresh) for _ in range(whole - len(self._pages))]
        partial = [next(fresh)] if rest else []
        return TraceRequest(at_s, self.tokens, (*self._pages, *partial))


def chat_trace(
    seed: int, seconds: float, sessions_per_s: float, page_tokens: int = TRACE_PAGE_TOKENS
) -> Trace:
    """All requests within `seconds` of a service that starts empty."""
    draw = random.Random(seed)
    trace, fresh = Trace(page_tokens), count()
    lengths = [draw.randint(*SYSTEM_TOKENS) for _ in range(SYSTEM_PROMPTS)]
    prompts = [([next(fresh) for _ in range(n // page_tokens)], n) for n in lengths]
    weights = [1 / rank for rank in range(1, SYSTEM_PROMPTS + 1)]
    due: list[tuple[float, int, Chat]] = []  # heap: time of the next turn, session
    next_session_s, sessions = draw.expovariate(sessions_per_s), 0
    while True:
        if not due or next_session_s <= due[0][0]:
            at_s, sessions = next_session_s, sessions + 1
            next_session_s += draw.expovariate(sessions_per_s)
            pages, tokens = draw.choices(prompts, weights)[0]
            session, chat = sessions, Chat(pages, tokens, page_tokens)
        else:
            at_s, session, chat = heappop(due)
        if at_s >= seconds:
            return trace
        median = MESSAGE_TOKENS if chat.turns else OPENING_TOKENS
        request = chat.request(at_s, _around(draw, median, 1.2), fresh)
        goes_on = draw.random() < GOES_ON[min(chat.turns, len(GOES_ON)) - 1]
        answer_tokens = _around(draw, ANSWER_TOKENS, 0.8)
        trace.add(replace(request, new_tokens=answer_tokens))
        chat.tokens += answer_tokens
        if goes_on and chat.tokens < TOKENS_MAX:
            heappush(due, (at_s + draw.lognormvariate(log(THINK_S), 0.9), session, chat))


def _around(draw: random.Random, median: float, spread: float) -> int:
    """A number of tokens whose logarithm is normal, at least one."""
    return max(1, round(draw.lognormvariate(log(median), spread)))
