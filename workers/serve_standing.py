"""An inference worker among its fleet, from when it is made to when it has left. No model here.

Owns the order: it listens before the fleet hears of it, and joins before it is announced; at a
signal it hands over what runs while it beats on, and leaves. Who breaks leaves at once.
"""

from __future__ import annotations

import asyncio
import signal
from typing import TYPE_CHECKING, Final, Protocol

from aiohttp import web

from kvstore.announcement import Announcement, announce, withdraw

if TYPE_CHECKING:
    import socket
    from contextlib import AsyncExitStack
    from pathlib import Path

    from workers.serve_member import Membership
    from workers.serve_roles import Roles

CLOSE_S: Final = 2.0
"""For answers that are under way when the worker ends."""


class InFleet(Protocol):
    """What is needed of a worker."""

    membership: Membership
    roles: Roles
    broken: asyncio.Future[None]
    """Has an error once the worker can do nothing more."""


async def serve_until_asked(
    undo: AsyncExitStack,
    worker: InFleet,
    application: web.Application,
    sock: socket.socket,
    announced: Announcement,
    data_dir: Path | None,
) -> None:
    """Run until a signal, or what breaks the worker, ends it."""
    membership, loop = worker.membership, asyncio.get_running_loop()
    runner = web.AppRunner(
        application, handler_cancellation=True, shutdown_timeout=CLOSE_S, access_log=None
    )
    await runner.setup()
    undo.push_async_callback(runner.cleanup)
    await web.SockSite(runner, sock).start()
    # The master counts on a decode worker from its first beat on.
    await membership.beat_once()
    if data_dir is not None:
        announce(data_dir, announced)
        undo.callback(withdraw, data_dir, announced.role)
    beats = asyncio.ensure_future(membership.beat_on())
    stopping = asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stopping.set)
    stopped = asyncio.ensure_future(stopping.wait())
    changes = asyncio.ensure_future(worker.roles.follow(membership))
    done, _ = await asyncio.wait(
        (beats, changes, stopped, worker.broken), return_when=asyncio.FIRST_COMPLETED
    )
    changes.cancel()
    if done == {stopped}:
        await worker.roles.hand_over(membership)
    beats.cancel()
    await membership.leave()
    for each in done - {stopped}:
        each.result()
