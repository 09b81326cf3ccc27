"""A segment file on a disk that may fail: the first error takes the segment out of service.

Owns what an error of the system means for a segment. The process lives, nothing but OutOfService
reaches its callers, and the operator reads what happened. Only a new start serves again.
"""

from __future__ import annotations

import errno
import logging
from enum import StrEnum
from threading import Lock
from typing import TYPE_CHECKING, Final

from kvstore.errors import Unavailable
from workers.tiers.disk import read_whole, write_whole

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from workers.tiers.disk import Channel, DiskFile

LOG: Final = logging.getLogger(__name__)


class OutOfService(Unavailable):
    """The segment's disk has failed, or takes no writes any more; the text says since when."""


class ServiceState(StrEnum):
    """What a segment on a disk still does, best first. It never gets better."""

    SERVING = "serving"
    READ_ONLY = "read_only"
    """Reads are verified and go on; nothing is written, freed or removed."""
    FAILED = "failed"
    """Every read is a miss."""


_WORSE: Final = {ServiceState.SERVING: 0, ServiceState.READ_ONLY: 1, ServiceState.FAILED: 2}


class GuardedFile:
    """Reads and writes of one segment file, as a whole or not at all. Thread-safe.

    Records go through the page cache (see `workers.record_table.RecordArea`), payloads past it
    where the file system can.
    """

    def __init__(self, name: str, file: DiskFile, is_named: Callable[[], bool]) -> None:
        """Take an owned file over; `name` is for logs. OSError where even its first block fails.

        `is_named` tells whether the file's path still leads to it, or raises OSError.
        """
        self.service = ServiceState.SERVING
        self.reason = ""
        """What took it out of service, for the operator."""
        self.errors = 0
        """Calls of the system that failed."""
        self._name = name
        self._file = file
        self._is_named = is_named
        self._mutex = Lock()
        direct = file.direct()
        self.is_direct: Final = direct is not None
        self._payload: Final[Channel] = direct or file.cached
        if direct is None:
            LOG.warning("%s: its file system has no O_DIRECT; payloads take page cache", name)

    # --- record area --------------------------------------------------------------------------

    def look(self, at: int, length: int) -> memoryview:
        """A copy all the same: a page that cannot be read would kill whoever has it mapped."""
        return memoryview(self.load(at, length))

    def load(self, at: int, length: int) -> bytes:
        """Bytes of the record area."""
        data = bytearray(length)
        self._read(self._file.cached, [memoryview(data)], at)
        return bytes(data)

    def store(self, at: int, data: bytes | bytearray | memoryview) -> None:
        """Write, in the order of the calls as reads see it, in any order as the disk does."""
        self._write(self._file.cached, [memoryview(data)], at)

    def allocate(self, at: int, length: int) -> None:
        """Have room. OSError (ENOSPC) where there is none: a full disk is not a broken one."""
        self.require_writable()
        try:
            self._file.allocate(at, length)
        except OSError as error:
            if error.errno == errno.ENOSPC:
                raise
            raise self._out(ServiceState.READ_ONLY, error, "room for records") from error

    def next_data(self, at: int) -> int | None:
        """The first place from `at` on that is no hole."""
        self._require_readable()
        try:
            return self._file.next_data(at)
        except OSError as error:
            raise self._out(ServiceState.FAILED, error, "holes") from error

    def sync(self) -> None:
        """Return when everything written so far is durable."""
        self.require_writable()
        try:
            self._file.sync()
        except OSError as error:
            # What the page cache holds may never reach the disk; a second try would say nothing.
            raise self._out(ServiceState.READ_ONLY, error, "sync") from error

    # --- payload area -------------------------------------------------------------------------

    def read_payload(self, views: Sequence[memoryview], at: int) -> None:
        """Fill block-aligned views from file offset `at`."""
        self._read(self._payload, views, at)

    def write_payload(self, views: Sequence[memoryview], at: int) -> None:
        """Write block-aligned views."""
        self._write(self._payload, views, at)

    # --- service ------------------------------------------------------------------------------

    def require_writable(self) -> None:
        """OutOfService unless writes are taken."""
        if self.service is not ServiceState.SERVING:
            raise OutOfService(f"{self._name}: {self.service}: {self.reason}")

    def end_service(self, service: ServiceState, reason: str) -> None:
        """Serve less from now on, unless it is less already; said once."""
        with self._mutex:
            if _WORSE[service] <= _WORSE[self.service]:
                return
            self.reason, self.service = reason, service  # whoever sees the one finds the other
        LOG.error("%s: %s from now on: %s", self._name, service, reason)

    def check_name(self) -> None:
        """READ_ONLY from now on when the file cannot be found by its path any more."""
        try:
            if not self._is_named():
                self.end_service(
                    ServiceState.READ_ONLY, "its file has been removed from the directory"
                )
        except OSError as error:
            self._out(ServiceState.READ_ONLY, error, "directory")

    def close(self) -> None:
        """Give the ownership up."""
        self._file.close()

    def _require_readable(self) -> None:
        if self.service is ServiceState.FAILED:
            raise OutOfService(f"{self._name}: {self.service}: {self.reason}")

    def _read(self, channel: Channel, views: Sequence[memoryview], at: int) -> None:
        self._require_readable()
        try:
            read_whole(channel, views, at)
        except OSError as error:
            raise self._out(ServiceState.FAILED, error, f"read at {at}") from error

    def _write(self, channel: Channel, views: Sequence[memoryview], at: int) -> None:
        self.require_writable()
        try:
            write_whole(channel, views, at)
        except OSError as error:
            raise self._out(ServiceState.READ_ONLY, error, f"write at {at}") from error

    def _out(self, service: ServiceState, error: OSError, doing: str) -> OutOfService:
        with self._mutex:
            self.errors += 1
        self.end_service(service, f"{doing}: {error.strerror or error}")
        return OutOfService(f"{self._name}: {doing}: {error.strerror or error}")
