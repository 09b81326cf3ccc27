"""Pages of a device: copied down to memory ahead of eviction, and up to it where that is asked."""

from __future__ import annotations

import pytest

from kvstore.segment import check_geometry
from kvstore.wire.messages.hello import Done
from kvstore.wire.messages.puts import PutPlans
from kvstore.wire.messages.reads import Prefetch
from master.tunables import Tunables
from tests.unit.master_pages import KEYS
from tests.unit.master_rig import CHUNK, OpenedNamespace, Rig, chain, failure
from tests.unit.master_worker import FakeSegment
from tests.unit.pools import held

DEVICE, MEMORY = "w1-dram", "w1-memory"
TIERED = Tunables(watermark_demote=0.4, watermark_low=0.6, watermark_high=0.8, nvme_admission="all")


@pytest.fixture
def rig() -> Rig:
    """One worker with a small device above its memory."""
    made = Rig(TIERED)
    worker = made.add_worker(chunks=4, join=False)
    worker.tier = "hbm"
    worker.lower = FakeSegment(MEMORY, "dram", check_geometry(64 * CHUNK, CHUNK))
    worker.join()
    return made


def put(space: OpenedNamespace, keys: bytes, tier: str = "hbm") -> None:
    plans = space.begin(keys, tier=tier)
    assert isinstance(plans, PutPlans), plans
    assert not any(map(any, space.report(space.write(plans, keys))))


def pages_of(keys: bytes) -> set[bytes]:
    return {keys[at : at + 32] for at in range(0, len(keys), 32)}


def tiers(space: OpenedNamespace, keys: bytes) -> list[str]:
    return [ref.tier for ref in space.match(keys, lease=False).segments]


def test_a_full_device_copies_down_and_loses_nothing(rig: Rig, space: OpenedNamespace) -> None:
    for number in range(40):
        put(space, chain(number, 4))
        rig.pass_time(1.0)
    counters = rig.master.core.counters
    assert counters["copies_evicted_hbm"] > 80
    assert counters["pages_evicted"] == 0
    assert not any(name.startswith("demotions_refused") for name in counters)
    assert all(space.probe(chain(number, 4)) == b"\1" * 4 for number in range(40))
    assert tiers(space, chain(0, 4)) == ["dram"]
    assert tiers(space, chain(39, 4)) == ["hbm"]


def test_a_device_with_room_copies_nothing(rig: Rig, space: OpenedNamespace) -> None:
    put(space, KEYS)
    rig.pass_time(5.0)
    assert not held(rig, MEMORY)
    assert not rig.master.core.moves.demoting


def test_pages_come_up_to_a_device_where_that_is_asked(rig: Rig, space: OpenedNamespace) -> None:
    put(space, KEYS, tier="")
    assert tiers(space, KEYS) == ["dram"]
    assert rig.ask(rig.engine, Prefetch(space.id, KEYS)) == Done()
    rig.pass_time(1.0)
    assert tiers(space, KEYS) == ["dram"], "memory is where they lie"
    assert rig.ask(rig.engine, Prefetch(space.id, KEYS[:96], "hbm")) == Done()
    rig.pass_time(1.0)
    assert held(rig, DEVICE) == pages_of(KEYS[:96])
    assert tiers(space, KEYS[:96]) == ["hbm", "dram"]
    assert not rig.master.core.moves.wishes
    assert rig.ask(rig.engine, Prefetch(space.id, KEYS[:96], "hbm")) == Done()
    assert not rig.master.core.moves.wishes, "they are there"


def test_a_device_without_room_makes_some(rig: Rig, space: OpenedNamespace) -> None:
    for number in range(16):
        put(space, chain(number, 4))
        rig.pass_time(1.0)
    put(space, KEYS, tier="")
    assert rig.ask(rig.engine, Prefetch(space.id, KEYS, "hbm")) == Done()
    rig.pass_time(2.0)
    assert pages_of(KEYS) <= held(rig, DEVICE)
    assert all(space.probe(chain(number, 4)) == b"\1" * 4 for number in range(16))


def test_a_wish_for_a_device_that_no_worker_has_ends(space: OpenedNamespace, rig: Rig) -> None:
    rig.add_worker("w2")
    rig.workers["w1"].leave()
    rig.pass_time(4.0)
    put(space, KEYS, tier="")
    assert rig.ask(rig.engine, Prefetch(space.id, KEYS, "hbm")) == Done()
    rig.pass_time(1.0)
    assert tiers(space, KEYS) == ["dram"]
    assert not rig.master.core.moves.wishes


def test_an_unknown_tier_is_refused(space: OpenedNamespace, rig: Rig) -> None:
    answer = failure(rig.ask(rig.engine, Prefetch(space.id, KEYS, "tape")))
    assert answer.text == "tier: got 'tape', want one of hbm, dram, nvme"
