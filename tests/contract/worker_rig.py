"""A worker's whole shell in this process, a scripted leader, and raw clients. Not a test.

Real sockets, real memory, real threads; nothing here waits for time to pass.
"""

from __future__ import annotations

import contextlib
import time
from array import array
from queue import SimpleQueue
from typing import TYPE_CHECKING, Final

import msgspec

from kvstore.clock import SystemClock
from kvstore.errors import DeadlineExceeded
from kvstore.ids import SegmentId
from kvstore.rpc.address import bind, bound_address
from kvstore.rpc.dialling import dial
from kvstore.rpc.failure import error_of
from kvstore.rpc.identity import Identity, ListenerIdentity, Role
from kvstore.segment import check_geometry
from kvstore.transfer.choice import Choice
from kvstore.wire.framing import FrameKind, pack_frame
from kvstore.wire.messages.common import Address, Outcome
from kvstore.wire.messages.hello import Done, Failure
from kvstore.wire.messages.puts import Ingest, StreamSource
from kvstore.wire.messages.transfers import (
    AttachBuffer,
    CheckRecords,
    ReadEnded,
    ReadExtents,
    ReadStarted,
)
from tests.contract.scripted_leader import CLUSTER, PATIENCE_S, Leader
from tests.unit import hbm_segments, nvme_parts
from tests.unit.worker_scripts import CHUNK, EPOCH, PAGE, generation
from tests.unit.worker_segments import Pages, memory_folder, opened, sealed_memfd
from workers.control_link import ControlLink
from workers.extent_table import SegmentTable
from workers.listeners import Listeners
from workers.membership import Profile
from workers.mover import MoverThreads
from workers.report_line import ReportLine
from workers.service import Service
from workers.staging import Staging
from workers.state import WorkerState
from workers.tiers.dram import nameless_dram

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

    from kvstore.clock import Clock
    from kvstore.errors import KVStoreError
    from kvstore.rpc.frame_socket import FrameSocket
    from kvstore.transfer.device import Device
    from kvstore.wire.messages.base import Message
    from kvstore.wire.messages.membership import (
        CheckExtents,
        FenceExtents,
        FreeExtents,
        RetireExtents,
    )
    from tests.fake_disk import FakeDisk
    from workers.ingest import EngineDesk
    from workers.tiers.tier import Segment

WORKER: Final = "w"
TRANSPORTS: Final = ("shm", "tcp")
OFFSETS: Final = (0, PAGE, 2 * PAGE, CHUNK)


def soon() -> float:
    """A deadline that only a failure reaches."""
    return time.monotonic() + PATIENCE_S


class Rig:
    """One worker of one life: segment, state machine, listeners, control link."""

    def __init__(
        self, folder: Path, leader: Leader, *, clock: Clock | None = None,
        secret: bytes | None = None, disk: FakeDisk | None = None, device: Device | None = None,
        masters: Sequence[str] = (), worker: str = WORKER,
    ) -> None:  # fmt: skip
        """Start everything; `folder` and `disk` keep the segments between lives."""
        self.leader = leader
        self.worker = worker
        self.secret = secret
        self.refusals: SimpleQueue[KVStoreError] = SimpleQueue()
        self.bugs: SimpleQueue[BaseException] = SimpleQueue()
        """What would have ended the process: a test takes out what it has caused itself."""
        self.segment, self.found = opened(folder / "segment", name=SegmentId(f"{worker}-dram0"))
        table = SegmentTable(self.segment.id, self.segment.incarnation, self.segment.geometry)
        table.adopt(self.found.adopted)
        segments: list[Segment] = [self.segment]
        tables = [table]
        if disk is not None:
            self.nvme, self.adopted = nvme_parts.opened(disk, name=SegmentId(f"{worker}-nvme0"))
            nvme = self.nvme
            segments.append(nvme)
            below = SegmentTable(nvme.id, nvme.incarnation, nvme.geometry, holds_encoded=True)
            below.adopt(self.adopted.adopted)
            tables.append(below)
        if device is not None:
            self.hbm = hbm_segments.opened(device, SegmentId(f"{worker}-hbm0"))
            segments.append(self.hbm)
            life, geometry = self.hbm.incarnation, self.hbm.geometry
            tables.append(SegmentTable(self.hbm.id, life, geometry, can_shrink=True))
        self._sockets = [bind(f"unix:{folder}/w.sock", secret), bind("127.0.0.1:0", secret)]
        self.unix, self.tcp = (bound_address(sock) for sock in self._sockets)
        tiers = {str(segment.id): str(segment.tier) for segment in segments}
        profile = Profile(worker, "host", (Address("tcp", self.tcp, 10),), tiers)
        identity = Identity(Role.WORKER, name=worker, secret=secret, cluster=CLUSTER)
        self.state = WorkerState(profile, tables)
        line = ReportLine(identity.renewed())
        clock = SystemClock() if clock is None else clock
        staging = None if disk is None else self._staging(folder, clock)
        desk = self.engine_desk(clock)
        reader = identity.renewed()
        self.service = Service(
            self.state, segments, clock, line, desk, staging,
            peers=Choice(TRANSPORTS, lambda: reader, clock), threads=MoverThreads(2, 2),
        )  # fmt: skip
        self.listeners = Listeners(self.service, ListenerIdentity(CLUSTER, secret), self._sockets)
        self.control = ControlLink(
            self.service, masters or [leader.address], identity, self.refusals.put
        )
        self.service.control = self.control
        self.service.on_broken = self.bugs.put
        self.control.start()
        self.listeners.start()

    def stop(self) -> None:
        """End in the order of workers.program."""
        self.listeners.close()
        self.control.stop()
        self.service.close()
        for sock in self._sockets:
            sock.close()
        for segment in self.service.segments.values():
            segment.close()
        if self.service.staging is not None:
            self.service.staging.segment.close()
        if not self.bugs.empty():
            raise self.bugs.get()

    def engine_desk(self, clock: Clock) -> EngineDesk | None:
        """None here: see tests.contract.engine_rig."""
        return None

    def _staging(self, folder: Path, clock: Clock) -> Staging:
        """Room for one chunk of pages on their way from the disk to readers."""
        name, geometry = SegmentId(f"{self.worker}-staging"), check_geometry(CHUNK, CHUNK)
        memory = nameless_dram(folder, CLUSTER, name, geometry)
        tables = self.state.holdings.segments
        return Staging(memory, {self.nvme.id: self.nvme}, tables, clock)

    @contextlib.contextmanager
    def client(self, address: str = "", identity: Identity | None = None) -> Iterator[Client]:
        """A client's connection, to the Unix socket unless told otherwise."""
        me = identity or Identity(Role.ENGINE, secret=self.secret)
        link, _ = dial(address or self.unix, me, soon())
        try:
            yield Client(link, self)
        finally:
            link.close()


class Client:
    """One data connection, driven by hand."""

    def __init__(self, link: FrameSocket, rig: Rig) -> None:
        """Use a greeted connection."""
        self.link = link
        self.rig = rig
        self._last = 0

    def send(self, message: Message, **extras: object) -> int:
        """Ask; the request's id."""
        self._last += 1
        kind = FrameKind.REQUEST
        self.link.send(kind, self._last, message, **extras)  # type: ignore[arg-type]  # passed on
        return self._last

    def reply(self, request_id: int) -> Message:
        """The next frame, which must be the answer to that request."""
        frame = self.link.receive(soon())
        assert (frame.kind, frame.request_id) == (FrameKind.REPLY, request_id)
        return frame.message

    def call(self, message: Message, **extras: object) -> Message:
        """Ask and wait; a Failure is raised as its error."""
        reply = self.reply(self.send(message, **extras))
        if isinstance(reply, Failure):
            raise error_of(reply)
        return reply

    def attach(self, number: int, data: bytes) -> None:
        """Hand a buffer over."""
        assert self.call(AttachBuffer(number, len(data)), fds=[sealed_memfd(data)]) == Done()

    def ingest(self, pages: Pages, counter: int = 5) -> Message:
        """Put pages out of a buffer of their own."""
        self.attach(1, pages.source)
        return self.call(pages.ingest(self.rig.segment, counter))

    def stream(self, pages: Pages, counter: int = 5, *, upto: int | None = None) -> int:
        """Send an Ingest whose bytes follow it, or only the first `upto` of them."""
        raw = [pages.source[:upto]] if upto != 0 else []
        return self.send(streamed(pages.ingest(self.rig.segment, counter)), raw=raw)

    def two_streams(self, first: Pages, second: Pages, counter: int = 5) -> list[int]:
        """Send two small puts in one piece: whoever has read the first finds the second there."""
        numbers = [self._last + 1, self._last + 2]
        message = streamed(second.ingest(self.rig.segment, counter))
        frame = pack_frame(FrameKind.REQUEST, numbers[1], message, self.link.version)
        behind = [first.source, frame, second.source]
        self.send(streamed(first.ingest(self.rig.segment, counter)), raw=behind)
        self._last += 1
        return numbers


def streamed(message: Ingest) -> Ingest:
    """The same request with its bytes behind it."""
    return msgspec.structs.replace(message, source=StreamSource())


def column(values: array[int] | list[int]) -> bytes:
    """A packed u64 column."""
    return array("Q", values).tobytes()


@contextlib.contextmanager
def running(
    folder: Path, leader: Leader, clock: Clock | None = None, secret: bytes | None = None,
    disk: FakeDisk | None = None, device: Device | None = None, worker: str = WORKER,
) -> Iterator[Rig]:  # fmt: skip
    """A worker that serves, until the block ends."""
    rig = Rig(folder, leader, clock=clock, secret=secret, disk=disk, device=device, worker=worker)
    try:
        leader.await_served()
        yield rig
    finally:
        rig.stop()


@contextlib.contextmanager
def pool(
    disk: FakeDisk | None = None, device: Device | None = None, worker: str = WORKER
) -> Iterator[Rig]:
    """A leader and a worker that serves, in a folder of their own."""
    with memory_folder() as folder:
        leader = Leader()
        try:
            with running(folder, leader, disk=disk, device=device, worker=worker) as rig:
                yield rig
        finally:
            leader.stop()


def order(
    kind: type[FenceExtents | FreeExtents | RetireExtents | CheckExtents], rig: Rig,
    offsets: tuple[int, ...] = OFFSETS, counter: int = 5,
) -> Message:  # fmt: skip
    """A command on these extents, at one generation."""
    generations = column([generation(counter)] * len(offsets))
    packed = column(list(offsets))
    return kind(EPOCH, rig.segment.id, rig.segment.incarnation, PAGE, packed, generations)


def question(
    kind: type[ReadExtents | CheckRecords], rig: Rig, pages: Pages, counter: int = 5,
    segment: Segment | None = None,
) -> Message:  # fmt: skip
    """A question about these pages, put there at one generation."""
    segment = segment or rig.segment
    return kind(
        segment.id, segment.incarnation, 0, pages.size, b"".join(pages.keys),
        pages.offsets.tobytes(), column([generation(counter)] * len(pages.keys)),
    )  # fmt: skip


def read(
    client: Client, pages: Pages, counter: int = 5, segment: Segment | None = None
) -> tuple[bytes, bytes, bytes]:
    """Outcomes before, the bytes, outcomes after."""
    request = client.send(question(ReadExtents, client.rig, pages, counter, segment))
    started = client.reply(request)
    assert isinstance(started, ReadStarted)
    data = bytearray(started.outcomes.count(Outcome.OK) * pages.size)
    client.link.receive_raw_into([memoryview(data)], soon())
    ended = client.reply(request)
    assert isinstance(ended, ReadEnded)
    return started.outcomes, bytes(data), ended.outcomes


def is_silent(client: Client) -> bool:
    """Whether no frame has come."""
    try:
        client.link.receive(0.0)
    except DeadlineExceeded:
        return True
    return False
