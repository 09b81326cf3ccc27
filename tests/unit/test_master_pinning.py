"""Pins: what they hold back, until when, what they may come to, and who may ask."""

from __future__ import annotations

from math import inf

import msgspec
import pytest

from kvstore import limits
from kvstore.ids import KEY_BYTES, NO_PARENT, ROOT_PARENT
from kvstore.namespace import NAME_PART_BYTES, Layout, opaque, open_layout
from kvstore.wire.messages.namespaces import NamespaceOpened, OpenNamespace
from kvstore.wire.messages.pins import (
    ListPins,
    PagesPinned,
    PagesUnpinned,
    PinList,
    PinPages,
    PinRow,
    UnpinPages,
)
from kvstore.wire.messages.puts import BeginPut, PutChain, PutPlans
from master import pinning
from master.tunables import Tunables
from master.write_behind import CLOCK_EVERY_S
from tests.unit.master_rig import TENANT, OpenedNamespace, Rig, chain, failure, small_content
from tests.unit.pools import PAGE, evict, held, put_chains, rig_with

KEYS = chain(0, 8)
OTHER = chain(1, 8)
LATE_S = 0.75
"""Later than a grain of either wheel."""


class Pool:
    """A pool of 16 pages in one chunk, all of them put, the first chain before the second."""

    def __init__(self, chunks: int = 1, **tunables: float) -> None:
        self.rig = Rig(Tunables("test", pin_quota=1.0, watermark_high=1.0, watermark_low=0.99))
        if tunables:
            self.rig = Rig(Tunables("test", **tunables))  # type: ignore[arg-type]  # numbers all
        self.rig.add_worker(chunks=chunks)
        self.space: OpenedNamespace = self.rig.open_namespace()
        self.space.put(KEYS)
        self.rig.pass_time(1.0)
        self.space.put(OTHER)

    def pin(
        self, keys: bytes = KEYS, owner: str = "o", ttl_s: float = 60.0, *, hard: bool = True
    ) -> bytes:
        reply = self.rig.ask(self.rig.engine, PinPages(self.space.id, keys, owner, hard, ttl_s))
        assert isinstance(reply, PagesPinned), reply
        return reply.pinned

    def refused(self, keys: bytes, *, hard: bool = True) -> str:
        message = PinPages(self.space.id, keys, "o", hard, 60.0)
        refused = failure(self.rig.ask(self.rig.engine, message))
        assert refused.code == "out_of_space"
        return refused.text

    def unpin(self, keys: bytes = b"", owner: str = "o") -> int:
        reply = self.rig.ask(self.rig.engine, UnpinPages(self.space.id, keys, owner))
        assert isinstance(reply, PagesUnpinned), reply
        return reply.pages

    def listed(self) -> list[PinRow]:
        reply = self.rig.ask(self.rig.engine, ListPins())
        assert isinstance(reply, PinList), reply
        return list(reply.pins)

    def evict(self, pages: int) -> int:
        """Evict so many pages if possible; how many went."""
        return evict(self.rig, pages * PAGE)[0] // PAGE


def test_hard_pinned_pages_are_never_evicted() -> None:
    pool = Pool()
    assert pool.pin() == b"\1" * 8
    assert pool.evict(16) == 8
    assert pool.space.probe(KEYS + OTHER) == b"\1" * 8 + bytes(8)
    assert pool.evict(1) == 0
    pool.unpin()
    assert pool.evict(16) == 8


def test_soft_pinned_pages_go_when_nothing_else_may() -> None:
    pool = Pool()
    pool.pin(hard=False)
    assert pool.evict(8) == 8
    assert pool.space.probe(KEYS + OTHER) == b"\1" * 8 + bytes(8)
    assert pool.evict(4) == 4
    assert pool.space.probe(KEYS) == b"\1" * 4 + bytes(4)


@pytest.mark.parametrize("hard", [True, False])
def test_only_what_follows_the_last_pinned_page_goes(hard: bool) -> None:
    pool = Pool()
    pool.pin(KEYS[: 3 * KEY_BYTES], hard=hard)
    pool.evict(5)
    assert pool.space.probe(KEYS + OTHER) == b"\1" * 3 + bytes(5) + b"\1" * 8


def test_what_is_above_a_pinned_page_stays() -> None:
    pool = Pool()
    pool.pin(KEYS[-KEY_BYTES:])
    assert pool.evict(16) == 8
    assert pool.space.probe(KEYS) == b"\1" * 8


def test_pages_are_pinned_until_the_deadline() -> None:
    pool = Pool()
    pool.pin(ttl_s=5.0)
    pool.rig.pass_time(4.0)
    assert [row.left_s for row in pool.listed()] == [1.0]
    assert pool.evict(16) == 8
    pool.rig.pass_time(1.0 + LATE_S)
    assert pool.listed() == []
    assert pool.evict(16) == 8


@pytest.mark.parametrize(("end", "ttl_s"), [("deadline", 8.0), ("unpin", inf), ("soft", inf)])
def test_hard_pinned_pages_expire_with_the_pin(end: str, ttl_s: float) -> None:
    pool = Pool(chunks=4, page_ttl_s=4.0)
    pool.pin(KEYS[: 5 * KEY_BYTES], ttl_s=ttl_s)
    pool.rig.pass_time(4.0 + LATE_S)
    assert pool.space.probe(KEYS + OTHER) == b"\1" * 5 + bytes(11)
    assert pool.rig.master.core.counters["pages_expired"] == 11
    if end == "unpin":
        assert pool.unpin() == 5
    elif end == "soft":
        pool.pin(KEYS[: 5 * KEY_BYTES], hard=False)
    pool.rig.pass_time(8.0)
    assert pool.space.probe(KEYS) == bytes(8)


def test_a_soft_pin_is_no_reason_to_live_longer() -> None:
    pool = Pool(chunks=4, page_ttl_s=4.0)
    pool.pin(hard=False, ttl_s=inf)
    pool.rig.pass_time(4.0 + LATE_S)
    assert pool.space.probe(KEYS) == bytes(8)


def test_a_removal_ends_everybodys_pins() -> None:
    pool = Pool()
    pool.pin()
    pool.pin(owner="p", hard=False)
    assert pool.space.remove(KEYS[4 * KEY_BYTES :]) == b"\1" * 4
    assert pool.space.probe(KEYS) == b"\1" * 4 + bytes(4)
    assert [(row.owner, row.pages) for row in pool.listed()] == [("o", 4), ("p", 4)]
    pool.space.remove(KEYS)
    assert pool.listed() == []
    assert not any(key.startswith("pins/") for key in pool.rig.store)


def test_a_removal_is_answered_when_the_end_of_pins_is_durable() -> None:
    pool = Pool()
    pool.pin()
    pool.rig.holds_persists = True
    assert pool.space.remove(KEYS) is None
    pool.rig.holds_persists = False
    asked = pool.rig.last_request
    pool.rig.store_all()
    assert pool.rig.reply(pool.rig.engine, asked) is not None
    assert not any(key.startswith("pins/") for key in pool.rig.store)


def test_pages_that_are_not_readable_are_not_pinned() -> None:
    pool = Pool()
    pool.space.remove(KEYS[-KEY_BYTES:])
    pool.space.plans(chain(3, 1))
    assert pool.pin(KEYS + chain(3, 1)) == b"\1" * 7 + bytes(2)
    assert pool.pin(chain(4, 2), owner="p") == bytes(2)
    assert [row.pages for row in pool.listed()] == [7]


def test_the_last_pin_of_an_owner_counts() -> None:
    pool = Pool()
    pool.pin()
    pool.pin(KEYS[: 6 * KEY_BYTES], hard=False)
    pool.pin(KEYS[: 2 * KEY_BYTES])
    rows = [(row.hard, row.pages, row.size_bytes) for row in pool.listed()]
    assert rows == [(True, 2, 2 * PAGE), (False, 4, 4 * PAGE), (True, 2, 2 * PAGE)]
    assert pool.unpin(KEYS[: 3 * KEY_BYTES]) == 3
    assert pool.unpin(owner="p") == 0
    assert pool.unpin() == 5


def test_another_owners_pin_stays() -> None:
    pool = Pool()
    pool.pin()
    pool.pin(owner="p")
    pool.unpin()
    assert pool.evict(16) == 8


def test_hard_pins_count_against_the_tenants_quota() -> None:
    pool = Pool(chunks=2, pin_quota=0.25, watermark_high=1.0, watermark_low=0.99)
    pool.pin()
    assert pool.refused(OTHER) == (
        f"pin_quota: tenant {TENANT} has pinned {8 * PAGE} bytes hard and wants {8 * PAGE} more, "
        f"may pin {8 * PAGE}"
    )
    assert pool.pin(OTHER, hard=False) == b"\1" * 8, "soft pins do not"
    assert pool.pin() == b"\1" * 8, "nor does what the owner has pinned already"
    pool.unpin(KEYS[4 * KEY_BYTES :])
    assert pool.pin(OTHER[: 4 * KEY_BYTES]) == b"\1" * 4


def test_a_pinned_object_counts_with_its_kept_name() -> None:
    pool = Pool(chunks=16, pin_quota=0.9, watermark_high=1.0, watermark_low=0.99)
    named = opaque(TENANT, "objects", keeps_names=True)
    opened = pool.rig.ask(pool.rig.engine, OpenNamespace(named.content, named.layout))
    key, sizes = chain(7, 1), (3 * PAGE, NAME_PART_BYTES)
    put = BeginPut(bytes(16), named.id, (PutChain(NO_PARENT, key),), (0, 1), sizes, 5.0)
    plans = pool.rig.ask(pool.rig.engine, put)
    assert isinstance(plans, PutPlans)
    assert isinstance(opened, NamespaceOpened)
    segment, number = pool.rig.segment("w1-dram"), opened.ordinal
    for span in plans.spans:
        report = segment.write(number, span, key, ROOT_PARENT, sizes[span.part])
        assert report is not None
        pool.space.report([msgspec.structs.replace(report, token_count=1)])
    pool.rig.ask(pool.rig.engine, PinPages(named.id, key, "o", True, 60.0))
    assert [row.size_bytes for row in pool.listed()] == [4 * PAGE]


def test_what_a_hard_pin_holds_above_itself_counts_too() -> None:
    pool = Pool(chunks=2, pin_quota=0.25, watermark_high=1.0, watermark_low=0.99)
    pool.pin(KEYS[-KEY_BYTES:])
    assert [(row.pages, row.size_bytes) for row in pool.listed()] == [(1, 8 * PAGE)]
    assert f"wants {PAGE} more" in pool.refused(OTHER[:KEY_BYTES])
    assert pool.pin(KEYS[-KEY_BYTES:], ttl_s=90.0) == b"\1"
    pool.unpin()
    assert pool.pin(OTHER[-KEY_BYTES:]) == b"\1"


def test_what_is_held_already_counts_once() -> None:
    pool = Pool(chunks=2, pin_quota=0.25, watermark_high=1.0, watermark_low=0.99)
    hard_bytes = pool.rig.master.core.pins.hard_bytes
    pool.pin(KEYS[: 4 * KEY_BYTES])
    pool.pin(KEYS[5 * KEY_BYTES : 6 * KEY_BYTES], owner="p")
    assert hard_bytes[TENANT] == 6 * PAGE
    pool.pin(KEYS, owner="q", hard=False)
    pool.pin(KEYS[-KEY_BYTES:])
    assert hard_bytes[TENANT] == 8 * PAGE
    pool.unpin(KEYS[: 4 * KEY_BYTES])
    assert hard_bytes[TENANT] == 8 * PAGE, "the lower pins hold them all the same"
    pool.unpin(owner="p")
    pool.unpin()
    assert hard_bytes[TENANT] == 0


def test_what_is_above_counts_over_runs_and_only_so_many(monkeypatch: pytest.MonkeyPatch) -> None:
    pool = Pool(chunks=4, pin_quota=1.0, watermark_high=1.0, watermark_low=0.99)
    keys = chain(5, 12)
    for at in range(0, 12, 4):
        parent = keys[(at - 1) * KEY_BYTES : at * KEY_BYTES] if at else ROOT_PARENT
        pool.space.put(keys[at * KEY_BYTES : (at + 4) * KEY_BYTES], parent)
    monkeypatch.setattr(pinning, "ABOVE_RUNS_MAX", 2)
    assert pool.refused(keys[-KEY_BYTES:]) == "more than 2 runs are above: pin those first"
    assert pool.listed() == []
    pool.pin(keys[: 2 * KEY_BYTES])
    pool.pin(keys[6 * KEY_BYTES : 7 * KEY_BYTES])
    pool.pin(keys[-KEY_BYTES:])
    assert [row.size_bytes // PAGE for row in pool.listed()] == [2, 5, 5]


def test_what_is_above_counts_for_the_next_leader_too() -> None:
    pool = Pool(chunks=2, pin_quota=0.25, watermark_high=1.0, watermark_low=0.99)
    pool.pin(KEYS[-KEY_BYTES:])
    pool.rig.takeover(2)
    pool.rig.workers["w1"].join()
    pool.rig.settle()
    assert pool.rig.master.core.pins.hard_bytes[TENANT] == 8 * PAGE


@pytest.mark.parametrize(("bound", "text"), [("PINS_MAX", "pins"), ("PINNED_PAGES_MAX", "pages")])
def test_pins_are_bounded(monkeypatch: pytest.MonkeyPatch, bound: str, text: str) -> None:
    pool = Pool()
    monkeypatch.setattr(limits, bound, {"PINS_MAX": 1, "PINNED_PAGES_MAX": 8}[bound])
    pool.pin()
    assert text in pool.refused(OTHER, hard=False)
    assert len(pool.listed()) == 1
    assert pool.pin(ttl_s=90.0) == b"\1" * 8, "a pin can be made longer all the same"
    assert [row.left_s for row in pool.listed()] == [90.0]


def test_a_pin_is_durable_before_the_answer_and_outlives_a_master() -> None:
    pool = Pool()
    rig, space = pool.rig, pool.space
    rig.holds_persists = True
    assert rig.ask(rig.engine, PinPages(space.id, KEYS, "o", True, 20.0)) is None
    asked = rig.last_request
    rig.holds_persists = False
    rig.store_all()
    assert isinstance(rig.reply(rig.engine, asked), PagesPinned)
    rig.pass_time(12.0)
    rig.takeover(2)
    rig.workers["w1"].join()
    rig.settle()
    (row,) = pool.listed()
    assert (row.owner, row.hard, row.pages) == ("o", True, 8)
    assert 8.0 <= row.left_s <= 8.0 + CLOCK_EVERY_S, "its time goes on"
    core = rig.master.core
    run = core.tree(space.ordinal).get(KEYS[:KEY_BYTES])
    assert run is not None
    assert core.pins.kept(run) == 8
    rig.pass_time(row.left_s + LATE_S)
    assert pool.listed() == []
    assert not any(key.startswith("pins/") for key in rig.store)


def test_a_lost_page_is_pinned_again_when_its_worker_is_back() -> None:
    pool = Pool()
    pool.pin()
    pool.rig.workers["w1"].leave()
    pool.rig.pass_time(5.0)
    assert pool.space.probe(KEYS) == bytes(8)
    pool.rig.workers["w1"].join()
    pool.rig.settle()
    pool.rig.pass_time(limits.LEASE_TTL_MAX_S + 1.0)
    assert pool.evict(16) == 8
    assert pool.space.probe(KEYS) == b"\1" * 8


def test_pinned_pages_make_no_room_for_another_size() -> None:
    pool = Pool()
    pool.pin()
    layout = Layout(page_tokens=2048)
    opened = pool.rig.ask(pool.rig.engine, OpenNamespace(small_content(), layout))
    assert isinstance(opened, NamespaceOpened)
    large = OpenedNamespace(pool.rig, open_layout(small_content(), layout), opened.ordinal)
    assert large.begin(chain(3, 1), wait=True, timeout_s=3.0) is None
    asked = pool.rig.last_request
    pool.rig.pass_time(2.0)
    assert pool.space.probe(KEYS) == b"\1" * 8
    pool.unpin()
    pool.rig.pass_time(0.75)
    reply = pool.rig.reply(pool.rig.engine, asked)
    assert isinstance(reply, PutPlans)
    assert len(reply.spans) == 1


def test_pinned_pages_may_leave_memory_but_not_the_pool() -> None:
    rig, space = rig_with(chunks=2, nvme_chunks=2)
    keys = chain(0, 4)
    space.put(keys)
    rig.ask(rig.engine, PinPages(space.id, keys, "o", True, 600.0))
    put_chains(rig, space, range(1, 24))
    assert space.probe(keys) == b"\1" * 4
    assert not {keys[at : at + KEY_BYTES] for at in range(0, len(keys), KEY_BYTES)} & held(
        rig, "w1-dram"
    )
    assert rig.master.core.counters["pages_evicted"] > 0
    rig.ask(rig.engine, UnpinPages(space.id, b"", "o"))
    put_chains(rig, space, range(24, 48))
    assert space.probe(keys) == bytes(4)


@pytest.mark.parametrize(
    ("owner", "ttl_s", "text"),
    [
        ("", 60.0, "owner: got '', want a name that can be printed"),
        ("a\nb", 60.0, "owner: got"),
        ("x" * 513, 60.0, "owner: got"),
        ("o", 0.0, "ttl_s: got 0.0, want 1.0 to 604800.0 seconds, or inf"),
        ("o", float("nan"), "ttl_s: got nan"),
    ],
)
def test_what_is_never_right_is_named(owner: str, ttl_s: float, text: str) -> None:
    pool = Pool()
    reply = failure(
        pool.rig.ask(pool.rig.engine, PinPages(pool.space.id, KEYS, owner, True, ttl_s))
    )
    assert reply.code == "bad_value"
    assert reply.text.startswith(text)


def test_pins_are_their_tenants_and_the_operators() -> None:
    pool = Pool()
    pool.pin()
    rig, space = pool.rig, pool.space
    stranger = rig.open("engine", "another", "e")
    for message in (
        PinPages(space.id, KEYS, "o", False, 60.0),
        UnpinPages(space.id, KEYS, "o"),
    ):
        assert failure(rig.ask(stranger, message)).code == "access_denied"
    assert rig.ask(stranger, ListPins()) == PinList(())
    worker = rig.workers["w1"].session
    assert worker is not None
    assert failure(rig.ask(worker, ListPins())).code == "access_denied"
    operator = rig.open("operator", "", "kvharbor")
    (row,) = pool.listed()
    assert row == PinRow(
        space.id, TENANT, space.namespace.content.model, "o", True, 60.0, 8, 8 * PAGE
    )
    assert rig.ask(operator, ListPins()) == PinList((row,))
    assert rig.ask(operator, UnpinPages(space.id, KEYS, "o")) == PagesUnpinned(8)
