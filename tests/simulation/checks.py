"""The checkers of the simulation: told of everything that happens, they raise at the first lie.

Numbers are those of the invariants in ARCHITECTURE.md. What is checked here is checked at the
moment it happens, on both sides of a boundary; scans of everything are in `scans`.
"""

from __future__ import annotations

from array import array
from collections import defaultdict
from typing import TYPE_CHECKING, Final

from kvstore.codec import Codec
from kvstore.errors import InvariantBroken
from kvstore.limits import LEADER_LEASE_S, LEASE_MARGIN_S
from kvstore.replica import Tier
from kvstore.wire.messages.hello import Failure
from kvstore.wire.messages.membership import (
    FenceExtents,
    FreeExtents,
    OfferInventory,
    ReportDamage,
    RetireExtents,
    WorkerAccepted,
)
from kvstore.wire.messages.namespaces import NamespaceOpened
from kvstore.wire.messages.pins import PagesPinned
from kvstore.wire.messages.puts import Ingest
from kvstore.wire.messages.reads import Located, Probed, Removed, Status
from kvstore.wire.messages.tickets import Term
from master.events import (
    Action,
    CloseSession,
    CommandAnswered,
    Note,
    Prolonged,
    RaiseEpoch,
    Reply,
    Request,
    Tick,
)
from master.events import Event as MasterEvent
from tests.fakes import adopted_records
from tests.simulation.answers import Answers
from tests.simulation.history import History
from tests.simulation.leases import LeaseBook
from tests.simulation.move_checks import MoveChecks
from tests.simulation.pages import VERSION_BYTES, page_bytes, version_of
from tests.simulation.sim_metadata import leader_in, leads
from workers import events as worker_events

if TYPE_CHECKING:
    from collections.abc import Callable

    from kvstore.namespace import Namespace
    from kvstore.record import Record
    from kvstore.transfer.transport import ReadSpan
    from kvstore.wire.messages.base import Message
    from tests.simulation.memory import SegmentMemory
    from tests.simulation.options import Options
    from tests.simulation.pd_checks import PdChecks
    from tests.simulation.sim_client import SimClient
    from tests.simulation.sim_etcd import SimEtcd, Transaction
    from tests.simulation.sim_master import SimMaster
    from tests.simulation.sim_worker import SimWorker
    from tests.simulation.store import SegmentStore
    from tests.simulation.world import World
    from workers.record_table import Found


FACTS: Final = (NamespaceOpened, PagesPinned, Removed, WorkerAccepted)
"""Answers that tell what is durable already, and are no less true once the lease has ended."""


class Violation(InvariantBroken):
    """What no history may show."""

    code = "violation"


class Checks:
    """All checkers of one simulation, and what they remember."""

    def __init__(self, world: World, options: Options) -> None:
        """Told of nothing yet."""
        self.world = world
        self.options = options
        self.history = History()
        self.leases = LeaseBook()
        self.memories: dict[str, SegmentStore] = {}
        self.workers: dict[str, SimWorker] = {}
        self.masters: dict[str, SimMaster] = {}
        self.etcd: SimEtcd | None = None
        """Where the masters keep what is durable, if there may be several."""
        self.is_healed = False
        """From here on nothing goes wrong any more."""
        self.dead_owners: dict[bytes, float] = {}
        """Session tokens of clients that have died, and when."""
        self.orders: dict[tuple[str, int, int], str] = {}
        """The last order about (segment, offset, generation)."""
        self.registrations: dict[str, float] = defaultdict(float)
        """When each segment was last lost or registered."""
        self.answers = Answers(self)
        self.moves = MoveChecks(self)
        self.tickets: PdChecks | None = None
        """Where there are gateways and inference workers."""
        self.confirmed: set[tuple[int, str, int]] = set()
        """(epoch, segment, incarnation) whose inventory a worker has offered."""
        self._ordinals: dict[bytes, int] = {}
        self._epochs: set[int] = set()
        """In which masters have led."""

    def fail(self, invariant: str, text: str) -> None:
        """Give the run up."""
        raise Violation(f"{invariant}: {text}")

    # --- the master -------------------------------------------------------------------------

    @property
    def leader(self) -> SimMaster | None:
        """Who leads in truth, whatever anybody thinks; None while nobody does."""
        return next((each for each in self.masters.values() if self.is_in_force(each)), None)

    def is_in_force(self, master: SimMaster) -> bool:
        """Whether the store would still take what this master writes."""
        if master.core is None or self.etcd is None:
            return master.core is not None
        leader = leads(self.etcd)
        return leader is not None and leader.epoch == master.epoch

    def _is_betrayed(self, master: SimMaster) -> bool:
        """Whether etcd has ended its lease too early, so that it cannot know better yet."""
        assert self.etcd is not None
        return any(
            leader_in(value).epoch == master.epoch and self.world.now < at_s + LEADER_LEASE_S
            for value, at_s in self.etcd.broken
        )

    def etcd_was_put_back(self) -> None:
        """It knows nothing of epochs that have been: masters may begin some of them again, until
        they meet who does.
        """
        self._epochs.clear()

    def begins_term(self, master: SimMaster) -> None:
        """A master begins to lead."""
        is_late = self._epochs and master.epoch < max(self._epochs)
        if master.epoch in self._epochs or (is_late and self.is_in_force(master)):
            self.fail("I10", f"epoch {master.epoch} after {sorted(self._epochs)}")
        self._epochs.add(master.epoch)
        if self.tickets is not None:
            self.tickets.begins_term()
        self.world.counts["terms"] += 1

    def is_written(self, transaction: Transaction) -> None:
        """I10: whatever changes etcd comes from whoever leads."""
        assert self.etcd is not None
        leader = leads(self.etcd)
        if transaction.epoch and (leader is None or leader.epoch != transaction.epoch):
            self.fail("I10", f"epoch {transaction.epoch} writes while {leader} leads")

    def master_hears(self, master: SimMaster, event: MasterEvent) -> None:
        """Something is about to be handled."""
        if isinstance(event, Request):
            message = event.message
            self.answers.hears(message)
            if self.tickets is not None:
                self.tickets.master_hears(master, message)
            if isinstance(message, OfferInventory):
                self.confirmed.add((master.epoch, message.segment, message.incarnation))
            name = type(message).__name__
            self.world.note(f"{master.name} <- {name} of session {event.session}")
        elif isinstance(event, CommandAnswered):
            self.moves.ended(master, event.command, event.reply)
        if not isinstance(event, Request | Tick | Prolonged):
            self.world.note(f"{master.name} <- {type(event).__name__}")

    def master_acts(self, master: SimMaster, action: Action) -> None:
        """I10: a master whose lease has ended changes nothing, and promises nothing."""
        if self.is_in_force(master) or self._is_betrayed(master):
            return
        if not isinstance(action, CloseSession) and not is_harmless(action):
            self.fail("I10", f"{master.name} does {action} when epoch {master.epoch} is over")
        self.world.counts["answers in doubt"] += isinstance(action, Reply)

    def master_replies(self, master: SimMaster, asked: Message, reply: Message) -> None:
        """The master's answer, at the moment that it is true."""
        self.answers.check(master, asked, reply)
        if self.tickets is not None and self.is_in_force(master):
            self.tickets.master_replies(master, asked, reply)

    # --- bytes ------------------------------------------------------------------------------

    def holds_right_bytes(self, memory: SegmentStore, record: Record) -> None:
        """I4: what is sealed is what its writer had."""
        if not self.is_right(record.key, record.part, memory.decoded(record)):
            self.fail("I4", f"wrong bytes in {memory.segment}+{record.offset}: {record}")

    def is_right_record(self, store: SegmentStore) -> Callable[[Record], bool]:
        """Tells of a record whether what lies there is a page that some client has stored."""
        return lambda record: self.is_right(record.key, record.part, store.decoded(record))

    def is_right(self, key: bytes, part: int, data: bytes | memoryview) -> bool:
        """Whether these are bytes that some client has stored under (key, part). No bytes at all,
        as of a stored form that cannot be decoded, are none.
        """
        if not data:
            return False
        if data == page_bytes(key, part, len(data)):
            return True
        if len(data) < VERSION_BYTES:
            return False
        version = version_of(data)
        return version in self.history.pages[key].versions and data == page_bytes(
            key, part, len(data), version
        )

    def master_commands(self, master: SimMaster, message: Message) -> None:
        """The master tells a worker something."""
        if isinstance(message, Ingest):
            self.moves.begins(master, message)
        if not isinstance(message, FreeExtents | FenceExtents | RetireExtents):
            return
        kind = type(message).__name__
        life = (message.segment, message.incarnation)
        pairs = zip(array("Q", message.offsets), array("Q", message.generations), strict=True)
        for offset, generation in pairs:
            self.orders[message.segment, offset, generation] = kind
            if isinstance(message, FreeExtents):
                self.moves.stays(life, offset, "freed")
                lease = self.leases.unreleased(life, offset, message.size_class, self.world.now)
                if lease is not None and lease.generation <= generation:
                    self.fail("I9", f"{message.segment}+{offset} is freed under {lease}")
        self.world.note(f"master {kind} x{len(message.offsets) // 8} in {message.segment}")

    # --- workers ----------------------------------------------------------------------------

    def taken_over(self, worker: SimWorker, memory: SegmentStore, found: Found) -> None:
        """A worker has started and looked at a segment."""
        for record in adopted_records(memory.records, found):
            if record.offset in memory.damaged:
                continue
            self.holds_right_bytes(memory, record)
        self.world.note(
            f"{worker.name} takes over {len(found.adopted)} records of {memory.segment} "
            f"in life {memory.incarnation}, {found.unfinished} unfinished, {found.damaged} damaged"
        )

    def worker_handled(
        self,
        worker: SimWorker,
        event: worker_events.Event,
        actions: list[worker_events.Action],
        epoch_before: int,
    ) -> None:
        """A worker's core has decided."""
        assert worker.core is not None
        if worker.core.epoch < epoch_before:
            self.fail("I10", f"{worker.name} goes from epoch {epoch_before} to {worker.core.epoch}")
        if isinstance(event, worker_events.CommandReceived):
            epoch = getattr(event.message, "epoch", epoch_before)
            writes = (worker_events.WriteFree, worker_events.WriteRemoved, worker_events.CancelPull)
            if epoch < epoch_before and any(isinstance(each, writes) for each in actions):
                self.fail("I10", f"{worker.name} obeys epoch {epoch} after {epoch_before}")
        for action in actions:
            message = getattr(action, "message", None)
            if isinstance(message, ReportDamage):
                self._is_damaged(message)
        if not isinstance(event, worker_events.Tick | worker_events.MasterAnswered):
            self.world.note(f"{worker.name} <- {type(event).__name__}")

    def _is_damaged(self, message: ReportDamage) -> None:
        """I13: nothing whole is given up. What a disk did not free for good is on its way out."""
        memory = self.memories[message.segment]
        for offset in array("Q", message.offsets):
            if memory.is_writable and offset not in memory.damaged:
                self.fail("I13", f"{memory.segment}+{offset} is told damaged, and is not")
            self.world.counts["damage told"] += 1

    def overwrites(self, worker: SimWorker, memory: SegmentStore, offset: int, size: int) -> None:
        """A pull is about to write into an extent."""
        if memory.is_read_in_place(offset, size):
            self.fail("I4", f"{memory.segment}+{offset} is overwritten while it is read in place")
        life = (memory.segment, memory.incarnation)
        self.moves.stays(life, offset, "overwritten")
        lease = self.leases.running(life, offset, size, self.world.now)
        if lease is not None:
            self.fail("I9", f"{memory.segment}+{offset} is overwritten under {lease}")
        del worker

    def sealed(self, memory: SegmentStore, record: Record | None) -> None:
        """A SEALED record was written."""
        assert record is not None, memory.segment
        self.holds_right_bytes(memory, record)
        self.history.sealed(memory.segment, record, self.world.now)
        self.world.counts["pages sealed"] += 1
        if memory.tier is Tier.NVME:
            self.world.counts["pages sealed on disk"] += 1
            self.world.counts["pages compressed"] += record.codec != Codec.NONE

    # --- clients ----------------------------------------------------------------------------

    def opened(self, namespace: Namespace, reply: NamespaceOpened) -> None:
        """An ordinal is in records: it may never change, nor be another namespace's."""
        known = self._ordinals.setdefault(namespace.id, reply.ordinal)
        values = list(self._ordinals.values())
        if known != reply.ordinal or len(set(values)) != len(values):
            self.fail("I12", f"ordinals {self._ordinals} and now {reply}")

    def accepted(self, span: ReadSpan, i: int, memory: SegmentMemory) -> None:
        """A reader has verified a page of a mapped segment."""
        del i
        if memory.incarnation != span.segment.incarnation:
            self.fail("I11", f"a page of life {span.segment.incarnation} of {memory.segment}")

    def client_died(self, client: SimClient) -> None:
        """Everything that it held must go."""
        self.dead_owners[client.token] = self.world.now

    def taken(self, key: bytes, at_s: float) -> None:
        """I9: a leased hit was decided on before the last moment that any lease allows."""
        late_s = at_s - (self.leases.promised_s[key] - LEASE_MARGIN_S)
        if late_s >= 0:
            self.fail("I9", f"a hit on {key[:4].hex()} {late_s:.3f} s after the end of its lease")

    def delivered(self, key: bytes, part: int, data: bytes | memoryview) -> None:
        """I1: a hit was handed to a caller."""
        self.world.counts["pages read"] += 1
        if not self.is_right(key, part, data):
            self.fail("I1", f"wrong bytes delivered for {key[:4].hex()} part {part}")

    def withheld(self, key: bytes, data: bytes | memoryview) -> None:
        """A miss was handed to a caller: its place holds nothing of the pool's."""
        self.world.counts["pages missed"] += 1
        if any(data):
            self.fail("I8", f"a miss of {key[:4].hex()} left bytes behind")


def is_harmless(action: Action) -> bool:
    """Whether an action neither changes nor promises anything."""
    if not isinstance(action, Reply):
        return isinstance(action, RaiseEpoch | Note)
    if isinstance(action.message, Located):
        return not action.message.lease_ttl_s
    return isinstance(action.message, (Failure, Probed, Status, Term, *FACTS))
