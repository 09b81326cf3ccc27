"""The master's HTTP pages for people and monitoring: /health, /status, /metrics. Owns aiohttp.

Read-only and without authentication: what they say names no key and no client.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import msgspec
from aiohttp import web

from kvstore.rpc.address import bind, bound_address
from kvstore.wire.named import named
from master.metrics import CONTENT_TYPE, exposition

if TYPE_CHECKING:
    from collections.abc import Callable

    from kvstore.wire.messages.reads import Status
    from master.metrics import ShellCounts

CLOSE_TIMEOUT_S: Final = 1.0
BODY_BYTES_MAX: Final = 1024
JSON: Final = "application/json"


class AdminPages:
    """One HTTP listener that answers from what `look` returns."""

    def __init__(self, look: Callable[[], tuple[Status, ShellCounts]]) -> None:
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
        """200 while the master serves; `persisting` is false while metadata cannot be stored."""
        status, counts = self._look()
        return _json(
            {
                "serving": True,
                "persisting": counts.is_persisting,
                "cluster": status.cluster,
                "epoch": status.epoch,
            }
        )

    async def _status(self, _: web.Request) -> web.Response:
        """What `kvharbor status --json` prints."""
        return _json(self._look()[0])

    async def _metrics(self, _: web.Request) -> web.Response:
        """Prometheus' text format."""
        return web.Response(body=exposition(self._look), content_type=CONTENT_TYPE)


def _json(value: object) -> web.Response:
    return web.Response(body=msgspec.json.encode(named(value)), content_type=JSON)
