"""What is checked and prepared before a call sends anything, and how asyncio waits for threads."""

from __future__ import annotations

import asyncio
import threading
from contextlib import suppress

import msgspec
import numpy as np
import pytest

from kvstore import limits
from kvstore.client import checks, staging
from kvstore.client.async_connected import in_thread
from kvstore.client.calls import Calls, check_source
from kvstore.client.namespaces import OpenedNamespace
from kvstore.client.outcomes import PutOutcome, Refused, RefusedReason, Stored
from kvstore.client.steps import drive
from kvstore.client.writes import PutWishes
from kvstore.errors import BadValue, BufferClosed, LayoutMismatch, OutOfSpace
from kvstore.namespace import NAME_PART, NAME_PART_BYTES, opaque
from kvstore.page import PageChain
from kvstore.transfer.buffer import Buffer
from kvstore.transfer.memory import Memory
from kvstore.wire.messages.namespaces import NamespaceOpened, OpenNamespace
from tests.fakes import ManualClock
from tests.unit.client_scripts import Script, opened

WISHES = PutWishes()
SIZE = 4096


def calls() -> Calls:
    return Calls(ManualClock(), 10.0)


def test_the_usual_deadline_leaves_time_for_the_bytes() -> None:
    space = opened(part_bytes=4 << 20)
    chain = space.chain(range(64 * 4))
    prepared = calls()
    request = prepared.put_request(space, chain, {0: range(64)}, None, WISHES)
    want_s = prepared.clock.now_s() + 10.0 + (64 * (4 << 20)) / limits.PUT_BYTES_PER_S_MIN
    assert request.deadline_s == pytest.approx(want_s)
    told = prepared.put_request(space, chain, {0: range(64)}, None, PutWishes(timeout_s=3.0))
    assert told.deadline_s == prepared.clock.now_s() + 3.0


def test_a_namespace_is_asked_for_once_but_for_its_ttl() -> None:
    space, script, prepared = opened(), Script(), calls()
    script.will(*[NamespaceOpened(space.namespace.id, 7)] * 3)
    for ttl_s in (None, None, 60.0, 60.0, None):
        assert drive(prepared.open_steps(space.namespace, ttl_s), script) == space
    content, layout = space.namespace.content, space.namespace.layout
    assert script.asked == [OpenNamespace(content, layout, each) for each in (None, 60.0, 60.0)]


def test_what_is_wished_of_replicas_is_told_each_time() -> None:
    space, script, prepared = opened(), Script(), calls()
    script.will(*[NamespaceOpened(space.namespace.id, 7)] * 3)
    for replicas in (2, 0, 2, 3):
        assert drive(prepared.open_steps(space.namespace, None, replicas), script) == space
    content, layout = space.namespace.content, space.namespace.layout
    wanted = [OpenNamespace(content, layout, None, replicas) for replicas in (2, 2, 3)]
    assert script.asked == wanted


def test_what_a_put_wishes_of_replicas_reaches_its_plan() -> None:
    prepared, space, chain = calls(), opened(), PageChain(bytes(range(32)))
    wishes = PutWishes(replicas=3, strict=True, replicas_now=True)
    request = prepared.put_request(space, chain, {0: [0]}, None, wishes)
    assert (request.replicas, request.strict, request.replicas_now) == (3, True, True)
    assert PutWishes() == WISHES == PutWishes(replicas=0, strict=False, replicas_now=False)


@pytest.mark.parametrize("timeout_s", [0.0, -1.0, float("nan"), float("inf"), 1e9])
def test_a_deadline_that_is_none_is_refused(timeout_s: float) -> None:
    with pytest.raises(BadValue, match="timeout_s"):
        checks.check_timeout(timeout_s)


def test_a_wish_for_an_unknown_tier_is_refused() -> None:
    prepared, space, chain = calls(), opened(), PageChain(bytes(range(32)))
    request = prepared.put_request(space, chain, {0: [0]}, None, PutWishes(tier="hbm"))
    assert request.tier == "hbm"
    for tier in ("HBM", "gpu"):
        with pytest.raises(BadValue, match=f"tier: got {tier!r}"):
            prepared.put_request(space, chain, {0: [0]}, None, PutWishes(tier=tier))


def test_sizes_follow_from_the_layout_or_are_named() -> None:
    space = opened(tensor_parallel=2)
    assert checks.part_size(space, 1, None) == SIZE
    with pytest.raises(BadValue, match="part: got 2, want 0 to 1"):
        checks.part_size(space, 2, None)
    with pytest.raises(LayoutMismatch, match="got 100 bytes, layout gives 4096"):
        checks.part_size(space, 0, 100)
    objects = OpenedNamespace(opaque("tests", "objects"), 1)
    assert checks.part_size(objects, 0, 12_345) == 12_345
    with pytest.raises(BadValue, match="size_bytes"):
        checks.part_size(objects, 0, None)
    with pytest.raises(BadValue, match="part_bytes"):
        checks.part_size(objects, 0, limits.CHUNK_BYTES + 1)
    with pytest.raises(BadValue, match=r"size_bytes: got 1\.5"):
        checks.part_size(objects, 0, 1.5)  # type: ignore[arg-type]  # callers do not all check


def test_names_are_put_where_they_are_kept_and_only_there() -> None:
    plain = OpenedNamespace(opaque("tests", "objects"), 1)
    named = OpenedNamespace(opaque("tests", "objects", keeps_names=True), 2)
    assert checks.object_offsets(plain, [0], None) == {0: [0]}
    places = checks.object_offsets(named, [0], [64])
    assert places == {0: [0], NAME_PART: [64]}
    request = calls().put_request(named, named.names([b"n"]), places, 50, WISHES)
    assert [each.part_bytes for each in request.sources] == [50, NAME_PART_BYTES]
    with pytest.raises(BadValue, match="name_offsets: got None, want one for each object"):
        checks.object_offsets(named, [0], None)
    with pytest.raises(BadValue, match="want None: none are kept"):
        checks.object_offsets(plain, [0], [64])


def test_offsets_are_whole_numbers() -> None:
    assert checks.check_offsets(list(np.arange(2)), 2) == (0, 1)
    for wrong in ([0.0, 1.0], ["a", "b"], [None, None]):
        with pytest.raises(BadValue, match=r"offsets: got .*, want whole numbers"):
            checks.check_offsets(wrong, 2)  # type: ignore[arg-type]  # as above


def test_buffers_are_bounded_and_belong_to_one_store(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "BUFFERS_PER_SESSION_MAX", 3)
    mine, others = calls(), calls()
    held = [mine.buffer(100) for _ in range(3)]
    with pytest.raises(OutOfSpace, match="3 buffers are open"):
        mine.buffer(100)
    held[0].close()
    held.append(mine.buffer(100))
    assert len({each.number for each in held}) == 4
    with pytest.raises(BufferClosed), others.memory("source", held[1], writable=False):
        pass
    with mine.memory("source", held[1], writable=True) as memory:
        assert isinstance(memory, Memory)
        assert memory.buffer is held[1]
    mine.close()
    assert all(each.closed for each in held)


def test_foreign_memory_is_staged_slice_by_slice(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(staging, "STAGING_BYTES", 3 * 2 * SIZE)
    space = opened(tensor_parallel=2)
    chain = space.chain(range(8 * 4))
    source = bytearray(16 * SIZE)
    script = Script()
    for part in (0, 1):
        places = [(2 * i + part) * SIZE for i in range(8)]
        script.fill(chain, places, SIZE, part)
    source[:] = script.memory.view[: len(source)]
    memory = Memory.of("source", source, writable=False)
    prepared = calls()
    offsets = {part: [(2 * i + part) * SIZE for i in range(8)] for part in (0, 1)}
    request = prepared.put_request(space, chain, offsets, None, WISHES)
    check_source(request, memory)
    seen = 0
    for some in prepared.staging.slices(request, memory):
        filled = some.fill()
        assert filled.chain == chain.slice(seen, seen + filled.pages)
        for each in filled.sources:
            for key, place in zip(filled.chain, each.places, strict=True):
                start = offsets[each.part][seen + filled.chain.packed.find(key) // 32]
                assert some.memory.view[place : place + SIZE] == source[start : start + SIZE]
        seen += filled.pages
    assert seen == 8
    assert len(list(prepared.staging.slices(request, memory))) == 3
    prepared.close()


def test_a_spare_that_is_too_small_is_closed() -> None:
    prepared = calls()
    spares = staging.SpareBuffers(prepared.buffer)
    with spares.take(SIZE) as small:
        pass
    with spares.take(SIZE) as again:
        assert again is small
    with spares.take(2 * SIZE) as large:
        assert small.closed  # or workers that attached it would hold it for ever
        assert large.size_bytes == 2 * SIZE
    spares.close()
    assert large.closed


def test_threads_that_take_the_last_spare_at_once_get_two_buffers() -> None:
    made: list[int] = []
    prepared = calls()

    class Taken(list[Buffer]):
        """The list as a thread sees it whose last spare another has just taken."""

        def __len__(self) -> int:
            return 1

    def new_buffer(size_bytes: int) -> Buffer:
        made.append(size_bytes)
        return prepared.buffer(size_bytes)

    spares = staging.SpareBuffers(new_buffer)
    spares._idle = Taken()  # noqa: SLF001 — no thread can be stopped between look and pop
    with spares.take(SIZE):
        assert made == [SIZE]
    prepared.close()


def test_a_refused_slice_ends_a_chain_but_not_named_objects() -> None:
    space, objects = opened(), OpenedNamespace(opaque("tests", "objects"), 1)
    refused: list[PutOutcome] = [Stored(), Refused(RefusedReason.OUT_OF_SPACE)]
    prepared = calls()
    request = prepared.put_request(space, space.chain(range(16)), {0: range(4)}, None, WISHES)
    outcomes = list(refused)
    assert staging.is_stopped(request, outcomes)
    assert outcomes == [Stored(), *[Refused(RefusedReason.OUT_OF_SPACE)] * 3]
    names = msgspec.structs.replace(request, opened=objects)
    assert not staging.is_stopped(names, list(refused))
    assert not staging.is_stopped(request, [Stored()])


def test_a_cancelled_transfer_is_waited_for() -> None:
    async def work() -> bool:
        entered, leave, ended = threading.Event(), threading.Event(), threading.Event()

        def transfer() -> None:
            entered.set()
            leave.wait()
            ended.set()

        task = asyncio.create_task(in_thread(transfer))
        await asyncio.to_thread(entered.wait)
        task.cancel()
        await asyncio.sleep(0)
        task.cancel()
        await asyncio.sleep(0)
        assert not task.done(), "the caller's memory is still being written"
        leave.set()
        with suppress(asyncio.CancelledError):
            await task
        return ended.is_set() and task.cancelled()

    assert asyncio.run(work())


def test_masters_are_named_in_a_list_or_in_one_text() -> None:
    both = ["a:1", "unix:/b"]
    assert checks.master_addresses("a:1,unix:/b") == both
    assert checks.master_addresses(both) == both
    with pytest.raises(BadValue, match="masters"):
        checks.master_addresses(7)  # type: ignore[arg-type]  # as untyped callers may
