"""The pool worker's shell: events into the state machine, actions out, from any thread.

Owns the one lock around `WorkerState.handle` and the routing of actions to the threads that carry
them out. Decides nothing.
"""

from __future__ import annotations

import logging
import os
import threading
from itertools import count
from typing import TYPE_CHECKING, Final, assert_never

from kvstore.errors import BadValue, BufferClosed, Unavailable
from kvstore.wire.messages.common import Outcome
from kvstore.wire.messages.hello import Done, Failure
from kvstore.wire.messages.membership import InventoryRows
from kvstore.wire.messages.puts import ExtentSource, Ingested, Sealed
from workers import events
from workers.client_buffers import ClientBuffers
from workers.data_session import never_started
from workers.device_pull import DevicePull
from workers.disk_pull import DiskPull
from workers.disk_watch import DiskWatch
from workers.events import MOVER, AnswerIngest, PullEnded, RefuseIngest, StartPull
from workers.guarded_threads import GuardedThreads
from workers.ingest import Pull
from workers.metrics import Counts
from workers.mover import Mover
from workers.peer_source import PeerPages, PeerReads
from workers.running_pulls import RunningPulls
from workers.scrubber import Scrubber
from workers.tiers.guarded_file import OutOfService
from workers.tiers.hbm import HbmSegment
from workers.tiers.nvme import NvmeSegment
from workers.verification import verify_all

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    from kvstore.clock import Clock
    from kvstore.transfer.choice import Choice
    from kvstore.transfer.device import Block, Handle
    from kvstore.wire.messages.base import Message
    from workers.control_link import ControlLink
    from workers.data_session import DataSession, ToSession
    from workers.events import Action, Event, ExtentGroup
    from workers.extent_table import SegmentTable
    from workers.ingest import EngineDesk, Source
    from workers.mover import MoverThreads
    from workers.report_line import ReportLine
    from workers.running_pulls import RunningPull
    from workers.staging import Staging
    from workers.state import WorkerState
    from workers.tiers.tier import ExtentSegment, MemorySegment, Segment

    RecordWork = events.WriteFree | events.WriteRemoved

LOG: Final = logging.getLogger(__name__)


class Service:
    """State machine, segments and running pulls of one worker process. Thread-safe."""

    def __init__(
        self,
        state: WorkerState,
        segments: Iterable[Segment],
        clock: Clock,
        line: ReportLine,
        engine: EngineDesk | None = None,
        staging: Staging | None = None,
        *,
        peers: Choice,
        threads: MoverThreads,
    ) -> None:
        """Serve nothing yet: `control` must be set before the first event. Own `peers`, the ways to
        other workers.
        """
        self.state = state
        self.segments: dict[str, Segment] = {segment.id: segment for segment in segments}
        self.clock = clock
        self.line = line
        self.buffers = ClientBuffers()
        self.pulls = RunningPulls()
        self.counts = Counts()
        reads = PeerReads(peers, clock, self.counts.note_copied_in)
        self.mover = Mover(self, threads, reads)
        self.scrubber = Scrubber(self.segments, self.dispatch, self.broken)
        self.control: ControlLink | None = None
        self.on_left: Callable[[], None] = _stay
        """Ends the process; for any thread. Nobody takes leave before it is set."""
        self.on_broken: Callable[[BaseException], None] = _stay
        """Ends the process because of a bug; for any thread, and more than once."""
        self.staging: Final = staging
        self._engine = engine
        self._mutex = threading.Lock()
        self._numbers = count(1)
        self._sessions: dict[int, DataSession] = {}
        """By number: whose threads carry out the actions that answer them."""
        self._checks: dict[str, GuardedThreads] = {
            each.id: GuardedThreads(1, f"checks-{each.id}", self.broken)
            for each in self.segments.values()
        }
        self._disk_records = {
            each: GuardedThreads(1, f"records-{each.id}", self.broken)
            for each in self.segments.values()
            if isinstance(each, NvmeSegment)
        }
        """For records that are written durably: a disk may take seconds, or forever (I27)."""
        self.disks = DiskWatch(self._disk_records, self.dispatch)

    @property
    def tables(self) -> Mapping[str, SegmentTable]:
        """What the state machine knows of each segment, to look at only."""
        return self.state.holdings.segments

    @property
    def shared_segments(self) -> list[MemorySegment]:
        """What clients of this host map."""
        found: list[MemorySegment] = [
            each
            for each in self.segments.values()
            if not isinstance(each, HbmSegment | NvmeSegment)
        ]
        return found if self.staging is None else [*found, self.staging.segment]

    def device_segment(self, name: str, incarnation: int) -> HbmSegment:
        """One on a device in that life. BadValue for a stranger or another life (I11)."""
        segment = self.segments.get(name)
        if not isinstance(segment, HbmSegment) or segment.incarnation != incarnation:
            want = "a segment on a device, in the life that it is in"
            raise BadValue("segment", f"{name}, {incarnation}", want)
        return segment

    def open_block(self, handle: Handle, descriptors: list[int]) -> Block:
        """A client's memory on a device that this worker lends; the descriptors are consumed.

        BadValue for any other device; BufferClosed for memory that cannot be opened here, such as
        another container's.
        """
        found = {
            each.device.identity: each.device
            for each in self.segments.values()
            if isinstance(each, HbmSegment)
        }
        if handle.device not in found:
            for descriptor in descriptors:
                os.close(descriptor)
            want = "a device whose memory this worker lends"
            raise BadValue("device", handle.device, want)
        try:
            return found[handle.device].open(handle, descriptors)
        except (BadValue, Unavailable) as error:
            raise BufferClosed(f"a block on {handle.device} cannot be opened: {error}") from error

    def carry_out(self, start: StartPull, source: Source) -> PullEnded:
        """Run a pull in this thread, for any to end."""
        segment = self.segments[start.message.segment]
        pull: RunningPull
        if isinstance(segment, NvmeSegment):
            pull = DiskPull(segment, start, source)
        elif isinstance(segment, HbmSegment):
            pull = DevicePull(segment, start, source)
        else:
            pull = Pull(segment, start, source)
        self.pulls.begin(start.pull, pull)
        outcomes = pull.run()
        self.pulls.end(start.pull)
        if isinstance(source, PeerPages):
            outcomes = source.explained(outcomes)
            self.counts.note_copy(outcomes)
        self.counts.note_pull(outcomes, start.message.part_bytes)
        if isinstance(start.message.source, ExtentSource):
            origin = self.segments[start.message.source.segment]
            self.counts.note_move(origin.tier, segment.tier, outcomes)
        return PullEnded(start.pull, outcomes, pull.stored_max)

    def dispatch(self, event: Event, session: DataSession | None = None) -> None:
        """Take an event in and carry out or hand on what follows from it.

        `session` is that of the calling thread, if it serves one: it reports seals itself.
        """
        pending = [event]
        for each in pending:  # grows meanwhile
            try:
                with self._mutex:
                    actions = self.state.handle(each, self.clock.now_s())
            except Exception as error:  # whoever's thread it is: every other one relies on it
                self.broken(error)
                raise
            for action in actions:
                follows = self._execute(action, session)
                if follows is not None:
                    pending.append(follows)

    def broken(self, error: BaseException) -> None:
        """A bug has left work of this worker undone: end the process. For any thread."""
        self.on_broken(error)

    def answer(self, command: int, message: Message) -> None:
        """Reply to a command of the leader's, from any thread."""
        self._control().answer(command, message)

    def next_number(self) -> int:
        """A number for a session, a request or a command, never used before."""
        return next(self._numbers)

    def enter(self, session: DataSession) -> None:
        """Hand this session the actions that are for it."""
        self._sessions[session.number] = session

    def leave(self, session: DataSession) -> None:
        """The session has ended."""
        del self._sessions[session.number]

    def require_engine(self) -> EngineDesk:
        """The transfer engine's side; BadValue where this worker has none."""
        if self._engine is None:
            raise BadValue("source", "the transfer engine", "a transport that this worker serves")
        return self._engine

    def require_staging(self) -> Staging:
        """Where pages of disks are staged; BadValue where this worker has none."""
        if self.staging is None:
            raise BadValue("message", "StageExtents", "a request to a worker with NVMe segments")
        return self.staging

    def close(self) -> None:
        """End moves and copies, wait for checks that run; every other thread must have ended."""
        self.mover.close()
        self.scrubber.close()
        for thread in (*self._checks.values(), *self._disk_records.values()):
            thread.close()

    def _execute(self, action: Action, session: DataSession | None) -> Event | None:
        """Carry one action out; the event that it ends in, if that is known at once."""
        match action:
            case StartPull() | AnswerIngest() | RefuseIngest():
                return self._route(action)
            case events.CallMaster(call, message):
                if session is not None and isinstance(message, Sealed):
                    session.report(call, message)
                else:
                    self._control().call(call, message)
            case events.SendRows():
                self._send_rows(action)
            case events.CloseLink(reason):
                self._control().drop(reason)
            case events.EndProcess():
                self.on_left()
            case events.AnswerCommand(command, message):
                self._control().answer(command, message)
            case events.CancelPull(pull):
                self.pulls.cancel(pull)
            case events.WriteFree() | events.WriteRemoved():
                return self._write(action)
            case events.ComputeParity():
                self.mover.compute(action)
            case events.ReleaseMemory():
                self._checks[action.segment].begin(self._release, action)
            case events.VerifyPayloads():
                self._checks[action.extents.segment].begin(self._verify, action)
            case events.ScrubExtents():
                self.scrubber.begin(action)
            case _:
                assert_never(action)
        return None

    def _control(self) -> ControlLink:
        assert self.control is not None, "the control link is wired before the first event"
        return self.control

    def _route(self, action: ToSession) -> Event | None:
        if action.session == MOVER:
            self._move(action)
            return None
        session = self._sessions.get(action.session)
        if session is not None and session.post(action):
            return None
        return never_started(action) if isinstance(action, StartPull) else None

    def _move(self, action: ToSession) -> None:
        match action:
            case StartPull():
                self.mover.begin(action)
            case AnswerIngest(request, _, outcomes, stored_max):
                self._control().answer(request, Ingested(outcomes, stored_max))
            case RefuseIngest(request, _, code, text):
                self._control().answer(request, Failure(code, text))

    def _send_rows(self, action: events.SendRows) -> None:
        segment = self.segments[action.segment]
        if isinstance(segment, NvmeSegment):
            self._disk_records[segment].begin(self._send_rows_of, segment, action)
        else:
            self._send_rows_of(segment, action)

    def _send_rows_of(self, segment: Segment, action: events.SendRows) -> None:
        start, size_class = action.chunk_start, action.size_class
        try:
            rows = segment.records.rows(start, size_class, action.listed)
        except OutOfService:
            self.dispatch(events.MasterAnswered(action.call, None))
            return  # the inventory ends; the next registration will know that the disk has failed
        message = InventoryRows(segment.id, segment.incarnation, start, size_class, rows)
        self._control().call(action.call, message)

    def _write(self, action: RecordWork) -> Event | None:
        """Change records; the end of it, if that is known at once."""
        segment = self.segments[action.extents.segment]
        if isinstance(segment, NvmeSegment):
            self._disk_records[segment].begin(self._write_to_disk, segment, action)
            return None
        if isinstance(action, events.WriteFree):
            return events.WorkEnded(action.work, self._write_free(segment, action.extents))
        for stretch in action.extents.stretches:
            segment.records.write_removed(stretch, action.extents.size_class)
        return events.WorkEnded(action.work, bytes(action.extents.count))

    def _write_to_disk(self, segment: NvmeSegment, action: RecordWork) -> None:
        """The same, durably. Nobody holds a lock on what is not mapped."""
        extents = action.extents
        if isinstance(action, events.WriteFree):
            outcome = segment.write_free(extents.stretches, extents.size_class)
        else:
            outcome = segment.write_removed(extents.stretches, extents.size_class)
        self.dispatch(events.WorkEnded(action.work, bytes((outcome,)) * extents.count))

    def _write_free(self, segment: ExtentSegment, extents: ExtentGroup) -> bytes:
        """FREE records first, so that no reader can begin; then see whether one still holds."""
        outcomes = bytearray()
        for stretch in extents.stretches:
            try:
                segment.records.write_free(stretch, extents.size_class)
                granted = segment.locks.try_lock(stretch, extents.size_class)
                segment.locks.unlock(stretch, extents.size_class)
            except OSError:  # a system out of locks: not confirmed, so the master asks again
                LOG.exception("%s: not freed", segment.id)
                granted = bytes(stretch.count)
            outcomes += bytes(Outcome.OK if each else Outcome.BUSY for each in granted)
        return bytes(outcomes)

    def _release(self, action: events.ReleaseMemory) -> None:
        """Give chunks of a device back, in the segment's thread, since copies are waited for."""
        segment = self.segments[action.segment]
        assert isinstance(segment, HbmSegment), "no other can shrink"
        segment.release(action.chunks)
        if self._engine is not None:
            self._engine.withdraw(segment.id, action.chunks)
        self._control().answer(action.command, Done())

    def _verify(self, action: events.VerifyPayloads) -> None:
        """Hash sealed extents, in the segment's thread, since it may take long (I27)."""
        outcomes = verify_all(self.segments[action.extents.segment], action.extents)
        if self.staging is not None:
            self.staging.doubt(action.extents)
        self.dispatch(events.WorkEnded(action.work, outcomes))


def _stay(*_: object) -> None:
    """A service without a process of its own has nothing to end."""
