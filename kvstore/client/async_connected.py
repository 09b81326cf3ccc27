"""What an asyncio store is made of: the link to the masters, the transports, and what runs plans.

Questions to the master travel on the event loop; bytes are moved in threads, by the transports of
the blocking store. A call that is cancelled ends its transfer first: nothing touches the caller's
memory after it has returned. Must not know what calls there are.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Self, TypeVar

from kvstore import limits
from kvstore.client import checks
from kvstore.client.async_link import AsyncMasterLink
from kvstore.client.calls import Calls
from kvstore.client.connected import DEFAULT_MASTERS, DEFAULT_TRANSPORTS
from kvstore.client.steps import Ask, IngestPages, Pause, ReadPages, WipePages, ask
from kvstore.clock import SystemClock
from kvstore.rpc.identity import Identity, Role, this_host
from kvstore.transfer.choice import Choice
from kvstore.wire.messages.reads import GetStatus, Status

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from types import TracebackType

    from kvstore.client.counters import ClientCounters
    from kvstore.client.locations import Locations
    from kvstore.client.performer import Mover, Viewer
    from kvstore.client.steps import Answer, Step, Steps

T = TypeVar("T")


async def in_thread(call: Callable[[], T]) -> T:
    """The result of a blocking call. When cancelled it waits for the call's end all the same."""
    running = asyncio.ensure_future(asyncio.to_thread(call))
    try:
        return await asyncio.shield(running)
    except asyncio.CancelledError:
        while not running.done():
            try:
                await asyncio.wait((running,))
            except asyncio.CancelledError:
                continue
        raise


class AsyncConnected:
    """The connections of an `AsyncKVStore`, and how long they are open."""

    def __init__(
        self,
        link: AsyncMasterLink,
        choice: Choice,
        *,
        tenant: str,
        timeout_s: float,
        hedge: bool = False,
    ) -> None:
        """Own `link` and `choice`. `connect` is the usual way."""
        self.tenant = tenant
        self._link = link
        self._choice = choice
        self._calls = Calls(SystemClock(), timeout_s, hedge=hedge)

    @classmethod
    async def connect(
        cls,
        masters: str | Sequence[str] = DEFAULT_MASTERS,
        *,
        tenant: str = "default",
        secret: bytes | None = None,
        name: str = "",
        host: str | None = None,
        transports: Sequence[str] = DEFAULT_TRANSPORTS,
        timeout_s: float = limits.CALL_TIMEOUT_S,
        hedge: bool = False,
    ) -> Self:
        """Reach a master of the pool; see KVStore.connect."""
        addresses = checks.master_addresses(masters)
        checks.texts("transports", transports)
        host = this_host() if host is None else host
        identity = Identity(Role.ENGINE, tenant, name, secret, host=host)
        link = AsyncMasterLink(addresses, identity)
        try:
            choice = Choice(transports, lambda: identity, SystemClock())
            store = cls(link, choice, tenant=tenant, timeout_s=timeout_s, hedge=hedge)
            await store.stat()
        except BaseException:
            link.close()
            raise
        return store

    async def stat(self, *, timeout_s: float | None = None) -> Status:
        """See KVStore.stat."""
        return await self._run(ask(GetStatus(), Status, self._calls.left_s(timeout_s)))

    async def carry_out(self, plan: Steps[T]) -> T:
        """See KVStore.carry_out."""
        return await self._run(plan)

    def counters(self) -> ClientCounters:
        """See KVStore.counters."""
        return self._calls.counters

    async def close(self) -> None:
        """Close buffers, transports and the link to the masters. Safe to repeat."""
        await in_thread(self._calls.close)
        await in_thread(self._choice.close)
        self._link.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self.close()

    async def _open_transports(self, locations: Locations) -> None:
        """Dial, beside the loop, the workers that a plan will choose among."""
        segments = [s for piece in locations.pieces for s in piece.located.segments]
        left_s = self._calls.left_s(None)
        await in_thread(lambda: [self._choice.rank(segment, left_s) for segment in segments])

    async def _run(self, steps: Steps[T], pages: Mover | Viewer | None = None) -> T:
        """As kvstore.client.steps.drive, awaiting each step."""
        try:
            step = next(steps)
            while True:
                try:
                    answer = await self._perform(step, pages)
                except BaseException as error:
                    step = steps.throw(error)
                else:
                    step = steps.send(answer)
        except StopIteration as stop:
            result: T = stop.value
            return result

    async def _perform(self, step: Step, pages: Mover | Viewer | None) -> Answer:
        match step:
            case Ask(message, timeout_s):
                return await self._link.call(message, timeout_s)
            case Pause(seconds):
                await asyncio.sleep(seconds)
                return None
        assert pages is not None, step
        mover = pages
        match step:
            case IngestPages(ingests, timeout_s):
                return await in_thread(lambda: mover.ingest(ingests, timeout_s))
            case ReadPages(reads, timeout_s, others):
                return await in_thread(lambda: mover.read(reads, timeout_s, others))
            case WipePages(places, size_bytes):
                mover.wipe(places, size_bytes)
        return None
