"""What BeginPut grants, what it finds there, and what it refuses."""

from __future__ import annotations

import math
from collections import deque

import msgspec
import pytest

from kvstore import limits
from kvstore.ids import KEY_BYTES, NO_PARENT, ROOT_PARENT, epoch_of
from kvstore.namespace import NAME_PART_BYTES, Layout, opaque, open_layout
from kvstore.replica import ExtentState
from kvstore.wire.messages.common import Outcome
from kvstore.wire.messages.namespaces import NamespaceOpened, OpenNamespace
from kvstore.wire.messages.puts import (
    BeginPut,
    PageRange,
    PutChain,
    PutPlans,
)
from master import planning
from master.state import STEPS_PER_TICK
from tests.unit.master_pages import KEY, KEYS, bytes_in, granted, key, piece, refused, upto
from tests.unit.master_rig import (
    CHUNK,
    TENANT,
    OpenedNamespace,
    Rig,
    chain,
    failure,
    small_content,
)


def test_a_new_chain_is_granted_whole(rig: Rig, space: OpenedNamespace) -> None:
    plans = space.plans(KEYS)
    (span,) = plans.spans
    assert granted(plans) == [(0, 8, 0)]
    assert plans.segments[0].segment == "w1-dram"
    assert epoch_of(span.generation) == plans.epoch == 1  # type: ignore[arg-type]  # a plain int
    (put,) = rig.engine_owner().puts.values()
    assert put.timeout_s == limits.put_timeout_s(8 * 4096)
    assert space.probe(KEYS) == bytes(8)
    assert space.report(space.write(plans, KEYS)) == [bytes(8)]
    assert space.probe(KEYS) == b"\1" * 8
    assert not rig.master.core.plans
    assert not rig.engine_owner().puts


def test_a_longer_chain_gets_only_what_is_new(space: OpenedNamespace) -> None:
    space.put(upto(3))
    plans = space.plans(KEYS)
    assert plans.present == (PageRange(0, 3, 0),)
    assert granted(plans) == [(3, 5, 0)]


def test_a_branch_goes_below_its_parent(space: OpenedNamespace) -> None:
    space.put(KEYS)
    branch = chain(2, 3)
    assert granted(space.put(branch, parent=key(4))) == [(0, 3, 0)]
    assert space.probe(upto(5) + branch) == b"\1" * 8


def test_holes_in_the_middle_are_filled(space: OpenedNamespace) -> None:
    space.put(KEYS)
    assert space.remove(key(2) + key(5)) == b"\1\1"
    plans = space.plans(KEYS)
    assert granted(plans) == [(2, 1, 0), (5, 1, 0)]
    assert [(p.first, p.count) for p in plans.present] == [(0, 2), (3, 2), (6, 2)]
    space.report(space.write(plans, KEYS))
    assert space.probe(KEYS) == b"\1" * 8


def test_a_page_that_went_while_its_put_goes_on_is_granted_anew(space: OpenedNamespace) -> None:
    (report,) = space.write(space.plans(KEYS), KEYS)
    space.report([piece(report, 0)])
    space.remove(KEY)
    plans = space.plans(KEYS)
    assert granted(plans) == [(0, 1, 0)]
    assert refused(plans) == [(1, 7, Outcome.IN_PROGRESS)]


def test_chains_are_numbered_through(rig: Rig, space: OpenedNamespace) -> None:
    chains = PutChain(ROOT_PARENT, upto(3)), PutChain(ROOT_PARENT, chain(2, 2))
    message = BeginPut(bytes(16), space.id, chains, (0,), (4096,), 5.0)
    plans = rig.ask(rig.engine, message)
    assert isinstance(plans, PutPlans)
    assert granted(plans) == [(0, 3, 0), (3, 2, 0)]


def test_one_batch_may_share_a_prefix(rig: Rig, space: OpenedNamespace) -> None:
    chains = PutChain(ROOT_PARENT, upto(3)), PutChain(ROOT_PARENT, upto(2) + chain(2, 2))
    message = BeginPut(bytes(16), space.id, chains, (0,), (4096,), 5.0)
    plans = rig.ask(rig.engine, message)
    assert isinstance(plans, PutPlans)
    assert granted(plans) == [(0, 3, 0)]
    assert refused(plans) == [(3, 4, Outcome.IN_PROGRESS)]


def test_without_its_parent_a_chain_is_refused(space: OpenedNamespace) -> None:
    plans = space.plans(KEYS, parent=chain(9, 1))
    assert refused(plans) == [(0, 8, Outcome.PARENT_MISSING)]


def test_a_parent_that_is_only_planned_will_do(space: OpenedNamespace) -> None:
    first = space.plans(upto(4))
    second = space.plans(KEYS[4 * KEY_BYTES :], parent=key(3))
    assert granted(second) == [(0, 4, 0)]
    space.report(space.write(second, KEYS[4 * KEY_BYTES :], parent=key(3)))
    assert space.probe(KEYS) == bytes(4) + b"\1" * 4
    space.report(space.write(first, upto(4)))
    assert space.probe(KEYS) == b"\1" * 8


def test_what_another_put_has_open_is_in_progress(space: OpenedNamespace) -> None:
    space.plans(KEYS[2 * KEY_BYTES : 4 * KEY_BYTES], parent=ROOT_PARENT)
    plans = space.plans(KEYS[2 * KEY_BYTES :], parent=ROOT_PARENT)
    assert refused(plans) == [(0, 6, Outcome.IN_PROGRESS)]
    assert plans.refused[0].retry_after_s == planning.RETRY_AFTER_S[Outcome.IN_PROGRESS]


def test_a_prefix_before_what_is_in_progress_is_granted(space: OpenedNamespace) -> None:
    space.plans(KEYS)
    branch = upto(0) + chain(3, 2)
    space.plans(branch)
    plans = space.plans(branch + chain(4, 2))
    assert refused(plans) == [(0, 4, Outcome.IN_PROGRESS)]


def test_too_little_room_grants_a_prefix(rig: Rig, space: OpenedNamespace) -> None:
    plans = space.plans(chain(1, 300))
    assert sum(span.count for span in plans.spans) == 256
    assert refused(plans) == [(256, 44, Outcome.OUT_OF_SPACE)]
    assert rig.master.core.wanted_bytes == {4096: 44 * 4096}


def test_a_put_spreads_over_segments_when_one_is_full(rig: Rig, space: OpenedNamespace) -> None:
    rig.add_worker("w2", chunks=2)
    plans = space.plans(chain(1, 270))
    assert [segment.segment for segment in plans.segments] == ["w1-dram", "w2-dram"]
    assert granted(plans) == [(0, 256, 0), (256, 14, 0)]
    assert len({span.generation for span in plans.spans}) == 2


def test_parts_are_planned_each_for_itself(rig: Rig) -> None:
    space = rig.open_namespace(parts=2)
    first = space.plans(KEYS, parts=(0,))
    space.report(space.write(first, KEYS))
    assert space.probe(KEYS) == bytes(8)
    second = space.plans(KEYS, parts=(0, 1))
    assert second.present == (PageRange(0, 8, 0),)
    assert granted(second) == [(0, 8, 1)]
    space.report(space.write(second, KEYS))
    assert space.probe(KEYS) == b"\1" * 8


def test_named_objects_have_one_part_and_no_parent(rig: Rig) -> None:
    named = opaque(TENANT, "objects")
    opened = rig.ask(rig.engine, OpenNamespace(named.content, named.layout))
    assert isinstance(opened, NamespaceOpened)
    keys = chain(1, 1) + chain(2, 1)
    message = BeginPut(bytes(16), named.id, (PutChain(NO_PARENT, keys),), (0,), (5000,), 5.0)
    plans = rig.ask(rig.engine, message)
    assert isinstance(plans, PutPlans)
    assert granted(plans) == [(0, 2, 0)]
    for wrong in (
        msgspec.structs.replace(message, parts=(1,)),
        msgspec.structs.replace(message, chains=(PutChain(ROOT_PARENT, chain(1, 2)),)),
        msgspec.structs.replace(message, chains=(PutChain(chain(1, 1), chain(2, 1)),)),
        msgspec.structs.replace(message, chains=(PutChain(NO_PARENT, chain(3, 1) * 2),)),
    ):
        wrong = msgspec.structs.replace(wrong, request=b"another request.")
        assert failure(rig.ask(rig.engine, wrong)).code == "bad_value"


def test_an_object_and_its_kept_name_are_put_together(rig: Rig) -> None:
    named = opaque(TENANT, "objects", keeps_names=True)
    rig.ask(rig.engine, OpenNamespace(named.content, named.layout))
    chains = (PutChain(NO_PARENT, chain(1, 1) + chain(2, 1)),)
    message = BeginPut(bytes(16), named.id, chains, (0, 1), (5000, NAME_PART_BYTES), 5.0)
    plans = rig.ask(rig.engine, message)
    assert isinstance(plans, PutPlans)
    assert granted(plans) == [(0, 2, 1), (0, 2, 0)], "the small part first"
    alone = msgspec.structs.replace(message, parts=(0,), part_bytes=(5000,), request=b"r" * 16)
    assert "all of an object in one put" in failure(rig.ask(rig.engine, alone)).text


@pytest.mark.parametrize(
    ("change", "code", "text"),
    [
        ({"request": b"short"}, "bad_value", "request"),
        ({"namespace": bytes(32)}, "unknown_namespace", "open it first"),
        ({"parts": ()}, "bad_value", "part"),
        ({"parts": (0, 0), "part_bytes": (4096, 4096)}, "bad_value", "each once"),
        ({"parts": (1,)}, "bad_value", "part"),
        ({"part_bytes": ()}, "bad_value", "part_bytes"),
        ({"part_bytes": (4097,)}, "layout_mismatch", "got 4097 bytes, layout gives 4096"),
        ({"chains": (PutChain(ROOT_PARENT, b""),)}, "bad_value", "keys"),
        ({"chains": (PutChain(ROOT_PARENT, b"x" * 33),)}, "bad_value", "keys"),
        ({"chains": (PutChain(b"root", KEYS),)}, "bad_value", "parent"),
        ({"chains": (PutChain(ROOT_PARENT, KEY + KEY),)}, "bad_value", "once"),
        ({"chains": (PutChain(ROOT_PARENT, chain(1, 4097)),)}, "bad_value", "4096"),
        ({"timeout_s": -1.0}, "bad_value", "timeout_s"),
        ({"timeout_s": math.nan}, "bad_value", "timeout_s"),
        ({"ttl_s": math.nan}, "bad_value", "ttl_s"),
    ],
)
def test_bad_puts_are_refused_and_change_nothing(
    rig: Rig, space: OpenedNamespace, change: dict[str, object], code: str, text: str
) -> None:
    good = BeginPut(bytes(16), space.id, (PutChain(ROOT_PARENT, KEYS),), (0,), (4096,), 5.0)
    reply = failure(rig.ask(rig.engine, msgspec.structs.replace(good, **change)))
    assert (reply.code, text in reply.text) == (code, True), reply
    assert not rig.master.core.plans
    assert bytes_in(rig, ExtentState.RESERVED) == 0


def test_too_many_parts_in_all_are_refused(rig: Rig) -> None:
    space = rig.open_namespace(parts=32)
    pages = planning.BATCH_PARTS_MAX // 32 + 1
    reply = failure(space.begin(chain(1, pages), parts=tuple(range(32))))
    assert "parts" in reply.text


def test_a_part_larger_than_any_chunk_is_refused(rig: Rig) -> None:
    content = small_content()
    layout = Layout(page_tokens=4096)
    assert isinstance(rig.ask(rig.engine, OpenNamespace(content, layout)), NamespaceOpened)
    large = OpenedNamespace(rig, open_layout(content, layout), 1)
    assert large.namespace.parts[0].size_bytes > CHUNK
    assert f"at most a chunk of {CHUNK} bytes" in failure(large.begin(KEYS)).text


def test_a_chain_that_contradicts_the_tree_is_refused(rig: Rig, space: OpenedNamespace) -> None:
    space.put(KEYS)
    for keys, parent in ((key(3), ROOT_PARENT), (key(0) + key(2), ROOT_PARENT), (key(3), key(1))):
        reply = failure(space.begin(keys, parent))
        assert (reply.code, "parent" in reply.text) == ("bad_value", True)
    assert not rig.master.core.plans


def test_a_contradiction_undoes_the_chains_before_it(rig: Rig, space: OpenedNamespace) -> None:
    space.put(KEYS)
    chains = PutChain(ROOT_PARENT, chain(2, 3)), PutChain(ROOT_PARENT, key(3))
    message = BeginPut(bytes(16), space.id, chains, (0,), (4096,), 5.0)
    assert failure(rig.ask(rig.engine, message)).code == "bad_value"
    rig.settle()
    assert not rig.master.core.plans
    assert bytes_in(rig, ExtentState.RESERVED) == bytes_in(rig, ExtentState.QUARANTINED) == 0


def test_only_the_tenants_own_engines_put(rig: Rig, space: OpenedNamespace) -> None:
    stranger = rig.open("engine", "another", "engine")
    assert failure(space.begin(KEYS, session=stranger)).code == "access_denied"
    worker = rig.workers["w1"].session
    assert failure(space.begin(KEYS, session=worker)).code == "access_denied"
    operator = rig.open("operator", "", "admin")
    assert isinstance(space.begin(KEYS, session=operator), PutPlans)


def test_a_page_cannot_be_put_below_its_own_descendants(rig: Rig, space: OpenedNamespace) -> None:
    # Whose parent is not in the pool: only an inventory brings such pages.
    worker = rig.workers["w1"]
    space.put(KEYS)
    del worker.records[0]
    rig.takeover(2)
    space = rig.open_namespace()
    worker.join()
    assert space.probe(KEYS) == b"\0" + b"\1" * 7
    refusal = failure(space.begin(key(0), parent=key(7)))
    assert refusal.code == "bad_value"
    assert "below the chain" in refusal.text
    assert granted(space.put(key(0))) == [(0, 1, 0)]
    assert space.probe(KEYS) == b"\1" * 8


def test_the_roots_key_is_no_page(space: OpenedNamespace) -> None:
    refusal = failure(space.begin(key(0) + ROOT_PARENT))
    assert refusal.code == "bad_value"
    assert "root" in refusal.text


@pytest.fixture
def few(monkeypatch: pytest.MonkeyPatch) -> None:
    """A step is two chains."""
    monkeypatch.setattr(planning, "PARTS_PER_STEP", 2)


def many_chains(space: OpenedNamespace, count: int, *last: PutChain) -> BeginPut:
    """A put of as many new pages, each a chain of its own, and of what else is given."""
    chains = [PutChain(ROOT_PARENT, chain(100 + number, 1)) for number in range(count)]
    return BeginPut(bytes(16), space.id, (*chains, *last), (0,), (4096,), 5.0)


def test_many_chains_are_planned_in_steps_and_answered_at_once() -> None:
    rig = Rig()
    rig.add_worker(chunks=4, chunk_bytes=64 * CHUNK)
    space = rig.open_namespace()
    rig.checks = False
    count = limits.BATCH_PAGES_MAX
    assert rig.ask(rig.engine, many_chains(space, count)) is None
    steps = 1
    while rig.master.core.jobs:
        planned = len(rig.master.core.plans)
        assert planned == steps * planning.PARTS_PER_STEP
        rig.tick()
        steps += STEPS_PER_TICK
    plans = rig.reply(rig.engine, rig.last_request)
    assert isinstance(plans, PutPlans)
    assert [(span.first, span.count) for span in plans.spans] == [(i, 1) for i in range(count)]
    assert steps >= count / planning.PARTS_PER_STEP
    rig.master.check_invariants()


@pytest.mark.usefixtures("few")
def test_whoever_repeats_a_put_that_is_being_planned_is_answered(
    rig: Rig, space: OpenedNamespace
) -> None:
    message = many_chains(space, 7)
    assert rig.ask(rig.engine, message) is None
    first = rig.last_request
    assert rig.ask(rig.engine, message) is None
    rig.settle()
    assert rig.reply(rig.engine, first) is None
    plans = rig.reply(rig.engine, rig.last_request)
    assert isinstance(plans, PutPlans)
    assert granted(plans) == [(i, 1, 0) for i in range(7)]
    assert rig.ask(rig.engine, message) is plans


@pytest.mark.usefixtures("few")
def test_a_writer_that_goes_while_its_put_is_planned_leaves_nothing(
    rig: Rig, space: OpenedNamespace
) -> None:
    writer = rig.open("engine", TENANT, "writer")
    assert rig.ask(writer, many_chains(space, 7)) is None
    assert bytes_in(rig, ExtentState.RESERVED) == 2 * 4096
    rig.close(writer)
    rig.settle()
    assert not rig.master.core.plans
    assert bytes_in(rig, ExtentState.RESERVED) == 0


@pytest.mark.usefixtures("few")
def test_a_late_contradiction_undoes_every_step(rig: Rig, space: OpenedNamespace) -> None:
    space.put(KEYS)
    assert rig.ask(rig.engine, many_chains(space, 6, PutChain(ROOT_PARENT, key(3)))) is None
    rig.settle()
    reply = rig.reply(rig.engine, rig.last_request)
    assert failure(reply).code == "bad_value"
    assert not rig.master.core.plans
    assert not rig.engine_owner().puts


@pytest.mark.usefixtures("few")
def test_pages_removed_while_their_put_is_planned_are_not_open(
    rig: Rig, space: OpenedNamespace
) -> None:
    assert rig.ask(rig.engine, many_chains(space, 3)) is None
    request = rig.last_request
    assert space.remove(chain(100, 1) + chain(101, 1)) == b"\1\1"
    assert not rig.master.core.plans
    rig.settle()
    assert isinstance(rig.reply(rig.engine, request), PutPlans)
    (plan,) = rig.master.core.plans.values()
    assert plan.keys == chain(102, 1)


@pytest.mark.usefixtures("few")
def test_a_put_that_is_still_planned_does_not_time_out(rig: Rig, space: OpenedNamespace) -> None:
    assert rig.ask(rig.engine, many_chains(space, 7)) is None
    request = rig.last_request
    jobs, rig.master.core.jobs = rig.master.core.jobs, deque()  # the master is very busy
    rig.pass_time(limits.put_timeout_s(7 * 4096) + 1.0)
    assert rig.master.core.plans
    rig.master.core.jobs = jobs
    rig.tick()
    rig.settle()
    assert isinstance(rig.reply(rig.engine, request), PutPlans)


@pytest.mark.usefixtures("few")
def test_nothing_is_held_back_for_a_connection_that_has_gone(
    rig: Rig, space: OpenedNamespace
) -> None:
    space.plans(KEYS)
    sessions = [rig.open("engine", TENANT, "w", token=b"token") for _ in range(2)]
    chains = tuple(PutChain(ROOT_PARENT, upto(8)) for _ in range(3))
    message = BeginPut(bytes(16), space.id, chains, (0,), (4096,), 5.0)
    assert rig.ask(sessions[0], message) is None
    rig.close(sessions[0])
    rig.settle()
    assert not rig.master.core.waiting
