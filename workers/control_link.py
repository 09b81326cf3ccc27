"""The control connection to the leader: an event loop in a thread of its own.

Carries heartbeats, inventories and commands, and nothing of the data plane, so that no copy can
delay a heartbeat (I27). Finds the leader among the masters (kvstore.rpc.search) and comes back to
it. Once the worker has fenced itself for want of answers, it is looked whether another leads.
"""

from __future__ import annotations

import asyncio
import logging
import os
import threading
from contextlib import suppress
from random import Random
from typing import TYPE_CHECKING, Final

from kvstore import limits
from kvstore.errors import (
    AccessDenied,
    DeadlineExceeded,
    KVStoreError,
    MalformedMessage,
    NotLeader,
    StaleEpoch,
    Unavailable,
    VersionMismatch,
)
from kvstore.loop_guard import tell_bugs
from kvstore.rpc.failure import failure_of
from kvstore.rpc.search import SILENT_PATIENCE_S, Search
from kvstore.rpc.server import dial_peer
from kvstore.wire.messages.membership import LeaveWorker, WorkerAccepted
from kvstore.wire.messages.puts import Ingest
from workers.events import (
    MOVER,
    CommandReceived,
    IngestRequested,
    LinkClosed,
    LinkOpened,
    MasterAnswered,
    Tick,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from kvstore.rpc.identity import Identity
    from kvstore.rpc.peer import Peer
    from kvstore.wire.messages.base import Message
    from workers.service import Service

LOG: Final = logging.getLogger(__name__)
TICK_MAX_S: Final = 0.25
TICK_MIN_S: Final = 0.005
ANSWER_TIMEOUT_S: Final = limits.WORKER_LOST_AFTER_S
"""A call that the master has not answered by then: the link counts as broken."""
REFUSALS: Final = (AccessDenied, VersionMismatch)
"""What trying again cannot mend: at the first connection they stop the start."""


class ControlLink:
    """One at a time. `call`, `answer` and `drop` are for any thread."""

    def __init__(
        self,
        service: Service,
        masters: Sequence[str],
        identity: Identity,
        on_refused: Callable[[KVStoreError], None],
    ) -> None:
        """Dial nothing yet. `on_refused` hears of a refusal before the first connection."""
        self._service = service
        self._search = Search(masters, Random(os.urandom(8)))
        self._identity = identity
        self._on_refused = on_refused
        self._thread = threading.Thread(target=self._run, name="worker-control")
        self._ready = threading.Event()
        self._loop: asyncio.AbstractEventLoop
        self._main: asyncio.Task[None]
        self._peer: Peer | None = None
        self._address = ""
        """Of the peer."""
        self._looking: asyncio.Task[None] | None = None
        self._commands: dict[int, tuple[Peer, int]] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._is_over = False
        self._was_connected = False
        self._told: set[str] = set()
        """What was logged of masters since a leader last accepted this worker."""
        self._unanswered: set[type[Message]] = set()
        """Calls that were logged as not answered, until one of their kind is."""

    def start(self) -> None:
        """Begin to look for the leader; returns once other threads may call."""
        self._thread.start()
        self._ready.wait()

    def stop(self) -> None:
        """End the connection and the thread."""
        with suppress(RuntimeError):  # the loop is closed: a bug has ended it
            self._loop.call_soon_threadsafe(self._main.cancel)
        self._thread.join()

    def call(self, number: int, message: Message) -> None:
        """Ask the leader; its reply becomes MasterAnswered."""
        self._in_loop(self._start_call, number, message)

    def answer(self, command: int, message: Message) -> None:
        """Reply to a command, or to an Ingest of the leader's."""
        self._in_loop(self._answer, command, message)

    def drop(self, reason: str) -> None:
        """End the present connection; another is dialled."""
        self._in_loop(self._drop, reason)

    def _in_loop(self, function: Callable[..., None], *arguments: object) -> None:
        if threading.current_thread() is self._thread:
            function(*arguments)
        else:
            with suppress(RuntimeError):  # the loop is closed: the worker is stopping
                self._loop.call_soon_threadsafe(function, *arguments)

    # --- in the loop's thread ---------------------------------------------------------------

    def _run(self) -> None:
        with suppress(asyncio.CancelledError):
            try:
                asyncio.run(self._live())
            except Exception as error:  # no heartbeat would follow, and nobody hear why
                self._service.broken(error)

    async def _live(self) -> None:
        self._loop = asyncio.get_running_loop()
        task = asyncio.current_task()
        assert task is not None
        self._main = task
        tell_bugs(self._loop, self._service.broken)
        self._ready.set()
        try:
            async with asyncio.TaskGroup() as both:
                both.create_task(self._tick())
                both.create_task(self._follow())
        finally:
            self._is_over = True
            for each in tuple(self._tasks):
                each.cancel()

    async def _follow(self) -> None:
        """Be connected to a master, and to the next one when that ends."""
        search = self._search
        while True:
            address = search.next()
            try:
                ended = await self._stay(address)
            except KVStoreError as error:
                self._refused(address, error)
                ended = error
            search.failed(address, ended)
            await asyncio.sleep(search.next_s(ended.retry_after_s))

    def _tell(self, address: str, error: KVStoreError) -> None:
        """Log why a master is not the one: once, not at every try."""
        told = f"master {address}: {error}"
        if told not in self._told:
            LOG.log(logging.INFO if isinstance(error, NotLeader) else logging.WARNING, told)
            self._told.add(told)

    def _tell_unanswered(self, message: Message, error: Unavailable) -> None:
        """Log it once for each kind of call, unless what is told of the connection says it all."""
        kind = type(message)
        lost = self._peer is None or self._peer.closed_because is not None
        waits = kind is LeaveWorker and isinstance(error, DeadlineExceeded)  # for readers
        if not lost and not waits and kind not in self._unanswered:
            self._unanswered.add(kind)
            LOG.warning("master %s: %s: %s", self._address, kind.__name__, error)

    def _refused(self, address: str, error: KVStoreError) -> None:
        self._tell(address, error)
        if isinstance(error, REFUSALS) and not self._was_connected:
            self._on_refused(error)

    async def _stay(self, address: str) -> KVStoreError:
        """Be connected to the master at `address`; why the connection has ended."""
        ended = asyncio.Event()
        patience_s = self._search.patience_s(address, limits.HELLO_TIMEOUT_S)
        peer = await dial_peer(
            address, self._identity, self._on_request, lambda _: ended.set(), patience_s
        )
        self._search.greeted(address)
        self._peer, self._address, self._was_connected = peer, address, True
        self._service.line.use(address)
        try:
            self._service.dispatch(LinkOpened())
            await ended.wait()
        finally:
            self._peer = None
            self._commands.clear()
            self._service.line.use(None)
            self._service.dispatch(LinkClosed())
            if not ended.is_set():  # the worker is stopping
                peer.abort(Unavailable("the worker is stopping"))
                await ended.wait()
        assert peer.closed_because is not None
        self._tell(address, peer.closed_because)
        return peer.closed_because

    async def _tick(self) -> None:
        service = self._service
        while True:
            service.dispatch(Tick())
            service.disks.look_soon()
            if self._search.has_others and service.state.is_fenced(service.clock.now_s()):
                self._look_elsewhere()
            wait_s = service.state.next_wakeup() - service.clock.now_s()
            await asyncio.sleep(min(TICK_MAX_S, max(TICK_MIN_S, wait_s)))

    def _look_elsewhere(self) -> None:
        """See, beside the connection that keeps silent, whether another master leads by now."""
        if self._peer is not None and (self._looking is None or self._looking.done()):
            self._looking = self._loop.create_task(self._find_other(self._peer))
            self._keep(self._looking)

    async def _find_other(self, present: Peer) -> None:
        for address in self._search.others(self._address):
            with suppress(KVStoreError):
                found = await dial_peer(
                    address, self._identity, _refuse, lambda _: None, SILENT_PATIENCE_S
                )
                found.close()
                if found.welcome is not None and found.welcome.epoch > self._service.state.epoch:
                    present.abort(NotLeader((address,)))
                    return

    def _start_call(self, number: int, message: Message) -> None:
        if self._is_over:  # what is begun now nobody would end
            return
        self._keep(self._loop.create_task(self._call(number, message)))

    def _keep(self, task: asyncio.Task[None]) -> None:
        """Hold a task until its end, which no exception may be."""
        self._tasks.add(task)
        task.add_done_callback(self._done)

    def _done(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            self._service.broken(error)

    async def _call(self, number: int, message: Message) -> None:
        reply: Message | None = None
        peer = self._peer
        try:
            if peer is not None:
                reply = await peer.call(message, ANSWER_TIMEOUT_S)
            if isinstance(reply, WorkerAccepted):
                LOG.info("master %s: accepted in epoch %d", self._address, reply.epoch)
                self._told.clear()
                self._search.succeeded()
            if reply is not None:
                self._unanswered.discard(type(message))
        except StaleEpoch as error:
            if peer is not None:
                peer.abort(error)
        except Unavailable as error:
            self._tell_unanswered(message, error)
        except KVStoreError as error:
            reply = failure_of(error)
        self._service.dispatch(MasterAnswered(number, reply))

    def _on_request(self, peer: Peer, request_id: int, message: Message) -> None:
        number = self._service.next_number()
        self._commands[number] = (peer, request_id)
        if isinstance(message, Ingest):
            self._service.dispatch(IngestRequested(number, MOVER, message))
        else:
            self._service.dispatch(CommandReceived(number, message))

    def _answer(self, command: int, message: Message) -> None:
        peer, request_id = self._commands.pop(command, (None, 0))
        if peer is not None:
            peer.reply(request_id, message)

    def _drop(self, reason: str) -> None:
        if self._peer is not None:
            self._peer.abort(Unavailable(reason))


def _refuse(peer: Peer, request_id: int, message: Message) -> None:
    del peer, request_id
    raise MalformedMessage(f"{type(message).__name__} on a connection that only looks")
