"""How long things would take, how loaded and how far away workers are: what policies compare."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from policies.routing.protocol import DecodeOffer, PrefillOffer, Wish

UNMEASURED_TOKENS_PER_S: Final = 1e3
UNMEASURED_STEP_S: Final = 0.03
UNMEASURED_LINK_BYTES_PER_S: Final = 1e9
"""Of all, while nobody has measured: they only weigh one kind of time against another."""


def distance(wish: Wish, offer: PrefillOffer | DecodeOffer) -> int:
    """From most of the pages: 0 on their host, 1 in their rack, 2 in their zone, 3 elsewhere."""
    place = wish.place
    if offer.host == place.host:
        return 0
    if offer.zone != place.zone:
        return 3
    if place.rack and offer.rack == place.rack:
        return 1
    return 2 if place.zone else 3


def load_with(wish: Wish, offer: DecodeOffer) -> float:
    """Share of its batch or of its KV tokens, whichever is scarcer, once it has the request."""
    free_tokens = offer.free_tokens - wish.tokens - wish.new_tokens
    used = 1 - free_tokens / offer.capacity_tokens
    return max(used, (offer.running + 1) / offer.batch_max)


def moved_bytes(wish: Wish, local_tokens: int) -> float:
    """Of its KV, what does not lie on the host that has so many of its tokens."""
    return wish.bytes_total * (1 - min(local_tokens, wish.tokens) / wish.tokens)


def transfers_s(wish: Wish, offers: Sequence[DecodeOffer]) -> list[float]:
    """Until each had pulled the KV, behind what is on its way already at the fuller end.

    If all of it lies on the worker's host, no link is used.
    """
    moved = [moved_bytes(wish, offer.prefix_tokens) for offer in offers]
    return [
        (size + max(offer.link_bytes, offer.source_link_bytes)) / link if size else 0.0
        for size, offer, link in zip(moved, offers, links(offers), strict=True)
    ]


def links(offers: Sequence[PrefillOffer | DecodeOffer]) -> list[float]:
    """Bytes a second that each pulls."""
    return filled([o.link_bytes_per_s for o in offers], max, UNMEASURED_LINK_BYTES_PER_S)


def steps_s(offers: Sequence[DecodeOffer]) -> list[float]:
    """Time of a decode step of each."""
    return filled([o.step_s for o in offers], min, UNMEASURED_STEP_S)


def filled(
    measured: Sequence[float], best: Callable[[Sequence[float]], float], assumed: float
) -> list[float]:
    """What has not been measured (0) counts as the best that has: so it is tried, and measured."""
    known = [each for each in measured if each > 0]
    otherwise = best(known) if known else assumed
    return [each if each > 0 else otherwise for each in measured]


def in_turn(wishes: Sequence[Wish]) -> list[int]:
    """Who was ready first, first."""
    return sorted(range(len(wishes)), key=lambda at: wishes[at].ready_s)


def least_loaded(wish: Wish, offers: Sequence[DecodeOffer]) -> int | None:
    """Index of the emptiest; of equal ones the nearest."""
    return first([(load_with(wish, offer), distance(wish, offer)) for offer in offers], offers)


def first(
    ranks: Iterable[tuple[float, ...] | None], offers: Sequence[PrefillOffer | DecodeOffer]
) -> int | None:
    """Index of the offer with the least rank, by name of equal ones, so that there is one order.

    None: that one does not count; if none does, None.
    """
    ranked = [
        (rank, offer.worker, at)
        for at, (rank, offer) in enumerate(zip(ranks, offers, strict=True))
        if rank is not None
    ]
    return min(ranked)[-1] if ranked else None
