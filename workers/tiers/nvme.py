"""NVMe segments: one preallocated file in one directory, on a disk that may fail.

Several directories are several segments: a disk that fails takes its own pages only, a directory
more or less leaves the others' files as they are, and the master spreads pages over segments as it
does over workers. Layout, records and re-adoption are those of DRAM segments; nothing is mapped,
because a page that cannot be read would kill the process.
"""

from __future__ import annotations

import contextlib
import logging
from functools import partial
from threading import Lock
from typing import TYPE_CHECKING, Final

import msgspec

from kvstore.errors import BadValue, ConfigError, OutOfSpace
from kvstore.page import payload_checksum
from kvstore.replica import Tier
from kvstore.segment import size_class_of
from kvstore.wire.messages.common import Outcome
from workers.record_table import RecordTable
from workers.tiers.codec_choice import CodecChoice
from workers.tiers.disk import LocalDisk
from workers.tiers.guarded_file import GuardedFile, OutOfService, ServiceState
from workers.tiers.io_threads import IoThreads
from workers.tiers.part_io import (
    Encoded,
    Extent,
    PartFile,
    PartRead,
    PartToRead,
    PartToWrite,
    PartWritten,
    encoded,
    runs,
    tried,
    wipe,
)
from workers.tiers.segment_file import Medium, own_segment_file

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence
    from pathlib import Path

    from kvstore.clock import Clock
    from kvstore.codec import Codec
    from kvstore.ids import Incarnation, SegmentId
    from kvstore.segment import Geometry, SegmentHeader
    from workers.events import Stretch
    from workers.record_table import Found
    from workers.tiers.disk import Disk, DiskFile
    from workers.tiers.io_threads import Job

LOG: Final = logging.getLogger(__name__)
THREADS: Final = 2
"""Measured on one disk of 1.7 GB/s: one thread reads 1.0, two 1.7, four and eight 1.6."""
MEDIUM: Final = Medium(
    folder="a folder of a disk that this user may write to",
    more_room="make room or lend less",
    remedy="; remove it, or name another directory",
)


class NvmeCounts(msgspec.Struct):
    """What a segment has done since its start. Bytes are those of stored forms."""

    parts_written: int = 0
    bytes_written: int = 0
    payload_bytes_written: int = 0
    """Before encoding: over bytes_written, the ratio of the codecs."""
    parts_read: int = 0
    bytes_read: int = 0
    misses: dict[str, int] = msgspec.field(default_factory=dict)
    """Parts that were asked for and not brought, by outcome."""


class NvmeSegment:
    """One segment file on a disk. Thread-safe: callers see to it that an extent has one writer."""

    tier: Final = Tier.NVME

    def __init__(
        self, file: GuardedFile, header: SegmentHeader, codec: Codec | None, clock: Clock
    ) -> None:
        """Own a file with this header, already in its new life; `codec` None chooses by itself."""
        self.id: Final = header.segment
        self.incarnation: Final = header.incarnation
        self.geometry: Final = header.geometry
        self.records: Final = RecordTable(file, header.geometry)
        self.counts: Final = NvmeCounts()
        self._file = file
        self._codec = codec
        self._clock = clock
        self._choice = CodecChoice()
        self._mutex = Lock()
        self._threads = IoThreads(THREADS, f"disk-{header.segment}")
        self._parts = PartFile(
            file, self.records, header.geometry, header.incarnation, self._threads
        )

    @property
    def service(self) -> ServiceState:
        """What the segment still does."""
        return self._file.service

    @property
    def reason(self) -> str:
        """Why it does not do everything; empty while it does."""
        return self._file.reason

    @property
    def errors(self) -> int:
        """Calls of the system that failed."""
        return self._file.errors

    @property
    def is_direct(self) -> bool:
        """Whether payloads go past the page cache."""
        return self._file.is_direct

    def read(self, parts: Sequence[PartToRead]) -> list[PartRead]:
        """Bring parts, each verified after its last byte; one answer a part, in their order.

        BadValue for places that no extent of this segment can have. Returns when the disk is done
        with all of them: what it was given is the caller's again.
        """
        found = [PartRead(Outcome.TRANSPORT)] * len(parts)

        def job(stretch: Stretch) -> None:
            page, stop = stretch.page, stretch.page + stretch.count
            with contextlib.suppress(OutOfService, OutOfSpace):  # the answer is there already
                found[page:stop] = self._parts.read_run(stretch, parts[page:stop])

        stretches = runs(self.geometry, [part.extent for part in parts])
        try:
            self._threads.run(partial(job, stretch) for stretch in stretches)
        finally:
            for part, each in zip(parts, found, strict=True):
                if each.record is None:
                    wipe(part.into)
        self._note_read(found)
        return found

    def write(self, parts: Sequence[PartToWrite]) -> list[PartWritten]:
        """Encode and seal parts; one answer a part, in their order.

        The payloads must not change meanwhile. A record's size class may be smaller than that of
        its payload, never larger: BadValue, as for places that no extent can have.
        """
        for part in parts:
            _check(part)
        found = [PartWritten(Outcome.TRANSPORT)] * len(parts)

        self._threads.run(self._writes(parts, found))
        self._note_written(parts, found)
        return found

    def write_free(self, stretches: Iterable[Stretch], size_class: int) -> Outcome:
        """Make extents FREE, durably before this returns: OK, or TRANSPORT where it is not.

        A free that a loss of power undid would bring back what was removed elsewhere since (I29).
        """
        return self._change(lambda each: self.records.write_free(each, size_class), stretches)

    def write_removed(self, stretches: Iterable[Stretch], size_class: int) -> Outcome:
        """Make records REMOVED, durably before this returns: OK, or TRANSPORT where it is not."""
        return self._change(lambda each: self.records.write_removed(each, size_class), stretches)

    def take_over(self, known: Incarnation | None) -> Found:
        """Bring what the last life has left into this one, durably; see `RecordTable`."""
        found = self.records.take_over(known, self.incarnation)
        self._file.sync()
        return found

    def check_name(self) -> None:
        """Take no more pages when the file's name is gone: the next start would not find them."""
        self._file.check_name()

    def close(self) -> None:
        """Wait for the disk and give the ownership up; nothing may use the segment any more."""
        self._threads.close()
        self._file.close()

    def _change(self, change: Callable[[Stretch], None], stretches: Iterable[Stretch]) -> Outcome:
        try:
            for stretch in stretches:
                change(stretch)
            self._file.sync()
        except OutOfService:
            return Outcome.TRANSPORT
        return Outcome.OK

    def _writes(self, parts: Sequence[PartToWrite], found: list[PartWritten]) -> Iterator[Job]:
        """Jobs that write neighbours, as far as they are what they say and fit.

        Encoded in the thread that asks for the next job: reads wait for the disk's own.
        """
        for near in runs(self.geometry, [_place(part) for part in parts]):
            fit: list[tuple[int, Encoded]] = []
            for page in range(near.page, near.page + near.count):
                form = self._form(parts[page]) if _is_true(parts[page]) else None
                found[page] = _fitted(parts[page], form)
                if form is not None and found[page].outcome is Outcome.OK:
                    fit.append((page, form))
            for stretch in runs(self.geometry, [_place(parts[page]) for page, _ in fit]):
                some = fit[stretch.page : stretch.page + stretch.count]
                yield partial(self._write_run, stretch, some, parts, found)

    def _write_run(
        self,
        stretch: Stretch,
        forms: Sequence[tuple[int, Encoded]],
        parts: Sequence[PartToWrite],
        found: list[PartWritten],
    ) -> None:
        records = [parts[page].record for page, _ in forms]
        outcome = Outcome.OK
        try:
            self._parts.write_run(stretch, records, [form for _, form in forms])
        except OutOfService:
            outcome = Outcome.TRANSPORT
        except (OSError, OutOfSpace) as error:
            LOG.warning("%s: no room for a record table, or no memory: %s", self.id, error)
            outcome = Outcome.OUT_OF_SPACE
        for page, _ in forms:
            found[page] = msgspec.structs.replace(found[page], outcome=outcome)

    def _form(self, part: PartToWrite) -> Encoded:
        if self._codec is not None:
            return encoded(self._codec, part.payload)
        namespace = part.record.namespace_ordinal
        with self._mutex:
            codec = self._choice.choose(namespace)
        if codec is not None:
            return encoded(codec, part.payload)
        trials, shortest = tried(part.payload, self._clock)
        with self._mutex:
            self._choice.learn(namespace, trials)
        return shortest

    def _note_read(self, found: Iterable[PartRead]) -> None:
        with self._mutex:
            counts = self.counts
            for each in found:
                if each.record is not None:
                    counts.parts_read += 1
                    counts.bytes_read += each.record.stored_bytes
                else:
                    name = each.outcome.name.lower()
                    counts.misses[name] = counts.misses.get(name, 0) + 1

    def _note_written(self, parts: Sequence[PartToWrite], found: Sequence[PartWritten]) -> None:
        with self._mutex:
            for part, each in zip(parts, found, strict=True):
                if each.outcome is Outcome.OK:
                    self.counts.parts_written += 1
                    self.counts.bytes_written += each.stored_bytes
                    self.counts.payload_bytes_written += len(part.payload)


def open_nvme(
    path: Path,
    cluster: str,
    segment: SegmentId,
    geometry: Geometry,
    *,
    codec: Codec | None,
    clock: Clock,
    disk: Disk[DiskFile] | None = None,
) -> tuple[NvmeSegment, Found]:
    """Own the segment file at `path`: the one that lies there, with its pages, or a new one.

    `codec` None measures and chooses by namespace. A file of another version or size is replaced
    by an empty one. Raises SegmentInUse when another process owns it, OutOfSpace with both numbers
    when the disk is too small, ConfigError when the directory does not do or the file is not this
    cluster's segment of that name.
    """
    disk = disk or LocalDisk()
    owned = own_segment_file(disk, path, cluster, segment, geometry, MEDIUM)
    try:
        file = GuardedFile(segment, owned.file, partial(disk.is_named, owned.file, path))
        opened = NvmeSegment(file, owned.header, codec, clock)
        found = opened.take_over(owned.known)
    except (OSError, OutOfService) as error:
        owned.file.close()
        raise ConfigError(f"{path}: cannot be used: {error}") from error
    except BaseException:
        owned.file.close()
        raise
    return opened, found


def _is_true(part: PartToWrite) -> bool:
    """Whether the payload is what the record says (I3)."""
    record = part.record
    return payload_checksum(part.payload, record.key, record.part) == record.checksum


def _fitted(part: PartToWrite, form: Encoded | None) -> PartWritten:
    if form is None:
        return PartWritten(Outcome.CHECKSUM)
    stored_bytes = len(form.stored)
    fits = stored_bytes <= part.record.size_class
    return PartWritten(Outcome.OK if fits else Outcome.TOO_BIG, stored_bytes, form.codec)


def _place(part: PartToWrite) -> Extent:
    return Extent(part.record.offset, part.record.size_class)


def _check(part: PartToWrite) -> None:
    """BadValue unless sizes fit each other."""
    record, length = part.record, len(part.payload)
    if record.payload_bytes != length or not length:
        raise BadValue("payload", length, f"{record.payload_bytes} bytes, as the record says")
    most = size_class_of(length)
    if record.size_class > most:
        raise BadValue("size_class", record.size_class, f"at most {most} for {length} bytes")
