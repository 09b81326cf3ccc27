"""No link fuller than need be: neither that of the worker, nor that of the host it pulls from.

A transfer takes as long as the fuller one of its two links lets it. Requests whose KV lies on
different hosts are served in turns, so that hosts send at the same time; each host's own ones in
the order of readiness. Whoever was ready first of all is first.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from policies.parameters import Parameters
from policies.routing.estimates import first, in_turn, links, load_with, moved_bytes
from policies.routing.protocol import DecodePolicy

if TYPE_CHECKING:
    from collections.abc import Sequence

    from policies.routing.protocol import DecodeOffer, Wish


class TransferBalance(DecodePolicy):
    """By what is on its way, at either end."""

    def __init__(self) -> None:
        """There is nothing to set."""
        self.parameters = Parameters()

    def order(self, wishes: Sequence[Wish], now_s: float) -> list[int]:
        """By the bytes that each host has to send before."""
        del now_s
        ahead: dict[str, int] = {}
        turns: dict[int, int] = {}
        for at in in_turn(wishes):
            wish = wishes[at]
            turns[at] = ahead.get(wish.place.host, 0)
            ahead[wish.place.host] = turns[at] + wish.bytes_total
        return sorted(turns, key=turns.__getitem__)

    def choose(self, wish: Wish, offers: Sequence[DecodeOffer], now_s: float) -> int | None:
        """The soonest by its fuller link, then by both, then the least loaded."""
        del now_s
        ranks = (
            (*_transfer_s(wish, offer, link), load_with(wish, offer))
            for offer, link in zip(offers, links(offers), strict=True)
        )
        return first(ranks, offers)


def _transfer_s(wish: Wish, offer: DecodeOffer, link: float) -> tuple[float, float]:
    """Behind what is on its way at the fuller end, and at both; nothing to move takes no time."""
    moved = moved_bytes(wish, offer.prefix_tokens)
    if not moved:
        return 0.0, 0.0
    ends = offer.link_bytes, offer.source_link_bytes
    return (moved + max(ends)) / link, (moved + sum(ends)) / link
