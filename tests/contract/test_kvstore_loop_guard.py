"""What nobody awaits in a loop of a server is heard, and what was to be expected ends nothing."""

from __future__ import annotations

import asyncio
import gc
from typing import TYPE_CHECKING

import pytest

from kvstore.errors import InvariantBroken, KVStoreError, Unavailable
from kvstore.loop_guard import tell_bugs

if TYPE_CHECKING:
    from collections.abc import Callable


class Bug(Exception):
    """What nobody expects."""


def fail(error: Exception) -> None:
    raise error


def heard_of(happen: Callable[[asyncio.AbstractEventLoop], object]) -> list[BaseException]:
    """What was heard of until the loop had done all that `happen` began."""
    heard: list[BaseException] = []

    async def life() -> None:
        loop = asyncio.get_running_loop()
        tell_bugs(loop, heard.append)
        happen(loop)
        for _ in range(5):
            await asyncio.sleep(0)
        gc.collect()  # a task tells of its exception when it goes

    asyncio.run(life())
    return heard


def forgotten(loop: asyncio.AbstractEventLoop, error: Exception) -> None:
    async def work() -> None:
        raise error

    loop.create_task(work())


@pytest.mark.parametrize("error", [Bug(), InvariantBroken("I5"), Unavailable("to nobody")])
def test_what_a_callback_raises_is_heard(error: Exception) -> None:
    assert heard_of(lambda loop: loop.call_soon(fail, error)) == [error]


def test_what_a_forgotten_task_raises_is_heard() -> None:
    (error,) = heard_of(lambda loop: forgotten(loop, Bug()))
    assert isinstance(error, Bug)


@pytest.mark.parametrize("error", [Unavailable("away"), KVStoreError("no"), OSError(24, "files")])
def test_what_was_to_be_expected_of_a_task_is_logged_alone(
    error: Exception, caplog: pytest.LogCaptureFixture
) -> None:
    assert heard_of(lambda loop: forgotten(loop, error)) == []
    assert "never retrieved" in caplog.text


def test_what_the_system_refuses_to_a_callback_is_logged_alone(
    caplog: pytest.LogCaptureFixture,
) -> None:
    assert heard_of(lambda loop: loop.call_soon(fail, OSError(24, "files"))) == []
    assert "Exception in callback" in caplog.text


def test_what_a_connection_raises_ends_that_connection_alone(
    caplog: pytest.LogCaptureFixture,
) -> None:
    class Handler(asyncio.Protocol):
        def data_received(self, data: bytes) -> None:
            raise Bug

    heard: list[BaseException] = []

    async def life() -> None:
        loop = asyncio.get_running_loop()
        tell_bugs(loop, heard.append)
        server = await loop.create_server(Handler, "127.0.0.1", 0)
        host, port = server.sockets[0].getsockname()
        reader, writer = await asyncio.open_connection(host, port)
        writer.write(b"anything")
        async with asyncio.timeout(60):
            with pytest.raises(ConnectionError):
                fail(ConnectionError() if not await reader.read() else Bug())
        writer.close()
        server.close()

    asyncio.run(life())
    assert heard == []
    assert "data_received" in caplog.text
