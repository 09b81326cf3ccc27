"""Checks of what the master answers, at the moment that it answers and so can still be asked why.

Locations, leases, plans and misses are compared with the workers' memory and with what clients
were told before. Numbers are those of the invariants in ARCHITECTURE.md.
"""

from __future__ import annotations

from array import array
from math import inf
from typing import TYPE_CHECKING, Final

from kvstore.ids import Generation, epoch_of
from kvstore.record import RecordState
from kvstore.replica import ExtentState
from kvstore.wire.messages import tickets
from kvstore.wire.messages.hello import Failure
from kvstore.wire.messages.membership import FreeExtents
from kvstore.wire.messages.pins import PagesPinned, PinPages, UnpinPages
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
    Status,
)
from tests.simulation import master_view
from tests.simulation.leases import Lease
from tests.simulation.pages import keys_of

if TYPE_CHECKING:
    from kvstore.wire.messages.base import Message
    from kvstore.wire.messages.common import SegmentRef
    from kvstore.wire.messages.puts import Ingest, PlanSpan
    from tests.simulation.checks import Checks
    from tests.simulation.history import Place
    from tests.simulation.sim_master import SimMaster

FAILURES_EXPECTED: Final = frozenset(
    (
        "unavailable",
        "out_of_space",
        "deadline_exceeded",
        "bad_value",
        "access_denied",
        "stale_epoch",
    )
)
"""What may be answered to requests that are right: a worker's may be overtaken by its own new
registration, and know of a higher epoch than who it asks."""
OF_TICKETS: Final = FAILURES_EXPECTED | {"fenced", "unknown_ticket"}
"""To those about tickets, which another claim may overtake, or their end."""
LET_GO: Final = frozenset((FreeExtents.__name__, "retired"))
"""Why a page is missing that the master has let go, and nobody else."""
WAS_AWAY: Final = "its worker was away"
IS_AWAY: Final = "its worker is away"
AWAY: Final = frozenset((WAS_AWAY, IS_AWAY))
LATE_REMOVE_S: Final = 30.0
"""A remove may still be on its way when its caller has given up on it."""


class Answers:
    """Checkers of the master's answers."""

    def __init__(self, checks: Checks) -> None:
        """Use what all checkers remember."""
        self._checks = checks
        self._pins_asked_s: dict[PinPages, float] = {}
        self._generations: dict[int, tuple[object, ...]] = {}

    def hears(self, asked: Message) -> None:
        """A request is about to be handled; a pin may end before that is answered."""
        if isinstance(asked, PinPages | UnpinPages):
            self._checks.history.pin_asked(keys_of(asked.keys), asked.owner)
        if isinstance(asked, PinPages):
            self._pins_asked_s.setdefault(asked, self._checks.world.now)

    def check(self, master: SimMaster, asked: Message, reply: Message) -> None:
        """The master's answer, at the moment that it is true."""
        self._promised(master, asked, reply)
        if not self._checks.is_in_force(master):
            return  # others may have changed what it still takes for true
        match asked, reply:
            case (MatchPrefix() | Lookup(), Located()):
                self._located(master, asked, reply)
            case (Probe(), Probed()):
                self._probed(master, asked, reply)
            case (RenewLease(), LeaseRenewed()):
                self._renewed(asked, reply)
            case (_, PutPlans()):
                self._planned(master, reply)
            case (PinPages(), PagesPinned()):
                self._pinned(asked, reply)
            case (_, Status()):
                self._adds_up(reply)
            case (_, Failure(code, text)):
                self._checks.world.note(f"master -> {code}: {text}")
                is_of_tickets = type(asked).__module__ == tickets.__name__
                if code not in (OF_TICKETS if is_of_tickets else FAILURES_EXPECTED):
                    self._checks.fail("I20", f"{type(asked).__name__} was answered {code}: {text}")
        if type(asked).__name__ == "RegisterWorker":
            for offer in getattr(asked, "segments", ()):
                self._checks.registrations[offer.segment] = self._checks.world.now

    def _located(self, master: SimMaster, asked: MatchPrefix | Lookup, reply: Located) -> None:
        keys = keys_of(asked.keys)
        covered: set[int] = set()
        for run in reply.runs:
            pages = range(run.first, run.first + run.count)
            covered.update(pages)
            for copy in run.copies:
                ref = reply.segments[copy.segment]
                self._copy_is_true(master, ref, copy, [keys[page] for page in pages])
            wanted = set(asked.parts or master_view.parts(master, asked.namespace))
            if {copy.part for copy in run.copies} != wanted:
                self._checks.fail("I15", f"pages {pages} with parts of {wanted} missing")
        if isinstance(asked, MatchPrefix) and covered != set(range(len(covered))):
            self._checks.fail("I16", f"a prefix of {sorted(covered)}")
        self._checks.world.counts["pages located"] += len(covered)
        self._explain_misses(master, asked.namespace, keys, covered, isinstance(asked, MatchPrefix))

    def _copy_is_true(
        self, master: SimMaster, ref: SegmentRef, copy: LocatedCopy, keys: list[bytes]
    ) -> None:
        """I3: what a lookup returns is sealed, and holds the right bytes; I29: and not removed."""
        memory = self._checks.memories[ref.segment]
        if (master.epoch, ref.segment, ref.incarnation) not in self._checks.confirmed:
            self._checks.fail("I12", f"{ref.segment} is located, and nobody offers its inventory")
        for key, offset, generation in zip(
            keys, array("Q", copy.offsets), array("Q", copy.generations), strict=True
        ):
            self._not_removed(key, generation, "is located")
            if memory.incarnation != ref.incarnation:
                continue  # the master cannot know yet that this life is over
            if offset in memory.damaged:
                continue
            size_class = master_view.size_class_at(master, ref.segment, offset)
            record = memory.record(offset, size_class)
            if (
                record is None
                or record.state is not RecordState.SEALED
                or (record.key, record.part, record.generation) != (key, copy.part, generation)
            ):
                self._checks.fail(
                    "I3", f"{ref.segment}+{offset} is located as {key[:4].hex()} generation "
                    f"{generation:#x}, but holds {record}"
                )  # fmt: skip
            else:
                self._checks.holds_right_bytes(memory, record)

    def _not_removed(self, key: bytes, generation: int, what: str) -> None:
        if generation <= self._checks.history.pages[key].removed_up_to:
            self._checks.fail(
                "I29", f"{key[:4].hex()} generation {generation:#x} {what} after its removal"
            )

    def _promised(self, master: SimMaster, asked: Message, reply: Message) -> None:
        """Note the leases that a reader has from now on."""
        match asked, reply:
            case (MatchPrefix() | Lookup(), Located()) if asked.lease and reply.lease_ttl_s:
                self._leases(master, asked, reply)
            case (RenewLease(), LeaseRenewed()):
                rows = zip(
                    keys_of(asked.keys), array("Q", asked.generations), reply.renewed, strict=True
                )
                until_s = self._checks.world.now + reply.lease_ttl_s
                for key, generation, is_renewed in rows:
                    if is_renewed:
                        self._checks.leases.renew(key, generation, until_s)

    def _leases(self, master: SimMaster, asked: MatchPrefix | Lookup, reply: Located) -> None:
        keys = keys_of(asked.keys)
        until_s = self._checks.world.now + reply.lease_ttl_s
        for run in reply.runs:
            leased = keys[run.first : run.first + run.count]
            for copy in run.copies:
                self._lease(master, reply.segments[copy.segment], copy, leased, until_s)

    def _lease(
        self,
        master: SimMaster,
        ref: SegmentRef,
        copy: LocatedCopy,
        keys: list[bytes],
        until_s: float,
    ) -> None:
        life = (ref.segment, ref.incarnation)
        for key, offset, generation in zip(
            keys, array("Q", copy.offsets), array("Q", copy.generations), strict=True
        ):
            size = min(copy.part_bytes, master_view.size_class_at(master, ref.segment, offset))
            self._checks.leases.grant(life, key, Lease(offset, size, generation, until_s))

    def _renewed(self, asked: RenewLease, reply: LeaseRenewed) -> None:
        rows = zip(keys_of(asked.keys), array("Q", asked.generations), reply.renewed, strict=True)
        for key, generation, is_renewed in rows:
            if is_renewed:
                self._not_removed(key, generation, "is leased again")

    def _pinned(self, asked: PinPages, reply: PagesPinned) -> None:
        asked_s = self._pins_asked_s.pop(asked, -inf)
        for key, is_pinned in zip(keys_of(asked.keys), reply.pinned, strict=True):
            self._checks.world.counts["pages pinned"] += is_pinned
            if is_pinned and asked.hard:
                pins = self._checks.history.pages[key].pins
                pins[asked.owner] = asked_s + asked.ttl_s

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
            if self._checks.history.pages[key].stored_s is not None:
                reason = self._why_missing(master, namespace, key)
                if reason is None:
                    self._checks.fail(
                        "I13", f"{key[:4].hex()} was stored, and is missing for no reason"
                    )
                else:
                    self._may_be_missing(master, namespace, key, reason)
            if prefix:
                return

    def _may_be_missing(self, master: SimMaster, namespace: bytes, key: bytes, reason: str) -> None:
        """I31: not by eviction or expiry, while somebody was told that the page stays."""
        checks = self._checks
        checks.world.counts[f"missing: {reason}"] += 1
        options = checks.options
        has_rotten = bool(options.flips or options.disk_faults)
        is_incomplete = len(master_view.parts(master, namespace)) > 1
        if reason not in LET_GO or has_rotten or is_incomplete:
            return
        places = checks.history.pages[key].sealed
        if any(self._why_part_missing(master, place) in AWAY for place in places):
            return  # one replica was let go of while another was there, which was lost since
        if checks.history.is_pinned(key, checks.world.now):
            checks.fail("I31", f"{key[:4].hex()} is pinned, and missing: {reason}")

    def _why_missing(self, master: SimMaster, namespace: bytes, key: bytes) -> str | None:
        past = self._checks.history.pages[key]
        assert past.stored_s is not None
        if past.remove_began_s > past.stored_s - LATE_REMOVE_S:
            return "removed"
        for part in master_view.parts(master, namespace):
            places = [place for place in past.sealed if place.part == part]
            if any(self._is_readable_at(master, place) for place in places):
                continue
            known = [place for place in places if not self._is_unreported(master, place)]
            # What is quarantined now may have been acknowledged in an earlier registration.
            candidates = known[-1:] or places
            reasons = (self._why_part_missing(master, place) for place in reversed(candidates))
            return next(filter(None, reasons), None)
        return None

    def _is_readable_at(self, master: SimMaster, place: Place) -> bool:
        is_sealed = master_view.state_of(master, place) == ExtentState.SEALED.name
        return is_sealed and master_view.is_readable(master, place.segment)

    def _is_unreported(self, master: SimMaster, place: Place) -> bool:
        """Whether the seal was not acknowledged: then nobody was told of it either."""
        unacknowledged = (ExtentState.RESERVED.name, ExtentState.QUARANTINED.name)
        return master_view.state_of(master, place) in unacknowledged

    def _why_part_missing(self, master: SimMaster, place: Place) -> str | None:
        order = self._checks.orders.get((place.segment, place.offset, place.generation))
        if order is not None:
            return order
        if master_view.state_of(master, place) == ExtentState.RETIRED.name:
            return "retired"
        if self._checks.registrations[place.segment] >= place.at_s:
            return WAS_AWAY
        if not master_view.is_readable(master, place.segment):
            return IS_AWAY
        return None

    def _adds_up(self, reply: Status) -> None:
        """I17: every byte of a segment is in one state."""
        for segment in reply.segments:
            parts = (
                segment.free_bytes, segment.reserved_bytes, segment.sealed_bytes,
                segment.retired_bytes, segment.quarantined_bytes,
            )  # fmt: skip
            if sum(parts) != segment.capacity_bytes or min(parts) < 0:
                self._checks.fail("I17", f"{segment}")

    def _planned(self, master: SimMaster, reply: PutPlans) -> None:
        """I5, I6, I9: what is planned is free, fenced and not leased."""
        for span in reply.spans:
            self.is_planned(master, reply.segments[span.segment], span)

    def is_planned(self, master: SimMaster, ref: SegmentRef, span: PlanSpan | Ingest) -> None:
        """Extents of a segment are given to a put or to a move."""
        place = (ref.segment, ref.incarnation, span.part, span.offsets)
        known = self._generations.setdefault(span.generation, place)
        if known is not place:
            if known != place:
                self._checks.fail("I6", f"generation {span.generation:#x} is given out twice")
            return  # the answer to a repeated request: some of it may be fenced by now
        if epoch_of(Generation(span.generation)) != master.epoch:
            self._checks.fail("I10", f"generation {span.generation:#x} in epoch {master.epoch}")
        for offset in array("Q", span.offsets):
            size_class = master_view.size_class_at(master, ref.segment, offset)
            self._may_be_planned(ref, offset, size_class, span.generation)

    def _may_be_planned(
        self, ref: SegmentRef, offset: int, size_class: int, generation: int
    ) -> None:
        memory = self._checks.memories[ref.segment]
        if memory.incarnation != ref.incarnation or not memory.is_writable:
            return
        lease = self._checks.leases.unreleased(
            (ref.segment, ref.incarnation), offset, size_class, self._checks.world.now
        )
        if (
            lease is not None
            and lease.generation != generation
            and lease.offset not in memory.damaged  # no reader can verify it anyway
        ):
            self._checks.fail("I9", f"{ref.segment}+{offset} is planned under {lease}")
        for record in memory.all_records():
            overlaps = record.offset < offset + size_class and (
                offset < record.offset + record.size_class
            )
            if overlaps and record.generation != generation:
                self._checks.fail("I5", f"{ref.segment}+{offset} is planned over {record}")
        worker = self._checks.workers[ref.worker]
        for pull in worker.pulls.values():
            if pull.message.segment != ref.segment or pull.message.generation == generation:
                continue
            for at, size in pull.targets():
                if at < offset + size_class and offset < at + size:
                    self._checks.fail(
                        "I6", f"{ref.segment}+{offset} is planned while pull {pull.number} of "
                        f"generation {pull.message.generation:#x} runs there"
                    )  # fmt: skip
