"""Single guards of the cores and of the reader's rules, switched off: what the simulation is for.

Each mutant is a function that patches one thing. A mutant that no checker notices would mean that
the guard, or the checker, is not needed, and neither is true.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from msgspec.structs import replace

from kvstore.client import reads as client_reads
from kvstore.ids import Epoch, generation_of
from kvstore.record import RecordState, unpack_record
from kvstore.replica import ExtentEvent
from kvstore.wire.messages.puts import SealedNoted
from master import core as master_core
from master import membership as master_membership
from master import moves as master_moves
from master import placing
from master import stopping as master_stopping
from master.directory import Tree
from master.lanes import Lane
from master.orders import Order, OrderBook, OrderKind
from master.pins import Pins
from master.run import Run
from master.tombstones import Tombstones
from tests.simulation import (
    leader_mutants,
    reader_moves,
    relocation_mutants,
    replica_mutants,
    sim_pull,
    ticket_mutants,
)
from tests.simulation.memory import SegmentMemory
from tests.simulation.world import Weather
from workers import membership as worker_membership
from workers import pulls as worker_pulls
from workers import record_table
from workers.commands import Commands
from workers.extent_table import ChunkTable
from workers.holdings import Holdings
from workers.membership import Membership
from workers.pull_requests import UNDECIDED
from workers.rounds import Rounds
from workers.staging import Staging
from workers.tiers.guarded_file import GuardedFile

if TYPE_CHECKING:
    from collections.abc import Callable

    import pytest

    from kvstore.record import Record
    from master.core import Core
    from master.directory import Stretch
    from workers.commands import ExtentCommand
    from workers.events import Stretch as Extents
    from workers.pulls import Pulls

    Patch = pytest.MonkeyPatch


Changes = dict[str, object]
"""Of fields of Options."""


@dataclass(frozen=True)
class Mutant:
    """A guard that is off, and the invariants by which that may be noticed."""

    apply: Callable[[Patch], None]
    noticed_by: tuple[str, ...]
    options: Changes
    """What makes the fault that the guard is for frequent."""


def _orders_done_at_once(patch: Patch, kind: OrderKind, event: ExtentEvent) -> None:
    """Take extents for free as soon as the order to free them is given."""
    give = OrderBook.give

    def give_or_forget(self: OrderBook, order: Order) -> None:
        if order.kind is not kind or order.registration != order.segment.registration:
            give(self, order)
            return
        allocator = order.segment.allocator
        for span in allocator.spans_at(order.offsets):
            allocator.apply(span, event)

    patch.setattr(OrderBook, "give", give_or_forget)


def no_fence_wait(patch: Patch) -> None:
    """Extents of failed puts are planned again before their worker has confirmed the fence."""
    _orders_done_at_once(patch, OrderKind.FENCE, ExtentEvent.FENCED)


def no_free_wait(patch: Patch) -> None:
    """Extents of dropped pages are planned again before their worker has freed them."""
    _orders_done_at_once(patch, OrderKind.FREE, ExtentEvent.FREED)


def no_lease_when_freeing(patch: Patch) -> None:
    """The master grants leases and forgets them."""
    patch.setattr(master_core.Core, "lease_end_s", lambda self: self.now)


def no_grace_after_a_takeover(patch: Patch) -> None:
    """A new master frees at once what an inventory lists, whatever its predecessor promised."""
    join = master_membership._join  # noqa: SLF001 — a guard is switched off from outside

    def join_without_grace(core: Core, worker: object, offer: object) -> None:
        join(core, worker, offer)  # type: ignore[arg-type]  # passed through
        for segment in core.segments.values():
            segment.free_not_before_s = 0.0

    patch.setattr(master_membership, "_join", join_without_grace)


def no_lease_check_by_the_reader(patch: Patch) -> None:
    """A reader takes what it has read, however long it took."""
    reading = client_reads._Read  # noqa: SLF001 — as above
    patch.setattr(reading, "leased", lambda self, stretch: True)


def no_record_check_by_the_reader(patch: Patch) -> None:
    """A reader trusts checksums alone."""
    patch.setattr(reader_moves, "is_sealed_as", lambda *args: True)


def no_checksum_by_the_reader(patch: Patch) -> None:
    """A reader trusts records alone."""
    patch.setattr(reader_moves, "has_checksum", lambda *args: True)


def no_wipe(patch: Patch) -> None:
    """What a reader refuses stays in its buffer."""
    patch.setattr(reader_moves.Read, "wipe", lambda self, places, size: None)


def no_checksum_by_the_worker(patch: Patch) -> None:
    """A worker seals whatever has come."""
    patch.setattr(sim_pull, "has_checksum", lambda *args: True)


def no_reader_locks(patch: Patch) -> None:
    """A worker overwrites extents that readers hold."""
    patch.setattr(SegmentMemory, "is_read_in_place", lambda self, offset, length: False)
    exclusive = SegmentMemory._add  # noqa: SLF001 — as above

    def take(self: SegmentMemory, owner: str, offset: int, length: int) -> bool:
        exclusive(self, "exclusive", owner, offset, length)
        return True

    patch.setattr(SegmentMemory, "try_exclusive", take)


def no_generation_check_by_the_worker(patch: Patch) -> None:
    """A worker pulls into whatever is free, also for plans that were fenced."""
    known = worker_pulls._known_outcome  # noqa: SLF001 — as above

    def known_outcome(chunk: object, slot: int, generation: int, checksum: int) -> int:
        if chunk.states[slot] == RecordState.FREE:  # type: ignore[attr-defined]  # a ChunkTable
            return UNDECIDED
        return known(chunk, slot, generation, checksum)  # type: ignore[arg-type]  # a ChunkTable

    patch.setattr(worker_pulls, "_known_outcome", known_outcome)


def answers_before_the_leader(patch: Patch) -> None:
    """A worker tells the client before the leader has acknowledged the seal."""
    noted = worker_pulls.Pulls.noted

    def noted_well(self: Pulls, call: int, reply: object) -> object:
        if reply is None:
            count = len(self.reports[call].message.offsets) // 8
            reply = SealedNoted(bytes(count))
        return noted(self, call, reply)  # type: ignore[arg-type]  # passed through

    patch.setattr(worker_pulls.Pulls, "noted", noted_well)


def unfinished_records_are_adopted(patch: Patch) -> None:
    """A worker that starts takes records for sealed whose pull did not end."""

    def unpack_as_sealed(data: bytes | memoryview) -> Record | None:
        record = unpack_record(data)
        if record is not None and record.state is RecordState.RESERVED:
            return replace(record, state=RecordState.SEALED)
        return record

    patch.setattr(record_table, "unpack_record", unpack_as_sealed)


def tombstones_are_ignored(patch: Patch) -> None:
    """A master takes removed pages in again."""
    patch.setattr(Tombstones, "covers", lambda self, segment, key, generation: False)


def generations_repeat(patch: Patch) -> None:
    """A new master counts from one again."""
    patch.setattr(master_core, "generation_of", lambda epoch, n: generation_of(Epoch(1), n))


def parts_are_not_waited_for(patch: Patch) -> None:
    """A page is found when its first part is in."""
    patch.setattr(Run, "readable", lambda self, parts, version: self.part_present(0))


def gaps_are_matched(patch: Patch) -> None:
    """A match goes on beyond a page that is not there."""

    def leading(self: Tree, keys: bytes, version: int) -> list[Stretch]:
        del version
        return [stretch for stretch in self.stretches(keys) if stretch.run.copies]

    patch.setattr(Tree, "leading", leading)


def dead_owners_keep_their_puts(patch: Patch) -> None:
    """Nobody gives up the puts of a client that is gone."""

    def put_off(core: Core) -> None:
        for put in core.put_deadlines.take_due(core.now, len(core.plans)):
            core.put_deadlines.place(put, core.now + 60.0)

    patch.setattr(master_stopping, "release_owner", lambda core, owner: None)
    patch.setattr(master_stopping, "fail_overdue_puts", put_off)


def epochs_are_not_compared(patch: Patch) -> None:
    """A worker obeys any leader that ever led."""
    receive = Commands.receive

    def receive_any(self: Commands, number: int, message: ExtentCommand, epoch: int) -> object:
        return receive(self, number, message, min(epoch, message.epoch))

    patch.setattr(Commands, "receive", receive_any)


def incarnations_are_not_compared(patch: Patch) -> None:
    """A worker obeys commands that were meant for an earlier life of a segment."""
    patch.setattr(Holdings, "find", lambda self, segment, incarnation: self.segments.get(segment))


def no_self_fence(patch: Patch) -> None:
    """A worker that hears nobody goes on writing."""
    patch.setattr(Membership, "is_fenced", lambda self, now: False)


def pulls_go_on_during_an_inventory(patch: Patch) -> None:
    """A worker pulls into a segment whose inventory it has just offered."""
    patch.setattr(Membership, "is_paused", lambda self, segment: False)


def quarantine_has_no_bound(patch: Patch) -> None:
    """A segment takes puts however much of it waits for fences."""
    patch.setattr(placing, "is_quarantine_full", lambda core, segment: False)


def copies_count_that_are_not_there(patch: Patch) -> None:
    """Eviction drops a copy in memory although nothing lies below it."""
    patch.setattr(Run, "covered", lambda self, segment, _=None: b"\1" * len(self))


def moves_have_no_bound(patch: Patch) -> None:
    """A worker is asked for every move that could be made."""
    patch.setattr(Lane, "free_at_s", lambda self, now_s, bytes_per_s: now_s)


def hard_pins_are_ignored(patch: Patch) -> None:
    """Pinned pages are evicted and expire like all others."""
    patch.setattr(Pins, "is_hard", lambda self, run: False)
    patch.setattr(Pins, "kept", lambda self, run: 0)
    patch.setattr(Pins, "kept_if_possible", lambda self, run: 0)


def frees_are_not_synced(patch: Patch) -> None:
    """What a disk has confirmed may be lost with the power."""
    patch.setattr(GuardedFile, "sync", lambda self: None)


def doubted_copies_stay_staged(patch: Patch) -> None:
    """A staged copy that a reader could not verify is shown to the next one."""
    patch.setattr(Staging, "doubt", lambda self, extents: None)


def refused_writes_count_as_done(patch: Patch) -> None:
    """A worker takes records for written that its disk refused."""
    restate = ChunkTable.restate

    def restate_all(self: ChunkTable, stretch: Extents, outcomes: bytes, state: int) -> None:
        restate(self, stretch, bytes(len(outcomes)), RecordState(state))

    patch.setattr(ChunkTable, "restate", restate_all)


def failed_disks_have_inventories(patch: Patch) -> None:
    """A worker offers what it cannot read."""
    patch.setattr(worker_membership, "FAILED", "")


def failures_of_disks_are_not_told(patch: Patch) -> None:
    """A worker keeps to itself that a disk gives nothing back."""
    patch.setattr(Membership, "medium_changed", lambda self, segment, medium, now: [])


def copies_are_not_leased(patch: Patch) -> None:
    """What another worker reads may go meanwhile."""
    patch.setattr(master_moves, "_lease", lambda *args: 0.0)


def what_has_changed_is_a_finding(patch: Patch) -> None:
    """What the scrubber was told to look at is damaged, whatever has become of it by then."""
    patch.setattr(Rounds, "_is_there", lambda self, found: True)


MANY_VIEWS: Final[Changes] = {
    "views": 0.5,
    "hosts": 1,
    "lease_ttl_s": 0.8,
    "page_ttl_s": 1.5,
    "chunks": 2,
}
MANY_CRASHES: Final[Changes] = {"crashes": 0.4, "fault_kinds": ("worker",), "slow_pull_s": 0.5}
MANY_FLIPS: Final[Changes] = {"flips": 1.0}
TIERS: Final[Changes] = {"disks": 1, "segments": 1, "watermark_demote": 0.1, "slow_pull_s": 0.5}
ONLY_DISKS: Final[Changes] = {"disks": 1, "segments": 0, "disk_faults": 0.5, "removes": 0.25}
LONELY_DISKS: Final[Changes] = {**ONLY_DISKS, "disk_faults": 0.0, "workers": 1, "clients": 2}
PINS: Final[Changes] = {"pins": 0.3, "flips": 0.0, "disk_faults": 0.0}
MANY_LOSSES: Final[Changes] = {"weather": Weather(loss=0.05, slow=0.05)}
MASTERS: Final[Changes] = {"masters": 2, "etcd": True, "cuts": 0.5, "stale_read_max_s": 300.0}
SLOW_ETCD: Final[Changes] = {
    **MASTERS,
    "cuts": 0.3,
    "weather": Weather(loss=0.05, slow=0.5, slow_max_s=0.6),
    "seconds": 25.0,
    "pause_s": 0.1,
}
SCRUBS: Final[Changes] = {"scrub_bytes_per_s": 1 << 20, "slow_pull_s": 0.5, "page_ttl_s": 1.5}
LONE: Final[Changes] = {"replicas": 1, "heat_bytes_per_s": 0.0, "relocations": 0.0}
"""Nobody copies anything, and so notices before readers do."""
WISHES: Final[Changes] = {"workers": 3, "hosts": 3, "replicas": 1, "relocations": 1.0}
REMOVALS: Final[Changes] = {"removes": 0.25, "crashes": 0.4, "fault_kinds": ("master", "worker")}
TAKEOVERS: Final[Changes] = {**MASTERS, "crashes": 0.4, "fault_kinds": ("master", "worker")}

_GUARDS: Final[tuple[tuple[Callable[[Patch], None], str, Changes], ...]] = (
    (no_fence_wait, "I5 I6 I12", {}),
    (no_free_wait, "I3 I5 I9 I12", {}),
    (no_lease_when_freeing, "I9", {}),
    (no_grace_after_a_takeover, "I9", LONE),
    (no_lease_check_by_the_reader, "I9", {}),
    (no_record_check_by_the_reader, "I11", MANY_CRASHES),
    (no_checksum_by_the_reader, "I1", MANY_FLIPS),
    (no_wipe, "I8", {}),
    (no_checksum_by_the_worker, "I4", {"disturb": 0.5}),
    (no_reader_locks, "I1 I4", MANY_VIEWS),
    (no_generation_check_by_the_worker, "I5 I6 I12", MANY_LOSSES),
    (answers_before_the_leader, "I13", MANY_LOSSES),
    (unfinished_records_are_adopted, "I3 I4 I12", MANY_CRASHES),
    (tombstones_are_ignored, "I29", REMOVALS),
    (generations_repeat, "I6 I10", {}),
    (parts_are_not_waited_for, "I13 I15 I34", LONE),
    (gaps_are_matched, "I3 I15 I16", LONE),
    (dead_owners_keep_their_puts, "I18", {}),
    (copies_count_that_are_not_there, "I13 I16", TIERS),
    (moves_have_no_bound, "I7", TIERS),
    (hard_pins_are_ignored, "I31", PINS),
    (frees_are_not_synced, "I3 I4 I5 I12 I29", ONLY_DISKS),
    (leader_mutants.leaders_trust_their_lease, "I10", MASTERS),
    (leader_mutants.leases_count_from_the_answer, "I10", {**SLOW_ETCD, "pauses": 0.2}),
    (leader_mutants.anybody_may_write, "I10", {**MASTERS, "pauses": 0.3}),
    (leader_mutants.stored_rows_are_trusted, "I3 I9 I12 I13", {**TAKEOVERS, **LONE}),
    (leader_mutants.inventories_are_not_waited_for, "I3 I12", TAKEOVERS),
    (leader_mutants.new_leaders_forget, "I13", TAKEOVERS),
    (what_has_changed_is_a_finding, "I13", SCRUBS),
    (replica_mutants.repair_forgets, "I34", replica_mutants.REPLICAS),
    (replica_mutants.losses_are_not_looked_into, "I34", replica_mutants.REPLICAS),
    (replica_mutants.copies_go_to_one_host, "I33", replica_mutants.CROWDED),
    (replica_mutants.repair_does_not_hear_of_heat, "I34", replica_mutants.HEAT),
    (replica_mutants.trimming_leaves_none, "I13 I16 I34", replica_mutants.REPLICAS),
    (relocation_mutants.relocations_take_the_last, "I13 I16", WISHES),
    (relocation_mutants.drained_workers_are_filled, "I36", WISHES),
    *ticket_mutants.GUARDS,
    (doubted_copies_stay_staged, "liveness", {**LONELY_DISKS, **MANY_FLIPS}),
)
MUTANTS: Final = {
    each.__name__: Mutant(each, tuple(numbers.split()), options)
    for each, numbers, options in _GUARDS
}
