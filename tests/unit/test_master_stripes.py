"""The book of stripes: durable values, what finds whom, and what would take pages for others."""

from __future__ import annotations

import random

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstore.checksummed import checksummed
from kvstore.errors import CorruptPage, InvariantBroken
from kvstore.limits import SHARDS_MAX
from master.packed import word
from master.stripes import PREFIX, Member, Stripe, Stripes, pack, parity_key, unpack
from master.wheel import Wakeup
from tests.unit.striped_pools import data_of, holder, lose, pool, striped, stripes, tunables


def a_stripe(number: int = 7, k: int = 2, m: int = 1, seed: int = 1) -> Stripe:
    draw = random.Random(seed)
    members = tuple(
        Member(draw.randrange(1 << 32), draw.randrange(1 << 16), draw.randbytes(32),
               draw.randrange(1 << 64))
        for _ in range(k + m)
    )  # fmt: skip
    return Stripe(number, k, m, 4096, members, is_durable=True)


def same(one: Stripe, other: Stripe) -> bool:
    return msgspec.structs.astuple(one) == msgspec.structs.astuple(other)


@given(
    number=st.integers(1, 2**64 - 1), k=st.integers(1, 16), m=st.integers(1, 16),
    seed=st.integers(0, 2**32),
)  # fmt: skip
def test_a_value_gives_the_stripe_again(number: int, k: int, m: int, seed: int) -> None:
    print("seed", seed)
    stripe = a_stripe(number, k, m, seed)
    assert same(unpack(pack(stripe)), stripe)


@given(at=st.integers(0, 10**6), bit=st.integers(0, 7))
def test_a_damaged_value_is_none(at: int, bit: int) -> None:
    value = bytearray(pack(a_stripe()))
    value[at % len(value)] ^= 1 << bit
    with pytest.raises(CorruptPage):
        unpack(bytes(value))


@pytest.mark.parametrize("value", [
    b"", b"short", checksummed(b""), checksummed(b"x" * 20), checksummed(pack(a_stripe())[:-9]),
    pack(a_stripe(k=SHARDS_MAX)), pack(a_stripe(k=0, m=2)), pack(a_stripe(k=2, m=0)),
])  # fmt: skip
def test_what_is_no_value_is_refused(value: bytes) -> None:
    with pytest.raises(CorruptPage):
        unpack(value)


def test_members_are_found_by_namespace_part_and_key_until_it_is_gone() -> None:
    book, stripe = Stripes(Wakeup()), a_stripe()
    book.add(stripe)
    for number, member in enumerate(stripe.members):
        assert book.find(member.namespace, member.part, member.key) is stripe
        assert book.find(member.namespace, member.part + 1, member.key) is None
        assert stripe.number_of(member.key, member.part, member.namespace) == number
    book.check()
    book.remove(stripe)
    assert not book
    member = stripe.members[0]
    assert book.find(member.namespace, member.part, member.key) is None
    book.check()


def test_spare_hosts_are_told_by_page() -> None:
    book, stripe = Stripes(Wakeup()), a_stripe()
    member = stripe.members[0]
    assert book.spare(member.namespace, member.part, member.key) == b""
    book.add(stripe)
    stripe.spare = 2
    keys = b"x" * 32 + member.key
    assert book.spare(member.namespace, member.part, keys) == b"\0\2"


def test_parity_has_keys_of_its_own() -> None:
    keys = {parity_key(stripe, number) for stripe in (1, 11) for number in (1, 11)}
    assert len(keys) == 4


def test_a_round_comes_by_every_stripe() -> None:
    book = Stripes(Wakeup())
    for number in range(1, 8):
        book.add(a_stripe(number, seed=number))
    seen = [s.number for _ in range(3) for s in book.next_of_round(3)]
    assert sorted(seen) == list(range(1, 8))
    assert len(list(book.next_of_round(3))) == 3, "and another begins"


def test_a_value_of_another_stripe_or_of_pages_of_another_is_set_aside() -> None:
    book, stripe = Stripes(Wakeup()), a_stripe()
    with pytest.raises(CorruptPage, match="holds stripe 7"):
        book.restore(PREFIX + "8", pack(stripe))
    book.restore(PREFIX + "7", pack(stripe))
    twin = a_stripe(number=9)
    with pytest.raises(CorruptPage, match="in another stripe"):
        book.restore(PREFIX + "9", pack(twin))


def test_a_damaged_value_costs_the_parity_and_no_page() -> None:
    rig = pool(4)
    keys = striped(rig)
    key = PREFIX + str(stripes(rig)[0].number)
    rig.store[key] = rig.store[key][:-1] + b"?"
    count = len(stripes(rig))
    rig.takeover(2)
    for worker in rig.workers.values():
        worker.join()
    assert len(stripes(rig)) == count - 1
    assert rig.master.damaged == [key]
    assert rig.open_namespace().probe(b"".join(keys)) == b"\1" * len(keys)


def test_the_index_that_forgets_a_member_is_noticed() -> None:
    """I37, broken on purpose."""
    rig = pool(4)
    striped(rig)
    member = stripes(rig)[0].members[0]
    book = rig.master.core.stripes
    del book._members[member.namespace, member.part][member.key]  # noqa: SLF001 -- to break it
    with pytest.raises(InvariantBroken, match="I37"):
        rig.master.check_invariants()


@pytest.mark.parametrize("column", ["generations", "checksums"])
def test_a_page_that_another_stripe_would_give_is_noticed(column: str) -> None:
    """I37, broken on purpose."""
    rig = pool(4, tunables(repair_after_s=1e6))
    striped(rig)
    one, other = stripes(rig)[:2]
    lose(rig, holder(rig, one, 0))
    run = rig.master.core.tree(1).get(data_of(one)[0])
    assert run is not None
    copy = next(c for c in run.copies if c.segment is rig.master.core.stripes.place)
    value = word(other.number if column == "generations" else 5)
    setattr(copy, column, value)
    with pytest.raises(InvariantBroken, match="I37"):
        rig.master.check_invariants()
