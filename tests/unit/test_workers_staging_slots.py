"""Slots of the staging segment: found again, reused in order, cut anew, given back."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hypothesis import given, settings
from hypothesis import strategies as st

from kvstore.limits import STAGING_LEASE_S
from kvstore.segment import check_geometry
from tests.unit.worker_scripts import CHUNK, PAGE
from workers.events import ExtentGroup, Stretch
from workers.staging_slots import PageId, Slots, SlotState

if TYPE_CHECKING:
    from workers.staging_slots import Slot

ME, YOU = 1, 2
FRAME = CHUNK // 4
LARGE = CHUNK // 2
"""A class with two extents a chunk."""


def page(number: int) -> PageId:
    return PageId("w-nvme0", b"key of %d" % number, 0, number)


def made(chunks: int = 1) -> Slots:
    return Slots("w-staging", check_geometry(chunks * CHUNK, CHUNK))


def filled(
    slots: Slots, number: int, now_s: float = 0.0, session: int = ME, size_class: int = LARGE
) -> Slot | None:
    """Stage a page as the shell does; None where there is no room."""
    candidate = slots.candidate(size_class, now_s)
    if candidate is None:
        return None
    slots.begin(candidate.slot, page(number), session)
    slots.staged(candidate.slot, now_s)
    slots.check_invariants()
    return candidate.slot


def must(slot: Slot | None) -> Slot:
    assert slot is not None
    return slot


def test_a_page_is_found_while_it_loads_and_afterwards() -> None:
    slots = made()
    candidate = slots.candidate(LARGE, 0.0)
    assert candidate is not None
    slots.begin(candidate.slot, page(1), ME)
    assert slots.find(page(1)) is candidate.slot
    slots.use(candidate.slot, YOU, 0.0)
    slots.staged(candidate.slot, 0.0)
    slots.release(ME, candidate.slot.offset, candidate.slot.generation)
    slots.check_invariants()
    assert slots.find(page(1)) is candidate.slot
    assert slots.find(page(2)) is None
    assert not slots.holds(ME)
    assert slots.holds(YOU)


def test_a_slot_with_users_is_not_reused_before_its_time() -> None:
    slots = made()
    first, second = must(filled(slots, 1, 0.0)), must(filled(slots, 2, 1.0))
    assert filled(slots, 3, STAGING_LEASE_S - 0.1) is None
    assert slots.next_end_s() == STAGING_LEASE_S
    assert filled(slots, 3, STAGING_LEASE_S) is first
    assert filled(slots, 4, STAGING_LEASE_S) is None
    assert filled(slots, 4, STAGING_LEASE_S + 1.0) is second


def test_being_told_of_a_page_again_renews_its_time() -> None:
    slots = made()
    first, second = must(filled(slots, 1)), must(filled(slots, 2))
    slots.use(first, YOU, 1.0)
    assert filled(slots, 3, STAGING_LEASE_S) is second
    slots.release(ME, second.offset, second.generation)
    slots.release(YOU, first.offset, first.generation)
    assert filled(slots, 4, STAGING_LEASE_S + 0.5) is second
    # The first session of the first slot is not done with it.
    assert filled(slots, 5, STAGING_LEASE_S + 0.5) is None


def test_released_slots_are_reused_longest_unused_first() -> None:
    slots = made()
    first, second = must(filled(slots, 1)), must(filled(slots, 2))
    slots.release(ME, second.offset, second.generation)
    slots.release(ME, first.offset, first.generation)
    assert filled(slots, 3) is second
    assert slots.find(page(1)) is first
    assert slots.find(page(2)) is None


def test_late_strange_and_repeated_releases_change_nothing() -> None:
    slots = made()
    first = must(filled(slots, 1))
    old = first.generation
    slots.release(YOU, first.offset, old)
    slots.release(ME, first.offset, old + 7)
    slots.release(ME, 99, old)
    assert slots.holds(ME)
    slots.release(ME, first.offset, old)
    must(filled(slots, 2, session=YOU))
    assert filled(slots, 3, session=ME) is first
    slots.release(ME, first.offset, old)
    slots.check_invariants()
    assert slots.holds(ME)


def test_a_session_that_ends_gives_all_its_slots_back() -> None:
    slots = made()
    first = must(filled(slots, 1))
    must(filled(slots, 2))
    slots.use(first, YOU, 0.0)
    slots.forget(ME)
    slots.forget(ME)
    slots.check_invariants()
    assert must(filled(slots, 3)).page == page(3)
    assert slots.find(page(1)) is first
    assert slots.find(page(2)) is None


def test_a_slot_that_could_not_be_loaded_is_free_at_once() -> None:
    slots = made()
    candidate = slots.candidate(LARGE, 0.0)
    assert candidate is not None
    slots.begin(candidate.slot, page(1), ME)
    slots.use(candidate.slot, YOU, 0.0)
    slots.failed(candidate.slot)
    slots.check_invariants()
    assert slots.find(page(1)) is None
    assert not slots.holds(YOU)
    assert filled(slots, 2) is candidate.slot


def test_a_slot_that_a_view_locks_keeps_its_page_and_its_turn_is_over() -> None:
    slots = made()
    first, second = must(filled(slots, 1)), must(filled(slots, 2))
    slots.forget(ME)
    candidate = slots.candidate(LARGE, 1.0)
    assert candidate is not None
    assert candidate.slot is first
    slots.viewed(first, 1.0)
    slots.check_invariants()
    assert slots.find(page(1)) is first
    assert filled(slots, 3, 1.0) is second
    assert filled(slots, 4, 1.0) is None
    assert filled(slots, 4, 1.0 + STAGING_LEASE_S) is first


def test_a_generation_is_never_used_twice() -> None:
    slots = made()
    seen = set()
    for number in range(20):
        seen.add(must(filled(slots, number)).generation)
        slots.forget(ME)
    assert len(seen) == 20


def test_another_class_gets_what_was_used_longest_ago() -> None:
    slots = made(chunks=2)
    for number in range(4):
        must(filled(slots, number))
    assert slots.candidate(PAGE, 0.0) is None
    slots.forget(ME)
    for number in (0, 1):
        slot = must(slots.find(page(number)))
        slots.use(slot, ME, 0.0)
        slots.release(ME, slot.offset, slot.generation)
    candidate = slots.candidate(PAGE, 0.0)
    assert candidate is not None
    assert candidate.slot.offset == CHUNK
    want = ExtentGroup("w-staging", LARGE, (Stretch(0, 2, CHUNK, 0, CHUNK),))
    assert candidate.cut_up == (want,)
    slots.begin(candidate.slot, page(9), ME)
    slots.staged(candidate.slot, 0.0)
    slots.check_invariants()
    assert [slots.find(page(n)) is None for n in range(4)] == [False, False, True, True]
    # The rest of the new chunk is taken before anything else goes.
    second = must(filled(slots, 10, size_class=PAGE))
    assert second.offset == CHUNK + PAGE


def test_a_view_of_an_older_cut_keeps_its_bytes() -> None:
    slots = made()
    must(filled(slots, 1))
    slots.forget(ME)
    candidate = slots.candidate(PAGE, 0.0)
    assert candidate is not None
    slots.viewed(candidate.slot, 0.0)
    slots.check_invariants()
    assert must(filled(slots, 2, size_class=PAGE)).offset == PAGE
    assert candidate.slot.state is SlotState.STAGED
    assert candidate.slot.page is None


OPERATIONS = st.lists(
    st.tuples(
        st.sampled_from(["fill", "fail", "view", "use", "release", "forget", "wait"]),
        st.integers(0, 11),
        st.sampled_from([PAGE, FRAME, LARGE, CHUNK]),
    ),
    max_size=60,
)


@settings(max_examples=200)
@given(OPERATIONS)
def test_a_page_in_use_is_never_overwritten(operations: list[tuple[str, int, int]]) -> None:
    """Whoever was told of a page finds it there, unless done, gone or out of time."""
    slots, now_s = made(chunks=2), 0.0
    told: dict[tuple[int, int], tuple[PageId, int, int, float]] = {}
    for name, number, size_class in operations:
        session = number % 3 + 1
        found = slots.find(page(number))
        if name in ("fill", "fail", "view") and found is None:
            candidate = slots.candidate(size_class, now_s)
            if candidate is not None and name == "view":
                slots.viewed(candidate.slot, now_s)
            elif candidate is not None:
                slots.begin(candidate.slot, page(number), session)
                if name == "fail":
                    slots.failed(candidate.slot)
                else:
                    slots.staged(candidate.slot, now_s)
                    found = candidate.slot
        if found is not None and name in ("fill", "use"):
            slots.use(found, session, now_s)
            end_s = now_s + STAGING_LEASE_S
            told[session, number] = (page(number), found.offset, found.generation, end_s)
        elif name == "release" and (session, number) in told:
            _, offset, generation, _ = told.pop((session, number))
            slots.release(session, offset, generation)
        elif name == "forget":
            slots.forget(session)
            told = {key: value for key, value in told.items() if key[0] != session}
        elif name == "wait":
            now_s += 0.7
        slots.check_invariants()
        for each, offset, generation, end_s in told.values():
            if now_s < end_s:
                slot = must(slots.find(each))
                assert (slot.offset, slot.generation) == (offset, generation)
