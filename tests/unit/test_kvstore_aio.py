"""The asyncio face, over a scripted master: what a task leaves behind that is cancelled."""

from __future__ import annotations

import asyncio
import threading
from typing import TYPE_CHECKING, cast

import pytest

from kvstore.aio import AsyncKVStore
from kvstore.transfer.transport import all_of
from kvstore.wire.messages.common import Outcome
from kvstore.wire.messages.puts import AbortPut, BeginPut
from tests.unit.client_scripts import Script, opened, plan, plans

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvstore.client.async_link import AsyncMasterLink
    from kvstore.transfer.choice import Choice
    from kvstore.transfer.memory import Memory
    from kvstore.transfer.transport import IngestSpan
    from kvstore.wire.messages.base import Message
    from kvstore.wire.messages.common import SegmentRef


class Way:
    """The one transport and the link to the master; a transfer ends when it is told to."""

    def __init__(self, script: Script) -> None:
        self.script = script
        self.entered, self.leave = threading.Event(), threading.Event()

    async def call(self, message: Message, timeout_s: float) -> Message:
        return self.script.ask(message, timeout_s)

    def transport(self, segment: SegmentRef, timeout_s: float) -> Way:
        del segment, timeout_s
        return self

    def ingest(self, spans: Sequence[IngestSpan], source: Memory, timeout_s: float) -> list[bytes]:
        del source, timeout_s
        self.entered.set()
        self.leave.wait()
        return [all_of(Outcome.OK, len(span)) for span in spans]


def test_a_cancelled_put_gives_its_plans_up() -> None:
    script = Script().will(plans(plan(0, 1, 50)))
    way = Way(script)

    async def work() -> None:
        link, choice = cast("AsyncMasterLink", way), cast("Choice", way)
        store = AsyncKVStore(link, choice, tenant="tests", timeout_s=10.0)
        space = opened()
        task = asyncio.create_task(store.put(space, space.chain(range(4)), store.buffer(4096), [0]))
        await asyncio.to_thread(way.entered.wait)
        task.cancel()
        await asyncio.sleep(0)
        way.leave.set()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(work())
    assert [type(message) for message in script.asked] == [BeginPut, AbortPut]
    assert script.asked[1] == AbortPut((50,))
