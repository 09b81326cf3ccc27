"""What drives may be written: pins beside the budget, and a budget that outlives its master."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from kvstore.wire.messages.operator import SetPolicy
from kvstore.wire.messages.pins import PagesPinned, PinPages
from master.restoring import ASIDE
from master.write_budget import KEY
from policies.admission.budget import DAY_S, Budget
from tests.unit import striped_pools
from tests.unit.master_rig import OpenedNamespace, Rig, chain
from tests.unit.pools import PAGE, TIERED, ask, held, put_chains, rig_with

DRIVE = 64 * 16 * PAGE
"""Bytes of the rig's drive."""
BUDGET = replace(
    TIERED, nvme_admission="budget", nvme_admission_parameters={"drive_writes_per_day": 0.05}
)
"""51 pages a day: half of them for any."""


def spent_pages(rig: Rig) -> float:
    """Used up of the budget."""
    return rig.master.core.admission.policy.spent().size_bytes / PAGE


def noted_pages(rig: Rig) -> float:
    """The same, as the next master will read it."""
    return int.from_bytes(rig.store[KEY], "little") / PAGE


def pin(rig: Rig, space: OpenedNamespace, keys: bytes, *, hard: bool) -> None:
    """Pin pages."""
    reply = rig.ask(rig.engine, PinPages(space.id, keys, "o", hard, 600.0))
    assert isinstance(reply, PagesPinned)
    assert all(reply.pinned)


@pytest.mark.parametrize("hard", [False, True])
def test_pinned_pages_are_copied_down_whatever_is_spent(hard: bool) -> None:
    rig, space = rig_with(tunables=BUDGET)
    rig.master.core.admission.begin_with(DRIVE)
    keys = chain(100, 4)
    space.put(keys)
    pin(rig, space, keys[: 3 * 32], hard=hard)
    put_chains(rig, space, range(30))
    there = held(rig, "w1-nvme")
    assert there == {keys[at : at + 32] for at in (0, 32, 64)}, "as far as they are pinned"
    assert space.probe(keys)[:3] == b"\1" * 3
    assert rig.master.core.counters["demotions_refused_budget"]


def test_pages_behind_the_last_pinned_one_are_as_any_others() -> None:
    rig, space = rig_with(tunables=replace(TIERED, nvme_admission="second-touch"))
    keys = chain(100, 4)
    space.put(keys)
    pin(rig, space, keys[:32], hard=True)
    put_chains(rig, space, range(30))
    assert held(rig, "w1-nvme") == {keys[:32]}


def test_a_pool_begins_with_a_whole_budget() -> None:
    rig, space = rig_with(tunables=BUDGET)
    put_chains(rig, space, range(9))
    assert held(rig, "w1-nvme")
    assert spent_pages(rig) == pytest.approx(len(held(rig, "w1-nvme")), abs=0.1)


def test_copies_and_parity_are_spent_as_whatever_else_is_written_to_drives() -> None:
    rig = striped_pools.pool(
        4,
        striped_pools.tunables(
            nvme_admission=BUDGET.nvme_admission,
            nvme_admission_parameters=BUDGET.nvme_admission_parameters,
        ),
    )
    striped_pools.striped(rig)
    parity = sum(stripe.m for stripe in striped_pools.stripes(rig))
    assert parity
    assert spent_pages(rig) == pytest.approx(parity, abs=0.5)


def test_what_is_spent_is_noted_ahead_and_outlives_the_master() -> None:
    rig, space = rig_with(tunables=BUDGET)
    grain = rig.master.core.admission.policy.spent().grain_bytes / PAGE
    for number in range(30):
        put_chains(rig, space, range(number, number + 1))
        if KEY in rig.store:
            assert 0 <= noted_pages(rig) - spent_pages(rig) <= 4 * grain
    spent, noted = spent_pages(rig), noted_pages(rig)
    assert spent > 20
    rig.takeover(2)
    assert spent <= spent_pages(rig) == noted
    rig.workers["w1"].join()
    rig.now += 10_000.0  # the next master's clock is of another host
    put_chains(rig, space, range(30, 31))
    assert spent_pages(rig) >= noted, "its time begins with the first question"


def test_notes_are_few_and_follow_what_is_made_up_for() -> None:
    rig, _ = rig_with(tunables=BUDGET)
    admission = rig.master.core.admission
    policy = admission.policy
    assert isinstance(policy, Budget)
    rate = policy.bytes_per_s
    assert admission.to_note() is None, "nothing is spent"
    notes = []
    for pages in range(1, 200):
        policy.begin_with(pages * PAGE / 10)
        notes.append(admission.to_note())
    made = [note for note in notes if note is not None]
    assert len(made) <= 199 * PAGE / 10 / (rate * DAY_S / 100) + 1
    assert made == sorted(made)
    policy.begin_with(0.0)
    note = admission.to_note()
    assert note is not None
    assert 0 < note < made[0] * 2


def test_another_policy_and_back_is_no_new_budget() -> None:
    rig, space = rig_with(tunables=BUDGET)
    put_chains(rig, space, range(30))
    noted = noted_pages(rig)
    ask(rig, SetPolicy("admission", "all", {}))
    ask(rig, SetPolicy("admission", "budget", {}))
    assert spent_pages(rig) == noted


@pytest.mark.parametrize("value", [b"", b"1234567", b"123456789", b"\xff" * 8])
def test_without_a_value_of_ours_the_bucket_is_full(value: bytes) -> None:
    rig, space = rig_with(tunables=BUDGET)
    put_chains(rig, space, range(30))
    assert spent_pages(rig) > 20
    rig.store[KEY] = value
    rig.takeover(2)
    assert rig.master.damaged == [KEY]
    assert spent_pages(rig) == 0
    rig.workers["w1"].join()
    put_chains(rig, rig.open_namespace(), range(30, 40))
    assert 0 < spent_pages(rig) <= noted_pages(rig)
    assert rig.store[ASIDE + KEY] == value


def test_a_drive_that_is_nearly_full_costs_what_it_takes() -> None:
    often = replace(BUDGET, nvme_admission_parameters={"drive_writes_per_day": 20.0})
    rig, space = rig_with(nvme_chunks=2, tunables=often)
    put_chains(rig, space, range(60), pages=5)
    counters = rig.master.core.counters
    assert counters["pages_evicted_nvme"] > 50, "it was full most of the time"
    assert spent_pages(rig) == pytest.approx(counters["moved_pages_nvme"], abs=1)
