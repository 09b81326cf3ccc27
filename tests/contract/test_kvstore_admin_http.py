"""A server's HTTP pages over loopback: what they answer, and how long anybody may hold a socket."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from typing import TYPE_CHECKING, Final

import pytest

from kvstore import admin_http
from kvstore.admin_http import AdminHttp, Page, json_page
from kvstore.errors import ConfigError
from kvstore.wire.messages.reads import WorkerStatus

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    Use = Callable[[str, int], Awaitable[None]]

SHORT_S: Final = 0.3
TIMEOUT_S: Final = 20.0
"""After which a test has failed; nothing waits for it."""
ANSWER_BYTES: Final = 64 << 20
"""More than the kernel takes for a peer that does not read."""
ASK: Final = b"GET /text HTTP/1.1\r\nHost: x\r\n\r\n"

PAGES: Final = {
    "/text": lambda: Page(b"all is well"),
    "/json": lambda: json_page(WorkerStatus("w", "h", "live", 0.5, ()), status=503),
    "/large": lambda: Page(bytes(ANSWER_BYTES)),
}


def serve(use: Use, life_s: float = admin_http.CONNECTION_LIFE_S) -> None:
    """Serve PAGES on a free port while `use` talks to it."""

    async def life() -> None:
        http = AdminHttp(PAGES, life_s)
        host, _, port = (await http.listen("127.0.0.1:0", None)).rpartition(":")
        try:
            async with asyncio.timeout(TIMEOUT_S):
                await use(host, int(port))
        finally:
            await http.close()

    asyncio.run(life())


async def said(host: str, port: int, request: bytes) -> bytes:
    """All that the listener says to `request` until it closes the connection."""
    reader, writer = await asyncio.open_connection(host, port)
    writer.write(request)
    found = await until_closed(reader)
    writer.close()
    return found


async def until_closed(reader: asyncio.StreamReader) -> bytes:
    """What the listener says until it ends the connection, kindly or not."""
    found = b""
    with suppress(ConnectionResetError):
        while some := await reader.read(1 << 20):
            found += some
    return found


@pytest.mark.parametrize(
    ("request_line", "status", "body"),
    [
        (b"GET /text", b"200", b"all is well"),
        (b"HEAD /text", b"200", b""),
        (b"GET /text?a=b", b"200", b"all is well"),
        (b"GET /json", b"503", b'"state":"live"'),
        (b"GET /", b"404", b"there are /text, /json, /large"),
        (b"GET /../etc/passwd", b"404", b"there are"),
        (b"POST /text", b"405", b"by GET"),
        (b"nonsense", b"400", b""),
    ],
)
def test_each_connection_gets_one_answer(request_line: bytes, status: bytes, body: bytes) -> None:
    async def use(host: str, port: int) -> None:
        answer = await said(host, port, request_line + b" HTTP/1.1\r\nHost: x\r\n\r\n" + ASK)
        head, _, rest = answer.partition(b"\r\n\r\n")
        assert head.split()[1] == status
        assert body in rest
        assert b"HTTP/1.1 " not in rest  # the second question is not answered

    serve(use)


def test_whoever_is_silent_is_cut_off() -> None:
    async def use(host: str, port: int) -> None:
        reader, writer = await asyncio.open_connection(host, port)
        await until_closed(reader)
        writer.close()

    serve(use, SHORT_S)


def test_whoever_asks_byte_by_byte_is_cut_off() -> None:
    async def drip(writer: asyncio.StreamWriter) -> None:
        writer.write(b"GET /text HTTP/1.1\r\n")
        while True:
            writer.write(b"x")
            await asyncio.sleep(SHORT_S / 20)

    async def use(host: str, port: int) -> None:
        reader, writer = await asyncio.open_connection(host, port)
        dripping = asyncio.create_task(drip(writer))
        await until_closed(reader)
        dripping.cancel()
        writer.close()

    serve(use, SHORT_S)


def test_whoever_does_not_read_is_cut_off() -> None:
    async def use(host: str, port: int) -> None:
        reader, writer = await asyncio.open_connection(host, port, limit=1)  # stops reading
        writer.write(ASK.replace(b"/text", b"/large"))
        await asyncio.sleep(3 * SHORT_S)
        with pytest.raises((ConnectionResetError, asyncio.IncompleteReadError)):
            await reader.readexactly(ANSWER_BYTES)
        writer.close()

    serve(use, SHORT_S)


def test_as_many_connections_as_are_allowed_and_no_more() -> None:
    async def use(host: str, port: int) -> None:
        silent = [
            await asyncio.open_connection(host, port) for _ in range(admin_http.CONNECTIONS_MAX)
        ]
        reader, writer = await asyncio.open_connection(host, port)
        await until_closed(reader)
        writer.close()
        assert not any(each.at_eof() for each, _ in silent)
        silent[0][1].write(ASK)
        assert b"all is well" in await silent[0][0].read()
        while b"all is well" not in await said(host, port, ASK):
            pass  # its place is free a moment after the answer
        for _, each in silent:
            each.close()

    serve(use)


def test_closing_waits_for_nobody_who_is_silent() -> None:
    async def life() -> None:
        http = AdminHttp(PAGES)
        host, _, port = (await http.listen("127.0.0.1:0", None)).rpartition(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        assert b"all is well" in await said(host, int(port), ASK)
        async with asyncio.timeout(admin_http.CONNECTION_LIFE_S / 2):
            await http.close()
            await until_closed(reader)
        writer.close()
        with pytest.raises(ConnectionRefusedError):
            await asyncio.open_connection(host, int(port))

    asyncio.run(life())


def test_pages_stay_on_this_host_without_a_secret() -> None:
    async def life() -> None:
        http = AdminHttp(PAGES)
        with pytest.raises(ConfigError, match="other hosts"):
            await http.listen("0.0.0.0:0", None)
        await http.close()

    asyncio.run(life())


def test_a_taken_address_is_named() -> None:
    async def life() -> None:
        first, second = AdminHttp(PAGES), AdminHttp(PAGES)
        address = await first.listen("127.0.0.1:0", None)
        with pytest.raises(ConfigError, match=f"cannot listen on {address}"):
            await second.listen(address, None)
        await first.close()
        await second.close()

    asyncio.run(life())
