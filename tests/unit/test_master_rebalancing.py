"""Evening out segments: what goes from the fullest to the emptiest, and when that ends."""

from __future__ import annotations

import pytest

from kvstore.wire.messages.relocation import GetRelocations, RelocationRow, StartRelocation
from kvstore.wire.messages.relocation import Relocations as Rows
from master import rebalancing
from master.tunables import Tunables
from tests.unit.master_rig import Rig, chain

PAGES = 256
"""Of a worker with 16 chunks."""


def made(*, rebalance: bool = False, replicas: int = 1) -> Rig:
    return Rig(Tunables(cluster="test", replicas=replicas, rebalance=rebalance))


def fill(rig: Rig, chains: range) -> None:
    """Put chains of 8 pages, one after the other."""
    space = rig.open_namespace()
    for number in chains:
        space.put(chain(number, 8))
        rig.tick(0.01)


def ask(rig: Rig, message: StartRelocation | GetRelocations) -> tuple[RelocationRow, ...]:
    reply = rig.ask(rig.open("operator", "", "kvharbor"), message)
    assert isinstance(reply, Rows), reply
    return reply.rows


def shares(rig: Rig) -> dict[str, float]:
    return {
        worker.name: len(worker.records) / (worker.geometry.payload_bytes // 4096)
        for worker in rig.workers.values()
    }


def test_a_new_worker_is_filled_like_the_others() -> None:
    rig = made()
    rig.add_worker("w1")
    fill(rig, range(24))
    rig.add_worker("w2")
    (planned,) = ask(rig, StartRelocation("rebalance", dry_run=True))
    assert planned.state == "planned"
    assert planned.reason == "w1-dram is 75% full, w2-dram 0%"
    assert planned.left_bytes == pytest.approx(PAGES * 4096 * 0.375)
    rig.pass_time(1.0)
    assert shares(rig)["w2"] == 0
    (row,) = ask(rig, StartRelocation("rebalance"))
    rig.pass_time(20.0)
    (row,) = ask(rig, GetRelocations(row.id))
    assert (row.state, row.reason, row.left_bytes) == ("done", "", 0)
    assert row.by_operator
    found = shares(rig)
    assert found["w1"] - found["w2"] <= rebalancing.GAP
    assert found["w1"] >= found["w2"]  # no more than needed goes
    assert sum(found.values()) == pytest.approx(0.75)
    space = rig.open_namespace()
    assert all(space.probe(chain(number, 8)) == b"\1" * 8 for number in range(24))


def test_a_worker_that_joins_starts_it_where_that_is_configured() -> None:
    rig = made(rebalance=True)
    rig.add_worker("w1")
    fill(rig, range(24))
    rig.add_worker("w2")
    rig.pass_time(30.0)
    found = shares(rig)
    assert found["w1"] - found["w2"] <= rebalancing.GAP
    (row,) = ask(rig, GetRelocations())
    assert (row.kind, row.state, row.by_operator) == ("rebalance", "done", False)
    assert not any(key.startswith("relocations/") for key in rig.store)
    assert any(note.startswith("segments are filled unevenly: w1-dram is") for note in rig.notes)


def test_nothing_is_begun_where_all_are_alike() -> None:
    rig = made(rebalance=True)
    for name in ("w1", "w2"):
        rig.add_worker(name)
    fill(rig, range(12))
    rig.pass_time(20.0)
    assert ask(rig, GetRelocations()) == ()
    (row,) = ask(rig, StartRelocation("rebalance"))
    rig.pass_time(1.0)
    (row,) = ask(rig, GetRelocations(row.id))
    assert (row.state, row.done_pages) == ("done", 0)


def test_no_page_comes_to_a_host_that_has_it() -> None:
    rig = made(replicas=2)
    for name in ("w1", "w2"):
        rig.add_worker(name)
    fill(rig, range(20))
    rig.pass_time(20.0)
    assert shares(rig) == {"w1": 0.625, "w2": 0.625}
    rig.add_worker("w3")
    (row,) = ask(rig, StartRelocation("rebalance"))
    rig.pass_time(60.0)
    (row,) = ask(rig, GetRelocations(row.id))
    assert row.state == "done"
    found = shares(rig)
    assert max(found.values()) - min(found.values()) <= rebalancing.GAP + 0.02
    core = rig.master.core
    for run in core.tree(1).all_runs():
        for page in range(len(run)):
            places = [c.segment.id for c in run.copies if c.generation(page)]
            assert len(set(places)) == len(places) == 2


def test_what_is_in_use_all_the_time_stays_and_the_rest_is_left() -> None:
    rig = made()
    rig.add_worker("w1")
    fill(rig, range(24))
    space = rig.open_namespace()
    rig.add_worker("w2")
    (row,) = ask(rig, StartRelocation("rebalance"))
    for _ in range(20):
        for number in range(24):
            space.match(chain(number, 8))
        rig.pass_time(0.5)
    (row,) = ask(rig, GetRelocations(row.id))
    assert (row.state, row.reason) == (
        "done", "what is left is in use, or lies on the other hosts already",
    )  # fmt: skip
    assert shares(rig)["w2"] == 0


def test_a_segment_at_its_watermark_is_not_filled_further() -> None:
    rig = made()
    rig.add_worker("w1")
    fill(rig, range(30))
    rig.add_worker("w2", chunks=4)
    (row,) = ask(rig, StartRelocation("rebalance"))
    rig.pass_time(20.0)
    (row,) = ask(rig, GetRelocations(row.id))
    assert row.state == "done"
    assert rig.master.core.counters["pages_evicted"] == 0
    assert shares(rig)["w2"] <= rig.tunables.watermark_low + 8 / 64
