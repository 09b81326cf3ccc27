"""Work beside an event loop, for callers that may be cancelled while it is done.

The thread that does it cannot be stopped: the work ends all the same, and what it has taken for
its caller is handed to whoever gives it back.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable

T = TypeVar("T")


def _forget(_: object) -> None:
    """For work that takes nothing for its caller."""


async def aside(work: Callable[[], T], unwanted: Callable[[T], None] = _forget) -> T:
    """The result of `work`, which is done in a thread: the event loop goes on.

    Where the caller is cancelled, `unwanted` is called with the result later, in the event loop.
    """
    working = asyncio.get_running_loop().run_in_executor(None, work)

    def give_back(done: asyncio.Future[T]) -> None:
        if not done.cancelled() and done.exception() is None:
            unwanted(done.result())

    try:
        return await asyncio.shield(working)
    except asyncio.CancelledError:
        working.add_done_callback(give_back)
        raise
