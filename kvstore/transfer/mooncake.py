"""The `mooncake` transport: bulk bytes through the transfer engine, everything else through ours.

The engine proves nothing and checks nothing, so a worker's engine is asked for through the
worker's own authenticated connection, a put is an Ingest that names this client's engine, and
after a read the records are checked through that connection too. The engine runs in children of
this process (kvstore.transfer.mooncake_process): a read lands in a bounce buffer that this
process does not touch before the engine has finished or has been ended, and the engine that
serves this client's buffers has them mapped read-only.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import socket
import threading
import time
import weakref
from array import array
from collections import deque
from typing import TYPE_CHECKING, Final

from kvstore import limits
from kvstore.errors import BadValue, KVStoreError, MalformedMessage, Unavailable
from kvstore.rpc.address import UnixAddress, parse_address
from kvstore.transfer.data_links import DataLinks, call, patience_s, silent_at_s
from kvstore.transfer.memory import address_of, copy_bytes, populate
from kvstore.transfer.mooncake_process import (
    EngineProcess,
    EngineSettings,
    ProcessPool,
    check_installed,
)
from kvstore.transfer.piece_calls import PieceCalls
from kvstore.transfer.transport import COLUMN_BYTES, all_of, column, span_checksums, verified
from kvstore.wire.framing import FrameKind
from kvstore.wire.messages.common import Outcome
from kvstore.wire.messages.engine import EnginePull
from kvstore.wire.messages.puts import EngineSource
from kvstore.wire.messages.transfers import CheckRecords, EngineFound, FindEngine, RecordsChecked

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from kvstore.rpc.frame_socket import FrameSocket
    from kvstore.transfer.buffer import Buffer
    from kvstore.transfer.context import TransferContext
    from kvstore.transfer.memory import Memory
    from kvstore.transfer.transport import IngestSpan, ReadSpan
    from kvstore.wire.messages.base import Message

BOUNCE_BYTES: Final = limits.CHUNK_BYTES
"""Room for the largest part, or for many small ones."""
READS_AT_ONCE: Final = 2
"""Each holds a bounce buffer, and waits by spinning."""
_MADV_POPULATE_WRITE: Final = 23


class _Reader:
    """An engine that reads, and the memory that it writes: shared by the child and this process."""

    def __init__(self, settings: EngineSettings) -> None:
        fd = os.memfd_create("kvharbor-bounce", os.MFD_CLOEXEC)
        try:
            os.ftruncate(fd, BOUNCE_BYTES)
            self._map = mmap.mmap(fd, BOUNCE_BYTES)
            self.address = address_of(memoryview(self._map))
            populate(self.address, BOUNCE_BYTES, _MADV_POPULATE_WRITE)
            self.process = EngineProcess(settings)
            try:
                self.region, _ = self.process.map(fd, 0, BOUNCE_BYTES, writable=True, served=False)
            except BaseException:
                self.process.close()
                raise
        finally:
            os.close(fd)

    @property
    def alive(self) -> bool:
        return self.process.alive

    def close(self) -> None:
        self.process.close()


class ClientEngines:
    """The engines of this process: one that serves buffers, a few that read. Thread-safe."""

    def __init__(self, settings: EngineSettings) -> None:
        """Start nothing yet."""
        self._settings = settings
        self._lock = threading.Lock()
        self._server: EngineProcess | None = None
        self._addresses: weakref.WeakKeyDictionary[Buffer, int] = weakref.WeakKeyDictionary()
        self._unused: deque[tuple[EngineProcess, int]] = deque()
        """Regions whose buffer is gone. A finalizer may run anywhere, so it only leaves word."""
        self._closed = False
        self.readers = ProcessPool(lambda: _Reader(settings), READS_AT_ONCE)

    def serve(self, buffer: Buffer) -> tuple[str, int]:
        """Let peers read a buffer until it closes: (name of the engine, address of the buffer)."""
        with self._lock:
            if self._closed:
                raise Unavailable("this store is closed")
            server = self._living_server()
            self._withdraw_unused()
            address = self._addresses.get(buffer)
            if address is None:
                address = self._addresses[buffer] = self._map(server, buffer)
            return server.peer, address

    def _living_server(self) -> EngineProcess:
        if self._server is None or not self._server.alive:
            if self._server is not None:
                self._server.close()
            self._addresses.clear()
            self._server = EngineProcess(self._settings)
        return self._server

    def _map(self, server: EngineProcess, buffer: Buffer) -> int:
        length = os.fstat(buffer.descriptor()).st_size
        writable = not self._settings.read_only
        region, address = server.map(buffer.descriptor(), 0, length, writable=writable, served=True)
        forget = weakref.finalize(buffer, self._unused.append, (server, region))
        forget.atexit = False
        buffer.on_close(lambda _: self._forget(forget))
        return address

    def _forget(self, forget: Callable[[], object]) -> None:
        with self._lock:
            forget()
            self._withdraw_unused()

    def _withdraw_unused(self) -> None:
        while self._unused:
            server, region = self._unused.popleft()
            with contextlib.suppress(KVStoreError):  # It has ended: nothing is served.
                server.unmap(region)

    def close(self) -> None:
        """End every engine. Safe to repeat."""
        with self._lock:
            self._closed = True
            server, self._server = self._server, None
        if server is not None:
            server.close()
        self.readers.close()


class _Shared:
    """Engines by settings, shared by all transports of this process; ended with the last user."""

    def __init__(self) -> None:
        self.start_anew()

    def start_anew(self) -> None:
        """Forget all: at the start, and in a forked child, whose parent's engines are not its."""
        self._lock = threading.Lock()
        self._held: dict[EngineSettings, tuple[ClientEngines, int]] = {}

    def take(self, settings: EngineSettings) -> ClientEngines:
        with self._lock:
            engines, users = self._held.get(settings) or (ClientEngines(settings), 0)
            self._held[settings] = engines, users + 1
            return engines

    def give_back(self, settings: EngineSettings) -> None:
        with self._lock:
            held = self._held.pop(settings, None)
            if held is None:
                return  # Taken before a fork.
            engines, users = held
            if users > 1:
                self._held[settings] = engines, users - 1
                return
        engines.close()


_SHARED: Final = _Shared()
os.register_at_fork(after_in_child=_SHARED.start_anew)


def require() -> None:
    """ConfigError, naming the reason, when the transfer engine cannot or may not be used here."""
    check_installed()
    # A library that the system lacks shows only when the engine is loaded.
    EngineProcess(EngineSettings()).close()


def open_transport(context: TransferContext, timeout_s: float) -> MooncakeTransport:
    """Reach the worker, which tells where its engine is. Unavailable when it does not answer."""
    transport = MooncakeTransport(context)
    try:
        transport.greet(silent_at_s(time.monotonic() + timeout_s))
    except BaseException:
        transport.close()
        raise
    return transport


class MooncakeTransport:
    """One worker's segments through the transfer engine (see `transport.Transport`)."""

    def __init__(self, context: TransferContext) -> None:
        """Reach for nothing yet. The context's address is the worker's, not its engine's."""
        where = context.address.where
        self._links = DataLinks(where, context.identity)
        self._settings = settings_towards(where)
        self._engines = _SHARED.take(self._settings)
        self._found: dict[tuple[str, int], EngineFound] = {}
        self._closed = False

    def greet(self, deadline_s: float) -> None:
        """Unavailable when the worker does not answer at its address."""
        with self._links.link(deadline_s):
            pass

    def read(self, span: ReadSpan, into: Memory, timeout_s: float) -> bytes:
        """One Outcome byte a page; see `Transport.read`."""
        deadline_s = time.monotonic() + timeout_s
        outcomes = bytearray(all_of(Outcome.TRANSPORT, len(span)))
        try:
            gone = self._fetch(span, into, deadline_s)
            outcomes[:] = self._verified(span, into, deadline_s)
            for page in gone:
                outcomes[page] = Outcome.STALE
        except KVStoreError:
            self._found.pop(_life(span), None)
        bad = [place for place, code in zip(span.places, outcomes, strict=True) if code]
        into.wipe(bad, span.part_bytes)
        return bytes(outcomes)

    def ingest(self, spans: Sequence[IngestSpan], source: Memory, timeout_s: float) -> list[bytes]:
        """One Outcome byte a page for each span; see `Transport.ingest`."""
        deadline_s = time.monotonic() + timeout_s
        calls = PieceCalls(spans)
        if source.buffer is None:
            raise BadValue("source", source, "a buffer of this store")
        with contextlib.suppress(KVStoreError):
            peer, base = self._engines.serve(source.buffer)

            def send(link: FrameSocket, number: int, piece: IngestSpan, until_s: float) -> None:
                checksums = span_checksums(piece, source.view)
                addresses = array("Q", (base + place for place in piece.places))
                message = piece.message(checksums, EngineSource(peer, addresses.tobytes()))
                link.send(FrameKind.REQUEST, number, message, deadline_s=until_s)

            with self._links.link(deadline_s) as link:
                calls.run(link, send, deadline_s)
        return [bytes(each) for each in calls.outcomes]

    def close(self) -> None:
        """End the connections to this worker, and the engines with their last user."""
        self._links.close()
        closed, self._closed = self._closed, True
        if not closed:
            _SHARED.give_back(self._settings)

    def _fetch(self, span: ReadSpan, into: Memory, deadline_s: float) -> list[int]:
        """Bring the bytes to their places, unverified. Raises when some may be missing.

        Pages are left out, and returned, whose block the worker has given back.
        """
        known = _life(span) in self._found
        try:
            return self._read_all(span, into, deadline_s)
        except Unavailable:
            if not known:
                raise
            # The worker's engine may have been replaced since it was asked for, or moved a block.
            self._found.pop(_life(span), None)
            return self._read_all(span, into, deadline_s)

    def _read_all(self, span: ReadSpan, into: Memory, deadline_s: float) -> list[int]:
        found = self._find(span, deadline_s)
        bases, offsets = column(found.addresses), column(span.offsets)
        by_block: dict[int, list[int]] = {}
        for page, offset in enumerate(offsets):
            by_block.setdefault(offset // found.block_bytes, []).append(page)
        gone: list[int] = []
        # Blocks may lie side by side, but peers see each for itself: no transfer spans two.
        for block, pages in by_block.items():
            if block >= len(bases) or not bases[block]:
                gone += pages
                continue
            base = bases[block] - block * found.block_bytes
            step = BOUNCE_BYTES // span.part_bytes
            for start in range(0, len(pages), step):
                some = pages[start : start + step]
                addresses = array("Q", [base + offsets[page] for page in some])
                places = [span.places[page] for page in some]
                self._read_some(found.peer, addresses, places, span.part_bytes, into, deadline_s)
        return gone

    def _read_some(
        self, peer: str, addresses: array[int], places: Sequence[int], size: int, into: Memory,
        deadline_s: float,
    ) -> None:  # fmt: skip
        """Bring as many pages as the bounce buffer has room for."""
        bounce_places = array("Q", range(0, len(places) * size, size))
        with self._engines.readers.one(deadline_s) as reader:
            message = EnginePull(
                peer, reader.region, size, bounce_places.tobytes(), addresses.tobytes()
            )
            # The engine does not say whether bytes are coming: slow ones have their time, too.
            allowance_s = len(places) * size / limits.PUT_BYTES_PER_S_MIN
            silent_s = silent_at_s(deadline_s) + patience_s(deadline_s) + allowance_s
            reader.process.pull(message, min(deadline_s, silent_s))
            for bounce, place, length in neighbours(places, size):
                copy_bytes(into.address + place, reader.address + bounce, length)

    def _find(self, span: ReadSpan, deadline_s: float) -> EngineFound:
        found = self._found.get(_life(span))
        if found is None:
            message = FindEngine(span.segment.segment, span.segment.incarnation)
            reply = self._ask(message, deadline_s)  # a worker may have to start an engine first
            if not isinstance(reply, EngineFound):
                raise MalformedMessage(f"{type(reply).__name__} in answer to FindEngine")
            if reply.block_bytes <= 0 or len(reply.addresses) % COLUMN_BYTES:
                sizes = f"{reply.block_bytes}, {len(reply.addresses)}"
                raise MalformedMessage(f"EngineFound with block_bytes, addresses of {sizes}")
            found = self._found[_life(span)] = reply
        return found

    def _verified(self, span: ReadSpan, into: Memory, deadline_s: float) -> bytes:
        """Outcomes: checksum of the bytes in place, then the record, which is asked for last."""
        found = verified(span, into.view, bytes(len(span)))
        message = CheckRecords(
            span.segment.segment, span.segment.incarnation, span.part, span.part_bytes,
            span.keys, span.offsets, span.generations,
        )  # fmt: skip
        reply = self._ask(message, silent_at_s(deadline_s))
        if not isinstance(reply, RecordsChecked) or len(reply.outcomes) != len(span):
            raise MalformedMessage(f"{type(reply).__name__} in answer to CheckRecords")
        # A page whose record is another's now is stale, whatever its bytes are.
        return bytes(last or checked for last, checked in zip(reply.outcomes, found, strict=True))

    def _ask(self, message: Message, deadline_s: float) -> Message:
        with self._links.link(silent_at_s(deadline_s)) as link:
            return call(link, message, deadline_s)


def _life(span: ReadSpan) -> tuple[str, int]:
    return span.segment.segment, span.segment.incarnation


def neighbours(places: Sequence[int], size: int) -> Iterator[tuple[int, int, int]]:
    """(offset in the bounce buffer, place, bytes) with pages joined that stay neighbours."""
    first = 0
    for i in range(1, len(places) + 1):
        if i < len(places) and places[i] == places[i - 1] + size:
            continue
        yield first * size, places[first], (i - first) * size
        first = i


def settings_towards(address: str) -> EngineSettings:
    """How to start a client's engines so that the worker at `address` can reach them."""
    where = parse_address(address)
    if isinstance(where, UnixAddress):
        return EngineSettings()
    with contextlib.suppress(OSError):
        family, kind, _, _, target = socket.getaddrinfo(
            where.host, where.port, type=socket.SOCK_DGRAM
        )[0]
        with socket.socket(family, kind) as probe:
            probe.connect(target)  # Nothing is sent: the kernel only chooses our address.
            return EngineSettings(host=probe.getsockname()[0])
    return EngineSettings()
