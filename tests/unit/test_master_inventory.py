"""The table of what a worker says and what the master says, cell by cell; digests; takeovers."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec
import pytest

from kvstore.ids import Generation, Incarnation, PageKey
from kvstore.lease import inherited_release_s
from kvstore.record import RECORD_BYTES, Record, RecordState, pack_record
from kvstore.replica import ExtentState
from kvstore.wire.messages.hello import Done
from kvstore.wire.messages.membership import (
    ChunkDigest,
    InventoryEnd,
    InventoryRows,
    InventoryWanted,
    OfferInventory,
    ReportSegment,
)
from kvstore.wire.messages.puts import AbortPut
from tests.unit.master_rig import CHUNK, OpenedNamespace, Rig, chain, failure

if TYPE_CHECKING:
    from master.extent_allocator import ExtentAllocator
    from tests.unit.master_worker import FakeWorker

PAGE = 4096
KEY = chain(1, 1)
OTHER = chain(2, 1)
GRACE_S = inherited_release_s(0.0)


class Scene:
    """One extent, at offset 0, in the state that a test wants on either side."""

    def __init__(self, master_says: str) -> None:
        self.rig = Rig()
        self.worker = self.rig.add_worker()
        self.space = self.rig.open_namespace()
        self.space.put(OTHER)  # keeps the chunk; lies at offset 0 and goes to make room
        self.space.remove(OTHER)
        self.rig.settle()
        self.rig.pass_time(0.5)
        self.generation = 0
        if master_says != "FREE":
            self.plan(master_says)

    def plan(self, master_says: str) -> None:
        """Bring the extent into this state, without the worker's help at the end."""
        plans = self.space.plans(KEY)
        self.generation = plans.spans[0].generation
        reports = self.space.write(plans, KEY)
        self.rig.holds_commands = True
        match master_says:
            case "SEALED":
                self.space.report(reports)
            case "RETIRED":
                self.space.report(reports)
                self.space.remove(KEY)
            case "QUARANTINED":
                self.rig.ask(self.rig.engine, AbortPut((self.generation,)))
        self.rig.holds_commands = False
        assert self.state() == ExtentState[master_says]

    def record(self, says: str) -> Record | None:
        """The record that a worker who says this has."""
        record = self.worker.records.get(0) or Record(
            RecordState.SEALED, PageKey(KEY), 0, Generation(self.generation or 77),
            Incarnation(self.worker.incarnation), PAGE, 5, 0, PAGE, self.space.ordinal,
            PageKey(bytes(32)), 128,
        )  # fmt: skip
        match says:
            case "RESERVED":
                return msgspec.structs.replace(record, state=RecordState.RESERVED)
            case "SEALED":
                return msgspec.structs.replace(record, state=RecordState.SEALED)
            case "other":
                later = Generation(record.generation + 5)
                return msgspec.structs.replace(record, state=RecordState.SEALED, generation=later)
            case "REMOVED":
                return msgspec.structs.replace(record, state=RecordState.REMOVED)
        return None

    def state(self) -> ExtentState:
        """State of the extent at offset 0."""
        span = self.allocator.locate(0)
        return ExtentState.FREE if span is None else ExtentState(span.chunk.states[span.slot])

    @property
    def allocator(self) -> ExtentAllocator:
        """The segment's space."""
        return self.rig.master.core.segments[self.worker.segment].allocator

    def rejoin(self, worker_says: str) -> None:
        """The worker comes back with this record; nothing is carried out yet."""
        self.worker.leave()
        self.rig.commands.clear()
        record = self.record(worker_says)
        self.worker.records = {} if record is None else {0: record}
        self.rig.holds_commands = True
        self.worker.join()

    def end(self) -> None:
        """Let everything be carried out."""
        self.rig.holds_commands = False
        self.rig.obey_all()
        self.rig.pass_time(GRACE_S + 1.0)


SEALED, FREE = ExtentState.SEALED, ExtentState.FREE
RETIRED, QUARANTINED = ExtentState.RETIRED, ExtentState.QUARANTINED
RESERVED = ExtentState.RESERVED

CELLS = [
    # (worker says, master says, at once, in the end, the page is readable)
    ("nothing", "FREE", FREE, FREE, False),
    ("RESERVED", "FREE", QUARANTINED, FREE, False),
    ("SEALED", "FREE", SEALED, SEALED, True),
    ("REMOVED", "FREE", QUARANTINED, FREE, False),
    ("nothing", "RESERVED", RESERVED, FREE, False),
    ("RESERVED", "RESERVED", RESERVED, FREE, False),
    ("SEALED", "RESERVED", SEALED, SEALED, True),
    ("other", "RESERVED", QUARANTINED, FREE, False),
    ("REMOVED", "RESERVED", QUARANTINED, FREE, False),
    ("nothing", "SEALED", FREE, FREE, False),
    ("RESERVED", "SEALED", RETIRED, FREE, False),
    ("SEALED", "SEALED", SEALED, SEALED, True),
    ("other", "SEALED", RETIRED, FREE, False),
    ("REMOVED", "SEALED", RETIRED, FREE, False),
    ("nothing", "RETIRED", FREE, FREE, False),
    ("RESERVED", "RETIRED", RETIRED, FREE, False),
    ("SEALED", "RETIRED", RETIRED, FREE, False),
    ("other", "RETIRED", RETIRED, FREE, False),
    ("REMOVED", "RETIRED", RETIRED, FREE, False),
    ("nothing", "QUARANTINED", QUARANTINED, FREE, False),
    ("RESERVED", "QUARANTINED", QUARANTINED, FREE, False),
    ("SEALED", "QUARANTINED", QUARANTINED, FREE, False),
    ("other", "QUARANTINED", QUARANTINED, FREE, False),
    ("REMOVED", "QUARANTINED", QUARANTINED, FREE, False),
]


@pytest.mark.parametrize(("worker", "master", "soon", "late", "readable"), CELLS)
def test_every_cell(
    worker: str, master: str, soon: ExtentState, late: ExtentState, readable: bool
) -> None:
    scene = Scene(master)
    scene.rejoin(worker)
    assert scene.state() is soon
    assert scene.space.probe(KEY) == bytes([readable])
    scene.end()
    assert scene.state() is late
    assert scene.space.probe(KEY) == bytes([readable])
    assert bool(scene.worker.records) is (late is SEALED)


def test_the_cells_are_all_there() -> None:
    says = ("nothing", "RESERVED", "SEALED", "other", "REMOVED")
    wanted = {(worker, state.name) for worker in says for state in ExtentState}
    wanted.remove(("other", "FREE"))  # no generation to differ from
    assert {(worker, master) for worker, master, *_ in CELLS} == wanted


def test_a_new_life_ends_the_pulls_of_the_old_one() -> None:
    scene = Scene("RESERVED")
    scene.worker.leave()
    scene.worker.records.clear()
    scene.worker.restart()
    scene.worker.join()
    assert not scene.rig.master.core.plans
    scene.end()
    assert scene.state() is FREE


def test_a_new_life_of_sealed_pages_serves_them() -> None:
    scene = Scene("SEALED")
    scene.worker.leave()
    scene.worker.restart()
    scene.worker.join()
    assert scene.space.probe(KEY) == b"\1"
    found = scene.space.match(KEY)
    assert found.segments[0].incarnation == 2


# Digests.


def test_equal_digests_need_no_rows(rig: Rig, space: OpenedNamespace) -> None:
    space.put(chain(1, 40))
    worker = rig.workers["w1"]
    worker.leave()
    worker.connect()
    assert worker.offer() == InventoryWanted(())
    assert space.probe(chain(1, 40)) == bytes(40)
    assert isinstance(worker.ask(InventoryEnd(worker.segment, 1)), Done)
    assert space.probe(chain(1, 40)) == b"\1" * 40


def test_only_chunks_that_differ_are_sent(rig: Rig, space: OpenedNamespace) -> None:
    space.put(chain(1, 40))
    worker = rig.workers["w1"]
    worker.leave()
    del worker.records[CHUNK]
    worker.connect()
    assert worker.offer() == InventoryWanted((CHUNK,))
    worker.send_rows(CHUNK)
    worker.ask(InventoryEnd(worker.segment, 1))
    lost = [i for i, there in enumerate(space.probe(chain(1, 40))) if not there]
    assert len(lost) == 1
    assert rig.master.core.counters["pages_lost"] == 1


def test_a_chunk_that_is_not_listed_is_empty(rig: Rig, space: OpenedNamespace) -> None:
    space.put(chain(1, 40))
    worker = rig.workers["w1"]
    worker.leave()
    worker.records.clear()
    worker.join()
    assert space.probe(chain(1, 40)) == bytes(40)
    assert not rig.master.core.segments["w1-dram"].allocator.chunks
    assert rig.master.core.tree(1).pages == 0


def test_a_chunk_of_another_class_replaces_ours(rig: Rig, space: OpenedNamespace) -> None:
    space.put(chain(1, 3))
    worker = rig.workers["w1"]
    worker.leave()
    record = worker.records[0]
    worker.records = {0: msgspec.structs.replace(record, size_class=2 * PAGE, payload_bytes=PAGE)}
    worker.join()
    assert space.probe(chain(1, 3)) == bytes(3)
    rig.pass_time(GRACE_S + 1.0)
    assert not worker.records


def test_a_chunk_of_another_class_in_place_of_planned_ones_may_not_serve() -> None:
    scene = Scene("QUARANTINED")
    record = scene.record("SEALED")
    assert record is not None
    worker = scene.worker
    worker.leave()
    scene.rig.commands.clear()
    worker.records = {0: msgspec.structs.replace(record, size_class=2 * PAGE)}
    worker.connect()
    assert worker.offer() == InventoryWanted((0,))
    rows = InventoryRows(worker.segment, 1, 0, 2 * PAGE, rows_of(worker, 0))
    assert "as planned there" in failure(worker.ask(rows)).text
    assert failure(worker.ask(InventoryEnd(worker.segment, 1))).code == "unavailable"


def takeover(rig: Rig) -> OpenedNamespace:
    """Another master, with its first client."""
    rig.takeover(2)
    return rig.open_namespace()


def test_corrupt_rows_are_counted_and_ignored(rig: Rig, space: OpenedNamespace) -> None:
    space.put(chain(1, 4))
    again = takeover(rig)
    worker = rig.workers["w1"]
    worker.connect()
    assert worker.offer().chunk_starts == (0,)
    rows = bytearray(rows_of(worker, 0))
    rows[RECORD_BYTES + 40] ^= 1
    message = InventoryRows(worker.segment, 1, 0, PAGE, bytes(rows))
    assert isinstance(worker.ask(message), Done)
    assert isinstance(worker.ask(message), Done)  # repeated
    worker.ask(InventoryEnd(worker.segment, 1))
    assert again.probe(chain(1, 4)) == b"\1\0\1\1"
    assert rig.master.core.counters["records_corrupt"] == 1


def rows_of(worker: FakeWorker, start: int) -> bytes:
    """The rows of one chunk."""
    held = [r for o, r in sorted(worker.records.items()) if start <= o < start + CHUNK]
    return b"".join(map(pack_record, held))


def test_long_inventories_are_compared_in_steps() -> None:
    rig = Rig()
    worker = rig.add_worker(chunks=2, chunk_bytes=64 * CHUNK)
    space = rig.open_namespace()
    space.put(chain(1, 1500))
    again = takeover(rig)
    worker.connect()
    assert worker.offer().chunk_starts
    message = InventoryRows(worker.segment, 1, 0, PAGE, rows_of_all(worker, 64 * CHUNK))
    assert worker.ask(message) is None
    request = rig.last_request
    reply = failure(worker.ask(InventoryEnd(worker.segment, 1)))
    assert (reply.code, "missing" in reply.text) == ("unavailable", True)
    rig.settle()
    assert isinstance(rig.reply(worker.session or again.rig.engine, request), Done)


def rows_of_all(worker: FakeWorker, stop: int) -> bytes:
    """The rows of every record before `stop`."""
    return b"".join(pack_record(r) for o, r in sorted(worker.records.items()) if o < stop)


def test_a_registration_ends_the_steps_of_the_one_before() -> None:
    rig = Rig()
    worker = rig.add_worker(chunks=2, chunk_bytes=64 * CHUNK)
    space = rig.open_namespace()
    space.put(chain(1, 1000))
    again = takeover(rig)
    worker.connect()
    worker.offer()
    rows = InventoryRows(worker.segment, 1, 0, PAGE, rows_of_all(worker, 64 * CHUNK))
    assert worker.ask(rows) is None
    request = rig.last_request
    assert worker.session is not None
    worker.register()
    rig.settle()
    assert rig.reply(worker.session, request) is None
    worker.join()
    assert again.probe(chain(1, 1000)) == b"\1" * 1000


def test_a_registration_ends_the_comparison_of_the_one_before(
    rig: Rig, space: OpenedNamespace
) -> None:
    space.put(chain(1, 40))
    takeover(rig)
    worker = rig.workers["w1"]
    worker.connect()
    wanted = worker.offer().chunk_starts
    worker.register()
    message = InventoryRows(worker.segment, 1, wanted[0], PAGE, rows_of(worker, wanted[0]))
    assert failure(worker.ask(message)).code == "unavailable"
    assert failure(worker.ask(InventoryEnd(worker.segment, 1))).code == "unavailable"


def test_bad_inventories_are_refused(rig: Rig) -> None:
    worker = rig.workers["w1"]
    worker.connect()
    name = worker.segment
    cases = [
        (OfferInventory("nowhere", 1, ()), "unavailable"),
        (OfferInventory(name, 2, ()), "bad_value"),
        (OfferInventory(name, 1, (ChunkDigest(0, PAGE, 1), ChunkDigest(0, PAGE, 2))), "bad_value"),
        (InventoryRows(name, 1, 0, PAGE, b""), "unavailable"),
    ]
    for message, code in cases:
        assert failure(worker.ask(message)).code == code, message
    assert isinstance(
        worker.ask(OfferInventory(name, 1, (ChunkDigest(0, PAGE, 1),))), InventoryWanted
    )
    for rows, start, size_class in ((b"x", 0, PAGE), (b"", 0, 0), (b"", 0, -PAGE)):
        message = InventoryRows(name, 1, start, size_class, rows)
        assert failure(worker.ask(message)).code == "bad_value"
    other = rig.open("worker", "", "w1")
    assert failure(rig.ask(other, OfferInventory(name, 1, ()))).code == "access_denied"
    assert failure(rig.ask(rig.engine, OfferInventory(name, 1, ()))).code == "access_denied"
    assert isinstance(worker.ask(InventoryRows(name, 1, 0, PAGE, b"")), Done)
    assert isinstance(worker.ask(InventoryEnd(name, 1)), Done)
    assert isinstance(worker.ask(InventoryEnd(name, 1)), Done)  # repeated
    assert failure(worker.ask(OfferInventory(name, 1, ()))).code == "unavailable"


def test_a_disk_that_fails_before_its_offer_does_not_keep_memory_from_serving() -> None:
    rig = Rig()
    worker = rig.add_worker(nvme_chunks=4, join=False)
    disk = rig.segment("w1-nvme")
    offer = OfferInventory(disk.segment, disk.incarnation, ())
    for _ in range(2):  # the worker may have offered both before it knew; then it comes again
        worker.connect()
        assert worker.ask(ReportSegment("w1-nvme", 1, "failed", "EIO")) == Done()
        refused = failure(worker.ask(offer))
        assert (refused.code, refused.text) == ("unavailable", "segment w1-nvme is not registered")
        worker.offer()
        assert worker.ask(InventoryEnd("w1-dram", 1)) == Done()
        assert rig.master.core.segments["w1-dram"].readable
        worker.leave()
