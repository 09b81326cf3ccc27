"""A master that answers a worker as a test tells it. Not a test."""

from __future__ import annotations

import asyncio
import threading
from queue import SimpleQueue
from typing import TYPE_CHECKING, Final, TypeVar

from kvstore.errors import NotLeader, Unavailable
from kvstore.rpc.identity import ListenerIdentity
from kvstore.rpc.server import Server
from kvstore.wire.messages.hello import Done
from kvstore.wire.messages.membership import (
    Heartbeat,
    HeartbeatNoted,
    InventoryEnd,
    InventoryWanted,
    LeaveWorker,
    OfferInventory,
    RegisterWorker,
    WorkerAccepted,
)
from kvstore.wire.messages.puts import Sealed, SealedNoted
from tests.unit.worker_scripts import EPOCH

if TYPE_CHECKING:
    from collections.abc import Callable

    from kvstore.rpc.peer import Peer
    from kvstore.wire.messages.base import Message

CLUSTER: Final = "testing"
PATIENCE_S: Final = 20.0
"""Only a test that fails waits so long."""

Answer = TypeVar("Answer")


class Leader:
    """A master that answers as it is told. Runs in a thread of its own."""

    def __init__(self, epoch: int = EPOCH, address: str = "127.0.0.1:0",
                 secret: bytes | None = None) -> None:  # fmt: skip
        """Listen; every Sealed is acknowledged until `on_sealed` is replaced."""
        self.epoch = epoch
        self.seen: SimpleQueue[Message] = SimpleQueue()
        """Everything that was asked but heartbeats."""
        self.beats: SimpleQueue[Heartbeat] = SimpleQueue()
        self.on_sealed: Callable[[Sealed], Message | None] = acknowledge
        """Its None leaves the report without an answer; see `late`."""
        self.late: SimpleQueue[tuple[Peer, int]] = SimpleQueue()
        self.wants_rows = False
        self.answers_beats = True
        self.leads = True
        self.where: tuple[str, ...] = ()
        """Who it says leads instead."""
        self.doubts = 0
        """So many requests are refused, as by a leader whose lease is in doubt."""
        self.lets_go = True
        """Whether a worker that leaves is told that no reader needs it."""
        self.lost_after_s = 3.0
        self._control: Peer | None = None
        self._served = threading.Event()
        self._ready = threading.Event()
        self._address, self._secret = address, secret
        self._thread = threading.Thread(target=lambda: asyncio.run(self._live()))
        self._thread.start()
        self._ready.wait()

    @property
    def address(self) -> str:
        """Where it listens."""
        return self._address

    def await_served(self) -> None:
        """Until a worker's inventory has been taken in."""
        assert self._served.wait(PATIENCE_S)

    def expect(self, kind: type[Answer]) -> Answer:
        """The next message of that kind."""
        while True:
            message = self.seen.get(timeout=PATIENCE_S)
            if isinstance(message, kind):
                return message

    def command(self, message: Message) -> Message:
        """Ask the worker and wait for its answer."""
        return self.begin_command(message)()

    def begin_command(self, message: Message) -> Callable[[], Message]:
        """Ask the worker; the result waits for its answer."""
        control = self._control
        assert control is not None
        call = asyncio.run_coroutine_threadsafe(control.call(message, PATIENCE_S), self._loop)
        return lambda: call.result(PATIENCE_S)

    def answer(self, message: Message) -> None:
        """Answer the oldest report that was left without one."""
        peer, request_id = self.late.get(timeout=PATIENCE_S)
        self._loop.call_soon_threadsafe(peer.reply, request_id, message)

    def stop(self) -> None:
        """End every connection and the thread. May be repeated."""
        if not self._thread.is_alive():
            return
        self._loop.call_soon_threadsafe(self._stopping.set)
        self._thread.join()

    async def _live(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._stopping = asyncio.Event()
        identity = ListenerIdentity(CLUSTER, self._secret, epoch=self.epoch)
        server = Server(identity, lambda *_: None, self._on_request, lambda _: None)
        self._address = await server.listen(self._address)
        self._ready.set()
        await self._stopping.wait()
        await server.close()

    def _on_request(self, peer: Peer, request_id: int, message: Message) -> None:
        reply: Message | None = Done()
        if not self.leads:
            self.seen.put(message)
            raise NotLeader(self.where)
        if self.doubts:
            self.doubts -= 1
            self.seen.put(message)
            raise Unavailable(f"in doubt, {self.doubts} times more")
        match message:
            case Heartbeat():
                self.beats.put(message)
                if not self.answers_beats:
                    return
                peer.reply(request_id, HeartbeatNoted(self.epoch, True))
                return
            case RegisterWorker():
                self._control = peer
                reply = WorkerAccepted(self.epoch, 0.05, self.lost_after_s)
            case OfferInventory():
                starts = tuple(chunk.chunk_start for chunk in message.chunks)
                reply = InventoryWanted(starts if self.wants_rows else ())
            case LeaveWorker() if not self.lets_go:
                reply = None
            case Sealed():
                reply = self.on_sealed(message)
        if reply is None:
            self.late.put((peer, request_id))
        else:
            peer.reply(request_id, reply)
        self.seen.put(message)
        if isinstance(message, InventoryEnd):
            self._served.set()


def acknowledge(message: Sealed) -> SealedNoted:
    """Everything reported is welcome."""
    return SealedNoted(bytes(len(message.offsets) // 8))
