"""BeginPut, Sealed, AbortPut: what is granted, what waits, and what is left when a put stops."""

from __future__ import annotations

import math

import msgspec
import pytest

from kvstore import limits
from kvstore.ids import KEY_BYTES, ROOT_PARENT, epoch_of
from kvstore.namespace import Layout, opaque, open_layout
from kvstore.replica import ExtentState
from kvstore.wire.messages.common import Outcome
from kvstore.wire.messages.hello import Done
from kvstore.wire.messages.membership import FenceExtents
from kvstore.wire.messages.namespaces import NamespaceOpened, OpenNamespace
from kvstore.wire.messages.puts import (
    AbortPut,
    BeginPut,
    PageRange,
    PutChain,
    PutPlans,
    Sealed,
    SealedNoted,
)
from master import planning, waiting
from master.packed import words
from master.puts import BATCH_PARTS_MAX
from master.tunables import Tunables
from tests.unit.master_rig import (
    CHUNK,
    TENANT,
    FakeWorker,
    OpenedNamespace,
    Rig,
    chain,
    failure,
    small_content,
)

KEYS = chain(1, 8)
KEY = KEYS[:KEY_BYTES]


def key(page: int) -> bytes:
    """Key of one page of KEYS."""
    return KEYS[page * KEY_BYTES : (page + 1) * KEY_BYTES]


def upto(page: int) -> bytes:
    """Keys of the pages of KEYS before this one."""
    return KEYS[: page * KEY_BYTES]


@pytest.fixture
def rig() -> Rig:
    """A master with one worker of 16 chunks."""
    made = Rig()
    made.add_worker()
    return made


@pytest.fixture
def space(rig: Rig) -> OpenedNamespace:
    """A namespace of one part of 4 KiB."""
    return rig.open_namespace()


def bytes_in(rig: Rig, state: ExtentState, name: str = "w1-dram") -> int:
    """Bytes of a segment in this state."""
    return rig.master.core.segments[name].allocator.bytes_in[state]


def refused(plans: PutPlans) -> list[tuple[int, int, int]]:
    """(first, count, reason) of what was refused."""
    return [(each.first, each.count, each.reason) for each in plans.refused]


def granted(plans: PutPlans) -> list[tuple[int, int, int]]:
    """(first, count, part) of what was granted."""
    return [(each.first, each.count, each.part) for each in plans.spans]


def test_a_new_chain_is_granted_whole(rig: Rig, space: OpenedNamespace) -> None:
    plans = space.plans(KEYS)
    (span,) = plans.spans
    assert granted(plans) == [(0, 8, 0)]
    assert plans.segments[0].segment == "w1-dram"
    assert epoch_of(span.generation) == plans.epoch == 1  # type: ignore[arg-type]  # a plain int
    assert plans.plan_ttl_s == limits.put_timeout_s(8 * 4096)
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
    chains = PutChain(ROOT_PARENT, chain(1, 1)), PutChain(ROOT_PARENT, chain(2, 1))
    message = BeginPut(bytes(16), named.id, chains, (0,), (5000,), 5.0)
    plans = rig.ask(rig.engine, message)
    assert isinstance(plans, PutPlans)
    assert granted(plans) == [(0, 1, 0), (1, 1, 0)]
    for wrong in (
        msgspec.structs.replace(message, parts=(1,)),
        msgspec.structs.replace(message, chains=(PutChain(ROOT_PARENT, chain(1, 2)),)),
        msgspec.structs.replace(message, chains=(PutChain(chain(1, 1), chain(2, 1)),)),
    ):
        wrong = msgspec.structs.replace(wrong, request=b"another request.")
        assert failure(rig.ask(rig.engine, wrong)).code == "bad_value"


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
        ({"replicas": 0}, "bad_value", "replicas"),
        ({"replicas": limits.REPLICAS_MAX + 1}, "bad_value", "replicas"),
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
    pages = BATCH_PARTS_MAX // 32 + 1
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


# Repeats and waits.


def test_a_repeated_request_gets_the_same_answer(space: OpenedNamespace) -> None:
    first = space.begin(KEYS, request=b"r" * 16)
    assert space.begin(KEYS, request=b"r" * 16) is first


def test_open_puts_are_bounded(
    rig: Rig, space: OpenedNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "IDEMPOTENT_REPLIES_MAX", 2)
    first = space.plans(chain(1, 1))
    space.plans(chain(2, 1))
    assert failure(space.begin(chain(3, 1))).code == "out_of_space"
    rig.ask(rig.engine, AbortPut((first.spans[0].generation,)))
    assert granted(space.plans(chain(3, 1))) == [(0, 1, 0)]


def test_another_peer_shares_no_request_numbers(rig: Rig, space: OpenedNamespace) -> None:
    space.begin(KEYS, request=b"r" * 16)
    other = rig.open("engine", TENANT, "other")
    reply = space.begin(KEYS, request=b"r" * 16, session=other)
    assert isinstance(reply, PutPlans)
    assert refused(reply) == [(0, 8, Outcome.IN_PROGRESS)]


def test_a_reconnected_peer_gets_its_answer_again(rig: Rig, space: OpenedNamespace) -> None:
    old = rig.open("engine", TENANT, "e", token=b"token")
    first = space.begin(KEYS, request=b"r" * 16, session=old)
    new = rig.open("engine", TENANT, "e", token=b"token")
    rig.close(old)
    assert space.begin(KEYS, request=b"r" * 16, session=new) is first


def test_a_token_of_another_tenant_is_another_peer(rig: Rig, space: OpenedNamespace) -> None:
    mine = rig.open("engine", TENANT, "e", token=b"token")
    plans = space.plans(KEYS, session=mine)
    thief = rig.open("engine", "another", "e", token=b"token")
    generation = plans.spans[0].generation
    assert isinstance(rig.ask(thief, AbortPut((generation,))), Done)
    assert generation in rig.master.core.plans


def test_a_put_waits_for_the_seal_of_another(rig: Rig, space: OpenedNamespace) -> None:
    plans = space.plans(KEYS)
    other = rig.open("engine", TENANT, "other")
    assert space.begin(KEYS, wait=True, session=other) is None
    request = rig.last_request
    reports = space.write(plans, KEYS)
    space.report(reports)
    reply = rig.reply(other, request)
    assert isinstance(reply, PutPlans)
    assert reply.present == (PageRange(0, 8, 0),)


def test_a_put_waits_for_the_failure_of_another(rig: Rig, space: OpenedNamespace) -> None:
    space.plans(KEYS)
    other = rig.open("engine", TENANT, "other")
    assert space.begin(KEYS, wait=True, session=other) is None
    request = rig.last_request
    rig.close(rig.engine)
    reply = rig.reply(other, request)
    assert isinstance(reply, PutPlans)
    assert granted(reply) == [(0, 8, 0)]


def test_a_put_waits_no_longer_than_it_said(rig: Rig, space: OpenedNamespace) -> None:
    space.plans(KEYS)
    other = rig.open("engine", TENANT, "other")
    assert space.begin(KEYS, wait=True, timeout_s=2.0, session=other) is None
    request = rig.last_request
    rig.pass_time(1.9)
    assert rig.reply(other, request) is None
    rig.pass_time(0.2)
    reply = rig.reply(other, request)
    assert isinstance(reply, PutPlans)
    assert refused(reply) == [(0, 8, Outcome.IN_PROGRESS)]


def test_a_put_waits_for_room(rig: Rig, space: OpenedNamespace) -> None:
    space.plans(chain(1, 256))
    other = rig.open("engine", TENANT, "other")
    assert space.begin(chain(2, 4), wait=True, session=other) is None
    request = rig.last_request
    rig.close(rig.engine)
    rig.settle()
    reply = rig.reply(other, request)
    assert isinstance(reply, PutPlans)
    assert granted(reply) == [(0, 4, 0)]


def test_a_put_waits_for_a_worker(space: OpenedNamespace) -> None:
    rig = space.rig
    rig.workers.pop("w1").leave()
    rig.pass_time(4.0)
    assert space.begin(KEYS, wait=True) is None
    request = rig.last_request
    rig.add_worker("w2")
    reply = rig.reply(rig.engine, request)
    assert isinstance(reply, PutPlans)
    assert granted(reply) == [(0, 8, 0)]


def test_a_put_that_cannot_be_right_any_more_is_refused_when_it_is_woken(rig: Rig) -> None:
    space = rig.open_namespace()
    rig.workers.pop("w1").leave()
    rig.pass_time(4.0)
    assert space.begin(KEYS, wait=True) is None
    request = rig.last_request
    # The chain's first page comes in by another way, below another parent.
    rig.add_worker("w2")
    assert isinstance(rig.reply(rig.engine, request), PutPlans)
    other = rig.open("engine", TENANT, "other")
    assert space.begin(KEYS, wait=True, timeout_s=1.0, session=other) is None
    waits = rig.last_request
    waiting_message = next(iter(rig.master.core.sessions[other].owner.waits.values())).message
    assert waiting_message.chains[0].keys == KEYS
    (held,) = rig.master.core.sessions[other].owner.waits.values()
    held.message = msgspec.structs.replace(
        waiting_message, chains=(PutChain(ROOT_PARENT, key(0) + key(0)),)
    )
    rig.pass_time(1.2)
    assert failure(rig.reply(other, waits)).code == "bad_value"


def test_a_put_that_got_something_does_not_wait(space: OpenedNamespace) -> None:
    reply = space.begin(chain(1, 300), wait=True)
    assert isinstance(reply, PutPlans)


def test_a_repeated_waiting_request_is_answered_once(rig: Rig, space: OpenedNamespace) -> None:
    plans = space.plans(KEYS)
    other = rig.open("engine", TENANT, "other")
    for _ in range(2):
        assert space.begin(KEYS, wait=True, request=b"r" * 16, session=other) is None
    request = rig.last_request
    assert len(rig.master.core.waiting) == 1
    space.report(space.write(plans, KEYS))
    assert isinstance(rig.reply(other, request), PutPlans)
    assert rig.reply(other, request - 1) is None


def test_a_closed_connection_waits_no_more(rig: Rig, space: OpenedNamespace) -> None:
    space.plans(KEYS)
    other = rig.open("engine", TENANT, "other", token=b"t")
    rig.open("engine", TENANT, "other", token=b"t")
    assert space.begin(KEYS, wait=True, session=other) is None
    rig.close(other)
    assert len(rig.master.core.waiting) == 0


def test_too_many_waits_are_answered_at_once(
    rig: Rig, space: OpenedNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "WAITING_PUTS_MAX", 2)
    space.plans(KEYS)
    other = rig.open("engine", TENANT, "other")
    assert [space.begin(KEYS, wait=True, session=other) for _ in range(2)] == [None, None]
    assert isinstance(space.begin(KEYS, wait=True, session=other), PutPlans)
    assert rig.master.core.counters["waiting_puts_refused"] == 1


def test_many_waits_are_woken_bit_by_bit(rig: Rig, space: OpenedNamespace) -> None:
    plans = space.plans(KEYS)
    other = rig.open("engine", TENANT, "other")
    for _ in range(waiting.RETRIES_PER_EVENT + 5):
        assert space.begin(KEYS, wait=True, session=other) is None
    space.report(space.write(plans, KEYS))
    assert len(rig.master.core.waiting) == 5
    assert rig.master.next_wakeup(rig.now) == rig.now
    rig.settle()
    assert len(rig.master.core.waiting) == 0


# Sealed.


def test_a_plan_may_be_sealed_in_pieces(rig: Rig, space: OpenedNamespace) -> None:
    plans = space.plans(KEYS)
    (report,) = space.write(plans, KEYS)
    for page in (5, 0, 7, 1, 2, 3, 4):
        assert space.report([piece(report, page)]) == [b"\0"]
    assert space.probe(KEYS) == b"\1\1\1\1\1\1\0\1"
    assert space.report([report]) == [bytes(8)]
    assert space.probe(KEYS) == b"\1" * 8
    assert not rig.master.core.plans


def piece(report: Sealed, page: int, count: int = 1) -> Sealed:
    """The report of some pages alone."""
    stop = page + count
    return msgspec.structs.replace(
        report,
        keys=report.keys[page * 32 : stop * 32],
        offsets=report.offsets[page * 8 : stop * 8],
        checksums=report.checksums[page * 8 : stop * 8],
    )


def test_a_repeated_report_is_acknowledged_again(space: OpenedNamespace) -> None:
    reports = space.write(space.plans(KEYS), KEYS)
    assert space.report(reports) == space.report(reports) == [bytes(8)]


@pytest.mark.parametrize(
    "change",
    [
        {"generation": 99},
        {"part": 1},
        {"namespace_ordinal": 7},
        {"keys": chain(8, 8)},
        {"offsets": bytes(64)},
    ],
)
def test_a_report_that_fits_no_plan_is_closed(
    rig: Rig, space: OpenedNamespace, change: dict[str, object]
) -> None:
    (report,) = space.write(space.plans(KEYS), KEYS)
    changed = msgspec.structs.replace(report, **change)
    outcomes = space.report([changed])[0]
    assert Outcome.PLAN_CLOSED in outcomes
    assert bytes_in(rig, ExtentState.SEALED) <= 4096
    assert set(space.probe(KEYS[KEY_BYTES:])) == {0}


def test_a_report_of_another_life_is_stale(space: OpenedNamespace) -> None:
    (report,) = space.write(space.plans(KEYS), KEYS)
    stale = msgspec.structs.replace(report, incarnation=2)
    assert space.report([stale]) == [bytes([Outcome.STALE]) * 8]


def test_a_report_before_the_inventory_has_to_come_again(rig: Rig, space: OpenedNamespace) -> None:
    (report,) = space.write(space.plans(KEYS), KEYS)
    worker = rig.workers["w1"]
    worker.leave()
    worker.connect()
    assert worker.session is not None
    assert failure(rig.ask(worker.session, report)).code == "unavailable"


def test_reports_come_on_any_connection_of_the_worker(rig: Rig, space: OpenedNamespace) -> None:
    (report,) = space.write(space.plans(KEYS), KEYS)
    data = rig.open("worker", "", "w1")
    assert rig.ask(data, report) == SealedNoted(bytes(8))


def test_nobody_else_may_report(rig: Rig, space: OpenedNamespace) -> None:
    (report,) = space.write(space.plans(KEYS), KEYS)
    stranger = rig.open("worker", "", "w2")
    assert failure(rig.ask(stranger, report)).code == "access_denied"
    assert failure(rig.ask(rig.engine, report)).code == "access_denied"
    unknown = msgspec.structs.replace(report, segment="nowhere")
    assert failure(rig.ask(stranger, unknown)).code == "unavailable"
    for change in ({"keys": b""}, {"offsets": b""}, {"checksums": bytes(9)}):
        bad = msgspec.structs.replace(report, **change)
        session = rig.workers["w1"].session
        assert session is not None
        assert failure(rig.ask(session, bad)).code == "bad_value"


# Puts that stop.


def test_an_aborted_put_is_fenced_and_forgotten(rig: Rig, space: OpenedNamespace) -> None:
    plans = space.plans(KEYS)
    (report,) = space.write(plans, KEYS)
    space.report([piece(report, 0, 3)])
    rig.holds_commands = True
    reply = rig.ask(rig.engine, AbortPut((plans.spans[0].generation, 12345)))
    assert isinstance(reply, Done)
    (command,) = rig.commands
    assert isinstance(command.message, FenceExtents)
    assert len(words(command.message.offsets)) == 5
    assert set(words(command.message.generations)) == {plans.spans[0].generation}
    assert bytes_in(rig, ExtentState.QUARANTINED) == 5 * 4096
    assert space.report([piece(report, 3, 5)]) == [bytes([Outcome.PLAN_CLOSED]) * 5]
    assert space.report([piece(report, 0, 3)]) == [bytes(3)]
    rig.obey_all()
    assert bytes_in(rig, ExtentState.QUARANTINED) == 0
    assert bytes_in(rig, ExtentState.SEALED) == 3 * 4096
    assert rig.master.core.namespaces.get(space.id).tree.pages == 3


def test_too_many_generations_are_refused(rig: Rig) -> None:
    reply = failure(rig.ask(rig.engine, AbortPut(tuple(range(limits.BATCH_PAGES_MAX + 1)))))
    assert "generations" in reply.text


def test_a_dead_writer_leaves_nothing(rig: Rig, space: OpenedNamespace) -> None:
    space.plans(KEYS)
    rig.close(rig.engine)
    assert not rig.master.core.plans
    assert not rig.master.core.owners.keys() & {("engine", TENANT, b"token 1")}
    assert bytes_in(rig, ExtentState.RESERVED) == bytes_in(rig, ExtentState.QUARANTINED) == 0
    assert rig.master.core.namespaces.get(space.id).tree.pages == 0


def test_a_put_without_progress_times_out(rig: Rig, space: OpenedNamespace) -> None:
    plans = space.plans(KEYS)
    rig.pass_time(plans.plan_ttl_s - 0.1)
    assert rig.master.core.plans
    rig.pass_time(0.2)
    assert not rig.master.core.plans
    assert rig.master.core.counters["puts_timed_out"] == 1


def test_progress_keeps_a_put_alive(rig: Rig, space: OpenedNamespace) -> None:
    plans = space.plans(KEYS)
    (report,) = space.write(plans, KEYS)
    for page in range(7):
        rig.pass_time(plans.plan_ttl_s - 0.2)
        space.report([piece(report, page)])
    rig.pass_time(plans.plan_ttl_s - 0.2)
    assert rig.master.core.plans
    rig.pass_time(0.5)
    assert not rig.master.core.plans
    assert space.probe(KEYS) == b"\1" * 7 + b"\0"


def test_a_full_quarantine_stops_puts_into_that_segment_only() -> None:
    rig = Rig(Tunables(quarantine_fraction_max=0.1))
    first = rig.add_worker()
    space = rig.open_namespace()
    plans = space.plans(chain(1, 64))
    rig.holds_commands = True
    rig.ask(rig.engine, AbortPut((plans.spans[0].generation,)))
    assert refused(space.plans(KEYS)) == [(0, 8, Outcome.TOO_MANY_QUARANTINED)]
    assert not rig.master.core.wanted_bytes
    rig.holds_commands = False
    rig.add_worker("w2", chunks=1)
    rig.holds_commands = True
    assert granted(space.plans(KEYS)) == [(0, 8, 0)]
    rig.holds_commands = False
    rig.obey_all()
    assert granted(space.plans(chain(2, 100))) == [(0, 100, 0)]
    assert isinstance(first, FakeWorker)


def test_what_a_reader_holds_does_not_fill_the_quarantine() -> None:
    rig = Rig(Tunables(quarantine_fraction_max=0.1))
    worker = rig.add_worker()
    space = rig.open_namespace()
    plans = space.plans(chain(1, 64))
    space.write(plans, chain(1, 64))
    worker.locked.update(words(plans.spans[0].offsets))
    rig.ask(rig.engine, AbortPut((plans.spans[0].generation,)))
    segment = rig.master.core.segments["w1-dram"]
    assert sum(segment.held.values()) == bytes_in(rig, ExtentState.QUARANTINED) == 64 * 4096
    assert granted(space.plans(KEYS)) == [(0, 8, 0)]
    rig.pass_time(1.0)
    worker.locked.clear()
    rig.pass_time(1.0)
    assert not segment.held
    assert bytes_in(rig, ExtentState.QUARANTINED) == 0


def test_a_lost_workers_puts_fail(rig: Rig, space: OpenedNamespace) -> None:
    space.plans(KEYS)
    rig.workers["w1"].leave()
    rig.pass_time(2.9)
    assert rig.master.core.plans
    rig.pass_time(0.2)
    assert not rig.master.core.plans
    assert bytes_in(rig, ExtentState.QUARANTINED) == 8 * 4096


def test_parts_of_a_page_that_stays_incomplete_are_given_back(rig: Rig) -> None:
    space = rig.open_namespace(parts=2)
    plans = space.put(KEYS, parts=(0,))
    rig.pass_time(plans.plan_ttl_s - 0.5)
    assert bytes_in(rig, ExtentState.SEALED) == 8 * 4096
    rig.pass_time(1.0)
    assert bytes_in(rig, ExtentState.SEALED) == 0
    assert rig.master.core.counters["pages_incomplete"] == 8
    assert rig.master.core.namespaces.get(space.id).tree.pages == 0


def test_parts_wait_for_a_holder_that_is_away_but_not_lost(rig: Rig) -> None:
    space = rig.open_namespace(parts=2)
    plans = space.put(KEYS, parts=(0,))
    rig.pass_time(plans.plan_ttl_s - 0.5)
    rig.workers["w1"].connect()  # its inventory is not compared yet
    rig.pass_time(2.0)
    assert bytes_in(rig, ExtentState.SEALED) == 8 * 4096
    rig.workers["w1"].join()
    rig.pass_time(plans.plan_ttl_s + 0.5)
    assert bytes_in(rig, ExtentState.SEALED) == 0


def test_later_parts_keep_earlier_ones(rig: Rig) -> None:
    space = rig.open_namespace(parts=2)
    plans = space.put(KEYS, parts=(0,))
    rig.pass_time(plans.plan_ttl_s - 0.5)
    second = space.plans(KEYS, parts=(1,))
    rig.pass_time(2.0)
    space.report(space.write(second, KEYS))
    rig.pass_time(20.0)
    assert space.probe(KEYS) == b"\1" * 8
