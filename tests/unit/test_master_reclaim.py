"""Expiry and eviction, where one page takes others along."""

from __future__ import annotations

from kvstore import limits
from kvstore.ids import KEY_BYTES, ROOT_PARENT
from kvstore.namespace import Layout, open_layout
from kvstore.replica import ExtentState
from kvstore.wire.messages.namespaces import NamespaceOpened, OpenNamespace
from kvstore.wire.messages.puts import PutPlans
from kvstore.wire.messages.reads import GiveBackLease, MatchPrefix
from master.reclaim import EXPIRED_PER_TICK, SIZE_EVERY_S, make_room
from master.tunables import Tunables
from policies.eviction.lru import Lru
from tests.unit.master_rig import OpenedNamespace, Rig, chain, small_content

TTL_S = 2.0


def test_a_hole_whose_time_is_up_goes_with_its_last_child() -> None:
    rig = Rig()
    rig.add_worker()
    space = rig.open_namespace()
    keys = chain(1, 2)
    parent, child = keys[:32], keys[32:]
    space.put(parent, ttl_s=TTL_S)
    space.put(child, parent, ttl_s=TTL_S)
    space.remove(parent)
    assert space.probe(keys) == b"\0\1"
    rig.now += TTL_S + 0.5  # and not so long that the worker is lost
    rig.tick()  # both are due at once, and the child's end is the hole's
    tree = rig.master.core.tree(space.ordinal)
    assert (tree.pages, tree.runs) == (0, 0)


HALF = Tunables(watermark_high=0.9, watermark_low=0.5, watermark_demote=0.4)


def rig_with(chunks: int = 16, tunables: Tunables | None = None) -> tuple[Rig, OpenedNamespace]:
    """A master, one worker, one namespace."""
    rig = Rig(tunables)
    rig.add_worker(chunks=chunks)
    return rig, rig.open_namespace()


class Listening(Lru):
    """Notes the sizes that it is told."""

    def __init__(self) -> None:
        super().__init__()
        self.sizes: list[int] = []

    def resize(self, pages: int) -> None:
        self.sizes.append(pages)


def test_the_policy_hears_how_large_the_pool_is() -> None:
    rig, space = rig_with()
    policy = rig.master.core.eviction.policy = Listening()
    space.put(chain(1, 8))
    rig.open_namespace(parts=2)
    for _ in range(3):
        make_room(rig.master.core)
    assert policy.sizes[-1] == 8
    heard = len(policy.sizes)
    rig.pass_time(SIZE_EVERY_S + 1.0)
    make_room(rig.master.core)
    assert len(policy.sizes) == heard + 1


def sealed_bytes(rig: Rig) -> int:
    """Bytes of sealed pages."""
    return rig.master.core.segments["w1-dram"].allocator.bytes_in[ExtentState.SEALED]


def test_pages_go_when_their_time_is_up() -> None:
    rig, space = rig_with()
    space.put(chain(1, 8), ttl_s=TTL_S)
    space.put(chain(2, 8))
    rig.pass_time(TTL_S - 0.1)
    assert space.probe(chain(1, 8)) == b"\1" * 8
    rig.pass_time(0.5)
    assert space.probe(chain(1, 8)) == bytes(8)
    assert space.probe(chain(2, 8)) == b"\1" * 8
    assert rig.master.core.counters["pages_expired"] == 8
    assert sealed_bytes(rig) == 8 * 4096


def test_a_parent_lives_as_long_as_its_children() -> None:
    rig, space = rig_with()
    keys = chain(1, 4)
    space.put(keys, ttl_s=TTL_S)
    space.put(chain(2, 2), parent=keys[-32:], ttl_s=3 * TTL_S)
    rig.pass_time(3 * TTL_S - 0.2)
    assert space.probe(keys + chain(2, 2)) == b"\1" * 6
    rig.pass_time(1.0)
    assert space.probe(keys + chain(2, 2)) == bytes(6)
    assert rig.master.core.tree(1).pages == 0


def test_a_child_that_is_only_planned_keeps_its_parent() -> None:
    rig, space = rig_with()
    keys = chain(1, 4)
    space.put(keys, ttl_s=TTL_S)
    space.plans(chain(2, 2), parent=keys[-32:], ttl_s=TTL_S)
    rig.pass_time(TTL_S + 1.0)
    assert space.probe(keys) == b"\1" * 4
    rig.pass_time(5.0)  # the put times out
    assert space.probe(keys) == bytes(4)


def test_a_leased_page_outlives_its_ttl() -> None:
    rig, space = rig_with()
    keys = chain(1, 4)
    space.put(keys, ttl_s=TTL_S)
    space.match(keys)
    run = rig.master.core.tree(1).get(keys[:32])
    assert run is not None
    run.expires_s = rig.now + 1.0
    rig.pass_time(limits.LEASE_TTL_S)
    assert space.probe(keys) == b"\1" * 4
    rig.pass_time(1.5)
    assert space.probe(keys) == bytes(4)


def test_use_keeps_a_page_until_it_is_too_old() -> None:
    rig, space = rig_with(tunables=Tunables(page_age_max_s=10.0))
    keys = chain(1, 4)
    space.put(keys, ttl_s=4.0)
    for _ in range(4):
        rig.pass_time(2.4)
        space.match(keys, lease=False)
        assert space.probe(keys) == b"\1" * 4
    rig.pass_time(1.0)
    assert space.probe(keys) == bytes(4)


def test_many_expiries_are_spread_over_ticks() -> None:
    rig, space = rig_with()
    for number in range(EXPIRED_PER_TICK + 10):
        space.put(chain(number, 1), ttl_s=TTL_S)
    rig.now += TTL_S + 0.5
    rig.tick()
    assert rig.master.core.tree(1).runs == 10
    assert rig.master.wakeup_s <= rig.now
    rig.settle()
    assert rig.master.core.tree(1).runs == 0


def test_above_the_high_watermark_room_is_made_to_the_low_one() -> None:
    rig, space = rig_with(tunables=HALF)
    for number in range(14):
        space.put(chain(number, 16))
    rig.settle()
    assert sealed_bytes(rig) == 14 * 16 * 4096
    space.put(chain(14, 16))
    rig.settle()
    assert sealed_bytes(rig) == 128 * 4096
    assert not rig.master.core.pressed


def test_what_was_used_last_stays() -> None:
    rig, space = rig_with(tunables=HALF)
    for number in range(14):
        space.put(chain(number, 16))
        rig.pass_time(1.0)
    hot = chain(0, 16)
    for _ in range(20):
        rig.pass_time(1.0)
        space.match(hot, lease=False)
    space.put(chain(14, 16))
    rig.settle()
    assert space.probe(hot) == b"\1" * 16
    assert space.probe(chain(14, 16)) == b"\1" * 16


def test_room_is_made_for_a_put_that_waits() -> None:
    rig, space = rig_with(chunks=1, tunables=Tunables(watermark_high=1.0, watermark_low=0.99))
    space.put(chain(1, 16))
    assert space.begin(chain(2, 4), wait=True) is None
    request = rig.last_request
    rig.settle()
    reply = rig.reply(rig.engine, request)
    assert isinstance(reply, PutPlans)
    assert sum(span.count for span in reply.spans) == 4
    assert space.probe(chain(1, 16)) == b"\1" * 12 + bytes(4)


def test_the_beginning_of_a_chain_makes_no_room_for_its_rest() -> None:
    rig, space = rig_with(chunks=1, tunables=Tunables(watermark_high=1.0, watermark_low=0.99))
    old, new = chain(1, 12), chain(2, 8)
    space.put(old)
    for _ in range(20):  # hotter than what is new
        rig.pass_time(0.1)
        space.match(old, lease=False)
    plans = space.begin(new, wait=True)
    assert isinstance(plans, PutPlans)
    assert sum(span.count for span in plans.spans) == 4
    space.report(space.write(plans, new))
    rig.settle()
    assert space.probe(new) == b"\1" * 4 + bytes(4)
    rest = space.begin(new[4 * 32 :], parent=new[3 * 32 : 4 * 32], wait=True)
    assert isinstance(rest, PutPlans), rest
    assert sum(span.count for span in rest.spans) == 4
    space.report(space.write(rest, new[4 * 32 :], new[3 * 32 : 4 * 32]))
    assert space.probe(new) == b"\1" * 8
    assert space.probe(old) == b"\1" * 8 + bytes(4)


def put_in_rounds(rig: Rig, space: OpenedNamespace, keys: bytes) -> int:
    """Store a chain as room is made for it, without any time passing; how often it was asked."""
    parent: bytes = ROOT_PARENT
    rounds = 0
    while keys:
        rounds += 1
        plans = space.begin(keys, parent, wait=True)
        if plans is None:
            request = rig.last_request
            rig.settle()
            plans = rig.reply(rig.engine, request)
        assert isinstance(plans, PutPlans), plans
        stop = KEY_BYTES * sum(span.count for span in plans.spans)
        space.report(space.write(plans, keys[:stop], parent))
        parent, keys = keys[stop - KEY_BYTES : stop], keys[stop:]
        rig.settle()
    return rounds


def test_what_a_put_kept_while_it_waited_can_go_when_it_is_done() -> None:
    rig, space = rig_with(chunks=1, tunables=Tunables(watermark_high=1.0, watermark_low=0.99))
    space.put(chain(1, 12))
    assert put_in_rounds(rig, space, chain(2, 16)) > 1
    assert space.probe(chain(2, 16)) == b"\1" * 16
    put_in_rounds(rig, space, chain(3, 16))
    assert space.probe(chain(3, 16)) == b"\1" * 16
    assert space.probe(chain(2, 16)) == bytes(16)


def test_leased_pages_make_no_room() -> None:
    rig, space = rig_with(chunks=1, tunables=Tunables(watermark_high=1.0, watermark_low=0.99))
    space.put(chain(1, 16))
    space.match(chain(1, 16))
    assert space.begin(chain(2, 4), wait=True, timeout_s=30.0) is None
    request = rig.last_request
    rig.pass_time(limits.LEASE_TTL_S - 1.0)
    assert rig.reply(rig.engine, request) is None
    assert space.probe(chain(1, 16)) == b"\1" * 16
    rig.pass_time(2.0)
    assert isinstance(rig.reply(rig.engine, request), PutPlans)


def test_pages_whose_lease_is_given_back_make_room_at_once() -> None:
    rig, space = rig_with(chunks=1, tunables=Tunables(watermark_high=1.0, watermark_low=0.99))
    space.put(chain(1, 16))
    rig.ask(rig.engine, MatchPrefix(space.id, chain(1, 16), lease_id=1))
    assert space.begin(chain(2, 4), wait=True, timeout_s=30.0) is None
    request = rig.last_request
    rig.pass_time(1.0)
    assert rig.reply(rig.engine, request) is None
    rig.ask(rig.engine, GiveBackLease(space.id, chain(1, 16), 1))
    rig.pass_time(0.25)
    assert isinstance(rig.reply(rig.engine, request), PutPlans)


def test_a_pool_that_can_make_no_room_rests() -> None:
    rig, space = rig_with(chunks=1)
    space.put(chain(1, 16))
    space.match(chain(1, 16))
    space.plans(chain(2, 4))
    rig.tick()
    assert rig.master.wakeup_s > rig.now
    rig.settle()
    assert not rig.master.core.wanted_bytes  # nobody waits: who still wants it asks again


def test_a_put_that_did_not_wait_wants_nothing_for_long() -> None:
    rig, space = rig_with(chunks=1)
    layout = Layout(page_tokens=2048)
    opened = rig.ask(rig.engine, OpenNamespace(small_content(), layout))
    assert isinstance(opened, NamespaceOpened)
    large = OpenedNamespace(rig, open_layout(small_content(), layout), opened.ordinal)
    space.put(chain(1, 16))
    space.match(chain(1, 16))
    assert space.begin(chain(2, 4), wait=True, timeout_s=30.0) is None
    large.plans(chain(3, 1))
    core = rig.master.core
    assert core.wanted_bytes == {4096: 4 * 4096, 16 * 4096: 16 * 4096}
    rig.tick()
    assert core.wanted_bytes == {4096: 4 * 4096}, "who waits asks again"


def test_eviction_takes_tails_first() -> None:
    rig, space = rig_with(chunks=1, tunables=Tunables(watermark_high=1.0, watermark_low=0.99))
    keys = chain(1, 8)
    space.put(keys)
    space.put(chain(2, 4), parent=keys[-32:])
    space.put(chain(3, 4), parent=keys[3 * 32 : 4 * 32])
    for number in range(4, 12):
        space.plans(chain(number, 1), ttl_s=1.0)
        rig.settle()
        present = space.probe(keys)
        assert present == b"\1" * present.count(1) + bytes(present.count(0))
        if 1 in space.probe(chain(2, 4)):
            assert 0 not in present
        if 1 in space.probe(chain(3, 4)):
            assert 0 not in present[:4]


def test_the_half_of_an_overdue_run_that_waits_for_nothing_expires() -> None:
    rig = Rig()
    rig.add_worker()
    space = rig.open_namespace(parts=2)
    keys = chain(1, 4)
    space.put(keys, ttl_s=1.0)
    plans = space.plans(keys[:64], parts=(1,), ttl_s=1.0)  # keeps the whole run
    rig.tick(2.0)
    tree = rig.master.core.tree(space.ordinal)
    assert (tree.pages, tree.runs) == (4, 1)
    space.plans(chain(2, 1), parent=keys[32:64])  # branches off in the middle
    rig.tick(0.5)
    assert tree.get(keys[96:]) is None
    assert plans.spans


def test_what_a_put_wanted_before_its_segment_came_evicts_nothing() -> None:
    rig = Rig()
    space = rig.open_namespace()
    assert space.begin(chain(1, 8), wait=True) is None  # nobody has any room
    request = rig.last_request
    rig.add_worker()
    plans = rig.reply(rig.engine, request)
    assert isinstance(plans, PutPlans)
    space.report(space.write(plans, chain(1, 8)))
    rig.settle()
    assert space.probe(chain(1, 8)) == b"\1" * 8
