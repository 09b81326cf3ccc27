"""The checkers of the simulation: told of everything that happens, they raise at the first lie.

Numbers are those of the invariants in ARCHITECTURE.md. What is checked here is checked at the
moment it happens, on both sides of a boundary; scans of everything are in `scans`.
"""

from __future__ import annotations

from array import array
from collections import defaultdict
from typing import TYPE_CHECKING, Final

from kvstore.errors import InvariantBroken
from kvstore.ids import epoch_of
from kvstore.record import RecordState
from kvstore.replica import ExtentState
from kvstore.segment import size_class_of
from kvstore.wire.messages.hello import Failure
from kvstore.wire.messages.membership import FenceExtents, FreeExtents, RetireExtents
from kvstore.wire.messages.puts import PutPlans
from kvstore.wire.messages.reads import (
    LeaseRenewed,
    Located,
    LocatedCopy,
    Lookup,
    MatchPrefix,
    Probe,
    Probed,
    RenewLease,
)
from master.events import Event as MasterEvent
from master.events import Request, Tick
from tests.simulation import master_view
from tests.simulation.history import History
from tests.simulation.leases import Lease, LeaseBook
from tests.simulation.pages import keys_of, page_bytes, version_of
from workers import events as worker_events

if TYPE_CHECKING:
    from kvstore.ids import Generation
    from kvstore.namespace import Namespace
    from kvstore.record import Record
    from kvstore.transfer.transport import ReadSpan
    from kvstore.wire.messages.base import Message
    from kvstore.wire.messages.common import SegmentRef
    from kvstore.wire.messages.namespaces import NamespaceOpened
    from tests.simulation.history import Place
    from tests.simulation.memory import SegmentMemory
    from tests.simulation.options import Options
    from tests.simulation.sim_client import SimClient
    from tests.simulation.sim_master import SimMaster
    from tests.simulation.sim_worker import SimWorker
    from tests.simulation.world import World
    from workers.record_table import Found

FAILURES_EXPECTED: Final = frozenset(("unavailable", "out_of_space", "deadline_exceeded"))
"""What a master may answer to requests that are right."""
WORKER_FAILURES_EXPECTED: Final = FAILURES_EXPECTED | {"bad_value", "access_denied"}
"""A worker's messages may be overtaken by its own new registration."""


LATE_REMOVE_S: Final = 30.0
"""A remove may still be on its way when its caller has given up on it."""


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
        self.memories: dict[str, SegmentMemory] = {}
        self.workers: dict[str, SimWorker] = {}
        self.master: SimMaster | None = None
        self.is_healed = False
        """From here on nothing goes wrong any more."""
        self.dead_owners: dict[bytes, float] = {}
        """Session tokens of clients that have died, and when."""
        self.orders: dict[tuple[str, int, int], str] = {}
        """The last order about (segment, offset, generation)."""
        self.registrations: dict[str, float] = defaultdict(float)
        """When each segment was last lost or registered."""
        self._ordinals: dict[bytes, int] = {}
        self._generations: dict[int, tuple[object, ...]] = {}
        self._last_epoch = 0

    def fail(self, invariant: str, text: str) -> None:
        """Give the run up."""
        raise Violation(f"{invariant}: {text}")

    # --- the master -------------------------------------------------------------------------

    def leads(self, master: SimMaster) -> None:
        """A new master starts."""
        if master.epoch <= self._last_epoch:
            self.fail("I10", f"epoch {master.epoch} after {self._last_epoch}")
        self._last_epoch = master.epoch

    def master_hears(self, event: MasterEvent) -> None:
        """Something is about to be handled."""
        if isinstance(event, Request):
            self.world.note(f"master <- {type(event.message).__name__} of session {event.session}")
        elif not isinstance(event, Tick):
            self.world.note(f"master <- {type(event).__name__}")

    def master_handled(self, master: SimMaster) -> None:
        """Something was handled."""

    def master_replies(self, master: SimMaster, asked: Message, reply: Message) -> None:
        """The master's answer, at the moment that it is true."""
        match asked, reply:
            case (MatchPrefix() | Lookup(), Located()):
                self._located(master, asked, reply)
            case (Probe(), Probed()):
                self._probed(master, asked, reply)
            case (RenewLease(), LeaseRenewed()):
                self._renewed(master, asked, reply)
            case (_, PutPlans()):
                self._planned(master, reply)
            case (_, Failure(code, text)):
                self.world.note(f"master -> {code}: {text}")
                if code not in WORKER_FAILURES_EXPECTED:
                    self.fail("I20", f"{type(asked).__name__} was answered {code}: {text}")
        if type(asked).__name__ == "RegisterWorker":
            for offer in getattr(asked, "segments", ()):
                self.registrations[offer.segment] = self.world.now

    def _located(self, master: SimMaster, asked: MatchPrefix | Lookup, reply: Located) -> None:
        keys = keys_of(asked.keys)
        covered: set[int] = set()
        for run in reply.runs:
            pages = range(run.first, run.first + run.count)
            covered.update(pages)
            for copy in run.copies:
                ref = reply.segments[copy.segment]
                self._copy_is_true(ref, copy, [keys[page] for page in pages])
                if asked.lease:
                    self._lease(ref, copy, [keys[page] for page in pages], reply.lease_ttl_s)
            wanted = set(asked.parts or master_view.parts(master, asked.namespace))
            if {copy.part for copy in run.copies} != wanted:
                self.fail("I15", f"pages {pages} with parts of {wanted} missing")
        if isinstance(asked, MatchPrefix) and covered != set(range(len(covered))):
            self.fail("I16", f"a prefix of {sorted(covered)}")
        self.world.counts["pages located"] += len(covered)
        self._explain_misses(master, asked.namespace, keys, covered, isinstance(asked, MatchPrefix))

    def _copy_is_true(self, ref: SegmentRef, copy: LocatedCopy, keys: list[bytes]) -> None:
        """I3: what a lookup returns is sealed, and holds the right bytes; I29: and not removed."""
        memory = self.memories[ref.segment]
        for key, offset, generation in zip(
            keys, array("Q", copy.offsets), array("Q", copy.generations), strict=True
        ):
            self._not_removed(key, generation, "is located")
            if memory.incarnation != ref.incarnation:
                continue  # the master cannot know yet that this life is over
            if offset in memory.damaged:
                continue
            record = memory.record(offset, size_class_of(copy.part_bytes))
            if (
                record is None
                or record.state is not RecordState.SEALED
                or (record.key, record.part, record.generation) != (key, copy.part, generation)
            ):
                self.fail(
                    "I3", f"{ref.segment}+{offset} is located as {key[:4].hex()} generation "
                    f"{generation:#x}, but holds {record}"
                )  # fmt: skip
            else:
                self.holds_right_bytes(memory, record)

    def _not_removed(self, key: bytes, generation: int, what: str) -> None:
        if generation <= self.history.pages[key].removed_up_to:
            self.fail("I29", f"{key[:4].hex()} generation {generation:#x} {what} after its removal")

    def holds_right_bytes(self, memory: SegmentMemory, record: Record) -> None:
        """I4: what is sealed is what its writer had."""
        size = record.payload_bytes
        data = memory.payload[record.offset : record.offset + size]
        if not self.is_right(record.key, record.part, data):
            self.fail("I4", f"wrong bytes in {memory.segment}+{record.offset}: {record}")

    def is_right(self, key: bytes, part: int, data: bytes | memoryview) -> bool:
        """Whether these are bytes that some client has stored under (key, part)."""
        if data == page_bytes(key, part, len(data)):
            return True
        version = version_of(data)
        return version in self.history.pages[key].versions and data == page_bytes(
            key, part, len(data), version
        )

    def _lease(self, ref: SegmentRef, copy: LocatedCopy, keys: list[bytes], ttl_s: float) -> None:
        until_s = self.world.now + ttl_s
        life = (ref.segment, ref.incarnation)
        for key, offset, generation in zip(
            keys, array("Q", copy.offsets), array("Q", copy.generations), strict=True
        ):
            self.leases.grant(life, key, Lease(offset, copy.part_bytes, generation, until_s))

    def _renewed(self, master: SimMaster, asked: RenewLease, reply: LeaseRenewed) -> None:
        del master
        for key, generation, is_renewed in zip(
            keys_of(asked.keys), array("Q", asked.generations), reply.renewed, strict=True
        ):
            if is_renewed:
                self._not_removed(key, generation, "is leased again")
                self.leases.renew(key, generation, self.world.now + reply.lease_ttl_s)

    def _probed(self, master: SimMaster, asked: Probe, reply: Probed) -> None:
        keys = keys_of(asked.keys)
        found = {page for page, flag in enumerate(reply.present) if flag}
        for page in found:
            for place in master_view.readable_copies(master, asked.namespace, keys[page]):
                self._not_removed(keys[page], place.generation, "is probed")
        self._explain_misses(master, asked.namespace, keys, found, prefix=False)

    def _explain_misses(
        self, master: SimMaster, namespace: bytes, keys: list[bytes], found: set[int], prefix: bool
    ) -> None:
        """I13: a page that was stored and is not found has gone for a reason that is counted."""
        for page, key in enumerate(keys):
            if page in found:
                continue
            if self.history.pages[key].stored_s is not None:
                reason = self._why_missing(master, namespace, key)
                if reason is None:
                    self.fail("I13", f"{key[:4].hex()} was stored, and is missing for no reason")
                else:
                    self.world.counts[f"missing: {reason}"] += 1
            if prefix:
                return

    def _why_missing(self, master: SimMaster, namespace: bytes, key: bytes) -> str | None:
        past = self.history.pages[key]
        assert past.stored_s is not None
        if past.remove_began_s > past.stored_s - LATE_REMOVE_S:
            return "removed"
        for part in master_view.parts(master, namespace):
            places = [place for place in past.sealed if place.part == part]
            if any(self._is_readable_at(master, place) for place in places):
                continue
            known = [place for place in places if not self._is_unreported(master, place)]
            return self._why_part_missing(master, (known or places)[-1])
        return None

    def _is_readable_at(self, master: SimMaster, place: Place) -> bool:
        is_sealed = master_view.state_of(master, place) == ExtentState.SEALED.name
        return is_sealed and master_view.is_readable(master, place.segment)

    def _is_unreported(self, master: SimMaster, place: Place) -> bool:
        """Whether the seal was not acknowledged: then nobody was told of it either."""
        unacknowledged = (ExtentState.RESERVED.name, ExtentState.QUARANTINED.name)
        return master_view.state_of(master, place) in unacknowledged

    def _why_part_missing(self, master: SimMaster, place: Place) -> str | None:
        order = self.orders.get((place.segment, place.offset, place.generation))
        if order is not None:
            return order
        if master_view.state_of(master, place) == ExtentState.RETIRED.name:
            return "retired"
        if self.registrations[place.segment] >= place.at_s:
            return "its worker was away"
        if not master_view.is_readable(master, place.segment):
            return "its worker is away"
        return None

    def _planned(self, master: SimMaster, reply: PutPlans) -> None:
        """I5, I6, I9: what is planned is free, fenced and not leased."""
        for span in reply.spans:
            ref = reply.segments[span.segment]
            place = (ref.segment, ref.incarnation, span.part, span.offsets)
            known = self._generations.setdefault(span.generation, place)
            if known is not place:
                if known != place:
                    self.fail("I6", f"generation {span.generation:#x} is given out twice")
                continue  # the answer to a repeated request: some of it may be fenced by now
            if epoch_of(_generation(span.generation)) != master.epoch:
                self.fail("I10", f"generation {span.generation:#x} in epoch {master.epoch}")
            for offset in array("Q", span.offsets):
                size_class = master_view.size_class_at(master, ref.segment, offset)
                self._may_be_planned(ref, offset, size_class, span.generation)

    def _may_be_planned(
        self, ref: SegmentRef, offset: int, size_class: int, generation: int
    ) -> None:
        memory = self.memories[ref.segment]
        if memory.incarnation != ref.incarnation:
            return
        lease = self.leases.unreleased(
            (ref.segment, ref.incarnation), offset, size_class, self.world.now
        )
        if (
            lease is not None
            and lease.generation != generation
            and lease.offset not in memory.damaged  # no reader can verify it anyway
        ):
            self.fail("I9", f"{ref.segment}+{offset} is planned under {lease}")
        for record in memory.all_records():
            overlaps = record.offset < offset + size_class and (
                offset < record.offset + record.size_class
            )
            if overlaps and record.generation != generation:
                self.fail("I5", f"{ref.segment}+{offset} is planned over {record}")
        worker = self.workers[ref.worker]
        for pull in worker.pulls.values():
            if pull.message.segment != ref.segment or pull.message.generation == generation:
                continue
            for at, size in pull.targets():
                if at < offset + size_class and offset < at + size:
                    self.fail(
                        "I6", f"{ref.segment}+{offset} is planned while pull {pull.number} of "
                        f"generation {pull.message.generation:#x} runs there"
                    )  # fmt: skip

    def master_commands(self, master: SimMaster, message: Message) -> None:
        """The master tells a worker something."""
        if not isinstance(message, FreeExtents | FenceExtents | RetireExtents):
            return
        kind = type(message).__name__
        life = (message.segment, message.incarnation)
        pairs = zip(array("Q", message.offsets), array("Q", message.generations), strict=True)
        for offset, generation in pairs:
            self.orders[message.segment, offset, generation] = kind
            if isinstance(message, FreeExtents):
                lease = self.leases.unreleased(life, offset, message.size_class, self.world.now)
                if lease is not None and lease.generation <= generation:
                    self.fail("I9", f"{message.segment}+{offset} is freed under {lease}")
        self.world.note(f"master {kind} x{len(message.offsets) // 8} in {message.segment}")
        del master

    # --- workers ----------------------------------------------------------------------------

    def taken_over(self, worker: SimWorker, memory: SegmentMemory, found: Found) -> None:
        """A worker has started and looked at a segment."""
        for record in found.adopted:
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
        if not isinstance(event, worker_events.Tick | worker_events.MasterAnswered):
            self.world.note(f"{worker.name} <- {type(event).__name__}")

    def overwrites(self, worker: SimWorker, memory: SegmentMemory, offset: int, size: int) -> None:
        """A pull is about to write into an extent."""
        if memory.is_read_in_place(offset, size):
            self.fail("I4", f"{memory.segment}+{offset} is overwritten while it is read in place")
        life = (memory.segment, memory.incarnation)
        lease = self.leases.running(life, offset, size, self.world.now)
        if lease is not None:
            self.fail("I9", f"{memory.segment}+{offset} is overwritten under {lease}")
        del worker

    def sealed(self, memory: SegmentMemory, record: Record | None) -> None:
        """A SEALED record was written."""
        assert record is not None, memory.segment
        self.holds_right_bytes(memory, record)
        self.history.sealed(memory.segment, record, self.world.now)
        self.world.counts["pages sealed"] += 1

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


def _generation(value: int) -> Generation:
    return value  # type: ignore[return-value]  # packed columns hold plain integers
