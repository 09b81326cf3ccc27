"""The worker's HTTP pages for people and monitoring: /health, /status, /metrics. Owns aiohttp.

Read-only and without authentication: what they say names no key and no client.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import msgspec
from aiohttp import web

from kvstore.rpc.address import bind, bound_address
from workers.metrics import CONTENT_TYPE, exposition

if TYPE_CHECKING:
    from collections.abc import Callable

    from workers.metrics import Look

CLOSE_TIMEOUT_S: Final = 1.0
BODY_BYTES_MAX: Final = 1024
UNAVAILABLE: Final = 503


class AdminPages:
    """One HTTP listener that answers from what `look` returns."""

    def __init__(self, look: Callable[[], Look]) -> None:
        """Nothing listens yet."""
        self._look = look
        application = web.Application(client_max_size=BODY_BYTES_MAX)
        application.router.add_get("/health", self._health)
        application.router.add_get("/status", self._status)
        application.router.add_get("/metrics", self._metrics)
        self._runner = web.AppRunner(
            application, access_log=None, handle_signals=False, shutdown_timeout=CLOSE_TIMEOUT_S
        )

    async def listen(self, address: str, secret: bytes | None) -> str:
        """Serve at "host:port"; the address with its real port.

        ConfigError when it is taken, or open to other hosts in a cluster without a secret.
        """
        sock = bind(address, secret)
        where = bound_address(sock)
        await self._runner.setup()
        await web.SockSite(self._runner, sock).start()
        return where

    async def close(self) -> None:
        """Stop serving."""
        await self._runner.cleanup()

    async def _health(self, _: web.Request) -> web.Response:
        """200 while a leader has this worker; 503 while it takes no pages (reads go on)."""
        look = self._look()
        body = {"serving": look.serving, "fenced": look.fenced, "epoch": look.epoch}
        taking = look.serving and not look.fenced
        return _json(body, 200 if taking else UNAVAILABLE)

    async def _status(self, _: web.Request) -> web.Response:
        """Everything that /metrics says, for people."""
        return _json(self._look(), 200)

    async def _metrics(self, _: web.Request) -> web.Response:
        """Prometheus' text format."""
        return web.Response(body=exposition(self._look), content_type=CONTENT_TYPE)


def _json(value: object, status: int) -> web.Response:
    body = msgspec.json.encode(value)
    return web.Response(body=body, status=status, content_type="application/json")
