"""Named objects are put together: one plan a part of many, and each stands for itself."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import msgspec
import pytest

from kvstore.ids import KEY_BYTES, NO_PARENT, ROOT_PARENT
from kvstore.namespace import NAME_PART, NAME_PART_BYTES, opaque
from kvstore.wire.messages.common import Outcome
from kvstore.wire.messages.namespaces import NamespaceOpened, OpenNamespace
from kvstore.wire.messages.puts import BeginPut, PageRange, PutChain, PutPlans
from master import planning
from tests.unit.master_pages import granted, refused
from tests.unit.master_rig import CHUNK, TENANT, OpenedNamespace, Rig, chain, failure

if TYPE_CHECKING:
    from kvstore.wire.messages.puts import Sealed

SIZE: Final = 5000
NAMED: Final = opaque(TENANT, "objects", keeps_names=True)
KEYS: Final = b"".join(chain(seed, 1) for seed in range(8))


class Objects(OpenedNamespace):
    """A namespace of objects with their names."""

    def __init__(self, rig: Rig) -> None:
        """Open it."""
        opened = rig.ask(rig.engine, OpenNamespace(NAMED.content, NAMED.layout))
        assert isinstance(opened, NamespaceOpened)
        super().__init__(rig, NAMED, opened.ordinal)

    def message(self, keys: bytes = KEYS, *, wait: bool = False) -> BeginPut:
        """A put of these objects and their names."""
        self.rig.puts += 1
        request, chains = self.rig.puts.to_bytes(16, "little"), (PutChain(NO_PARENT, keys),)
        return BeginPut(request, self.id, chains, (0, 1), (SIZE, NAME_PART_BYTES), 5.0, wait)

    def planned(self, keys: bytes = KEYS) -> PutPlans:
        """What is granted of these objects."""
        plans = self.rig.settled(self.rig.engine, self.rig.ask(self.rig.engine, self.message(keys)))
        assert isinstance(plans, PutPlans), plans
        return plans

    def pulled(self, plans: PutPlans, keys: bytes = KEYS) -> list[Sealed]:
        """What workers report once they have all of it."""
        reports = []
        for span in plans.spans:
            own = keys[span.first * KEY_BYTES : (span.first + span.count) * KEY_BYTES]
            segment = self.rig.segment(plans.segments[span.segment].segment)
            size = (SIZE, NAME_PART_BYTES)[span.part]
            report = segment.write(self.ordinal, span, own, NO_PARENT, size, token_count=1)
            assert report is not None
            reports.append(report)
        return reports


def object_key(number: int) -> bytes:
    """The key of one of them."""
    return KEYS[number * KEY_BYTES : (number + 1) * KEY_BYTES]


@pytest.fixture
def objects(rig: Rig) -> Objects:
    """None is there yet."""
    return Objects(rig)


def test_many_objects_are_one_plan_a_part_and_each_a_run(rig: Rig, objects: Objects) -> None:
    plans = objects.planned()
    assert granted(plans) == [(0, 8, NAME_PART), (0, 8, 0)]
    reports = objects.pulled(plans)
    assert objects.report(reports[:1]) == [bytes(8)]
    assert objects.probe(KEYS) == bytes(8), "an object is there with its name, or not at all"
    assert objects.report(reports[1:]) == [bytes(8)]
    assert objects.probe(KEYS) == b"\1" * 8
    assert rig.master.core.tree(objects.ordinal).runs == 8
    assert not rig.master.core.plans
    assert objects.remove(object_key(3)) == b"\1"
    assert objects.probe(KEYS) == b"\1" * 3 + b"\0" + b"\1" * 4
    assert objects.probe(object_key(2) * 2 + chain(99, 1)) == b"\1\1\0"


def test_objects_that_are_there_or_on_their_way_hold_no_other_up(objects: Objects) -> None:
    first, third = object_key(0), object_key(2)
    objects.report(objects.pulled(objects.planned(third), third))
    objects.planned(first)
    plans = objects.planned()
    assert granted(plans) == [(1, 1, 1), (3, 5, 1), (1, 1, 0), (3, 5, 0)]
    assert plans.present == (PageRange(2, 1, 1), PageRange(2, 1, 0))
    assert refused(plans) == [(0, 1, Outcome.IN_PROGRESS)] * 2


def test_who_waits_for_objects_is_answered_once_any_of_them_is_there(
    rig: Rig, objects: Objects
) -> None:
    two = KEYS[: 2 * KEY_BYTES]
    first, second = objects.planned(object_key(0)), objects.planned(object_key(1))
    assert rig.ask(rig.engine, objects.message(two, wait=True)) is None
    waiting = rig.last_request
    objects.report(objects.pulled(second, object_key(1)))
    objects.report(objects.pulled(first, object_key(0)))
    answer = rig.reply(rig.engine, waiting)
    assert isinstance(answer, PutPlans)
    assert answer.present == tuple(PageRange(n, 1, part) for part in (1, 0) for n in (0, 1))


def test_without_room_for_all_objects_the_others_are_granted_and_told() -> None:
    rig = Rig()
    rig.add_worker(chunks=2)  # one of names, and one of so many objects:
    room = CHUNK // (2 * 4096)
    objects = Objects(rig)
    last = chain(99, 1)
    objects.report(objects.pulled(objects.planned(last), last))
    many = b"".join(chain(100 + seed, 1) for seed in range(room)) + last
    plans = objects.planned(many)
    assert granted(plans) == [(0, room, NAME_PART), (0, room - 1, 0)]
    assert plans.present == (PageRange(room, 1, 1), PageRange(room, 1, 0))
    assert refused(plans) == [(room - 1, 1, Outcome.OUT_OF_SPACE)]


def test_records_that_hang_objects_below_each_other_are_not_served(
    rig: Rig, objects: Objects
) -> None:
    names, values = objects.pulled(objects.planned())
    wrong = msgspec.structs.replace(values, parents=(ROOT_PARENT + KEYS)[:-KEY_BYTES])
    assert objects.report([names, wrong]) == [
        bytes(8), bytes((Outcome.OK, *[Outcome.PLAN_CLOSED] * 7))
    ]  # fmt: skip
    assert objects.probe(KEYS) == b"\1" + bytes(7)
    assert rig.master.core.counters["seals_unlike_plan"] == 7


def test_many_objects_are_planned_in_groups_of_a_step(
    objects: Objects, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(planning, "PARTS_PER_STEP", 6)
    plans = objects.planned()
    assert granted(plans) == [
        (0, 3, 1), (0, 3, 0), (3, 3, 1), (3, 3, 0), (6, 2, 1), (6, 2, 0)
    ]  # fmt: skip
    objects.report(objects.pulled(plans))
    assert objects.probe(KEYS) == b"\1" * 8


def test_one_object_twice_is_a_contradiction(rig: Rig, objects: Objects) -> None:
    twice = objects.message(KEYS + object_key(5))
    assert "once in a chain" in failure(rig.ask(rig.engine, twice)).text
    assert not rig.master.core.plans
