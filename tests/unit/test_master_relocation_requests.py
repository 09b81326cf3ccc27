"""What operators may wish of relocations, and what they are told."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from kvstore import limits
from kvstore.namespace import namespace_id
from kvstore.wire.messages.namespaces import OpenNamespace
from kvstore.wire.messages.reads import GetStatus, Status
from kvstore.wire.messages.relocation import (
    CancelRelocation,
    GetRelocations,
    RelocationRow,
    Relocations,
    StartRelocation,
)
from master.relocations import ENDED_KEPT
from master.tunables import Tunables
from tests.unit.master_pages import KEYS
from tests.unit.master_rig import (
    OpenedNamespace,
    Rig,
    chain,
    failure,
    small_content,
    small_layout,
)

if TYPE_CHECKING:
    from kvstore.wire.messages.base import Message


@pytest.fixture
def rig() -> Rig:
    """Three workers; each page is put once."""
    rig = Rig(Tunables(cluster="test", replicas=1))
    for name in ("w1", "w2", "w3"):
        rig.add_worker(name)
    return rig


def ask(rig: Rig, message: Message) -> Message | None:
    return rig.ask(rig.open("operator", "", "kvharbor"), message)


def rows(rig: Rig, message: Message) -> tuple[RelocationRow, ...]:
    reply = ask(rig, message)
    assert isinstance(reply, Relocations), reply
    return reply.rows


def refused(rig: Rig, message: Message) -> str:
    return failure(ask(rig, message)).text


@pytest.mark.parametrize(
    ("wish", "text"),
    [
        (("shuffle",), "kind: got 'shuffle', want one of copy, move, drain, rebalance"),
        (("drain",), "source: got '', want the name of a worker"),
        (("drain", "w1", "w2"), "target: got 'w2', want nothing: a drain has none"),
        (("drain", "w9"), "source: got 'w9', want a worker that is there: w1, w2, w3"),
        (("rebalance", "w1"), "source: got 'w1', want nothing: a rebalance has none"),
        (("copy", "w1"), "target: got '', want the name of a worker"),
        (
            ("copy", "", "w2"),
            "namespace: got '', want one, or else the worker that pages come from",
        ),
        (("move", "w1", "w1"), "target: got 'w1', want another worker than pages come from"),
        (("move", "w1", "w2", b"", b"", "tape"), "tier: got 'tape', want one of hbm, dram, nvme"),
        (("move", "w1", "w2", b"", b"", "nvme"), "tier: got 'nvme', want one that w2 has: dram"),
        (("move", "w1", "w9"), "target: got 'w9', want a worker that is there: w1, w2, w3"),
        (("move", "w1", "w2", b"", KEYS), "keys: got 256, want none without a namespace"),
        (("move", "w1", "w2", b"n" * 32), "want one that an engine has opened"),
    ],
)
def test_wrong_wishes_are_refused_by_name(rig: Rig, wish: tuple[object, ...], text: str) -> None:
    message = StartRelocation(*wish)  # type: ignore[arg-type]  # one of each kind
    assert text in refused(rig, message)
    assert not rig.master.core.relocations.open
    assert not any(key.startswith("relocations/") for key in rig.store)


def test_pages_that_are_not_there_are_named(rig: Rig) -> None:
    space = rig.open_namespace()
    space.put(KEYS)
    missing = chain(9, 1)
    text = refused(rig, StartRelocation("copy", "", "w2", space.id, KEYS + missing))
    assert text == f"keys: got '{missing.hex()}', want pages that the pool has"
    assert "want 32 bytes each" in refused(
        rig, StartRelocation("copy", "", "w2", space.id, KEYS[:40])
    )


def test_only_operators_wish(rig: Rig) -> None:
    for message in (
        StartRelocation("drain", "w1"), GetRelocations(), CancelRelocation("1-1"),
    ):  # fmt: skip
        assert failure(rig.ask(rig.engine, message)).code == "access_denied"


def test_the_last_holder_is_not_drained(rig: Rig) -> None:
    for name in ("w1", "w2"):
        rows(rig, StartRelocation("drain", name))
    text = refused(rig, StartRelocation("drain", "w3"))
    assert text.startswith("source: got 'w3', want a worker beside which another may take pages")
    alone = Rig()
    alone.add_worker("w1")
    assert "there is another" in refused(alone, StartRelocation("drain", "w1"))


def test_a_lost_worker_is_not_drained_nor_a_drained_one_filled(rig: Rig) -> None:
    rig.workers["w3"].leave()
    rig.pass_time(10.0)
    text = refused(rig, StartRelocation("drain", "w3"))
    assert "one that is there: w1, w2; what a lost worker had is repaired without a wish" in text
    text = refused(rig, StartRelocation("copy", "w1", "w3"))
    assert text.endswith("want one that is there: w1, w2")
    rows(rig, StartRelocation("drain", "w2"))
    text = refused(rig, StartRelocation("copy", "w1", "w2"))
    assert "want a worker that takes pages: it is drained" in text


@pytest.mark.parametrize("apart", ["host", "worker"])
def test_a_host_gets_no_second_copy_unless_workers_count(apart: str) -> None:
    rig = Rig(Tunables(cluster="test", replicas=1, replicas_apart=apart))
    for name in ("w1", "w2"):
        rig.add_worker(name)
        rig.master.core.workers[name].host = "h"
    wish = StartRelocation("copy", "w1", "w2")
    if apart == "worker":
        assert rows(rig, wish)[0].state == "running"
        return
    want = "target: got 'w2', want a worker of another host than w1: no host has a page twice"
    assert refused(rig, wish) == want


def test_a_target_without_room_is_refused() -> None:
    rig = Rig(Tunables(cluster="test", replicas=1))
    rig.add_worker("w1")
    space = rig.open_namespace()
    space.put(KEYS)
    rig.add_worker("w2", chunks=1)
    tree, core = rig.open_namespace(2), rig.master.core
    assert tree.ordinal != space.ordinal
    allocator = core.segments["w2-dram"].allocator
    allocator.plan(4096, core.new_generation(), space.ordinal, chain(5, 16))
    rig.checks = False
    text = refused(rig, StartRelocation("copy", "", "w2", space.id))
    assert "target: got 'w2', want a worker with room for such pages" in text


def test_the_same_wish_is_the_same_relocation(rig: Rig) -> None:
    (first,) = rows(rig, StartRelocation("drain", "w1"))
    (second,) = rows(rig, StartRelocation("drain", "w1"))
    assert second.id == first.id
    assert len(rig.master.core.relocations.open) == 1
    rig.pass_time(1.0)
    (third,) = rows(rig, StartRelocation("drain", "w1"))
    assert (third.id, third.state) == (first.id, "done")


def test_a_wish_is_answered_when_it_is_durable(rig: Rig) -> None:
    rig.holds_persists = True
    operator = rig.open("operator", "", "kvharbor")
    assert rig.ask(operator, StartRelocation("drain", "w1")) is None
    request = rig.last_request
    rig.store_all()
    reply = rig.reply(operator, request)
    assert isinstance(reply, Relocations)
    (row,) = reply.rows
    assert f"relocations/{row.id}" in rig.store
    assert rig.ask(operator, CancelRelocation(row.id)) is None
    request = rig.last_request
    rig.store_all()
    reply = rig.reply(operator, request)
    assert isinstance(reply, Relocations)
    assert reply.rows[0].state == "cancelled"
    assert f"relocations/{row.id}" not in rig.store


def test_a_dry_run_begins_nothing(rig: Rig) -> None:
    space = rig.open_namespace()
    space.put(KEYS)
    (row,) = rows(rig, StartRelocation("copy", "", "w2", space.id, dry_run=True))
    assert (row.state, row.left_pages, row.left_bytes) == ("planned", 8, 8 * 4096)
    assert not rig.master.core.relocations.all()


def test_there_are_only_so_many(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "RELOCATIONS_MAX", 1)
    rows(rig, StartRelocation("drain", "w1"))
    answer = failure(ask(rig, StartRelocation("drain", "w2")))
    assert (answer.code, answer.text) == (
        "out_of_space", "1 relocations are open: cancel some first",
    )  # fmt: skip


def test_those_that_ended_are_told_of_for_a_while(rig: Rig) -> None:
    space = rig.open_namespace()
    space.put(KEYS)
    ids = []
    for _ in range(ENDED_KEPT + 2):
        (row,) = rows(rig, StartRelocation("drain", "w1"))
        ids.append(row.id)
        rows(rig, CancelRelocation(row.id))
    found = [row.id for row in rows(rig, GetRelocations())]
    assert found == ids[2:]
    assert rows(rig, GetRelocations(ids[0])) == ()
    assert "id: got '1-1', want one of those that are open: none" in refused(
        rig, CancelRelocation(ids[0])
    )


def state_of(rig: Rig, worker: str) -> str:
    status = ask(rig, GetStatus())
    assert isinstance(status, Status)
    return next(each.state for each in status.workers if each.worker == worker)


def test_status_tells_of_workers_that_are_emptied(rig: Rig, space: OpenedNamespace) -> None:
    space.put(KEYS)
    (holder,) = {ref.worker for ref in space.match(KEYS).segments}
    assert state_of(rig, holder) == "live"
    (row,) = rows(rig, StartRelocation("drain", holder))
    assert state_of(rig, holder) == "draining"
    rig.pass_time(20.0)
    assert state_of(rig, holder) == "drained"
    rows(rig, CancelRelocation(row.id))
    assert state_of(rig, holder) == "live"


def test_a_drain_of_a_worker_that_was_forgotten_is_over() -> None:
    rig = Rig(Tunables(cluster="test", segment_forget_s=20.0))
    rig.add_worker("w1")
    rig.add_worker("w2")
    (row,) = rows(rig, StartRelocation("drain", "w2"))
    rig.workers["w2"].leave()
    rig.pass_time(40.0)
    (row,) = rows(rig, GetRelocations(row.id))
    assert (row.state, row.reason) == ("cancelled", "a worker that it names was forgotten")
    assert f"relocations/{row.id}" not in rig.store


def test_a_namespace_that_is_not_durable_yet_is_none(rig: Rig) -> None:
    rig.holds_persists = True
    content, layout = small_content(), small_layout()
    assert rig.ask(rig.engine, OpenNamespace(content, layout)) is None
    wish = StartRelocation("copy", "", "w2", namespace_id(content, layout))
    assert "want one that an engine has opened" in refused(rig, wish)
