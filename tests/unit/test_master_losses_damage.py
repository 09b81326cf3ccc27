"""Copies that their worker found damaged by itself (`master.losses.report_damage`)."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec
import pytest

from kvstore import limits
from kvstore.wire.messages.hello import Done
from kvstore.wire.messages.membership import FreeExtents, ReportDamage
from master import losses
from master.packed import pack_words, words
from tests.unit.master_rig import OpenedNamespace, Rig, chain, failure

if TYPE_CHECKING:
    from kvstore.wire.messages.reads import Located

KEYS = chain(1, 4)
ALL = (0, 1, 2, 3)
HUGE = (1 << 64) - 4096


@pytest.fixture
def space(rig: Rig) -> OpenedNamespace:
    """A namespace with four pages."""
    made = rig.open_namespace()
    made.put(KEYS)
    return made


def damage(found: Located, *pages: int) -> ReportDamage:
    """A report on some of the pages that were found."""
    copy, segment = found.runs[0].copies[0], found.segments[0]
    offsets, generations = words(copy.offsets), words(copy.generations)
    return ReportDamage(
        segment.segment, segment.incarnation, pack_words(offsets[page] for page in pages),
        pack_words(generations[page] for page in pages),
    )  # fmt: skip


def corrupt(rig: Rig) -> int:
    """How many copies were found bad."""
    return rig.master.core.counters["pages_corrupt"]


def test_what_a_worker_found_goes_and_its_children_are_hidden(
    rig: Rig, space: OpenedNamespace
) -> None:
    worker = rig.workers["w1"]
    assert worker.ask(damage(space.match(KEYS, lease=False), 1, 3)) == Done()
    assert space.probe(KEYS) == b"\1\0\1\0"
    assert corrupt(rig) == 2
    rig.pass_time(0.25)
    assert len(worker.records) == 2
    space.put(KEYS[32:64], KEYS[:32])
    assert space.probe(KEYS) == b"\1\1\1\0"


def test_a_long_report_is_obeyed_in_steps(
    rig: Rig, space: OpenedNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(losses, "SLOTS_PER_STEP", 2)
    worker = rig.workers["w1"]
    reply = worker.ask(damage(space.match(KEYS, lease=False), *ALL))
    assert reply is None
    assert corrupt(rig) == 2
    assert rig.settled(worker.session, reply) == Done()
    assert corrupt(rig) == 4


def test_nothing_is_freed_before_the_last_lease_has_ended(rig: Rig, space: OpenedNamespace) -> None:
    worker = rig.workers["w1"]
    message = damage(space.match(KEYS), 2)
    rig.holds_commands = True
    worker.ask(message)
    rig.pass_time(limits.LEASE_TTL_S - 1.0)
    assert not rig.commands  # I9
    rig.pass_time(2.0)
    assert [type(each.message) for each in rig.commands] == [FreeExtents]


def test_a_report_may_be_repeated_and_may_be_late(rig: Rig, space: OpenedNamespace) -> None:
    worker = rig.workers["w1"]
    message = damage(space.match(KEYS, lease=False), *ALL)
    for _ in range(2):
        assert worker.ask(message) == Done()
    assert corrupt(rig) == 4
    rig.pass_time(0.25)
    space.put(KEYS)
    assert worker.ask(message) == Done()
    assert space.probe(KEYS) == b"\1" * 4
    assert corrupt(rig) == 4


@pytest.mark.parametrize(
    "change",
    [
        {"incarnation": 2},
        {"offsets": pack_words([4096 * 64])},
        {"offsets": pack_words([1])},
        {"offsets": pack_words([HUGE])},
        {"generations": pack_words([12])},
    ],
)
def test_what_is_not_there_is_left_alone(
    rig: Rig, space: OpenedNamespace, change: dict[str, object]
) -> None:
    message = msgspec.structs.replace(damage(space.match(KEYS, lease=False), 1), **change)
    assert rig.workers["w1"].ask(message) == Done()
    assert space.probe(KEYS) == b"\1" * 4
    assert corrupt(rig) == 0


def test_a_segment_out_of_service_is_left_alone(rig: Rig, space: OpenedNamespace) -> None:
    worker = rig.workers["w1"]
    message = damage(space.match(KEYS, lease=False), 1)
    worker.leave()
    worker.connect()
    worker.register()  # as a new master meets it: its inventory is not compared yet
    assert worker.ask(message) == Done()
    assert corrupt(rig) == 0
    worker.leave()
    worker.join()
    assert worker.ask(message) == Done()
    assert corrupt(rig) == 1


@pytest.mark.parametrize(
    ("change", "code"),
    [
        ({"segment": "nowhere"}, "unavailable"),
        ({"segment": "w2-dram"}, "access_denied"),
        ({"offsets": b"1234567"}, "bad_value"),
        ({"generations": b""}, "bad_value"),
        (
            {"offsets": bytes(8 * (limits.BATCH_PAGES_MAX + 1)),
             "generations": bytes(8 * (limits.BATCH_PAGES_MAX + 1))},
            "bad_value",
        ),
    ],
)  # fmt: skip
def test_wrong_reports_are_refused(
    rig: Rig, space: OpenedNamespace, change: dict[str, object], code: str
) -> None:
    message = damage(space.match(KEYS, lease=False), 1)
    rig.add_worker("w2")
    wrong = msgspec.structs.replace(message, **change)
    assert failure(rig.workers["w1"].ask(wrong)).code == code
    assert space.probe(KEYS) == b"\1" * 4


def test_only_workers_report(rig: Rig, space: OpenedNamespace) -> None:
    message = damage(space.match(KEYS, lease=False), 1)
    assert failure(rig.ask(rig.engine, message)).code == "access_denied"
    assert space.probe(KEYS) == b"\1" * 4
