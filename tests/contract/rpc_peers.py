"""A Server and its peers in the test's own event loop, for the contract tests of the rpc."""

from __future__ import annotations

import asyncio
import struct
from contextlib import asynccontextmanager
from random import Random
from typing import TYPE_CHECKING, Final

from kvstore import limits
from kvstore.errors import OutOfSpace
from kvstore.rpc.identity import Identity, ListenerIdentity, Role
from kvstore.rpc.server import Server, dial_peer
from kvstore.wire.framing import FrameKind, pack_frame
from kvstore.wire.messages.hello import Done
from kvstore.wire.messages.reads import Probe, Probed, Remove
from tests.contract.rpc_server import LOOPS, PATIENCE_S

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Coroutine

    from kvstore.rpc.peer import Peer
    from kvstore.wire.messages.base import Message
    from kvstore.wire.messages.hello import Hello

ENGINE: Final = Identity(Role.ENGINE, name="engine")
BLUE: Final = ListenerIdentity("blue", epoch=3)


def run(loop: str, body: Callable[[], Coroutine[None, None, None]]) -> None:
    """Run a test's coroutine on a loop of that kind, in bounded time."""

    async def bounded() -> None:
        async with asyncio.timeout(PATIENCE_S):
            await body()

    with asyncio.Runner(loop_factory=LOOPS[loop]) as runner:
        runner.run(bounded())


class Both:
    """A server, and what the handlers of both ends saw.

    Both ends answer Probe with its keys, refuse Remove, and queue everything else.
    """

    def __init__(self) -> None:
        """Nothing seen yet."""
        self.requests: asyncio.Queue[tuple[Peer, int, Message]] = asyncio.Queue()
        self.opened: asyncio.Queue[Peer] = asyncio.Queue()
        self.closed: asyncio.Queue[Peer] = asyncio.Queue()
        self.address = ""

    def on_open(self, peer: Peer, hello: Hello) -> None:
        """Note a session."""
        assert peer.hello is hello
        self.opened.put_nowait(peer)

    def on_request(self, peer: Peer, request_id: int, message: Message) -> None:
        """Answer, refuse or queue."""
        if isinstance(message, Probe):
            peer.reply(request_id, Probed(message.keys))
        elif isinstance(message, Remove):
            raise OutOfSpace("not now")
        else:
            self.requests.put_nowait((peer, request_id, message))

    async def until_closed(self, peer: Peer) -> None:
        """Wait for the end of one connection."""
        while await self.closed.get() is not peer:
            pass

    async def dial(self, identity: Identity = ENGINE) -> Peer:
        """Connect to the server."""
        return await dial_peer(
            self.address, identity, self.on_request, self.closed.put_nowait, PATIENCE_S
        )


@asynccontextmanager
async def serving(
    listener: ListenerIdentity = BLUE, address: str = "127.0.0.1:0", sessions_max: int = 64
) -> AsyncIterator[Both]:
    """Serve at `address` as long as the block runs."""
    both = Both()
    server = Server(
        listener,
        both.on_open,
        both.on_request,
        both.closed.put_nowait,
        sessions_max=sessions_max,
    )
    both.address = await server.listen(address)
    try:
        yield both
    finally:
        await server.close()
        assert not server.peers


def garbage(seed: int) -> list[bytes]:
    """What a port may be sent by those who are lost, and random bytes."""
    random = Random(seed)
    return [
        b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(40),
        struct.pack("<IHHQ", 0xFFFFFFFF, 0, 1, 0),
        struct.pack("<IHHQ", limits.HELLO_BYTES_MAX + 1, 0, 1, 0),
        struct.pack("<IHHQ", 13, 0, 1, 0) + b"\xc1",
        pack_frame(FrameKind.REQUEST, 0, Done(), version=0),
        pack_frame(FrameKind.REQUEST, 0, Probe(b"", b""), version=1),
        *(random.randbytes(random.randrange(16, 400)) for _ in range(20)),
    ]
