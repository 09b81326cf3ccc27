"""A TCP proxy between two processes under test, which cuts, holds, delays or resets on command.

All proxies of a test run on one event loop in a thread of its own. A command has taken effect when
it returns. What chance decides (delays, where a fragile connection breaks) comes from the seed and
the connection's number alone.
"""

from __future__ import annotations

import asyncio
import math
import socket
import struct
import threading
from contextlib import suppress
from random import Random
from typing import TYPE_CHECKING, Final, TypeVar

if TYPE_CHECKING:
    from collections.abc import Coroutine
    from typing import Self

T = TypeVar("T")

PIECE_BYTES: Final = 64 << 10
CONNECT_S: Final = 5.0
COMMAND_S: Final = 10.0
RESET_ON_CLOSE: Final = struct.pack("ii", 1, 0)
"""Of SO_LINGER: closing sends a reset instead of what is left."""


class Proxies:
    """The proxies of a test, and the thread that they run in; leaving the context ends all."""

    def __enter__(self) -> Self:
        self._made: list[TcpProxy] = []
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="proxies")
        self._thread.start()
        return self

    def front_of(self, target: str, seed: int = 0) -> TcpProxy:
        """A proxy in front of host:port, which need not listen yet."""
        self._made.append(TcpProxy(self, target, seed))
        return self._made[-1]

    def __exit__(self, *_: object) -> None:
        for each in self._made:
            each.cut()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def do(self, work: Coroutine[object, object, T]) -> T:
        """Run it there; returns what it returns."""
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(COMMAND_S)


class TcpProxy:
    """Listens at `address` in front of `target`; at first everything passes."""

    def __init__(self, proxies: Proxies, target: str, seed: int) -> None:
        """`Proxies.front_of` is how to make one."""
        self.target = target
        self._proxies = proxies
        self._seed = seed
        self._accepted = 0
        self._links: set[_Link] = set()
        self._server: asyncio.Server | None = None
        self._port = 0
        self.forward, self.backward = _Way(), _Way()
        self._bytes_max = 0
        proxies.do(self._listen())

    @property
    def address(self) -> str:
        """Where to connect instead of to the target; stays the same."""
        return f"127.0.0.1:{self._port}"

    def cut(self) -> None:
        """Reset what is connected and refuse what comes."""
        self._proxies.do(self._cut())

    def hold(self, *, forward: bool = True, backward: bool = True) -> None:
        """Let nothing through any more, though connections stay and new ones are accepted.

        Only towards the target (`forward`), or only from it (`backward`): then questions arrive
        and answers do not.
        """
        self._proxies.do(self._set_ways(forward, backward, 0.0))

    def slow(self, delay_max_s: float) -> None:
        """Keep each piece back for a while drawn evenly up to `delay_max_s`."""
        self._proxies.do(self._set_ways(forward=False, backward=False, delay_max_s=delay_max_s))

    def reset(self) -> None:
        """Reset what is connected; new connections pass."""
        self._proxies.do(self._reset())

    def fragile(self, bytes_max: int) -> None:
        """Reset each new connection after a number of bytes drawn from 1 to `bytes_max`."""
        self._bytes_max = bytes_max

    def heal(self) -> None:
        """Let everything pass again; what was held goes on its way."""
        self._bytes_max = 0
        self._proxies.do(self._listen())
        self._proxies.do(self._set_ways(forward=False, backward=False, delay_max_s=0.0))

    # --- in the loop's thread -----------------------------------------------------------------

    async def _listen(self) -> None:
        if self._server is None:
            self._server = await asyncio.start_server(self._accept, "127.0.0.1", self._port)
            self._port = self._server.sockets[0].getsockname()[1]

    async def _cut(self) -> None:
        if self._server is not None:
            self._server.close()
            self._server = None
        await self._reset()

    async def _reset(self) -> None:
        links = tuple(self._links)
        for link in links:
            link.end()
        await asyncio.gather(*(link.ended.wait() for link in links))

    async def _set_ways(self, forward: bool, backward: bool, delay_max_s: float) -> None:
        self.forward.set(held=forward, delay_max_s=delay_max_s)
        self.backward.set(held=backward, delay_max_s=delay_max_s)

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._accepted += 1
        link = _Link(self, Random(f"{self._seed}/{self._accepted}"), self._bytes_max)
        self._links.add(link)
        try:
            await link.serve(reader, writer)
        finally:
            self._links.discard(link)


class _Way:
    """How bytes travel in one direction."""

    def __init__(self) -> None:
        self._open = asyncio.Event()
        self._open.set()
        self._delay_max_s = 0.0

    def set(self, *, held: bool, delay_max_s: float) -> None:
        self._delay_max_s = delay_max_s
        if held:
            self._open.clear()
        else:
            self._open.set()

    async def passage(self, draw: Random) -> None:
        """Wait until a piece may go on."""
        if self._delay_max_s:
            await asyncio.sleep(draw.uniform(0, self._delay_max_s))
        await self._open.wait()


class _Link:
    """One connection and its continuation to the target."""

    def __init__(self, proxy: TcpProxy, draw: Random, bytes_max: int) -> None:
        self._proxy = proxy
        self._draw = draw
        self._left: float = draw.randint(1, bytes_max) if bytes_max else math.inf
        self._over = asyncio.Event()
        self.ended = asyncio.Event()

    def end(self) -> None:
        """Have both connections reset."""
        self._over.set()

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writers = [writer]
        work = asyncio.ensure_future(self._carry(reader, writer, writers))
        over = asyncio.ensure_future(self._over.wait())
        try:
            await asyncio.wait((work, over), return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in (work, over):
                task.cancel()
            await asyncio.gather(work, over, return_exceptions=True)
            for each in writers:
                _close(each, reset=self._over.is_set())
            self.ended.set()

    async def _carry(
        self,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        writers: list[asyncio.StreamWriter],
    ) -> None:
        host, _, port = self._proxy.target.rpartition(":")
        try:
            async with asyncio.timeout(CONNECT_S):
                back, onward = await asyncio.open_connection(host, int(port))
        except (OSError, TimeoutError):
            self.end()
            return
        writers.append(onward)
        # When one side is done, what the other still has to say is carried to its end.
        await asyncio.gather(
            self._pump(reader, onward, self._proxy.forward),
            self._pump(back, writer, self._proxy.backward),
        )

    async def _pump(
        self, source: asyncio.StreamReader, sink: asyncio.StreamWriter, way: _Way
    ) -> None:
        try:
            while piece := await source.read(PIECE_BYTES):
                await way.passage(self._draw)
                piece = piece[: int(min(len(piece), self._left))]
                self._left -= len(piece)
                sink.write(piece)
                await sink.drain()
                if not self._left:
                    self.end()
            await way.passage(self._draw)
            sink.write_eof()
        except OSError:
            self.end()  # one side was reset: so is the other


def _close(writer: asyncio.StreamWriter, *, reset: bool) -> None:
    if reset:
        with suppress(OSError):
            writer.get_extra_info("socket").setsockopt(
                socket.SOL_SOCKET, socket.SO_LINGER, RESET_ON_CLOSE
            )
        writer.transport.abort()
    else:
        writer.close()
