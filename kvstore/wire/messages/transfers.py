"""Client and worker, data connections: buffers, shared descriptors, reads over a stream."""

from __future__ import annotations

import msgspec

from kvstore.segment import Geometry
from kvstore.wire.messages.base import Message


class AttachBuffer(Message, frozen=True, tag=112):
    """Client to worker over the Unix socket; one memfd rides along -> Done.

    The worker refuses a descriptor without F_SEAL_SHRINK: a truncated mapping kills a process.
    """

    buffer: int
    size_bytes: int


class DetachBuffer(Message, frozen=True, tag=113):
    """Client to worker: the buffer is going away -> Done after the last pull from it ended."""

    buffer: int


class ShareSegments(Message, frozen=True, tag=114):
    """Client to worker over the Unix socket -> SegmentsShared."""


class SharedSegment(msgspec.Struct, frozen=True, array_like=True):
    """One segment whose read-only descriptor rides along, in the same order."""

    segment: str
    incarnation: int
    geometry: Geometry


class SegmentsShared(Message, frozen=True, tag=115):
    """Worker to client, with one read-only descriptor a segment, opened for this session."""

    segments: tuple[SharedSegment, ...]


class ReadExtents(Message, frozen=True, tag=116):
    """Client to worker on a stream -> ReadStarted, the bytes of every OK page, ReadEnded."""

    segment: str
    incarnation: int
    part: int
    part_bytes: int
    keys: bytes
    offsets: bytes
    generations: bytes


class ReadStarted(Message, frozen=True, tag=117):
    """One Outcome byte a page; the payloads of the OK ones follow raw, in order."""

    outcomes: bytes


class ReadEnded(Message, frozen=True, tag=118):
    """After the last byte: one Outcome byte a page; anything but OK makes that page a miss."""

    outcomes: bytes


class CheckRecords(Message, frozen=True, tag=119):
    """Client to worker: are these still SEALED as named? -> RecordsChecked."""

    segment: str
    incarnation: int
    part: int
    part_bytes: int
    keys: bytes
    offsets: bytes
    generations: bytes


class RecordsChecked(Message, frozen=True, tag=120):
    """One Outcome byte a page."""

    outcomes: bytes


class StageExtents(Message, frozen=True, tag=123):
    """Client to worker over the Unix socket: copy these pages from disk into memory -> Staged.

    The worker decodes and verifies them. Safe to repeat: what is staged already is found again.
    While there is room for none of them, a connection that holds nothing staged waits for some, for
    up to `timeout_s`.
    """

    segment: str
    incarnation: int
    part: int
    part_bytes: int
    keys: bytes
    offsets: bytes
    generations: bytes
    timeout_s: float


class Staged(Message, frozen=True, tag=124):
    """Worker to client: where OK pages lie now, in a DRAM segment that ShareSegments hands out.

    They are not overwritten for STAGING_LEASE_S seconds unless released, and never while a view
    holds its lock. BUSY: no room for this page yet. Packed u64 columns have one entry for each
    page, also for those that are not OK.
    """

    outcomes: bytes
    segment: str
    incarnation: int
    offsets: bytes
    generations: bytes


class ReleaseStaged(Message, frozen=True, tag=125):
    """Client to worker: these places of Staged were read, or are locked, by now -> Done."""

    offsets: bytes
    generations: bytes


class AttachDeviceBuffer(Message, frozen=True, tag=126):
    """Client to worker over the Unix socket: memory on a device to be pulled from -> Done.

    Numbered among the session's buffers, and detached like them. On the device cpu one sealed memfd
    rides along; elsewhere `ipc` names the driver's allocation, at most 64 bytes. BadValue where the
    worker lends no memory of that device.
    """

    buffer: int
    size_bytes: int
    device: str
    """The device's identity, the same for every process of the machine."""
    ipc: bytes
    offset: int
    """Where in the allocation."""


class ShareDeviceSegment(Message, frozen=True, tag=127):
    """Client to worker over the Unix socket: let us copy out of it -> DeviceSegmentShared.

    BadValue for a stranger or another life. `closed` are shares of this session that are not used
    any more: memory that is given back waits for them.
    """

    segment: str
    incarnation: int
    closed: tuple[int, ...] = ()


class SharedChunk(msgspec.Struct, frozen=True, array_like=True):
    """How the memory of one chunk is opened; fields as in AttachDeviceBuffer."""

    chunk: int
    size_bytes: int
    ipc: bytes
    offset: int


class DeviceSegmentShared(Message, frozen=True, tag=128):
    """Worker to client: the chunks that have their memory, until closed, or this session ends.

    A read-only descriptor of the records rides along, and on the device cpu one for each chunk.
    """

    share: int
    """A number for `closed`."""
    geometry: Geometry
    device: str
    chunks: tuple[SharedChunk, ...]


class FindEngine(Message, frozen=True, tag=121):
    """Client to worker: where does its transfer engine serve this segment? -> EngineFound.

    Asked of the worker itself, which can prove who it is; the engine cannot.
    """

    segment: str
    incarnation: int


class EngineFound(Message, frozen=True, tag=122):
    """Worker to client: the engine's name (host:port), and where it has the payload's blocks.

    Memory of the host is one block; of a device each chunk is one, wherever it lies, and one that
    was given back has none. No page lies in two.
    """

    peer: str
    block_bytes: int
    addresses: bytes
    """Packed u64 column, one entry a block; 0 for one that is not there."""
