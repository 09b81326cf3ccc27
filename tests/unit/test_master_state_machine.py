"""The whole core under random events: puts, reads, removes, pins, absences, restarts, takeovers.

After every event all invariants are checked; every location that the master gives out must be what
the worker's record says; nothing leased is freed; nothing removed comes back.
"""

from __future__ import annotations

import hashlib
from math import inf
from typing import TYPE_CHECKING

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from kvstore.ids import KEY_BYTES, ROOT_PARENT
from kvstore.record import RecordState
from kvstore.wire.messages.hello import Failure
from kvstore.wire.messages.operator import PolicyInForce, SetPolicy
from kvstore.wire.messages.pins import PagesPinned, PinPages, UnpinPages
from kvstore.wire.messages.puts import AbortPut, PageRange, PlanSpan, PutPlans, RefusedRange, Sealed
from kvstore.wire.messages.reads import Located, Lookup, RenewLease
from master.packed import words
from policies.registry import EVICTION
from tests.unit.master_rig import OpenedNamespace, Rig

if TYPE_CHECKING:
    from tests.unit.master_worker import FakeWorker

paths = st.lists(st.integers(0, 1), min_size=1, max_size=7).map(tuple)
names = st.sampled_from(["w1", "w2"])


def key_of(two: bool, path: tuple[int, ...]) -> bytes:
    """Key of the page at the end of a path."""
    return hashlib.sha256(bytes([two, *path])).digest()


def keys_of(two: bool, path: tuple[int, ...], start: int = 0) -> bytes:
    """Packed keys of the pages along a path, from the `start`-th on."""
    return b"".join(key_of(two, path[: i + 1]) for i in range(start, len(path)))


class MasterMachine(RuleBasedStateMachine):
    """Two workers with 16 extents each, one namespace of one part and one of two."""

    def __init__(self) -> None:
        super().__init__()
        self.rig = Rig()
        self.epoch = 1
        self.leases: dict[tuple[str, int, int], float] = {}
        self.removed: dict[tuple[str, bytes], int] = {}
        self.rotten: set[tuple[str, int]] = set()
        self.unsent: list[Sealed] = []
        self.generations: list[int] = []
        self.spaces: list[OpenedNamespace] = []
        self.rig.add_worker("w1", chunks=2)
        self.rig.add_worker("w2", chunks=1)
        self.open_spaces()

    def open_spaces(self) -> None:
        """Open both namespaces at the master of the moment."""
        self.spaces = [self.rig.open_namespace(1), self.rig.open_namespace(2)]

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
                self.free_refused(worker, report, getattr(reply, "outcomes", b""))

    @staticmethod
    def free_refused(worker: FakeWorker, report: Sealed, outcomes: bytes) -> None:
        """A worker frees what the master did not acknowledge."""
        for offset, outcome in zip(words(report.offsets), outcomes, strict=False):
            record = worker.records.get(offset)
            if outcome and record is not None and record.generation == report.generation:
                del worker.records[offset]

    @precondition(lambda self: self.unsent)
    @rule(index=st.integers(0, 100))
    def report_late(self, index: int) -> None:
        """Send, or send again, an old report."""
        report = self.unsent[index % len(self.unsent)]
        worker = self.rig.worker_of(report.segment)
        if report.incarnation == worker.incarnation and worker.session is not None:
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
            worker = self.rig.worker_of(ref.segment)
            columns = words(copy.offsets), words(copy.generations), words(copy.checksums)
            for i, (offset, generation, checksum) in enumerate(zip(*columns, strict=True)):
                key = keys[(first + i) * KEY_BYTES : (first + i + 1) * KEY_BYTES]
                assert generation > self.removed.get((ref.segment, key), 0), "removed"
                if found.lease_ttl_s:
                    until_s = self.rig.now + found.lease_ttl_s
                    self.leases[ref.segment, offset, generation] = until_s
                if ref.incarnation != worker.incarnation:
                    continue  # it has restarted and not registered yet: readers notice
                record = worker.records[offset]
                assert record.state is RecordState.SEALED
                assert (record.key, record.part) == (key, copy.part)
                assert (record.generation, record.checksum) == (generation, checksum)
                assert record.namespace_ordinal == space.ordinal

    @rule(path=paths, two=st.booleans())
    def renew(self, path: tuple[int, ...], two: bool) -> None:
        """Renew leases; those that are refused have ended or are gone."""
        space, keys = self.spaces[two], keys_of(two, path)
        self.rig.ask(self.rig.engine, RenewLease(space.id, keys, bytes(8 * len(path))))

    @rule(path=paths, start=st.integers(0, 6), two=st.booleans())
    def remove(self, path: tuple[int, ...], start: int, two: bool) -> None:
        """Remove pages; once answered they stay away."""
        space = self.spaces[two]
        keys = keys_of(two, path, min(start, len(path) - 1))
        held: dict[tuple[str, bytes], int] = {}
        for worker in self.rig.workers.values():
            for record in worker.records.values():
                place = worker.segment, record.key
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
                for (segment, page), generation in held.items():
                    if page == key:
                        self.removed[segment, key] = generation

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

    @rule(name=st.sampled_from(sorted(EVICTION)))
    def set_policy(self, name: str) -> None:
        """An operator chooses another policy."""
        operator = self.rig.open("operator", "", "kvharbor")
        assert isinstance(self.rig.ask(operator, SetPolicy(name, {})), PolicyInForce)
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

    @rule(name=names, offset=st.integers(0, 31), locked=st.booleans())
    def lock(self, name: str, offset: int, locked: bool) -> None:
        """A zero-copy reader holds an extent, or lets go of it."""
        worker = self.rig.workers[name]
        (worker.locked.add if locked else worker.locked.discard)(offset * 4096)

    @rule(name=names, offset=st.integers(0, 31))
    def rot(self, name: str, offset: int) -> None:
        """A worker that is away loses a record."""
        worker = self.rig.workers[name]
        if worker.session is None:
            worker.records.pop(offset * 4096, None)
            self.rotten.add((name, offset * 4096))
            worker.restart()

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
            worker = self.rig.worker_of(segment)
            record = worker.records.get(offset)
            freed = record is None or record.generation != generation
            assert not freed or (worker.name, offset) in self.rotten, "freed under a lease"


TestMasterMachine = MasterMachine.TestCase
TestMasterMachine.settings = settings(max_examples=60, stateful_step_count=40)
