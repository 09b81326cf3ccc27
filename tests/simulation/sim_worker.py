"""A pool worker of the simulation: the real core and record tables, over simulated memory.

Does for `workers.state.WorkerState` what `workers.service` does, in virtual time. Memory outlives
a crash; everything else is of one life.
"""

from __future__ import annotations

import math
from array import array
from functools import partial
from typing import TYPE_CHECKING, Final

from msgspec.structs import replace

from kvstore.record import Record, RecordState, pack_record, unpack_record
from kvstore.replica import Tier
from kvstore.wire.messages.base import Message
from kvstore.wire.messages.common import Address, Outcome
from kvstore.wire.messages.hello import Failure
from kvstore.wire.messages.membership import InventoryRows
from kvstore.wire.messages.puts import BufferSource, Ingest, Ingested, PeerSource
from kvstore.wire.messages.transfers import ReadExtents, ReleaseStaged, StageExtents
from tests.simulation.disk import DiskStore
from tests.simulation.memory import SegmentMemory
from tests.simulation.rpc import Endpoint
from tests.simulation.sim_disk_pull import DiskPullRun
from tests.simulation.sim_peer import PeerRead
from tests.simulation.sim_pull import Piece, PullRun
from tests.simulation.sim_reads import serve_read
from tests.simulation.sim_staging import SimStaging
from tests.simulation.sim_work import scrub, work
from tests.simulation.tasks import spawn
from tests.simulation.worker_links import Greeting, WorkerLinks
from workers import events
from workers.extent_table import SegmentTable
from workers.membership import Profile
from workers.state import WorkerState
from workers.tiers.guarded_file import OutOfService

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from tests.simulation.channel import Channel
    from tests.simulation.checks import Checks
    from tests.simulation.sim_client import SimClient
    from tests.simulation.sim_master import SimMaster
    from tests.simulation.store import SegmentStore
    from tests.simulation.world import World

TICK_MAX_S: Final = 0.25
"""As in workers.control_link: a tick comes at least this often, whatever the core asks for."""


class SimWorker:
    """One worker process, in all its lives."""

    def __init__(
        self,
        world: World,
        name: str,
        memories: Sequence[SegmentStore],
        checks: Checks,
        staging: SegmentMemory | None = None,
    ) -> None:
        """Lend these segments, with memory to stage what lies on disks; not started."""
        self.world = world
        self.name = name
        self.checks = checks
        self.memories: dict[str, SegmentStore] = {each.segment: each for each in memories}
        self.mapped: dict[str, SegmentMemory] = {
            each.segment: each for each in memories if isinstance(each, SegmentMemory)
        }
        """What readers of this host can map."""
        self.disks = [each for each in memories if isinstance(each, DiskStore)]
        self._staging_memory = staging
        if staging is not None:
            self.mapped[staging.segment] = staging
        self.masters: dict[str, SimMaster] = {}
        self.others: dict[str, SimWorker] = {}
        """All workers, by name, as they are found at their addresses."""
        self.clients: Callable[[str], SimClient] = _no_client
        self.core: WorkerState | None = None
        self.may_end = False
        """Whether it has taken its leave; the scene then ends it."""
        self.pulls: dict[int, PullRun] = {}
        self.staging: SimStaging | None = None
        self.copy_delay_max_s = 0.002
        self.links: WorkerLinks
        self.peers: dict[Endpoint, str] = {}
        """The client at the other end of each data connection."""
        self._sessions: dict[Endpoint, int] = {}
        self._requests: dict[int, tuple[Endpoint, int]] = {}
        self._commands: dict[int, tuple[Endpoint, int]] = {}
        self._services: dict[str, str] = {}
        """What was told of each disk."""
        self._last = 0
        self._alarm_at_s = math.inf

    # --- lives ------------------------------------------------------------------------------

    def start(self) -> None:
        """Begin a life: take the segments over and look for the master."""
        self.may_end = False
        host = self.world.nodes[self.name].host
        tables: list[SegmentTable] = []
        for memory in self.memories.values():
            found = memory.begin_life()
            on_disk = memory.tier is Tier.NVME
            table = SegmentTable(
                memory.segment, memory.incarnation, memory.geometry, holds_encoded=on_disk
            )
            table.adopt(found.adopted)
            tables.append(table)
            self.checks.taken_over(self, memory, found)
        addresses = (Address("shm", self.name, 0), Address("tcp", self.name, 10))
        tiers = {name: memory.tier.value for name, memory in self.memories.items()}
        profile = Profile(self.name, host, addresses, tiers)
        self.core = WorkerState(profile, tables, self.checks.options.scrub_bytes_per_s)
        self._services = {disk.segment: disk.service for disk in self.disks}
        if self._staging_memory is not None:
            self.staging = SimStaging(self, self._staging_memory)
        self._alarm_at_s = math.inf
        self.links = WorkerLinks(self)
        self.links.dial()

    def crash(self) -> None:
        """kill -9. Now and then it hits in the middle of a record's bytes."""
        for pull in self.pulls.values():
            if self.world.chance(0.3):
                self._tear_record(pull)
        self.world.crash(self.name)
        for memory in self.mapped.values():
            memory.drop_locks(self.name)
        self.core = self.staging = None
        self.pulls.clear()
        self.peers.clear()
        self._sessions.clear()
        self._requests.clear()
        self._commands.clear()

    def _tear_record(self, pull: PullRun) -> None:
        place = pull.record_in_hand()
        if place is None or not isinstance(pull.memory, SegmentMemory):
            return  # what was given to the system is whole, however the process ends
        row = pull.memory.records.read(*place)
        record = unpack_record(row)
        if isinstance(record, Record) and record.state is RecordState.RESERVED:
            sealed = pack_record(replace(record, state=RecordState.SEALED))
            cut = self.world.random.randrange(1, len(sealed))
            row[:cut] = sealed[:cut]
            self.world.counts["fault torn record"] += 1

    # --- the core ---------------------------------------------------------------------------

    def feed(self, event: events.Event) -> None:
        """Have the core handle an event, and carry its actions out."""
        core = self.core
        assert core is not None, (self.name, event)
        before = core.epoch
        actions = core.handle(event, self.world.now)
        self.checks.worker_handled(self, event, actions, before)
        for action in actions:
            self._carry_out(action)
        self._set_alarm()

    def next_number(self) -> int:
        """A number that nothing else in this process has."""
        self._last += 1
        return self._last

    def _set_alarm(self) -> None:
        assert self.core is not None
        at_s = min(self.core.next_wakeup(), self.world.now + TICK_MAX_S)
        if at_s < self._alarm_at_s:
            self._alarm_at_s = at_s
            delay_s = max(0.0, at_s - self.world.now)
            self.world.after_on(self.name, delay_s, partial(self._ring, at_s))

    def _ring(self, at_s: float) -> None:
        if at_s == self._alarm_at_s:
            self._alarm_at_s = math.inf
            self._look_at_disks()
            self.feed(events.Tick())
            if self.core is not None and self.core.is_fenced(self.world.now):
                self.links.look_elsewhere()

    def _look_at_disks(self) -> None:
        """As workers.disk_watch: the leader hears of each change."""
        for disk in self.disks:
            if disk.service is not self._services[disk.segment]:
                self._services[disk.segment] = disk.service
                reason = disk.file.reason
                self.feed(events.MediumChanged(disk.segment, disk.service, reason))

    def _carry_out(self, action: events.Action) -> None:
        match action:
            case events.CallMaster(call, message):
                self.links.call(call, message)
            case events.SendRows():
                self._send_rows(action)
            case events.CloseLink(reason):
                self.world.note(f"{self.name} closes its link: {reason}")
                self.links.close()
            case events.AnswerCommand(command, message):
                endpoint, number = self._commands.pop(command)
                endpoint.answer(number, message)
            case events.AnswerIngest(request, _, outcomes, stored_max):
                self.world.counts["ingests fenced"] += Outcome.FENCED in outcomes
                self._answer(request, Ingested(outcomes, stored_max))
            case events.RefuseIngest(request, _, code, text):
                self._answer(request, Failure(code, text))
            case _:
                self._work(action)

    def _work(self, action: events.Action) -> None:
        match action:
            case events.StartPull():
                self._start_pull(action)
            case events.CancelPull(pull):
                self.pulls[pull].cancel()
            case events.EndProcess():
                self.may_end = True
            case events.WriteFree() | events.WriteRemoved() | events.VerifyPayloads():
                spawn(self.world, self.name, work(self, action))
            case events.ScrubExtents():
                spawn(self.world, self.name, scrub(self, action))
            case _:
                raise AssertionError(action)

    def _answer(self, request: int, message: Message) -> None:
        endpoint, number = self._requests.pop(request)
        endpoint.answer(number, message)

    # --- the links to the master --------------------------------------------------------------

    def _send_rows(self, action: events.SendRows) -> None:
        memory = self.memories[action.segment]
        try:
            rows = memory.records.rows(action.chunk_start, action.size_class, action.listed)
        except OutOfService:
            failed = events.MasterAnswered(action.call, None)
            self.world.after_on(self.name, 0.0, lambda: self.feed(failed))
            return
        message = InventoryRows(
            memory.segment, memory.incarnation, action.chunk_start, action.size_class, rows
        )
        self.links.call(action.call, message)

    def commanded(self, endpoint: Endpoint, number: int, message: object) -> None:
        """The master asks for something."""
        assert isinstance(message, Message), message
        command = self.next_number()
        if isinstance(message, Ingest):
            self._requests[command] = (endpoint, number)
            self.feed(events.IngestRequested(command, events.MOVER, message))
        else:
            self._commands[command] = (endpoint, number)
            self.feed(events.CommandReceived(command, message))

    # --- data connections ---------------------------------------------------------------------

    def accept(self, channel: Channel, greeting: object) -> bool:
        """A client connects."""
        assert isinstance(greeting, Greeting), greeting
        if self.core is None:
            return False
        endpoint = Endpoint(self.world, self.name, self._serve, self.session_ended)
        channel.attach(self.name, endpoint.receive, endpoint.ended)
        endpoint.use(channel)
        self._sessions[endpoint] = self.next_number()
        self.peers[endpoint] = greeting.name
        return True

    def session_ended(self, endpoint: Endpoint) -> None:
        """A data connection is gone."""
        self.peers.pop(endpoint, None)
        session = self._sessions.pop(endpoint, None)
        if session is not None:
            if self.staging is not None:
                self.staging.forget(session)
            self.feed(events.SessionClosed(session))

    def _serve(self, endpoint: Endpoint, number: int, message: object) -> None:
        session = self._sessions.get(endpoint)
        if session is None:
            return
        if isinstance(message, Ingest):
            request = self.next_number()
            self._requests[request] = (endpoint, number)
            self.feed(events.IngestRequested(request, session, message))
        elif isinstance(message, Piece):
            for pull in list(self.pulls.values()):
                pull.take(endpoint, message)
        elif isinstance(message, ReadExtents):
            spawn(self.world, self.name, serve_read(self, endpoint, number, message))
        elif isinstance(message, StageExtents) and self.staging is not None:
            work = self.staging.stage(endpoint, number, session, message)
            spawn(self.world, self.name, work)
        elif isinstance(message, ReleaseStaged) and self.staging is not None:
            self.staging.release(endpoint, number, session, message)
        else:
            raise AssertionError(message)

    def client_bytes(
        self, endpoint: Endpoint, source: BufferSource, page: int, start: int, stop: int
    ) -> bytes | None:
        """Bytes of a page in a buffer that the client has handed over; None when it is gone."""
        name = self.peers.get(endpoint)
        buffer = None if name is None else self.clients(name).buffers.get(source.buffer)
        if buffer is None:
            return None
        at = array("Q", source.offsets)[page]
        return bytes(buffer[at + start : at + stop])

    # --- work on extents ----------------------------------------------------------------------

    def _start_pull(self, action: events.StartPull) -> None:
        endpoint, number = self._requests[action.request]
        on_disk = isinstance(self.memories[action.message.segment], DiskStore)
        kind = DiskPullRun if on_disk else PullRun
        is_copy = isinstance(action.message.source, PeerSource)
        peer = PeerRead(self, action.message) if is_copy else None
        pull = kind(self, action, endpoint, endpoint.caller_number(number), peer)
        self.pulls[action.pull] = pull
        spawn(self.world, self.name, pull.run(), self.copy_delay_s())

    def pull_ended(self, pull: PullRun) -> None:
        """All records of a pull are written, its locks are gone."""
        del self.pulls[pull.number]
        self.feed(events.PullEnded(pull.number, bytes(pull.outcomes), pull.stored_max))

    def copy_delay_s(self) -> float:
        """How long one piece of work takes."""
        longest_s = 0.001 if self.checks.is_healed else self.copy_delay_max_s
        return self.world.random.uniform(0.0001, longest_s)


def _no_client(name: str) -> SimClient:
    raise AssertionError(name)
