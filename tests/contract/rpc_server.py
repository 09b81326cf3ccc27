"""A real Server on an event loop in a thread of its own, for the contract tests of the rpc."""

from __future__ import annotations

import asyncio
import queue
import threading
from typing import TYPE_CHECKING, Final, Self

import uvloop

from kvstore.errors import OutOfSpace, Unavailable
from kvstore.rpc.server import Server
from kvstore.wire.messages.hello import Done
from kvstore.wire.messages.namespaces import NamespaceOpened
from kvstore.wire.messages.reads import GetStatus, Probe, Probed, Remove

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import TracebackType

    from kvstore.rpc.identity import ListenerIdentity
    from kvstore.rpc.peer import Peer
    from kvstore.wire.messages.base import Message
    from kvstore.wire.messages.hello import Hello

PATIENCE_S: Final = 10.0
"""Longer than anything here takes; reached only by a test that fails."""

LOOPS: Final[dict[str, Callable[[], asyncio.AbstractEventLoop]]] = {
    "asyncio": asyncio.new_event_loop,
    "uvloop": uvloop.new_event_loop,
}


class RunningServer:
    """Answers Probe with one byte a key, refuses Remove, holds GetStatus back until `release`.

    `opened` and `closed` receive a peer's name when it comes and goes.
    """

    def __init__(
        self,
        listener: ListenerIdentity,
        *addresses: str,
        loop: str = "uvloop",
        sessions_max: int = 64,
        admit: Callable[[Hello], None] = lambda hello: None,
    ) -> None:
        """Listen on `addresses`, by default a free TCP port."""
        self.opened: queue.Queue[str] = queue.Queue()
        self.closed: queue.Queue[str] = queue.Queue()
        self.hellos: list[Hello] = []
        self.held: queue.Queue[tuple[Peer, int]] = queue.Queue()
        self.addresses: list[str] = []
        self._listener = listener
        self._wanted = addresses or ("127.0.0.1:0",)
        self._make_loop = LOOPS[loop]
        self._sessions_max = sessions_max
        self._admit = admit
        self._started: queue.Queue[BaseException | None] = queue.Queue()
        self._thread = threading.Thread(target=self._run, name="rpc server")

    @property
    def address(self) -> str:
        """The first address listened on."""
        return self.addresses[0]

    def __enter__(self) -> Self:
        """Start; raise what kept it from starting."""
        self._thread.start()
        error = self._started.get(timeout=PATIENCE_S)
        if error is not None:
            self._thread.join(PATIENCE_S)
            raise error
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Close the server and end the thread."""
        self.call(self._stop.set)
        self._thread.join(PATIENCE_S)
        assert not self._thread.is_alive()

    def call(self, what: Callable[[], object]) -> None:
        """Do something in the loop's thread, soon."""
        self._loop.call_soon_threadsafe(what)

    def release(self, count: int, message: Message | None = None) -> None:
        """Answer `count` held requests, the latest first, within one turn of the loop."""
        held = [self.held.get(timeout=PATIENCE_S) for _ in range(count)]

        def answer() -> None:
            for peer, request_id in reversed(held):
                peer.reply(request_id, message or NamespaceOpened(b"", request_id))

        self.call(answer)

    def _run(self) -> None:
        with asyncio.Runner(loop_factory=self._make_loop) as runner:
            runner.run(self._serve())

    async def _serve(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._stop = asyncio.Event()
        self.server = Server(
            self._listener,
            self._on_open,
            self._on_request,
            self._on_close,
            sessions_max=self._sessions_max,
        )
        try:
            for address in self._wanted:
                self.addresses.append(await self.server.listen(address))
        except BaseException as error:
            await self.server.close()
            self._started.put(error)
            return
        self._started.put(None)
        await self._stop.wait()
        await self.server.close()

    def _on_open(self, peer: Peer, hello: Hello) -> None:
        self._admit(hello)
        self.hellos.append(hello)
        self.opened.put(hello.name)

    def _on_request(self, peer: Peer, request_id: int, message: Message) -> None:
        match message:
            case Probe():
                peer.reply(request_id, Probed(b"\1" * (len(message.keys) // 32)))
            case Remove():
                error = OutOfSpace("nothing can be removed now")
                error.retry_after_s = 0.25
                raise error
            case GetStatus():
                self.held.put((peer, request_id))
            case Done():
                peer.close(Unavailable("as asked"))
            case _:
                raise AssertionError(message)

    def _on_close(self, peer: Peer) -> None:
        assert peer.hello is not None
        self.closed.put(peer.hello.name)
