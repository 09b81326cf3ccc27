"""The worker's transfer engines, each in a child process: one that serves, some that pull.

The serving engine registers read-only mappings of the segments' payload; a self-test of every one
that is started refuses to offer the transport when a write to them goes through (R: no process but
its owner ever writes into a segment). The pulling engines register nothing and write into the
segments on this worker's behalf; each runs one pull, so that ending a pull by ending its process
is a fence (I6) that costs nobody else anything. All hold the segments' file locks: no new
incarnation starts before they are gone. Must not know plans, records or sessions.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from typing import TYPE_CHECKING, Final

import msgspec

from kvstore.errors import BadValue, ConfigError, KVStoreError, Unavailable
from kvstore.segment import Geometry
from kvstore.transfer.mooncake_process import (
    EngineProcess,
    EngineSettings,
    ProcessPool,
    check_installed,
)
from kvstore.wire.messages.engine import EnginePull, EnginePush
from kvstore.wire.messages.transfers import EngineFound

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvstore.wire.messages.puts import EngineSource

PULLS_AT_ONCE: Final = 2
"""Engines wait by spinning: more of them than this take cores from everything else."""
SELF_TEST_TIMEOUT_S: Final = 20.0
_SELF_TEST_BYTES: Final = 64


class EngineSegment(msgspec.Struct, frozen=True):
    """A segment file as the owner holds it: `fd` is the description that carries its lock."""

    segment: str
    fd: int
    geometry: Geometry


class _Puller:
    """A pulling engine with every segment mapped for writing."""

    def __init__(self, settings: EngineSettings, segments: Sequence[EngineSegment]) -> None:
        self.process = EngineProcess(settings)
        with contextlib.ExitStack() as undo:
            undo.callback(self.process.close)
            self.regions = {
                each.segment: self.process.map(
                    each.fd, each.geometry.payload_base, each.geometry.payload_bytes,
                    writable=True, served=False,
                )[0]
                for each in segments
            }  # fmt: skip
            undo.pop_all()

    @property
    def alive(self) -> bool:
        return self.process.alive

    def close(self) -> None:
        self.process.close()


class _Server:
    """A serving engine with every segment mapped; where its process has each."""

    def __init__(self, settings: EngineSettings, segments: Sequence[EngineSegment]) -> None:
        self.process = EngineProcess(settings)
        with contextlib.ExitStack() as undo:
            undo.callback(self.process.close)
            self.addresses = {
                each.segment: self.process.map(
                    each.fd, each.geometry.payload_base, each.geometry.payload_bytes,
                    writable=not settings.read_only, served=True,
                )[1]
                for each in segments
            }  # fmt: skip
            undo.pop_all()


class EngineCopy:
    """Copies for one request: each has a deadline, all have a cancel, and both are fences."""

    def __init__(self, pullers: ProcessPool[_Puller]) -> None:
        """Nothing runs yet. See `EngineChild.copy`."""
        self._pullers = pullers
        self._lock = threading.Lock()
        self._process: EngineProcess | None = None
        self._cancelled = False

    def run(
        self, segment: str, source: EngineSource, offsets: bytes, page_bytes: int, deadline_s: float
    ) -> None:
        """Copy `page_bytes` from each of the source's addresses to each payload offset.

        Returns after the last byte. Raises Unavailable or OutOfSpace only when no byte will come
        any more (I6), BadValue for a source that is none. For one thread at a time.
        """
        with self._pullers.one(deadline_s) as puller:
            with self._lock:
                if self._cancelled:
                    raise Unavailable("the pull was cancelled")
                self._process = puller.process
            message = EnginePull(
                source.peer, puller.regions[segment], page_bytes, offsets, source.addresses
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
        pulls_at_once: int = PULLS_AT_ONCE,
    ) -> None:
        """Start serving and pass the self-test. ConfigError, naming the reason, otherwise."""
        check_installed()
        self._settings = settings
        self._segments = tuple(segments)
        self._pullers = ProcessPool(self._new_puller, pulls_at_once)
        self._lock = threading.Lock()
        self._closed = False
        self._server = self._serve()

    def _new_puller(self) -> _Puller:
        return _Puller(self._settings, self._segments)

    def _serve(self) -> _Server:
        """A serving engine that has passed the self-test. ConfigError when it has not."""
        server = _Server(self._settings, self._segments)
        try:
            if self._settings.read_only:
                _test_read_only(server, self._settings)
        except BaseException:
            server.process.close()
            raise
        return server

    def find(self, segment: str) -> EngineFound:
        """Where peers read this segment now. A server that died is replaced first.

        Unavailable while none serves that has passed the self-test.
        """
        with self._lock:
            if self._closed or segment not in self._server.addresses:
                raise Unavailable(f"segment {segment} is not served by a transfer engine")
            if not self._server.process.alive:
                self._server.process.close()
                try:
                    self._server = self._serve()
                except ConfigError as error:
                    raise Unavailable(f"a new engine may not serve: {error}") from error
            return EngineFound(self._server.process.peer, self._server.addresses[segment])

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
        self._server.process.close()


def _test_read_only(server: _Server, settings: EngineSettings) -> None:
    """Write each segment's first bytes over themselves, as a peer could; it must fail."""
    scratch = os.memfd_create("kvharbor-self-test", os.MFD_CLOEXEC)
    try:
        os.ftruncate(scratch, 4096)
        with contextlib.closing(EngineProcess(settings)) as stranger:
            region, _ = stranger.map(scratch, 0, 4096, writable=True, served=False)
            for segment, address in server.addresses.items():
                _test_segment(stranger, region, server.process.peer, segment, address)
    finally:
        os.close(scratch)


def _test_segment(
    stranger: EngineProcess, region: int, peer: str, segment: str, address: int
) -> None:
    size = _SELF_TEST_BYTES
    deadline_s = time.monotonic() + SELF_TEST_TIMEOUT_S
    place = address.to_bytes(8, "little")
    try:
        stranger.pull(EnginePull(peer, region, size, bytes(8), place), deadline_s)
    except KVStoreError as error:
        raise ConfigError(f"transfer engine: segment {segment} cannot be read") from error
    if stranger.push(EnginePush(peer, region, size, address), deadline_s):
        raise ConfigError(
            f"transfer engine: segment {segment} is served read-only, yet a peer could write "
            "to it: the transport mooncake is not safe with this version of the engine"
        )


def check_peer(peer: str) -> None:
    """BadValue unless `peer`, which comes from a client, has the form of an engine's name."""
    host, colon, port = peer.rpartition(":")
    if not (host and colon and port.isdecimal() and 0 < int(port) < 1 << 16 and len(peer) < 256):
        raise BadValue("source.peer", peer, "host:port of a transfer engine")
