"""The plan of a put of named objects, driven by a scripted master."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from kvstore.client.namespaces import OpenedNamespace
from kvstore.client.outcomes import AlreadyThere, Refused, RefusedReason, Stored
from kvstore.client.steps import drive
from kvstore.client.writes import PartSource, PutRequest, put_steps
from kvstore.ids import NO_PARENT
from kvstore.namespace import NAME_PART, opaque
from kvstore.wire.messages.common import Outcome
from kvstore.wire.messages.puts import PageRange, RefusedRange
from tests.unit.client_scripts import Script, begin_put, plan, plans

if TYPE_CHECKING:
    from kvstore.client.outcomes import PutOutcome

SIZE: Final = 4096
NAMED: Final = OpenedNamespace(opaque("tests", "objects", keeps_names=True), 3)
BUSY: Final = RefusedRange(0, 1, NAME_PART, Outcome.IN_PROGRESS, 0.05)
"""Another writer has the name open."""


def test_named_objects_are_asked_for_together_and_have_no_parents() -> None:
    space = OpenedNamespace(opaque("tests", "objects"), 3)
    chain = space.names([b"a", b"b"])
    script = Script().will(plans(plan(0, 2, 1)))
    script.fill(chain, (0, SIZE), SIZE)
    request = PutRequest(space, chain, (PartSource(0, SIZE, (0, SIZE)),), script.clock.now_s() + 10)
    assert drive(put_steps(request, script.clock, script.new_id), script) == [Stored()] * 2
    begin = begin_put(script.asked[0])
    assert [(c.parent, c.keys) for c in begin.chains] == [(NO_PARENT, chain.packed)]
    (span,) = script.ingested
    assert [span.parent, span.cut(1, 2).parent] == [NO_PARENT] * 2


def put_one(script: Script) -> PutOutcome:
    """Put an object and its name."""
    chain = NAMED.names([b"a"])
    for part in (0, NAME_PART):
        script.fill(chain, (part * SIZE,), SIZE, part)
    sources = tuple(PartSource(part, SIZE, (part * SIZE,)) for part in (0, NAME_PART))
    request = PutRequest(NAMED, chain, sources, script.clock.now_s() + 10)
    (outcome,) = drive(put_steps(request, script.clock, script.new_id), script)
    return outcome


def test_objects_are_asked_for_whole_again_while_others_put_them() -> None:
    there = PageRange(0, 1, 0), PageRange(0, 1, NAME_PART)
    script = Script().will(plans(present=there[:1], refused=(BUSY,)), plans(present=there))
    assert put_one(script) == AlreadyThere()
    assert [begin_put(each).parts for each in script.asked] == [(0, NAME_PART)] * 2


def test_an_object_that_goes_while_it_is_waited_for_is_put_whole() -> None:
    script = Script().will(
        plans(present=(PageRange(0, 1, 0),), refused=(BUSY,)),
        plans(plan(0, 1, 1), plan(0, 1, 2, part=NAME_PART, at=1)),
    )
    assert put_one(script) == Stored()
    assert [span.part for span in script.ingested] == [0, NAME_PART]


def test_a_name_given_to_the_value_of_a_put_that_failed_is_no_success_of_this_one() -> None:
    script = Script().will(
        plans(plan(0, 1, 2, part=NAME_PART), present=(PageRange(0, 1, 0),)),
    )
    assert put_one(script) == AlreadyThere()


def test_a_value_given_to_the_name_of_a_put_that_failed_is_stored() -> None:
    script = Script().will(plans(plan(0, 1, 1), present=(PageRange(0, 1, NAME_PART),)))
    assert put_one(script) == Stored()


def test_a_part_that_was_there_and_cannot_be_put_anew_refuses_the_object() -> None:
    gone = plans(plan(0, 1, 1), plan(0, 1, 2, part=NAME_PART, at=1))
    script = Script().will(plans(present=(PageRange(0, 1, 0),), refused=(BUSY,)), gone, gone, gone)
    script.transport.spoil[("s0", 0)] = [Outcome.CHECKSUM] * 3
    assert put_one(script) == Refused(RefusedReason.CHECKSUM, 0.0)
