"""What the future would tell: the hit ratio of a policy that knows it, and hints that guess it.

Belady's MIN with bypass: after every request, of the pages held and the pages of the request, those
stay that are used again soonest (among equals those nearer to the root). A page is never used later
than one below it, so what stays is closed under prefixes, and MIN is exact for hits of prefixes.
"""

from __future__ import annotations

import random
from heapq import heappop, heappush
from typing import TYPE_CHECKING, Final

from kvstore.hints import NO_HINTS, Hints

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvstore.request_trace import Trace

NEVER: Final = 1 << 62
"""Number of a request that does not come."""


def offline_optimum(trace: Trace, capacity_pages: int, *, partial: bool = False) -> float:
    """Token hit ratio, 0 to 1, from an empty pool. `partial` keeps partial last pages too."""
    chains = [each.pages if partial else trace.full_pages(each) for each in trace.requests]
    next_uses = _next_uses(chains)
    held: dict[int, int] = {}  # page: number of the request that uses it next
    latest: list[tuple[int, int, int]] = []  # heap of (-next use, -depth, page), old ones included
    hit_tokens = 0
    for request, chain, uses in zip(trace.requests, chains, next_uses, strict=True):
        hits = leading(chain, held)
        hit_tokens += min(hits * trace.page_tokens, request.tokens)
        for depth, (page, use) in enumerate(zip(chain, uses, strict=True)):
            if use == NEVER:
                held.pop(page, None)
            else:
                held[page] = use
                heappush(latest, (-use, -depth, page))
        while len(held) > capacity_pages:
            use, _, page = heappop(latest)
            if held.get(page) == -use:
                del held[page]
    return hit_tokens / (trace.tokens or 1)


def session_hints(trace: Trace, right: float, seed: int) -> list[Hints]:
    """A hint for each request that says whether its session comes back, `right` of them truly.

    A session, or a document, comes back when half of the request's pages are used again: those
    that only begin alike have little in common. Which hints are wrong is drawn at random; those of
    a real source err alike where requests are alike.
    """
    draw = random.Random(seed)
    hints: list[Hints] = []
    for uses in _next_uses([trace.full_pages(request) for request in trace.requests]):
        comes_back = bool(uses) and uses[len(uses) // 2] != NEVER
        said = comes_back if draw.random() < right else not comes_back
        hints.append(Hints(reuse_probability=right if said else 1 - right) if uses else NO_HINTS)
    return hints


def session_ends(trace: Trace, right: float, seed: int) -> list[Hints]:
    """As `session_hints`, from who knows only that a session has ended and else says nothing."""
    said = [each.reuse_probability for each in session_hints(trace, right, seed)]
    ends = Hints(session_closed=True)
    return [ends if chance is not None and chance < 0.5 else NO_HINTS for chance in said]


def leading(chain: Sequence[int], held: dict[int, int]) -> int:
    """How many leading pages of the chain are held."""
    return next((i for i, page in enumerate(chain) if page not in held), len(chain))


def _next_uses(chains: Sequence[Sequence[int]]) -> list[list[int]]:
    """For each page of each request the number of the next request that uses it, or NEVER."""
    seen: dict[int, int] = {}
    found: list[list[int]] = []
    for number in range(len(chains) - 1, -1, -1):
        found.append([seen.get(page, NEVER) for page in chains[number]])
        seen.update(dict.fromkeys(chains[number], number))
    found.reverse()
    return found
