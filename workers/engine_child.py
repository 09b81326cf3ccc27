"""The worker's transfer engines, each in a child process: one that serves, some that pull.

The serving engine registers read-only mappings of the segments' payload, of a device's chunk by
chunk (CUDA's are read-only by convention alone); a self-test of every one that is started refuses
to offer the transport when a write to them goes through (R: no process but its owner ever writes
into a segment). The pulling engines register nothing and write into the segments in memory, or for
a device into rooms that it copies from, on this worker's behalf; each runs one pull, so that ending
a pull by ending its process is a fence (I6) that costs nobody else anything. All hold the
segments' file locks: no new incarnation starts before they are gone. Must not know plans, records
or sessions.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from array import array
from typing import TYPE_CHECKING, Final

import msgspec

from kvstore.errors import BadValue, ConfigError, KVStoreError, Unavailable
from kvstore.ids import SegmentId
from kvstore.segment import Geometry
from kvstore.transfer.mooncake_process import (
    EngineProcess,
    EngineSettings,
    ProcessPool,
    check_installed,
)
from kvstore.wire.messages.engine import EnginePull, EnginePush
from kvstore.wire.messages.transfers import EngineFound
from workers.landing import Landing

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from kvstore.wire.messages.puts import EngineSource
    from workers.tiers.hbm import HbmSegment

PULLS_AT_ONCE: Final = 2
"""Engines wait by spinning: more of them than this take cores from everything else."""
LANDING: Final = "landing"
"""A region of pullers, beside segments, whose names begin with their worker's and a dash."""
SELF_TEST_TIMEOUT_S: Final = 20.0
_SELF_TEST_BYTES: Final = 64


class EngineSegment(msgspec.Struct, frozen=True):
    """A segment file as the owner holds it: `fd` is the description that carries its lock."""

    segment: str
    fd: int
    geometry: Geometry


class _Puller:
    """A pulling engine with every segment, and the landing, mapped for writing."""

    def __init__(
        self, settings: EngineSettings, segments: Sequence[EngineSegment], landing: Landing | None
    ) -> None:
        places = {
            each.segment: (each.fd, each.geometry.payload_base, each.geometry.payload_bytes)
            for each in segments
        }
        if landing is not None:
            places[LANDING] = (landing.fd, 0, landing.size_bytes)
        self.process = EngineProcess(settings)
        with contextlib.ExitStack() as undo:
            undo.callback(self.process.close)
            self.regions = {
                name: self.process.map(*place, writable=True, served=False)[0]
                for name, place in places.items()
            }
            undo.pop_all()

    @property
    def alive(self) -> bool:
        return self.process.alive

    def close(self) -> None:
        self.process.close()


class _Blocks(msgspec.Struct, frozen=True):
    """Where a serving process has a segment's payload."""

    block_bytes: int
    blocks: int
    places: dict[int, tuple[int, int]]
    """Region and address by the number of a block; those that were given back are not there."""
    is_read_only: bool
    """Whether the system refuses what a peer writes."""

    def addresses(self) -> bytes:
        """As in EngineFound."""
        column = array("Q", [0]) * self.blocks
        for number, (_, address) in self.places.items():
            column[number] = address
        return column.tobytes()


class _Server:
    """A serving engine with every segment mapped. What it has open of devices is its share."""

    def __init__(
        self,
        settings: EngineSettings,
        segments: Sequence[EngineSegment],
        devices: Sequence[HbmSegment],
    ) -> None:
        self._devices = {each.id: each for each in devices}
        self.process = EngineProcess(settings)
        with contextlib.ExitStack() as undo:
            undo.callback(self.close)
            self.served = {
                each.segment: self._map(each, is_read_only=settings.read_only) for each in segments
            }
            for device in devices:
                self.served[device.id] = self._map_blocks(device, is_read_only=settings.read_only)
            undo.pop_all()

    def _map(self, segment: EngineSegment, *, is_read_only: bool) -> _Blocks:
        size = segment.geometry.payload_bytes
        place = self.process.map(
            segment.fd, segment.geometry.payload_base, size,
            writable=not is_read_only, served=True,
        )  # fmt: skip
        return _Blocks(size, 1, {0: place}, is_read_only)

    def _map_blocks(self, segment: HbmSegment, *, is_read_only: bool) -> _Blocks:
        size = segment.geometry.chunk_bytes
        with segment.shared(self) as blocks:
            places = {number: self.process.map_block(block) for number, block in blocks.items()}
        is_enforced = is_read_only and segment.device.is_read_only_enforced
        return _Blocks(size, segment.geometry.payload_bytes // size, places, is_enforced)

    def withdraw(self, segment: str, chunks: Iterable[int]) -> None:
        """Close chunks of a device, or end the process, which closes all that it has open."""
        places = self.served[segment].places
        for chunk in set(chunks) & places.keys():
            region, _ = places.pop(chunk)
            try:
                self.process.unmap(region)
            except KVStoreError:
                self.process.kill()
        self._devices[SegmentId(segment)].unshare(self, chunks)

    def close(self) -> None:
        """End the process; then nothing of a device is open there. Safe to repeat."""
        self.process.close()
        for device in self._devices.values():
            device.unshare(self)


class EngineCopy:
    """Copies for one request: each has a deadline, all have a cancel, and both are fences."""

    def __init__(self, pullers: ProcessPool[_Puller]) -> None:
        """Nothing runs yet. See `EngineChild.copy`."""
        self._pullers = pullers
        self._lock = threading.Lock()
        self._process: EngineProcess | None = None
        self._cancelled = False

    def run(
        self, region: str, source: EngineSource, offsets: bytes, page_bytes: int, deadline_s: float
    ) -> None:
        """Copy `page_bytes` from each of the source's addresses to each offset of a region.

        A region is the payload of a segment in memory, or LANDING. Returns after the last byte.
        Raises Unavailable or OutOfSpace only when no byte will come any more (I6), BadValue for a
        source that is none. For one thread at a time.
        """
        with self._pullers.one(deadline_s) as puller:
            with self._lock:
                if self._cancelled:
                    raise Unavailable("the pull was cancelled")
                self._process = puller.process
            message = EnginePull(
                source.peer, puller.regions[region], page_bytes, offsets, source.addresses
            )
            try:
                puller.process.pull(message, deadline_s)
            finally:
                with self._lock:
                    self._process = None

    def cancel(self) -> None:
        """End it now, running or not; every `run` raises from now on. From any thread."""
        with self._lock:
            self._cancelled = True
            if self._process is not None:
                self._process.kill()


class EngineChild:
    """What the rest of the worker sees: where segments are served, and pulls with an end."""

    def __init__(
        self,
        settings: EngineSettings,
        segments: Sequence[EngineSegment],
        devices: Sequence[HbmSegment] = (),
        pulls_at_once: int = PULLS_AT_ONCE,
    ) -> None:
        """Start serving and pass the self-test. ConfigError, naming the reason, otherwise.

        BadValue for memory of a device that cannot be shared.
        """
        check_installed()
        self._settings = settings
        self._segments = tuple(segments)
        self._devices = tuple(devices)
        self._pullers = ProcessPool(self._new_puller, pulls_at_once)
        self._lock = threading.Lock()
        self._closed = False
        self.landing: Landing | None = None
        """Where pulls for devices land; None without any."""
        with contextlib.ExitStack() as undo:
            if devices:
                room_bytes = max(each.geometry.chunk_bytes for each in devices)
                self.landing = Landing(pulls_at_once, room_bytes)
                undo.callback(self.landing.close)
            self._server = self._serve()
            undo.pop_all()

    def _new_puller(self) -> _Puller:
        return _Puller(self._settings, self._segments, self.landing)

    def _serve(self) -> _Server:
        """A serving engine that has passed the self-test. ConfigError when it has not."""
        server = _Server(self._settings, self._segments, self._devices)
        try:
            if self._settings.read_only:
                _test_itself(server, self._settings)
        except BaseException:
            server.close()
            raise
        return server

    def find(self, segment: str) -> EngineFound:
        """Where peers read this segment now. A server that died is replaced first.

        Unavailable while none serves that has passed the self-test.
        """
        with self._lock:
            if self._closed or segment not in self._server.served:
                raise Unavailable(f"segment {segment} is not served by a transfer engine")
            if not self._server.process.alive:
                self._server.close()
                try:
                    self._server = self._serve()
                except ConfigError as error:
                    raise Unavailable(f"a new engine may not serve: {error}") from error
            server = self._server
            served = server.served[segment]
            return EngineFound(server.process.peer, served.block_bytes, served.addresses())

    def withdraw(self, segment: str, chunks: Iterable[int]) -> None:
        """Serve these chunks of a device no more; they are open nowhere when this returns (W10).

        The device has released them: a server that is started later does not open them.
        """
        with self._lock:
            self._server.withdraw(segment, chunks)

    @property
    def server_pid(self) -> int:
        """The process that serves now."""
        return self._server.process.child_pid

    def copy(self) -> EngineCopy:
        """Copies for one request, which can be cancelled at any time, before the first too."""
        return EngineCopy(self._pullers)

    def close(self) -> None:
        """End every idle process and the serving one. Running pulls are the caller's to cancel."""
        with self._lock:
            self._closed = True
        self._pullers.close()
        self._server.close()
        if self.landing is not None:
            self.landing.close()


def _test_itself(server: _Server, settings: EngineSettings) -> None:
    """Read the first bytes of every block, as a peer could, and write some; that must fail.

    One block stands for all of its segment, which are mapped alike. Each write has a stranger of
    its own: one that was refused ends its connection, over which the next would fail in any case.
    """
    scratch = os.memfd_create("kvharbor-self-test", os.MFD_CLOEXEC)
    try:
        os.ftruncate(scratch, 4096)
        for segment, served in server.served.items():
            with contextlib.closing(EngineProcess(settings)) as stranger:
                region, _ = stranger.map(scratch, 0, 4096, writable=True, served=False)
                addresses = [address for _, address in served.places.values()]
                for address in addresses:
                    _test_read(stranger, region, server.process.peer, segment, address)
                if served.is_read_only and addresses:
                    _test_write(stranger, region, server.process.peer, segment, addresses[-1])
    finally:
        os.close(scratch)


def _test_read(stranger: EngineProcess, region: int, peer: str, segment: str, address: int) -> None:
    deadline_s, place = time.monotonic() + SELF_TEST_TIMEOUT_S, address.to_bytes(8, "little")
    try:
        stranger.pull(EnginePull(peer, region, _SELF_TEST_BYTES, bytes(8), place), deadline_s)
    except KVStoreError as error:
        raise ConfigError(
            f"transfer engine: segment {segment} cannot be read; memory of a CUDA device needs a "
            "CUDA build of the engine"
        ) from error


def _test_write(
    stranger: EngineProcess, region: int, peer: str, segment: str, address: int
) -> None:
    deadline_s = time.monotonic() + SELF_TEST_TIMEOUT_S
    if stranger.push(EnginePush(peer, region, _SELF_TEST_BYTES, address), deadline_s):
        raise ConfigError(
            f"transfer engine: segment {segment} is served read-only, yet a peer could write "
            "to it: the transport mooncake is not safe with this version of the engine"
        )


def check_peer(peer: str) -> None:
    """BadValue unless `peer`, which comes from a client, has the form of an engine's name."""
    host, colon, port = peer.rpartition(":")
    if not (host and colon and port.isdecimal() and 0 < int(port) < 1 << 16 and len(peer) < 256):
        raise BadValue("source.peer", peer, "host:port of a transfer engine")
