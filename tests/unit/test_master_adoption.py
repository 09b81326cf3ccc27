"""What a worker lists and the master does not know: taken in once, or fenced."""

from __future__ import annotations

import msgspec

from kvstore.ids import Generation
from kvstore.replica import ExtentState
from tests.unit.master_rig import Rig, chain

PAGE = 4096


def test_of_two_records_of_one_page_one_is_adopted_and_one_is_fenced() -> None:
    rig = Rig()
    worker = rig.add_worker(chunks=1)
    space = rig.open_namespace()
    keys = chain(1, 3)
    space.write(space.plans(keys), keys)
    # As after a seal whose report was lost, and a second put of the same page.
    first = worker.records[0]
    again = 8 * PAGE
    worker.records[again] = msgspec.structs.replace(
        first, offset=again, generation=Generation(first.generation + 7)
    )
    rig.takeover(2)
    rig.open_namespace()
    worker.join()
    assert space.probe(keys) == b"\1\1\1"
    counts = rig.master.core.segments[worker.segment].allocator.bytes_in
    assert counts[ExtentState.SEALED] == 3 * PAGE
    assert counts[ExtentState.QUARANTINED] == PAGE
    rig.pass_time(12.0)
    assert counts[ExtentState.QUARANTINED] == 0
    assert sorted(worker.records) == [0, PAGE, 2 * PAGE]
