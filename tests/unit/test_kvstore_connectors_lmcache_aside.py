"""Work beside an event loop whose caller is cancelled in the middle of it."""

from __future__ import annotations

import asyncio
import threading
from typing import TYPE_CHECKING

import pytest

from kvstore.connectors.lmcache.aside import aside

if TYPE_CHECKING:
    from collections.abc import Awaitable

LONG_S = 30.0


def test_the_result_comes_and_nobody_gives_it_back() -> None:
    unwanted: list[int] = []
    assert asyncio.run(aside(lambda: 7, unwanted.append)) == 7
    assert unwanted == []


def test_trouble_comes_as_it_is() -> None:
    with pytest.raises(ZeroDivisionError):
        asyncio.run(aside(lambda: 1 // 0))


@pytest.mark.parametrize("fails", [False, True])
def test_work_whose_caller_is_cancelled_ends_and_its_result_is_given_back(fails: bool) -> None:
    begun, go_on, ended = threading.Event(), threading.Event(), threading.Event()
    unwanted: list[int] = []

    def work() -> int:
        begun.set()
        assert go_on.wait(LONG_S)
        ended.set()
        return 1 // 0 if fails else 7

    async def cancelled() -> None:
        task = asyncio.ensure_future(aside(work, unwanted.append))
        await asyncio.to_thread(begun.wait, LONG_S)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert unwanted == [], "it is still under way"
        go_on.set()

    asyncio.run(given_time(cancelled()))
    assert ended.is_set()
    assert unwanted == ([] if fails else [7])


def test_a_result_that_comes_as_its_caller_is_cancelled_is_given_back() -> None:
    unwanted: list[int] = []
    came = threading.Event()

    def work() -> int:
        came.set()
        return 7

    async def cancelled() -> None:
        task = asyncio.ensure_future(aside(work, unwanted.append))
        await asyncio.sleep(0)
        assert came.wait(LONG_S), "the loop has not heard of it: it stands still here"
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(given_time(cancelled()))
    assert unwanted == [7]


async def given_time(act: Awaitable[None]) -> None:
    """Then wait for all threads of the loop, and for what they have told it."""
    await act
    await asyncio.get_running_loop().shutdown_default_executor()
    await asyncio.sleep(0)
