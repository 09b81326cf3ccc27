"""The whole core under random events: puts, reads, removes, pins, absences, restarts, takeovers.

After every event all invariants are checked; every location that the master gives out must be what
the worker's record says; nothing leased is freed; nothing removed comes back. One worker has a
drive, to and from which pages are moved all the time: at once, late, in part or not at all.
"""

from __future__ import annotations

import hashlib
from math import inf

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from kvstore.hints import Hints
from kvstore.ids import KEY_BYTES, ROOT_PARENT
from kvstore.record import RecordState
from kvstore.wire.messages.common import Outcome
from kvstore.wire.messages.hello import Done, Failure
from kvstore.wire.messages.membership import ReportSegment
from kvstore.wire.messages.operator import PoliciesInForce, SetPolicy
from kvstore.wire.messages.pins import PagesPinned, PinPages, UnpinPages
from kvstore.wire.messages.puts import (
    AbortPut,
    Ingest,
    Ingested,
    PageRange,
    PlanSpan,
    PutPlans,
    RefusedRange,
    Sealed,
)
from kvstore.wire.messages.reads import (
    GiveBackLease,
    GiveHints,
    Located,
    Lookup,
    MatchPrefix,
    Prefetch,
    RenewLease,
)
from master.events import CommandAnswered
from master.packed import words
from master.tunables import Tunables
from policies.registry import ADMISSION, EVICTION
from tests.unit.master_rig import OpenedNamespace, Rig

paths = st.lists(st.integers(0, 1), min_size=1, max_size=7).map(tuple)
names = st.sampled_from(["w1", "w2"])
segments = st.sampled_from(["w1-dram", "w2-dram", "w1-nvme"])
TIERED = Tunables(
    cluster="test", watermark_demote=0.01, watermark_low=0.4, watermark_high=0.5,
    nvme_admission="all",
)  # fmt: skip


def key_of(two: bool, path: tuple[int, ...]) -> bytes:
    """Key of the page at the end of a path."""
    return hashlib.sha256(bytes([two, *path])).digest()


def keys_of(two: bool, path: tuple[int, ...], start: int = 0) -> bytes:
    """Packed keys of the pages along a path, from the `start`-th on."""
    return b"".join(key_of(two, path[: i + 1]) for i in range(start, len(path)))


class MasterMachine(RuleBasedStateMachine):
    """Two workers, one with a drive, a namespace of one part of 8 KiB and one of two of 4 KiB."""

    def __init__(self) -> None:
        super().__init__()
        self.rig = Rig(TIERED)
        self.epoch = 1
        self.leases: dict[tuple[str, int, int], float] = {}
        self.removed: dict[tuple[str, bytes], int] = {}
        self.rotten: set[tuple[str, int]] = set()
        self.unsent: list[Sealed] = []
        self.generations: list[int] = []
        self.spaces: list[OpenedNamespace] = []
        self.rig.add_worker("w1", chunks=1, nvme_chunks=2)
        self.rig.add_worker("w2", chunks=1)
        self.open_spaces()

    def open_spaces(self) -> None:
        """Open both namespaces at the master of the moment."""
        self.spaces = [self.rig.open_namespace(1, heads=2), self.rig.open_namespace(2)]

    @rule(path=paths, start=st.integers(0, 3), two=st.booleans(), sent=st.integers(0, 3))
    def put(self, path: tuple[int, ...], start: int, two: bool, sent: int) -> None:
        """Plan a chain, let workers pull it, report some of it."""
        start = min(start, len(path) - 1)
        keys = keys_of(two, path, start)
        parent = key_of(two, path[:start]) if start else ROOT_PARENT
        space = self.spaces[two]
        reply = space.begin(keys, parent, (0, 1) if two else (0,))
        assert isinstance(reply, PutPlans), reply
        self.check_answer(reply, len(path) - start, 2 if two else 1)
        self.generations += [span.generation for span in reply.spans]
        if not two:
            # Most of these pages are half as long on a drive.
            pages = [keys[at : at + KEY_BYTES] for at in range(0, len(keys), KEY_BYTES)]
            lengths = {key: 4000 if key[0] % 8 else 8000 for key in pages}
            self.rig.workers["w1"].stored_bytes.update(lengths)
        reports = space.write(reply, keys, parent)
        self.send(space, reports[:sent])
        self.unsent += reports[sent:]

    @staticmethod
    def check_answer(reply: PutPlans, pages: int, parts: int) -> None:
        """Every (page, part) is in exactly one of the three lists."""
        answered: list[PlanSpan | PageRange | RefusedRange] = []
        answered += [*reply.spans, *reply.present, *reply.refused]
        seen = [
            (page, each.part)
            for each in answered
            for page in range(each.first, each.first + each.count)
        ]
        assert sorted(seen) == [(page, part) for page in range(pages) for part in range(parts)]

    def send(self, space: OpenedNamespace, reports: list[Sealed]) -> None:
        """Send reports of workers that are connected."""
        for report in reports:
            worker = self.rig.worker_of(report.segment)
            if worker.session is not None:
                reply = self.rig.ask(worker.session, report)
                self.free_refused(report, getattr(reply, "outcomes", b""))

    def free_refused(self, report: Sealed, outcomes: bytes) -> None:
        """A worker frees what the master did not acknowledge."""
        records = self.rig.segment(report.segment).records
        for offset, outcome in zip(words(report.offsets), outcomes, strict=False):
            record = records.get(offset)
            if outcome and record is not None and record.generation == report.generation:
                del records[offset]

    @rule(path=paths, two=st.booleans(), seconds=st.sampled_from([0.1, 0.6]))
    def put_whole(self, path: tuple[int, ...], two: bool, seconds: float) -> None:
        """Put a chain, let it move, and read it again."""
        self.put(path, 0, two, 99)
        self.rig.pass_time(seconds)
        self.read(path, two, lease=True, some=False)

    @precondition(lambda self: self.unsent)
    @rule(index=st.integers(0, 100))
    def report_late(self, index: int) -> None:
        """Send, or send again, an old report."""
        report = self.unsent[index % len(self.unsent)]
        is_current = report.incarnation == self.rig.segment(report.segment).incarnation
        if is_current and self.rig.worker_of(report.segment).session is not None:
            self.send(self.spaces[0], [report])

    @precondition(lambda self: self.generations)
    @rule(index=st.integers(0, 100))
    def abort(self, index: int) -> None:
        """Give a plan up."""
        generation = self.generations[index % len(self.generations)]
        self.rig.ask(self.rig.engine, AbortPut((generation,)))

    @rule()
    def engine_dies(self) -> None:
        """The engine's connection ends; another one comes."""
        self.rig.close(self.rig.engine)
        self.rig.engine = self.rig.open("engine", "tenant", "engine")

    @rule(path=paths, two=st.booleans(), lease=st.booleans(), some=st.booleans())
    def read(self, path: tuple[int, ...], two: bool, lease: bool, some: bool) -> None:
        """Match or look up; what comes back is what the workers hold."""
        space, keys = self.spaces[two], keys_of(two, path)
        if some:
            found = self.rig.ask(self.rig.engine, Lookup(space.id, keys, (), lease))
        else:
            found = space.match(keys, lease=lease)
        assert isinstance(found, Located), found
        probed = space.probe(keys)
        hits = [page for run in found.runs for page in range(run.first, run.first + run.count)]
        wanted = [page for page, there in enumerate(probed) if there]
        if not some:
            wanted = [page for page in wanted if 0 not in probed[:page]]
        assert hits == wanted
        for run in found.runs:
            parts = {copy.part for copy in run.copies}
            assert parts == set(range(2 if two else 1)), run
            self.check_run(space, keys, found, run.first)

    def check_run(self, space: OpenedNamespace, keys: bytes, found: Located, first: int) -> None:
        """Compare one located run with the records; note its leases."""
        run = next(run for run in found.runs if run.first == first)
        for copy in run.copies:
            ref = found.segments[copy.segment]
            segment = self.rig.segment(ref.segment)
            columns = words(copy.offsets), words(copy.generations), words(copy.checksums)
            for i, (offset, generation, checksum) in enumerate(zip(*columns, strict=True)):
                key = keys[(first + i) * KEY_BYTES : (first + i + 1) * KEY_BYTES]
                assert generation > self.removed.get((ref.segment, key), 0), "removed"
                if found.lease_ttl_s:
                    until_s = self.rig.now + found.lease_ttl_s
                    self.leases[ref.segment, offset, generation] = until_s
                if ref.incarnation != segment.incarnation:
                    continue  # it has restarted and not registered yet: readers notice
                record = segment.records[offset]
                assert record.state is RecordState.SEALED
                assert (record.key, record.part) == (key, copy.part)
                assert (record.generation, record.checksum) == (generation, checksum)
                assert record.namespace_ordinal == space.ordinal

    @rule(path=paths, two=st.booleans())
    def renew(self, path: tuple[int, ...], two: bool) -> None:
        """Renew leases; those that are refused have ended or are gone."""
        space, keys = self.spaces[two], keys_of(two, path)
        self.rig.ask(self.rig.engine, RenewLease(space.id, keys, bytes(8 * len(path))))

    @rule(path=paths, short=st.integers(1, 7), two=st.booleans(), number=st.integers(1, 2))
    def promise(self, path: tuple[int, ...], short: int, two: bool, number: int) -> None:
        """Lease pages and give some of that back; what was leased otherwise stays leased."""
        space, keys = self.spaces[two], keys_of(two, path)
        asked = MatchPrefix(space.id, keys, lease_id=number)
        assert isinstance(self.rig.ask(self.rig.engine, asked), Located)
        told = GiveBackLease(space.id, keys[: short * KEY_BYTES], number)
        assert self.rig.ask(self.rig.engine, told) == Done()

    @rule(path=paths, start=st.integers(0, 6), two=st.booleans())
    def remove(self, path: tuple[int, ...], start: int, two: bool) -> None:
        """Remove pages; once answered they stay away."""
        space = self.spaces[two]
        keys = keys_of(two, path, min(start, len(path) - 1))
        held: dict[tuple[str, bytes], int] = {}
        lent = [each for worker in self.rig.workers.values() for each in worker.segments]
        for segment in lent:
            for record in segment.records.values():
                place = segment.segment, record.key
                held[place] = max(held.get(place, 0), record.generation)
        asked = self.rig.last_request + 1
        reply = space.remove(keys)
        for _ in range(200):
            if reply is not None:
                break
            self.rig.tick(0.05)
            answer = self.rig.reply(self.rig.engine, asked)
            reply = getattr(answer, "removed", None)
        assert reply is not None, "a remove is answered in time"
        assert not any(space.probe(keys))
        pages = [keys[i : i + KEY_BYTES] for i in range(0, len(keys), KEY_BYTES)]
        for i, key in enumerate(pages):
            if reply[i]:
                for (name, page), generation in held.items():
                    if page == key:
                        self.removed[name, key] = generation

    @rule(path=paths, two=st.booleans(), hard=st.booleans(), ttl_s=st.sampled_from([1.0, 9.0, inf]))
    def pin(self, path: tuple[int, ...], two: bool, hard: bool, ttl_s: float) -> None:
        """Pin the pages of a path that are readable."""
        space, keys = self.spaces[two], keys_of(two, path)
        probed = space.probe(keys)
        reply = self.rig.ask(self.rig.engine, PinPages(space.id, keys, "owner", hard, ttl_s))
        assert isinstance(reply, Failure) or reply == PagesPinned(probed)

    @rule(path=paths, two=st.booleans())
    def unpin(self, path: tuple[int, ...], two: bool) -> None:
        """Take pins back."""
        self.rig.ask(self.rig.engine, UnpinPages(self.spaces[two].id, keys_of(two, path), "owner"))

    @rule(
        policy=st.sampled_from(
            [("eviction", name) for name in sorted(EVICTION)]
            + [("admission", name) for name in sorted(ADMISSION)]
        )
    )
    def set_policy(self, policy: tuple[str, str]) -> None:
        """An operator chooses another policy."""
        operator = self.rig.open("operator", "", "kvharbor")
        assert isinstance(self.rig.ask(operator, SetPolicy(*policy, {})), PoliciesInForce)
        self.rig.close(operator)

    @rule(seconds=st.sampled_from([0.1, 0.6, 4.0, 12.0]))
    def time_passes(self, seconds: float) -> None:
        """Everybody who is connected beats."""
        self.rig.pass_time(seconds)

    @rule(name=names)
    def leave(self, name: str) -> None:
        """A worker loses its connection."""
        worker = self.rig.workers[name]
        if worker.session is not None:
            worker.leave()

    @rule(name=names, restart=st.booleans())
    def join(self, name: str, restart: bool) -> None:
        """A worker comes (again), perhaps in a new life."""
        worker = self.rig.workers[name]
        if restart:
            worker.restart()
        worker.join()

    @rule(name=segments, offset=st.integers(0, 31), locked=st.booleans())
    def lock(self, name: str, offset: int, locked: bool) -> None:
        """A zero-copy reader holds an extent, or lets go of it."""
        held = self.rig.segment(name).locked
        (held.add if locked else held.discard)(offset * 4096)

    @rule(name=segments, offset=st.integers(0, 31))
    def rot(self, name: str, offset: int) -> None:
        """A worker that is away loses a record."""
        worker = self.rig.worker_of(name)
        if worker.session is None:
            self.rig.segment(name).records.pop(offset * 4096, None)
            self.rotten.add((name, offset * 4096))
            worker.restart()

    @rule(path=paths, two=st.booleans())
    def prefetch(self, path: tuple[int, ...], two: bool) -> None:
        """Somebody will read this soon."""
        keys = keys_of(two, path)
        assert self.rig.ask(self.rig.engine, Prefetch(self.spaces[two].id, keys)) == Done()

    @rule(path=paths, two=st.booleans(), closed=st.booleans())
    def hint(self, path: tuple[int, ...], two: bool, closed: bool) -> None:
        """Somebody knows what will become of it."""
        told = GiveHints(self.spaces[two].id, keys_of(two, path), Hints(1.0, closed))
        assert self.rig.ask(self.rig.engine, told) == Done()

    @rule(slow=st.booleans())
    def slow_mover(self, slow: bool) -> None:
        """The workers take their time for moves from now on, or do them at once."""
        self.rig.holds_moves = slow

    @precondition(lambda self: self.rig.moves)
    @rule(index=st.integers(0, 9), outcome=st.sampled_from(["done", "lost", Outcome.TRANSPORT]))
    def move(self, index: int, outcome: str | Outcome) -> None:
        """A worker ends one of the moves that it was asked for, or will never answer."""
        command = self.rig.moves.pop(index % len(self.rig.moves))
        assert isinstance(command.message, Ingest)
        if outcome == "done":
            self.rig.obey(command)
        else:
            pages = len(command.message.keys) // KEY_BYTES
            failed = Ingested(bytes([Outcome.TRANSPORT]) * pages)
            answer = None if outcome == "lost" else failed
            self.rig.send(CommandAnswered(command.command, answer))

    @rule(state=st.sampled_from(["serving", "serving", "read_only", "failed"]))
    def drive(self, state: str) -> None:
        """The drive's worker says how it is."""
        worker = self.rig.workers["w1"]
        if worker.session is not None:
            incarnation = self.rig.segment("w1-nvme").incarnation
            worker.ask(ReportSegment("w1-nvme", incarnation, state, "EIO"))

    @rule()
    def takeover(self) -> None:
        """Another master; the workers find it."""
        self.epoch += 1
        self.rig.takeover(self.epoch)
        self.open_spaces()
        for worker in self.rig.workers.values():
            worker.join()
        self.unsent.clear()

    @invariant()
    def leased_extents_stay(self) -> None:
        """No order to free names an extent whose lease runs (I9)."""
        for (segment, offset, generation), until_s in list(self.leases.items()):
            if until_s <= self.rig.now:
                del self.leases[segment, offset, generation]
                continue
            record = self.rig.segment(segment).records.get(offset)
            freed = record is None or record.generation != generation
            assert not freed or (segment, offset) in self.rotten, "freed under a lease"


TestMasterMachine = MasterMachine.TestCase
TestMasterMachine.settings = settings(max_examples=60, stateful_step_count=40)
