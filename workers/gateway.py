"""A gateway: OpenAI's API in front of one model's inference workers.

    python -m workers.gateway --master HOST:PORT --worker HOST:PORT

A client of the pool that moves no page and loads no model: it learns from a worker what runs
there, and opens tickets. Any number of gateways may serve one fleet.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
from contextlib import AsyncExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from aiohttp import web

from kvstore import limits
from kvstore.aio import AsyncKVStore
from kvstore.announcement import Announcement, announce, withdraw
from kvstore.clock import SystemClock
from kvstore.errors import BadValue, Unavailable
from kvstore.rpc.address import bind, bound_address
from kvstore.startup import run_server
from workers.chat_formats import chat_of
from workers.engine_options import pool_parser, secret_of
from workers.gateway_http import Gateway, Served
from workers.gateway_relay import Fleet, Patience
from workers.gateway_workers import InferenceWorkers
from workers.tracing import name_requests, spans_of

if TYPE_CHECKING:
    import argparse
    from collections.abc import Coroutine, Sequence

    from workers.serve_messages import About

ROLE: Final = "gateway"
FIRST_TOKEN_S: Final = 30.0
DEADLINE_S: Final = 600.0
START_S: Final = 60.0
"""Time for one of the workers to be there."""
AGAIN_S: Final = 0.5
DRAIN_S: Final = 30.0
CLOSE_S: Final = 2.0

LOG: Final = logging.getLogger(__name__)


async def serve(options: argparse.Namespace) -> None:
    """Run until a signal ends it."""
    secret = secret_of(options)
    async with AsyncExitStack() as undo:
        sock = undo.enter_context(bind(options.listen, secret))
        store = await undo.enter_async_context(
            await AsyncKVStore.connect(
                options.master, tenant=options.tenant, secret=secret, name=ROLE
            )
        )
        workers = InferenceWorkers(secret)
        undo.push_async_callback(workers.close)
        about = await asked(workers, options.worker)
        opened = await store.open(about.content, about.layout)
        chat = chat_of(about.tokenizer)
        patience = Patience(options.first_token_s, options.deadline_s)
        spans = spans_of(os.environ, ROLE)
        undo.push_async_callback(asyncio.to_thread, spans.close)
        fleet = Fleet(
            store, workers, opened, chat.end_token, patience, SystemClock(), about.hashing
        )
        undo.push_async_callback(fleet.close)
        await fleet.present()  # nothing yet: whoever leads now learns of tickets as they are opened
        gateway = Gateway(fleet, Served(about.model, chat, about.context_tokens), spans)
        runner = web.AppRunner(
            gateway.application(), handler_cancellation=True, shutdown_timeout=CLOSE_S,
            access_log=None,
        )  # fmt: skip
        await runner.setup()
        undo.push_async_callback(runner.cleanup)
        site = web.SockSite(runner, sock)
        await site.start()
        if options.data_dir is not None:
            announced = Announcement(ROLE, os.getpid(), "", bound_address(sock))
            announce(options.data_dir, announced)
            undo.callback(withdraw, options.data_dir, ROLE)
        keeping = asyncio.ensure_future(fleet.keep_on())
        undo.callback(keeping.cancel)
        ended = asyncio.Event()
        leave = _leave_asked(ended)
        await _first_of(keeping, leave.wait(), ended.wait())
        if leave.is_set():
            LOG.info("answering what was asked; SIGINT or a second SIGTERM ends it at once")
            await site.stop()
            await _first_of(keeping, gateway.drain(), ended.wait(), limit_s=options.drain_s)
        if keeping.done():
            keeping.result()


def _leave_asked(ended: asyncio.Event) -> asyncio.Event:
    """Set by SIGTERM; `ended` by SIGINT, and by a second SIGTERM."""
    loop, leave = asyncio.get_running_loop(), asyncio.Event()
    loop.add_signal_handler(signal.SIGINT, ended.set)
    loop.add_signal_handler(signal.SIGTERM, lambda: (ended if leave.is_set() else leave).set())
    return leave


async def _first_of(
    keeping: asyncio.Future[None],
    *others: Coroutine[Any, Any, object],
    limit_s: float | None = None,
) -> None:
    """Until one of them has ended; the program ends the rest."""
    tasks: list[asyncio.Future[Any]] = [keeping, *map(asyncio.ensure_future, others)]
    await asyncio.wait(tasks, timeout=limit_s, return_when=asyncio.FIRST_COMPLETED)


async def asked(workers: InferenceWorkers, places: Sequence[str]) -> About:
    """What the workers run, by the first that answers. Unavailable when none does in START_S."""
    ends_s = asyncio.get_running_loop().time() + START_S
    while True:
        for where in places:
            try:
                return await workers.about(where)
            except Unavailable as error:
                LOG.info("%s", error)
        if asyncio.get_running_loop().time() > ends_s:
            raise Unavailable(f"no worker at {', '.join(places)} within {START_S:g} s")
        await asyncio.sleep(AGAIN_S)


def run(arguments: Sequence[str]) -> None:
    """Parse the command line and serve."""
    parser = pool_parser("workers.gateway", "Serves OpenAI's API for a fleet of workers.")
    parser.add_argument(
        "--worker", action="append", required=True, metavar="HOST:PORT",
        help="an inference worker, to learn the model from; several are tried in turn",
    )  # fmt: skip
    parser.add_argument("--listen", default=f"127.0.0.1:{limits.GATEWAY_PORT}", metavar="HOST:PORT")
    parser.add_argument("--tenant", default="default", metavar="NAME")
    parser.add_argument(
        "--first-token-s", type=float, default=FIRST_TOKEN_S, metavar="SECONDS",
        help="time to the first token that admission goes by",
    )  # fmt: skip
    parser.add_argument(
        "--deadline-s", type=float, default=DEADLINE_S, metavar="SECONDS", help="of each request"
    )
    parser.add_argument(
        "--drain-s", type=float, default=DRAIN_S, metavar="SECONDS",
        help="after SIGTERM, for answers that are under way",
    )  # fmt: skip
    parser.add_argument(
        "--data-dir", type=Path, metavar="FOLDER", help=f"announce the address in {ROLE}.json"
    )
    options = parser.parse_args(arguments)
    for field in ("first_token_s", "deadline_s", "drain_s"):
        if not 0 < getattr(options, field) < float("inf"):
            raise BadValue(field, getattr(options, field), "more than 0 seconds")
    name_requests(logging.getLogger().handlers)
    asyncio.run(serve(options))


def main() -> None:
    """Run the program; ends the process."""
    run_server("workers.gateway", run)


if __name__ == "__main__":
    main()
