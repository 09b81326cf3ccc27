"""One master process from its configuration to its end: store, core, listeners, signals.

Owns the order of start and stop. A start that fails leaves nothing behind but a raised epoch.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
from contextlib import AsyncExitStack
from typing import TYPE_CHECKING, Final

from kvstore.announcement import Announcement, announce, withdraw
from kvstore.clock import SystemClock
from kvstore.coordination.metadata_store import Candidate, Leader
from kvstore.coordination.sqlite import SqliteStore
from kvstore.errors import ConfigError, InvariantBroken, Unavailable
from kvstore.rpc.address import require_free
from kvstore.rpc.identity import ListenerIdentity, Role
from master.admin import admin_pages
from master.event_dump import dump_events
from master.service import MasterService
from master.state import MasterState

if TYPE_CHECKING:
    from pathlib import Path

    from kvstore.config import ClusterConfig
    from master.config import MasterConfig

ROLE: Final = "master"
METADATA_FILE: Final = "metadata.db"
EVENTS_FILE: Final = "master.events.jsonl"
CRASH_FILE: Final = "master.crash.jsonl"
DUMP_SIGNAL: Final = signal.SIGUSR1
STOP_SIGNALS: Final = (signal.SIGINT, signal.SIGTERM)
SERVED_ROLES: Final = frozenset({Role.ENGINE, Role.WORKER, Role.OPERATOR})

_LOG = logging.getLogger(__name__)


async def serve(config: MasterConfig, cluster: ClusterConfig) -> None:
    """Run a master until a signal stops it. Raises what stopped it otherwise."""
    secret = cluster.secret()
    _make_folder(config)
    unix = config.unix_path()
    if unix is not None:
        # Before the campaign, which would fence a master that lives in the same folder.
        require_free(unix)
    async with AsyncExitStack() as undo:
        store = SqliteStore(config.data_dir / METADATA_FILE, cluster.name)
        undo.push_async_callback(store.close)
        await store.open()
        outcome = await store.campaign(Candidate(ROLE, (str(config.listen),)))
        if isinstance(outcome, Leader):
            raise Unavailable(f"master {outcome.name} leads")
        epoch = outcome.epoch
        restored = [entry async for page in store.load("") for entry in page]
        state = MasterState(config.tunables(cluster.name), epoch, restored)
        local = "" if unix is None else f"unix:{unix}"
        listener = ListenerIdentity(cluster.name, secret, SERVED_ROLES, epoch, local_address=local)
        service = MasterService(state, listener, store, SystemClock())
        dump = EventDump(state, config.data_dir, cluster=cluster.name, epoch=epoch)
        undo.push_async_callback(dump.close)
        _heed_signals(service, dump)
        listen = await service.listen(str(config.listen))
        if local:
            await service.listen(local)
        admin = None
        if config.admin is not None:
            pages = admin_pages(service.look)
            undo.push_async_callback(pages.close)
            admin = await pages.listen(str(config.admin), secret)
        path = None if unix is None else str(unix)
        where = Announcement(ROLE, os.getpid(), cluster.name, listen, admin, path, epoch)
        _announce(config, where)
        undo.callback(withdraw, config.data_dir, ROLE)
        try:
            await service.run()
        except InvariantBroken:
            await dump.write(CRASH_FILE)
            raise


class EventDump:
    """Writes the core's last events, with the facts that a reader needs, into the data folder."""

    def __init__(self, state: MasterState, folder: Path, **facts: str | float) -> None:
        """Write nothing yet."""
        self._state = state
        self._folder = folder
        self._facts = facts
        self._writing: asyncio.Task[None] | None = None

    async def write(self, name: str) -> None:
        """Write them now; the file replaces the last one of that name."""
        await dump_events(self._folder / name, self._state.ring, role=ROLE, **self._facts)

    def start(self) -> None:
        """Write them in the background, unless that is going on."""
        if self._writing is None or self._writing.done():
            self._writing = asyncio.create_task(self.write(EVENTS_FILE))

    async def close(self) -> None:
        """Let a dump that was started end."""
        if self._writing is not None:
            await asyncio.wait({self._writing})


def _make_folder(config: MasterConfig) -> None:
    try:
        config.data_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"folder {config.data_dir}: cannot be made: {error.strerror}") from error


def _heed_signals(service: MasterService, dump: EventDump) -> None:
    loop = asyncio.get_running_loop()
    for each in STOP_SIGNALS:
        loop.add_signal_handler(each, service.stop)
    loop.add_signal_handler(DUMP_SIGNAL, dump.start)


def _announce(config: MasterConfig, where: Announcement) -> None:
    announce(config.data_dir, where)
    _LOG.info("cluster %s, epoch %d: listening at %s", where.cluster, where.epoch, where.listen)
    if where.admin:
        _LOG.info("pages at http://%s/status", where.admin)
