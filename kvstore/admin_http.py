"""HTTP pages of a server for people and monitoring, the same for master and worker. Owns aiohttp.

Read-only and without authentication, so a page may name no key and no client. What a page says is
the server's business.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Final, cast

import msgspec
from aiohttp import web

from kvstore.rpc.address import bind, bound_address
from kvstore.wire.named import named

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

CONNECTIONS_MAX: Final = 64
"""Open at once; a further one is closed unheard."""
CONNECTION_LIFE_S: Final = 10.0
"""Time for the question, the answer and the way of both: Prometheus, too, gives up after so long.

One bound for whoever is silent, asks byte by byte or does not read.
"""
CLOSE_TIMEOUT_S: Final = 1.0
OK: Final = 200
NOT_FOUND: Final = 404
METHOD_NOT_ALLOWED: Final = 405


class Page(msgspec.Struct, frozen=True):
    """What a path answers."""

    body: bytes
    content_type: str = "text/plain"
    status: int = OK


def json_page(value: object, status: int = OK) -> Page:
    """Structs become objects with names."""
    return Page(msgspec.json.encode(named(value)), "application/json", status)


class AdminHttp:
    """One HTTP listener. A connection gets one answer and CONNECTION_LIFE_S at most (I7)."""

    def __init__(
        self, pages: Mapping[str, Callable[[], Page]], life_s: float = CONNECTION_LIFE_S
    ) -> None:
        """Nothing listens yet; `pages` has what makes each path's page when it is asked for."""
        self._pages = pages
        self._life_s = life_s
        self._listener: asyncio.Server | None = None
        self._server: web.Server | None = None

    async def listen(self, address: str, secret: bytes | None) -> str:
        """Serve at "host:port", once; the address with its real port.

        ConfigError when it is taken, or open to other hosts in a cluster without a secret.
        """
        sock = bind(address, secret)
        server = self._server = web.Server(self._answer)
        self._listener = await asyncio.get_running_loop().create_server(
            lambda: _Connection(server, self._life_s), sock=sock
        )
        return bound_address(sock)

    async def close(self) -> None:
        """Stop serving."""
        if self._listener is not None and self._server is not None:
            self._listener.close()
            self._server.pre_shutdown()
            await self._server.shutdown(CLOSE_TIMEOUT_S)

    async def _answer(self, request: web.BaseRequest) -> web.Response:
        make = self._pages.get(request.path)
        if make is None:
            page = Page(b"there are " + ", ".join(self._pages).encode() + b"\n", status=NOT_FOUND)
        elif request.method not in ("GET", "HEAD"):
            page = Page(b"pages are only read, by GET\n", status=METHOD_NOT_ALLOWED)
        else:
            page = make()
        response = web.Response(body=page.body, status=page.status, content_type=page.content_type)
        response.force_close()
        return response


class _Connection(web.RequestHandler):
    def __init__(self, server: web.Server, life_s: float) -> None:
        super().__init__(
            server,
            loop=asyncio.get_running_loop(),
            access_log=None,  # type: ignore[arg-type]  # what aiohttp takes for "no log"
            lingering_time=0.0,
        )
        self._server = server
        self._life_s = life_s
        self._end: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        abort = cast("asyncio.Transport", transport).abort
        if len(self._server.connections) > CONNECTIONS_MAX:
            abort()
        else:
            self._end = asyncio.get_running_loop().call_later(self._life_s, abort)

    def connection_lost(self, exc: BaseException | None) -> None:
        if self._end is not None:
            self._end.cancel()
        super().connection_lost(exc)
