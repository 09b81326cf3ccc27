"""One client's data connection, served by one thread: attach, share, ingest, read, stage.

Requests of a connection are carried out in order, but their reports to the master overlap: while a
seal is on its way the next pull copies. Owns nothing that outlives the connection; decisions are
the state machine's, reached through `Service`.
"""

from __future__ import annotations

import logging
from array import array
from collections import deque
from queue import Empty, SimpleQueue
from threading import Lock
from typing import TYPE_CHECKING, Final

import msgspec

from kvstore import limits
from kvstore.errors import (
    AccessDenied,
    BadValue,
    BufferClosed,
    KVStoreError,
    MalformedMessage,
    Unavailable,
)
from kvstore.ids import KEY_BYTES
from kvstore.rpc.failure import failure_of
from kvstore.rpc.identity import Role
from kvstore.transfer.device import CPU, Handle
from kvstore.wire.framing import REPLY, REQUEST
from kvstore.wire.messages.common import Outcome
from kvstore.wire.messages.hello import Done, Failure
from kvstore.wire.messages.puts import (
    BufferSource,
    EngineSource,
    ExtentSource,
    Ingest,
    Ingested,
    PeerSource,
    StreamSource,
    StripeSource,
)
from kvstore.wire.messages.transfers import (
    AttachBuffer,
    AttachDeviceBuffer,
    CheckRecords,
    DetachBuffer,
    FindEngine,
    ReadExtents,
    ReleaseStaged,
    ShareDeviceSegment,
    ShareSegments,
    StageExtents,
)
from workers import ingest, stream_source
from workers.client_buffers import HeldBuffer
from workers.device_source import DeviceSource
from workers.events import (
    AnswerIngest,
    IngestRequested,
    MasterAnswered,
    PullEnded,
    RefuseIngest,
    SessionClosed,
    StartPull,
)
from workers.serve_reads import check_records, send_extents
from workers.sharing import ClientBuffer, shared, shared_device

if TYPE_CHECKING:
    from kvstore.rpc.frame_socket import FrameSocket
    from kvstore.wire.messages.base import Message
    from workers.client_buffers import AnyBuffer, ClientKey, SessionBuffers
    from workers.report_line import Sent
    from workers.service import Service

LOG: Final = logging.getLogger(__name__)

ToSession = StartPull | AnswerIngest | RefuseIngest
"""Actions that the thread of the connection which asked carries out."""

_READS: Final = (
    ReadExtents | CheckRecords | ShareSegments | StageExtents | ReleaseStaged | FindEngine
)
"""What another worker may ask: nobody but the leader has it copy pages (R)."""
PATIENCE_S: Final = limits.CALL_TIMEOUT_MAX_S
"""How long a request may wait for a busy extent: the longest timeout that a client may name."""


class OpenIngest(msgspec.Struct):
    """An Ingest of this connection that is not answered yet."""

    request_id: int
    source: ingest.Source
    use: HeldBuffer | None = None
    """What keeps the source's buffer mapped."""
    stream: stream_source.StreamSource | None = None
    """The source, if its bytes lie on this connection before the next frame."""

    def let_go(self) -> None:
        """End the use of the source's buffer."""
        if self.use is not None:
            self.use.end()


class DataSession:
    """One greeted connection. `serve` is its thread; `post` and `end` are for other threads."""

    def __init__(
        self, service: Service, link: FrameSocket, number: int, client: ClientKey, *, is_unix: bool
    ) -> None:
        """Own `link`. `client` has a session, which other connections may share."""
        self.number: Final = number
        self._service = service
        self._link = link
        self._client = client
        self._is_unix = is_unix
        self._mailbox: SimpleQueue[ToSession] = SimpleQueue()
        self._posting = Lock()
        self._is_over = False
        self._open: dict[int, OpenIngest] = {}
        self._reports: deque[tuple[int, Sent | None]] = deque()

    def serve(self) -> None:
        """Carry out requests until the connection ends."""
        try:
            with self._service.buffers.connection(self._client) as buffers:
                self._service.enter(self)
                try:
                    self._serve(buffers)
                finally:
                    self._leave()
        except MalformedMessage as error:
            LOG.warning("data connection %d closed: %s", self.number, error)
        except Unavailable as error:
            LOG.debug("data connection %d ended: %s", self.number, error)
        finally:
            self._link.close()

    def end(self) -> None:
        """Make `serve` return soon."""
        self._link.shutdown()

    def post(self, action: ToSession) -> bool:
        """Hand an action to this connection's thread; False when it has ended."""
        with self._posting:
            if not self._is_over:
                self._mailbox.put(action)
            return not self._is_over

    def report(self, call: int, message: Message) -> None:
        """Send a seal to the master; its answer is taken in between two requests."""
        self._reports.append((call, self._service.line.start(message)))

    def _serve(self, buffers: SessionBuffers) -> None:
        link = self._link
        while True:
            # With answers of ours due, only a request that is there already comes before them.
            is_idle = not self._open and not self._reports
            frame = link.receive() if is_idle else link.receive_ready()
            if frame is None:
                self._progress()
                continue
            if frame.kind is not REQUEST:
                raise MalformedMessage(f"{type(frame.message).__name__} as a reply to nothing")
            try:
                self._carry_out(frame.request_id, frame.message, buffers)
            except (MalformedMessage, Unavailable):
                raise
            except KVStoreError as error:
                self._reply(frame.request_id, failure_of(error))

    def _carry_out(self, request_id: int, message: Message, buffers: SessionBuffers) -> None:
        service, is_worker = self._service, self._client[0] == Role.WORKER
        if is_worker and not isinstance(message, _READS):
            raise AccessDenied(f"{type(message).__name__}: another worker may only read")
        match message:
            case Ingest():
                self._ingest(request_id, message, buffers)
            case ReadExtents():
                tables = service.tables
                sent = send_extents(self._link, request_id, message, service.segments, tables)
                service.counts.note_sent(sent, is_copied=is_worker)
            case CheckRecords():
                checked = check_records(message, service.segments, service.tables)
                self._reply(request_id, checked)
            case (
                ShareSegments()
                | ShareDeviceSegment()
                | AttachBuffer()
                | AttachDeviceBuffer()
                | StageExtents()
            ) if not self._is_unix:
                raise BadValue("message", type(message).__name__, "the Unix socket for it")
            case ShareSegments():
                with shared(service.shared_segments) as (reply, descriptors):
                    self._link.send(REPLY, request_id, reply, descriptors)
            case ShareDeviceSegment(name, incarnation, closed):
                buffers.closed(closed)
                segment, share = service.device_segment(name, incarnation), service.next_number()
                with shared_device(segment, share) as (described, descriptors):
                    buffers.opened(share, segment)
                    self._link.send(REPLY, request_id, described, descriptors)
            case AttachBuffer(number, size_bytes):
                (descriptor,) = self._link.take_fds(1)
                buffers.attach(number, ClientBuffer(descriptor, size_bytes))
                self._reply(request_id, Done())
            case AttachDeviceBuffer(number, size_bytes, device, ipc, offset):
                descriptors = self._link.take_fds(1 if device == CPU else 0)
                handle = Handle(device, size_bytes, ipc, offset)
                buffers.attach(number, service.open_block(handle, descriptors))
                self._reply(request_id, Done())
            case DetachBuffer(number):
                while self._open:
                    self._progress()
                buffers.detach(number)
                self._reply(request_id, Done())
            case StageExtents():
                self._reply(request_id, service.require_staging().stage(self.number, message))
            case ReleaseStaged():
                service.require_staging().release(self.number, message)
                self._reply(request_id, Done())
            case FindEngine():
                self._reply(request_id, service.require_engine().find(message))
            case _:
                raise BadValue("message", type(message).__name__, "a request to a worker's data")

    def _reply(self, request_id: int, message: Message) -> None:
        self._link.send(REPLY, request_id, message)

    # --- ingest -----------------------------------------------------------------------------

    def _ingest(self, request_id: int, message: Ingest, buffers: SessionBuffers) -> None:
        try:
            opened = self._opened(request_id, message, buffers)
        except BufferClosed as error:
            LOG.info("data connection %d: %s", self.number, error)
            lost = bytes((Outcome.SOURCE_LOST,)) * (len(message.keys) // KEY_BYTES)
            self._reply(request_id, Ingested(lost))
            return
        number = self._service.next_number()
        self._open[number] = opened
        self._service.dispatch(IngestRequested(number, self.number, message), self)
        self._take_mail()
        if (stream := opened.stream) is not None:
            # Its bytes lie before the next frame.
            while not stream.is_finished:
                self._progress()

    def _opened(self, request_id: int, message: Ingest, buffers: SessionBuffers) -> OpenIngest:
        """The request with its source, whose buffer is in use from here on."""
        pages = len(message.keys) // KEY_BYTES
        match message.source:
            case BufferSource(number, offsets):
                if len(offsets) != 8 * pages:
                    want = f"{8 * pages} bytes for {pages} keys"
                    raise BadValue("source.offsets", len(offsets), want)
                use = buffers.use(number)
                places = array("Q", offsets)
                try:
                    source = _source(use.buffer, places, message.part_bytes)
                except BaseException:
                    use.end()
                    raise
                return OpenIngest(request_id, source, use)
            case StreamSource():
                if not 0 < message.part_bytes <= limits.CHUNK_BYTES:
                    # How many bytes follow is anybody's guess: the stream's position is lost.
                    raise MalformedMessage(f"part_bytes {message.part_bytes} of a stream")
                now = self._service.clock.now_s()
                stream = stream_source.StreamSource(self._link, pages, message.part_bytes, now)
                return OpenIngest(request_id, stream, stream=stream)
            case EngineSource():
                return OpenIngest(request_id, self._service.require_engine().source(message))
            case ExtentSource() | PeerSource() | StripeSource():
                raise BadValue("source", "extents", "a source that the client itself can reach")

    def _progress(self) -> None:
        """Bring one open request nearer to its answer; waits for whoever has its extents."""
        if self._reports:
            call, sent = self._reports.popleft()
            reply = None if sent is None else self._service.line.finish(sent)
            self._service.dispatch(MasterAnswered(call, reply), self)
        else:
            try:
                self._take(self._mailbox.get(timeout=PATIENCE_S))
            except Empty as error:
                raise Unavailable("a request waited too long for a busy extent") from error
        self._take_mail()

    def _take_mail(self) -> None:
        while not self._mailbox.empty():
            self._take(self._mailbox.get_nowait())

    def _take(self, action: ToSession) -> None:
        if isinstance(action, StartPull):
            self._pull(action)
            return
        opened = self._open.pop(action.request)
        opened.let_go()
        if isinstance(action, AnswerIngest):
            if opened.stream is not None:
                opened.stream.finish()
            self._reply(opened.request_id, Ingested(action.outcomes, action.stored_max))
            return
        self._reply(opened.request_id, Failure(action.code, action.text))
        if opened.stream is not None:
            raise MalformedMessage(f"a stream whose request was refused: {action.text}")

    def _pull(self, action: StartPull) -> None:
        service, opened = self._service, self._open[action.request]
        service.dispatch(service.carry_out(action, opened.source), self)
        if opened.stream is not None:
            opened.stream.finish()

    def _leave(self) -> None:
        """Settle what is open, so that no extent stays busy for a client that is gone."""
        with self._posting:
            self._is_over = True
        self._service.dispatch(SessionClosed(self.number), self)
        if self._service.staging is not None:
            self._service.staging.forget(self.number)
        while not self._mailbox.empty():
            action = self._mailbox.get_nowait()
            if isinstance(action, StartPull):
                self._service.dispatch(never_started(action), self)
                self._service.pulls.end(action.pull)
        while self._reports:
            call, sent = self._reports.popleft()
            reply = None if sent is None else self._service.line.finish(sent)
            self._service.dispatch(MasterAnswered(call, reply), self)
        self._service.leave(self)
        for opened in self._open.values():
            opened.let_go()


def never_started(action: StartPull) -> PullEnded:
    """The end of a pull whose client was gone before its first byte."""
    pages = len(action.message.keys) // KEY_BYTES
    return PullEnded(action.pull, bytes((Outcome.FENCED,)) * pages)


def _source(buffer: AnyBuffer, places: array[int], part_bytes: int) -> ingest.Source:
    if isinstance(buffer, ClientBuffer):
        return ingest.BufferSource(buffer, places, part_bytes)
    return DeviceSource(buffer, places, part_bytes)
