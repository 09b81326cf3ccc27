"""The book of relocations: what is durable of them, and what must always hold (I36)."""

from __future__ import annotations

import pytest

from kvstore.errors import CorruptPage, InvariantBroken
from kvstore.ids import Epoch
from kvstore.wire.encoding import encode
from kvstore.wire.messages.hello import Done
from kvstore.wire.messages.relocation import RelocationState, StartRelocation
from master.namespaces import Namespaces
from master.relocations import Relocation, Relocations
from master.wheel import Wakeup
from tests.unit.master_rig import Rig


def book() -> Relocations:
    return Relocations(Epoch(3), Wakeup())


def test_ids_are_of_the_epoch_and_never_repeat() -> None:
    made = book()
    assert [made.new_id() for _ in range(3)] == ["3-1", "3-2", "3-3"]


def test_what_is_stored_is_taken_in_again() -> None:
    made, wish = book(), StartRelocation("drain", "w1")
    made.restore(Namespaces(), "relocations/2-7", encode(wish))
    found = made.drain_of("w1")
    assert found is not None
    assert (found.id, found.wish, found.state) == ("2-7", wish, RelocationState.RUNNING)
    assert made.drain_of("w2") is None


@pytest.mark.parametrize(
    "value",
    [
        b"",
        b"\xff",
        encode(Done()),
        encode(StartRelocation("shuffle", "w1")),
        encode(StartRelocation("copy", "", "w1", b"n" * 32)),
    ],
)
def test_what_is_not_ours_is_said_to_be_corrupt(value: bytes) -> None:
    made = book()
    with pytest.raises(CorruptPage, match="relocations/1-1"):
        made.restore(Namespaces(), "relocations/1-1", value)
    assert not made.open


def test_a_damaged_value_ends_that_relocation_alone() -> None:
    rig = Rig()
    rig.store["relocations/1-1"] = b"\xff"
    rig.store["relocations/1-2"] = encode(StartRelocation("drain", "w1"))
    rig.takeover(2)
    assert list(rig.master.core.relocations.open) == ["1-2"]
    assert rig.master.damaged == ["relocations/1-1"]


def test_a_drain_that_is_done_is_found_out_where_something_lies() -> None:  # I36
    rig = Rig()
    rig.add_worker("w1")
    rig.add_worker("w2")
    core = rig.master.core
    space = rig.open_namespace()
    plans = space.plans(b"k" * 32)
    worker = plans.segments[0].worker
    drain = Relocation("1-1", StartRelocation("drain", worker))
    core.relocations.add(drain, rig.now)
    with pytest.raises(InvariantBroken, match=r"I36: .* drained: False"):
        rig.master.check_invariants()
    for segment in core.workers[worker].segments.values():
        segment.drained = True
    core.relocations.check(core.segments.values())
    drain.state = RelocationState.DONE
    with pytest.raises(InvariantBroken, match=r"I36: .* is drained and holds pages"):
        rig.master.check_invariants()
