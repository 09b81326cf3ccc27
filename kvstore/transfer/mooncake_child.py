"""The program that holds one transfer engine: `python -m kvstore.transfer.mooncake_child FD`.

It answers the messages of kvstore.wire.messages.engine on the socket pair whose descriptor is its
argument, one at a time, and ends with that socket: an engine outlives neither its parent's will
nor its parent. It keeps the descriptors that it was given, and with them their file locks.
"""

from __future__ import annotations

import mmap
import os
import select
import signal
import socket
import sys
import threading
from array import array
from typing import TYPE_CHECKING, Final

from kvstore import limits
from kvstore.errors import BadValue, KVStoreError, MalformedMessage, Unavailable
from kvstore.rpc.failure import failure_of
from kvstore.rpc.frame_socket import FrameSocket
from kvstore.transfer.memory import address_of
from kvstore.transfer.mooncake_engine import Engine
from kvstore.wire.framing import FrameKind
from kvstore.wire.messages.engine import (
    EngineMap,
    EngineMapped,
    EngineOpen,
    EngineOpened,
    EnginePull,
    EnginePush,
    EngineUnmap,
)
from kvstore.wire.messages.hello import Done

if TYPE_CHECKING:
    from collections.abc import Iterable

    from kvstore.wire.messages.base import Message

REQUEST_BYTES_MAX: Final = 4 * limits.MIB
"""Neighbouring pages are fetched together up to this: fewer requests, and still several lanes."""


class _Region:
    """One mapping of a file, and whether peers may read it."""

    def __init__(self, fd: int, message: EngineMap) -> None:
        # Without PROT_WRITE the kernel refuses what a peer tries to write, at once.
        protection = mmap.PROT_READ | (mmap.PROT_WRITE if message.writable else 0)
        # What is served is read by strangers, who should not wait for page faults; a puller maps
        # whole segments of which it may write a page or two before it is ended.
        flags = mmap.MAP_SHARED | (mmap.MAP_POPULATE if message.served else 0)
        self.map = mmap.mmap(fd, message.size_bytes, flags, protection, offset=message.file_offset)
        self.fd = fd
        self.size_bytes = message.size_bytes
        self.writable = message.writable
        self.served = message.served
        self.address = address_of(memoryview(self.map))


class Child:
    """Answers requests; the mappings and the engine behind them."""

    def __init__(self, link: FrameSocket) -> None:
        """Talk over `link`; the first request opens the engine."""
        self._link = link
        self._engine: Engine | None = None
        self._regions: dict[int, _Region] = {}

    def run(self) -> None:
        """Answer until the parent closes the socket (Unavailable)."""
        while True:
            frame = self._link.receive()
            try:
                reply = self._answer(frame.message)
            except KVStoreError as error:
                reply = failure_of(error)
            except OSError as error:
                reply = failure_of(Unavailable(f"transfer engine's child: {error}"))
            self._link.send(FrameKind.REPLY, frame.request_id, reply)

    def _answer(self, message: Message) -> Message:
        if isinstance(message, EngineOpen):
            self._engine = Engine(message.host, message.protocol, message.device, message.confined)
            return EngineOpened(self._engine.peer)
        engine = self._engine
        if engine is None:
            raise MalformedMessage(f"{type(message).__name__} before EngineOpen")
        match message:
            case EngineMap():
                return self._map(engine, message)
            case EngineUnmap(region):
                self._unmap(engine, region)
            case EnginePull():
                self._pull(engine, message)
            case EnginePush(peer, region, size_bytes, address):
                engine.push(peer, self._region(region).address, address, size_bytes)
            case _:
                raise MalformedMessage(f"{type(message).__name__} is no request to an engine")
        return Done()

    def _region(self, number: int) -> _Region:
        region = self._regions.get(number)
        if region is None:
            raise BadValue("region", number, "a mapped region")
        return region

    def _map(self, engine: Engine, message: EngineMap) -> EngineMapped:
        (fd,) = self._link.take_fds(1)
        if message.region in self._regions:
            raise BadValue("region", message.region, "a number that is not in use")
        region = _Region(fd, message)
        if message.served:
            engine.serve(region.address, region.size_bytes)
        self._regions[message.region] = region
        return EngineMapped(region.address)

    def _unmap(self, engine: Engine, number: int) -> None:
        region = self._region(number)
        if region.served:
            engine.withdraw(region.address)
        # A peer that is still reading gets an error, or bytes that its own checks refuse.
        del self._regions[number]
        os.close(region.fd)

    def _pull(self, engine: Engine, message: EnginePull) -> None:
        region = self._region(message.region)
        places, addresses = array("Q", message.places), array("Q", message.addresses)
        size = message.page_bytes
        if not places or len(places) != len(addresses) or size <= 0:
            raise BadValue("places", len(places), f"as many as addresses, {len(addresses)}")
        if not region.writable or max(places) + size > region.size_bytes:
            raise BadValue("places", max(places), f"{size} bytes inside a writable region")
        requests = list(joined(places, addresses, size))
        engine.pull(
            message.peer,
            [region.address + place for place, _, _ in requests],
            [address for _, address, _ in requests],
            [length for _, _, length in requests],
        )


def joined(
    places: Iterable[int], addresses: Iterable[int], size: int
) -> Iterable[tuple[int, int, int]]:
    """(place, address, bytes) with pages joined that are neighbours on both sides."""
    pairs = iter(zip(places, addresses, strict=True))
    place, address = next(pairs)
    length = size
    for next_place, next_address in pairs:
        follows = next_place == place + length and next_address == address + length
        if follows and length + size <= REQUEST_BYTES_MAX:
            length += size
            continue
        yield place, address, length
        place, address, length = next_place, next_address, size
    yield place, address, length


def _end_with_parent(descriptor: int) -> None:
    """End this process as soon as the other end is closed, also while the engine is busy.

    Not PR_SET_PDEATHSIG: that fires when the *thread* that started this process ends. A process
    that is stopped meanwhile ends when it goes on; until then its file locks keep new owners out.
    """
    poll = select.poll()
    poll.register(descriptor, select.POLLRDHUP)
    while not poll.poll():
        pass
    os._exit(0)


def main() -> None:
    """Run until the parent is done with it."""
    # The terminal's interrupt is for the parent, which ends this process when it is ready to.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    sock = socket.socket(fileno=int(sys.argv[1]))
    watcher = threading.Thread(target=_end_with_parent, args=(sock.fileno(),), daemon=True)
    watcher.start()
    try:
        Child(FrameSocket(sock)).run()
    except (Unavailable, MalformedMessage):
        # The engine's threads do not survive an orderly exit without delay.
        os._exit(0)


if __name__ == "__main__":
    main()
