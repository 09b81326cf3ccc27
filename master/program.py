"""One master process from its configuration to its end: store, core, listeners, signals.

Owns the order of start and stop. A start that fails leaves nothing behind but a raised epoch. It
listens before it leads: whoever comes is told who does.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
from contextlib import AsyncExitStack
from typing import TYPE_CHECKING, Final

import msgspec

from kvstore.announcement import Announcement, announce, withdraw
from kvstore.clock import SystemClock
from kvstore.coordination.metadata_store import Candidate
from kvstore.errors import ConfigError, InvariantBroken
from kvstore.folder_lock import hold
from kvstore.loop_guard import tell_bugs
from kvstore.rpc.address import require_free
from kvstore.rpc.identity import ListenerIdentity, Role
from kvstore.standing import Standing
from master.event_dump import dump_events
from master.metadata import metadata_store
from master.office import Office
from master.reception import Reception
from master.restoring import ASIDE, lost_with
from master.state import MasterState

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from kvstore.config import ClusterConfig
    from kvstore.coordination.etcd_config import EtcdConfig
    from kvstore.coordination.metadata_store import Entry
    from kvstore.ids import Epoch
    from master.config import MasterConfig
    from master.event_ring import EventRing
    from master.leadership import Leadership
    from master.tunables import Tunables

ROLE: Final = "master"
EVENTS_FILE: Final = "master.events.jsonl"
LOCK_FILE: Final = "master.lock"
CRASH_FILE: Final = "master.crash.jsonl"
DUMP_SIGNAL: Final = signal.SIGUSR1
STOP_SIGNALS: Final = (signal.SIGINT, signal.SIGTERM)
SERVED_ROLES: Final = frozenset({Role.ENGINE, Role.WORKER, Role.OPERATOR})

_LOG = logging.getLogger(__name__)


async def serve(config: MasterConfig, cluster: ClusterConfig, etcd: EtcdConfig) -> None:
    """Run a master until a signal stops it. Raises what stopped it otherwise."""
    secret = cluster.secret()
    _make_folder(config)
    unix = config.unix_path()
    async with AsyncExitStack() as undo:
        # Before the campaign, which would fence a master that lives in the same folder, and before
        # the announcement, which would replace the other's.
        undo.callback(os.close, hold(config.data_dir / LOCK_FILE, "a master"))
        if unix is not None:
            require_free(unix)
        store = metadata_store(config.metadata, config.data_dir, cluster, etcd)
        undo.push_async_callback(store.close)
        local = "" if unix is None else f"unix:{unix}"
        listener = ListenerIdentity(cluster.name, secret, SERVED_ROLES, local_address=local)
        reception = Reception(listener)
        undo.push_async_callback(reception.close)
        listen = await reception.listen(str(config.listen))
        if local:
            await reception.listen(local)
        where = tuple(map(str, config.advertise)) or (listen,)
        candidate = Candidate(config.name or where[0], where)
        tunables = config.tunables(cluster.name, candidate.name, where)
        cores = Cores(tunables, config.data_dir)
        undo.push_async_callback(cores.close)
        path = None if unix is None else str(unix)
        told = Announcement(ROLE, os.getpid(), cluster.name, listen, None, path)

        def tell(leadership: Leadership) -> None:
            tell_standing(config.data_dir, told, leadership)

        office = Office(reception, store, SystemClock(), candidate, cores.make, tell)
        tell_bugs(asyncio.get_running_loop(), office.fail)
        if config.admin is not None:
            from master.admin import admin_pages  # only here: a third of all that is loaded

            pages = admin_pages(office.look)
            undo.push_async_callback(pages.close)
            told = msgspec.structs.replace(
                told, admin=await pages.listen(str(config.admin), secret)
            )
            _LOG.info("pages at http://%s/status", told.admin)
        _heed_signals(office, cores)
        _LOG.info("cluster %s: listening at %s", cluster.name, listen)
        announce(config.data_dir, told)
        undo.callback(withdraw, config.data_dir, ROLE)
        try:
            await office.run()
        except InvariantBroken:
            await cores.dump(CRASH_FILE)
            raise


def tell_standing(folder: Path, told: Announcement, leadership: Leadership) -> None:
    """Announce in which epoch this master leads, if it does, and log what it is.

    Where that cannot be written the old announcement stays: no reason to end a leader.
    """
    leads = leadership.standing is Standing.LEADING
    try:
        announce(folder, msgspec.structs.replace(told, epoch=leadership.epoch if leads else None))
    except OSError as error:
        _LOG.warning("the announcement in %s is out of date: %s", folder, error.strerror)
    _LOG.info("this master: %s in epoch %d", leadership.standing, leadership.epoch)


class Cores:
    """Makes the core of each term, and writes the last one's events into the data folder."""

    def __init__(self, tunables: Tunables, folder: Path) -> None:
        """None was made yet."""
        self._tunables = tunables
        self._folder = folder
        self._last: tuple[Epoch, EventRing] | None = None
        """Not the core itself: one that leads no more would keep a whole directory in memory."""
        self._writing: asyncio.Task[None] | None = None

    def make(self, epoch: Epoch, restored: Sequence[Entry], until_s: float) -> MasterState:
        """A core that leads in `epoch` until then, with what is durable. ConfigError if it is not
        ours.
        """
        try:
            core = MasterState(self._tunables, epoch, restored, until_s)
        except ConfigError as error:
            # Without a namespace or a tombstone pages might be taken for others (I12, I29).
            do = "put it back from a backup, or delete all metadata for the pool to begin anew"
            raise ConfigError(f"{error}; {do}") from error
        self._last = epoch, core.ring
        for key in core.damaged:
            _LOG.error(
                "metadata value %s is damaged: moved to %s; %s", key, ASIDE + key, lost_with(key)
            )
        return core

    async def dump(self, name: str) -> None:
        """Write the events now, if there are any; the file replaces the last one of that name.

        Where it cannot be written that is logged: no reason to end a leader, or to hide why one
        ends.
        """
        if self._last is not None:
            (epoch, ring), cluster = self._last, self._tunables.cluster
            facts: dict[str, str | float] = {"role": ROLE, "cluster": cluster, "epoch": epoch}
            try:
                await dump_events(self._folder / name, ring, **facts)
            except OSError as error:
                _LOG.error("events are not written to %s: %s", self._folder / name, error.strerror)

    def start_dump(self) -> None:
        """Write them in the background, unless that is going on."""
        if self._writing is None or self._writing.done():
            self._writing = asyncio.create_task(self.dump(EVENTS_FILE))

    async def close(self) -> None:
        """Let a dump that was started end."""
        if self._writing is not None:
            await asyncio.wait({self._writing})


def _make_folder(config: MasterConfig) -> None:
    try:
        config.data_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"folder {config.data_dir}: cannot be made: {error.strerror}") from error


def _heed_signals(office: Office, cores: Cores) -> None:
    loop = asyncio.get_running_loop()
    for each in STOP_SIGNALS:
        loop.add_signal_handler(each, office.stop)
    loop.add_signal_handler(DUMP_SIGNAL, cores.start_dump)
