"""What a request's client knows of its chain's future, told to the pool once the answer has ended.

Only then the session ends, or the tool begins. Nothing depends on it: where it cannot be told, the
pool goes by what it sees itself.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Final

from kvstore.client.locations import Query, hint_steps
from kvstore.errors import KVStoreError

if TYPE_CHECKING:
    from kvstore.client.namespaces import OpenedNamespace
    from kvstore.clock import Clock
    from kvstore.hints import Hints
    from kvstore.page import PageChain
    from workers.gateway_ahead import Master

LOG: Final = logging.getLogger(__name__)
TELL_S: Final = 5.0


async def tell(
    master: Master, opened: OpenedNamespace, chain: PageChain, hints: Hints, clock: Clock
) -> None:
    """Say it of a chain's full pages: those that are in the pool by now."""
    query = Query(opened, chain, clock.now_s() + TELL_S, lease=False, hints=hints)
    try:
        await master.carry_out(hint_steps(query, clock))
    except KVStoreError as error:
        LOG.warning("telling hints: %s", error)
