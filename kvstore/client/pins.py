"""The plans of pinning pages and of taking pins back."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from kvstore.client.locations import batches, flags
from kvstore.client.namespaces import OpenedNamespace
from kvstore.client.steps import Steps, ask
from kvstore.page import PageChain
from kvstore.wire.messages.pins import PagesPinned, PagesUnpinned, PinPages, UnpinPages

if TYPE_CHECKING:
    from kvstore.clock import Clock


class PinRequest(msgspec.Struct, frozen=True):
    """A checked wish that pages stay."""

    opened: OpenedNamespace
    chain: PageChain
    owner: str
    hard: bool
    ttl_s: float
    deadline_s: float


def pin_steps(request: PinRequest, clock: Clock) -> Steps[list[bool]]:
    """Whether each page is pinned, one question a batch."""
    pinned: list[bool] = []
    namespace = request.opened.namespace.id
    for _, keys in batches(request.chain):
        question = PinPages(namespace, keys, request.owner, request.hard, request.ttl_s)
        reply = yield from ask(question, PagesPinned, request.deadline_s - clock.now_s())
        pinned += flags(reply.pinned, keys)
    return pinned


def unpin_steps(
    opened: OpenedNamespace,
    chain: PageChain | None,
    owner: str,
    deadline_s: float,
    clock: Clock,
) -> Steps[int]:
    """How many pages the owner had pinned, of the chain or, without one, in all."""
    pages = 0
    for keys in [b""] if chain is None else [keys for _, keys in batches(chain)]:
        question = UnpinPages(opened.namespace.id, keys, owner)
        reply = yield from ask(question, PagesUnpinned, deadline_s - clock.now_s())
        pages += reply.pages
    return pages
