"""One worker process from its configuration to its end: segments, listeners, links, signals.

Owns the order of start and stop: memory is owned, mapped and touched before anybody can connect;
at the end clients go first, the memory last. A start that fails leaves nothing behind.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
from contextlib import AsyncExitStack, suppress
from typing import TYPE_CHECKING, Final

from kvstore.announcement import Announcement, announce, withdraw
from kvstore.clock import SystemClock
from kvstore.errors import ConfigError, SegmentInUse
from kvstore.loop_guard import tell_bugs
from kvstore.rpc.address import bind, bound_address
from kvstore.rpc.identity import Identity, ListenerIdentity, Role
from kvstore.transfer.choice import Choice
from kvstore.transfer.mooncake_process import EngineSettings
from kvstore.wire.messages.common import Address
from workers.control_link import ControlLink
from workers.events import LeaveWanted
from workers.lent_segments import open_segments, open_staging
from workers.listeners import Listeners
from workers.looks import look
from workers.membership import Profile
from workers.mover import MoverThreads
from workers.report_line import ReportLine
from workers.service import Service
from workers.state import WorkerState

if TYPE_CHECKING:
    from pathlib import Path

    from kvstore.config import ClusterConfig
    from workers.config import WorkerConfig
    from workers.ingest import EngineDesk
    from workers.lent_segments import LentSegments

ROLE: Final = "worker"
SERVED_ROLES: Final = frozenset({Role.ENGINE, Role.WORKER, Role.OPERATOR})
SHM_COST: Final = 0
TCP_COST: Final = 10
MOONCAKE_COST: Final = 20
OWNED_PATIENCE_S: Final = 5.0
"""How long a segment may still be owned: a killed worker's transfer engines end after it did."""
OWNED_POLL_S: Final = 0.05

LOG: Final = logging.getLogger(__name__)


async def serve(config: WorkerConfig, cluster: ClusterConfig) -> None:
    """Run a worker until a signal stops it. Raises what stopped it otherwise.

    The caller's event loop serves the HTTP pages and waits for signals; control and data have
    threads of their own.
    """
    secret = cluster.secret()
    _make_folder(config.data_dir)
    stopping: asyncio.Future[None] = asyncio.get_running_loop().create_future()
    async with AsyncExitStack() as undo:
        clock = SystemClock()
        lent = await _own(config, cluster.name, clock, undo)
        sockets = [
            undo.enter_context(bind(address, secret))
            for address in (f"unix:{config.unix_path()}", str(config.listen))
        ]
        unix, tcp = (bound_address(sock) for sock in sockets)
        addresses = _addresses(config, unix, tcp)
        profile = Profile(config.id, config.host, addresses, lent.tiers, config.rack, config.zone)
        state = WorkerState(profile, lent.tables, config.scrub_bytes_per_s)
        identity = Identity(Role.WORKER, name=config.id, secret=secret, cluster=cluster.name)
        line = ReportLine(identity.renewed())
        engine = open_engine(config, lent, clock, undo)
        tables = state.holdings.segments
        staging = open_staging(config, cluster.name, lent, tables, clock, undo)
        reader = identity.renewed()
        service = Service(
            state, lent.all, clock, line, engine, staging,
            peers=Choice(config.transports, lambda: reader, clock),
            threads=MoverThreads(config.mover_threads, config.copy_threads),
        )  # fmt: skip
        undo.callback(service.close)
        greeter = ListenerIdentity(cluster.name, secret, SERVED_ROLES)
        listeners = Listeners(service, greeter, sockets)
        _end_on_signals(service, stopping)
        control = _control(service, config, identity, stopping)
        tell_bugs(asyncio.get_running_loop(), service.broken)
        control.start()
        undo.callback(control.stop)
        listeners.start()
        undo.callback(listeners.close)
        admin = None
        if config.admin is not None:
            from workers.admin import admin_pages  # only here: a third of all that is loaded

            pages = admin_pages(lambda: look(service, listeners, cluster.name, config.id))
            undo.push_async_callback(pages.close)
            admin = await pages.listen(str(config.admin), secret)
        _announce(config, cluster.name, unix, tcp, admin)
        undo.callback(withdraw, config.data_dir, ROLE)
        await stopping


async def _own(
    config: WorkerConfig, cluster: str, clock: SystemClock, undo: AsyncExitStack
) -> LentSegments:
    """`open_segments`, which waits for what is left of this worker's last life to end."""
    patient_until_s = None
    while True:
        try:
            async with AsyncExitStack() as tried:
                lent = open_segments(config, cluster, clock, tried)
                undo.push_async_exit(tried.pop_all())
                return lent
        except SegmentInUse as error:
            if patient_until_s is None:
                patient_until_s = clock.now_s() + OWNED_PATIENCE_S
                LOG.warning("waiting up to %.0f s: %s", OWNED_PATIENCE_S, error)
            if clock.now_s() >= patient_until_s:
                raise
        await asyncio.sleep(OWNED_POLL_S)


def _make_folder(folder: Path) -> None:
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"folder {folder}: cannot be made: {error.strerror}") from error


def open_engine(
    config: WorkerConfig, lent: LentSegments, clock: SystemClock, undo: AsyncExitStack
) -> EngineDesk | None:
    """The transfer engine in its child processes, where it is asked for; `undo` closes it.

    Raises as EngineChild does. Says what the engine does not keep peers from.
    """
    if "mooncake" not in config.transports:
        return None
    # Only now: it is installed only where it is used.
    from workers.engine_child import EngineChild, EngineSegment
    from workers.engine_source import EngineDesk as Desk

    host = config.advertise[0].host if config.advertise else config.listen.host
    settings = EngineSettings(host, config.mooncake_protocol, config.mooncake_device)
    if not settings.confined:
        LOG.warning(
            "mooncake: the transfer engine asks nobody for a secret: whoever reaches its ports on "
            "%s can read every page of this worker", host,
        )  # fmt: skip
    if not settings.read_only:
        LOG.warning("mooncake over %s: that peers only read is a convention", settings.protocol)
    for each in lent.devices:
        if not each.device.is_read_only_enforced:
            LOG.warning("mooncake: that peers only read %s is a convention", each.device.name)
    memory = EngineSegment(lent.memory.id, lent.memory.ownership, lent.memory.geometry)
    child = EngineChild(settings, [memory], lent.devices)
    undo.callback(child.close)
    return Desk(child, [lent.memory, *lent.devices], clock)


def _addresses(config: WorkerConfig, unix: str, tcp: str) -> tuple[Address, ...]:
    """How clients reach this worker, cheapest first."""
    outside = [str(each) for each in config.advertise] or [tcp]
    ways = [("shm", SHM_COST, [unix.removeprefix("unix:")]), ("tcp", TCP_COST, outside)]
    # The engine is asked for through the worker's own stream.
    ways.append(("mooncake", MOONCAKE_COST, outside))
    return tuple(
        Address(transport, where, cost + i)
        for transport, cost, places in ways
        if transport in config.transports
        for i, where in enumerate(places)
    )


def _end_on_signals(service: Service, stopping: asyncio.Future[None]) -> None:
    """SIGTERM takes leave of the leader and of readers first; SIGINT, or a second one, does not."""
    loop = asyncio.get_running_loop()

    def stop() -> None:
        if not stopping.done():
            stopping.set_result(None)

    def leave() -> None:
        loop.add_signal_handler(signal.SIGTERM, stop)
        LOG.info("leaving, once no reader needs this worker; a second signal ends it at once")
        service.dispatch(LeaveWanted())

    def left() -> None:
        loop.call_soon_threadsafe(stop)

    service.on_left = left
    loop.add_signal_handler(signal.SIGINT, stop)
    loop.add_signal_handler(signal.SIGTERM, leave)


def _control(
    service: Service, config: WorkerConfig, identity: Identity, stopping: asyncio.Future[None]
) -> ControlLink:
    """The link to the masters; a refusal at the first connection, or a bug, stops the worker."""
    loop = asyncio.get_running_loop()

    def fail(error: BaseException) -> None:
        if not stopping.done():
            stopping.set_exception(error)

    def ended(error: BaseException) -> None:
        with suppress(RuntimeError):  # the loop is closed: the worker has ended
            loop.call_soon_threadsafe(fail, error)

    masters = [str(each) for each in config.master]
    control = ControlLink(service, masters, identity, ended)
    service.control = control
    service.on_broken = ended
    return control


def _announce(config: WorkerConfig, cluster: str, unix: str, tcp: str, admin: str | None) -> None:
    announce(
        config.data_dir,
        Announcement(
            ROLE, os.getpid(), cluster, tcp, admin=admin, unix=unix.removeprefix("unix:"),
            worker=config.id,
        ),
    )  # fmt: skip
    LOG.info("worker %s of cluster %s: listening at %s and %s", config.id, cluster, tcp, unix)
