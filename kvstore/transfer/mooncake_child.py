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
import traceback
from array import array
from contextlib import ExitStack
from typing import TYPE_CHECKING, Final, NamedTuple

from kvstore import limits
from kvstore.errors import BadValue, KVStoreError, MalformedMessage, Unavailable
from kvstore.exit_codes import ExitCode
from kvstore.rpc.failure import failure_of
from kvstore.rpc.frame_socket import FrameSocket
from kvstore.transfer.device import CPU, Handle, open_device
from kvstore.transfer.memory import address_of
from kvstore.transfer.mooncake_engine import ANYWHERE, Engine
from kvstore.wire.framing import FrameKind
from kvstore.wire.messages.engine import (
    EngineMap,
    EngineMapBlock,
    EngineMapped,
    EngineOpen,
    EngineOpened,
    EnginePull,
    EnginePush,
    EngineUnmap,
)
from kvstore.wire.messages.hello import Done

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from kvstore.transfer.device import Device
    from kvstore.wire.messages.base import Message

REQUEST_BYTES_MAX: Final = 4 * limits.MIB
"""Neighbouring pages are fetched together up to this: fewer requests, and still several lanes."""


class _Region(NamedTuple):
    """Memory that this process has mapped, and whether peers may read it."""

    address: int
    size_bytes: int
    is_writable: bool
    is_served: bool
    close: Callable[[], object]


def _file_region(fd: int, message: EngineMap) -> _Region:
    """A stretch of a file, whose descriptor is kept for its locks."""
    # Without PROT_WRITE the kernel refuses what a peer tries to write, at once.
    protection = mmap.PROT_READ | (mmap.PROT_WRITE if message.writable else 0)
    # What is served is read by strangers, who should not wait for page faults; a puller maps
    # whole segments of which it may write a page or two before it is ended.
    flags = mmap.MAP_SHARED | (mmap.MAP_POPULATE if message.served else 0)
    whole = mmap.mmap(fd, message.size_bytes, flags, protection, offset=message.file_offset)

    def close() -> None:
        whole.close()
        os.close(fd)

    address = address_of(memoryview(whole))
    return _Region(address, message.size_bytes, message.writable, message.served, close)


class Child:
    """Answers requests; the mappings and the engine behind them."""

    def __init__(self, link: FrameSocket) -> None:
        """Talk over `link`; the first request opens the engine."""
        self._link = link
        self._engine: Engine | None = None
        self._regions: dict[int, _Region] = {}
        self._devices: dict[str, Device] = {}

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
            case EngineMapBlock():
                return self._map_block(engine, message)
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

    def _must_be_new(self, number: int) -> None:
        if number in self._regions:
            raise BadValue("region", number, "a number that is not in use")

    def _enter(
        self, engine: Engine, number: int, region: _Region, location: str = ANYWHERE
    ) -> EngineMapped:
        try:
            if region.is_served:
                engine.serve(region.address, region.size_bytes, location)
        except BaseException:
            region.close()
            raise
        self._regions[number] = region
        return EngineMapped(region.address)

    def _map(self, engine: Engine, message: EngineMap) -> EngineMapped:
        (fd,) = self._link.take_fds(1)
        with ExitStack() as undo:
            undo.callback(os.close, fd)
            self._must_be_new(message.region)
            region = _file_region(fd, message)
            undo.pop_all()
        return self._enter(engine, message.region, region)

    def _map_block(self, engine: Engine, message: EngineMapBlock) -> EngineMapped:
        """Read-only where the device enforces it (see Device.is_read_only_enforced)."""
        name = message.device
        descriptors = self._link.take_fds(1 if name == CPU else 0)
        self._must_be_new(message.region)
        if name not in self._devices:
            self._devices[name] = open_device(name)
        handle = Handle(message.identity, message.size_bytes, message.ipc, message.offset)
        block = self._devices[name].open(handle, descriptors)
        region = _Region(block.address, block.size_bytes, False, True, block.close)
        return self._enter(engine, message.region, region, ANYWHERE if name == CPU else name)

    def _unmap(self, engine: Engine, number: int) -> None:
        region = self._region(number)
        if region.is_served:
            engine.withdraw(region.address)
        # A peer that is still reading gets an error, or bytes that its own checks refuse.
        del self._regions[number]
        region.close()

    def _pull(self, engine: Engine, message: EnginePull) -> None:
        region = self._region(message.region)
        places, addresses = array("Q", message.places), array("Q", message.addresses)
        size = message.page_bytes
        if not places or len(places) != len(addresses) or size <= 0:
            raise BadValue("places", len(places), f"as many as addresses, {len(addresses)}")
        if not region.is_writable or max(places) + size > region.size_bytes:
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
    code = ExitCode.OK
    try:
        Child(FrameSocket(sock)).run()
    except (Unavailable, MalformedMessage):
        pass  # the parent is done with it
    except Exception:  # a bug of ours, of which the parent hears by our end
        traceback.print_exc()
        code = ExitCode.INTERNAL
    # The engine's threads do not survive an orderly exit without delay.
    os._exit(code)


if __name__ == "__main__":
    main()
