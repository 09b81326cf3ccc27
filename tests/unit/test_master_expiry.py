"""How long pages live: by whose TTL, with what hangs below them, after a split and a takeover."""

from __future__ import annotations

from math import inf

import pytest

from kvstore.ids import KEY_BYTES
from kvstore.wire.messages.namespaces import OpenNamespace
from kvstore.wire.messages.puts import BeginPut, PutChain
from master.chunk_values import PREFIX
from master.tunables import Tunables
from master.write_behind import CLOCK_EVERY_S
from tests.unit.master_rig import (
    OpenedNamespace,
    Rig,
    chain,
    failure,
    small_content,
    small_layout,
)

KEYS = chain(1, 8)
LATE_S = 0.5
"""Later than a grain of the wheel."""


def pool(page_ttl_s: float = 4.0, page_age_max_s: float = 100.0) -> tuple[Rig, OpenedNamespace]:
    """A pool whose pages live so long."""
    rig = Rig(Tunables("test", page_ttl_s=page_ttl_s, page_age_max_s=page_age_max_s))
    rig.add_worker()
    return rig, rig.open_namespace()


def live_for(rig: Rig, ttl_s: float | None) -> None:
    """Open the namespace again, with this TTL."""
    rig.ask(rig.engine, OpenNamespace(small_content(), small_layout(), ttl_s))


def test_the_puts_ttl_counts_before_the_namespaces_and_that_before_the_masters() -> None:
    rig, space = pool(page_ttl_s=4.0)
    space.put(chain(1, 1))
    live_for(rig, 8.0)
    live_for(rig, None)
    space.put(chain(2, 1))
    space.put(chain(3, 1), ttl_s=12.0)
    keys = chain(1, 1) + chain(2, 1) + chain(3, 1)
    for want in (b"\1\1\1", b"\0\1\1", b"\0\0\1", b"\0\0\0"):
        assert space.probe(keys) == want
        rig.pass_time(4.0 + LATE_S)


def test_use_moves_expiry_on_up_to_the_maximum_age() -> None:
    rig, space = pool(page_ttl_s=4.0, page_age_max_s=10.0)
    space.put(KEYS)
    for _ in range(4):
        rig.pass_time(2.0)
        assert space.match(KEYS, lease=False).runs
    rig.pass_time(2.0 + LATE_S)
    assert space.probe(KEYS) == bytes(8)


@pytest.mark.parametrize("whose", ["put", "namespace", "master"])
def test_pages_may_live_for_ever(whose: str) -> None:
    rig, space = pool(page_ttl_s=inf if whose == "master" else 4.0, page_age_max_s=10.0)
    if whose == "namespace":
        live_for(rig, inf)
    space.put(KEYS, ttl_s=inf if whose == "put" else None)
    rig.pass_time(20.0)
    space.match(KEYS, lease=False)
    rig.pass_time(20.0)
    assert space.probe(KEYS) == b"\1" * 8
    space.remove(KEYS)
    assert space.probe(KEYS) == bytes(8)


def test_a_page_lives_as_long_as_what_hangs_below_it() -> None:
    rig, space = pool()
    parent, child, leaf = (KEYS[i * KEY_BYTES : (i + 1) * KEY_BYTES] for i in range(3))
    space.put(parent, ttl_s=2.0)
    space.put(child, parent, ttl_s=8.0)
    space.put(leaf, child, ttl_s=4.0)
    rig.pass_time(4.0 + LATE_S)
    assert space.probe(KEYS) == b"\1\1" + bytes(6)
    rig.pass_time(4.0)
    assert space.probe(KEYS) == bytes(8)


def test_both_halves_of_a_split_keep_their_time() -> None:
    rig, space = pool()
    space.put(KEYS, ttl_s=4.0)
    rig.pass_time(2.0)
    space.match(KEYS[: 4 * KEY_BYTES], lease=False)  # splits, and uses the first half
    rig.pass_time(2.0 + LATE_S)
    assert space.probe(KEYS) == b"\1" * 4 + bytes(4)
    rig.pass_time(2.0)
    assert space.probe(KEYS) == bytes(8)


def test_a_put_of_pages_that_are_there_makes_them_live_as_long_as_it_asks() -> None:
    rig, space = pool()
    space.put(KEYS)
    assert not space.plans(KEYS[: 3 * KEY_BYTES], ttl_s=inf).spans
    assert not space.plans(KEYS[: 5 * KEY_BYTES], ttl_s=2.0).spans  # not less than before
    rig.pass_time(4.0 + LATE_S)
    assert space.probe(KEYS) == b"\1" * 3 + bytes(5)


def test_after_a_takeover_lives_go_on_where_they_were() -> None:
    rig, space = pool()
    space.put(KEYS[:KEY_BYTES], ttl_s=30.0)
    space.put(chain(2, 1), ttl_s=inf)
    space.put(chain(3, 1), ttl_s=15.0)
    rig.pass_time(10.0)
    rig.now += 1000.0  # in which nobody leads
    rig.takeover(2)
    rig.workers["w1"].join()
    rig.settle()
    run = rig.master.core.tree(1).get(KEYS[:KEY_BYTES])
    assert run is not None
    assert run.ttl_s == 30.0
    # Pool time is not stored all the time.
    left_s = run.expires_s - rig.now
    assert 20.0 <= left_s <= 20.0 + CLOCK_EVERY_S
    assert run.created_s - rig.now == pytest.approx(left_s - 30.0)
    everything = KEYS[:KEY_BYTES] + chain(2, 1) + chain(3, 1)
    rig.pass_time(CLOCK_EVERY_S + 10.0)  # what is left of the third, and leases that may run
    assert space.probe(everything) == b"\1\1\0"
    rig.pass_time(10.0 + LATE_S)
    assert space.probe(everything) == b"\0\1\0"


def test_use_after_a_takeover_counts_and_so_does_age_before_it() -> None:
    rig, space = pool(page_age_max_s=40.0)
    space.put(KEYS, ttl_s=30.0)
    rig.pass_time(20.0)
    rig.takeover(2)
    rig.workers["w1"].join()
    rig.pass_time(5.0)
    space.match(KEYS, lease=False)
    rig.pass_time(10.0)
    assert space.probe(KEYS) == b"\1" * 8
    rig.pass_time(CLOCK_EVERY_S + 5.0 + LATE_S)
    assert space.probe(KEYS) == bytes(8)


def test_pages_that_were_only_read_for_long_are_kept_by_a_takeover() -> None:
    rig, space = pool()
    space.put(KEYS, ttl_s=8.0)
    space.put(chain(2, 1), ttl_s=8.0)
    for _ in range(12):
        rig.pass_time(4.0)
        space.match(KEYS, lease=False)  # which nobody stores
    rig.takeover(2)
    rig.workers["w1"].join()
    run = rig.master.core.tree(1).get(KEYS[:KEY_BYTES])
    assert run is not None
    assert run.expires_s == rig.now + 8.0
    assert space.probe(KEYS + chain(2, 1)) == b"\1" * 8 + b"\0"


def test_pages_of_which_nothing_is_stored_begin_anew_with_their_namespaces_ttl() -> None:
    rig, space = pool()
    live_for(rig, 20.0)
    space.put(KEYS[:KEY_BYTES])
    space.put(chain(2, 1), ttl_s=inf)
    rig.pass_time(10.0)
    for key in [key for key in rig.store if key.startswith(PREFIX)]:
        del rig.store[key]
    rig.takeover(2)
    rig.workers["w1"].join()
    rig.settle()
    rig.pass_time(15.0)
    assert space.probe(KEYS[:KEY_BYTES] + chain(2, 1)) == b"\1\1"
    rig.pass_time(5.0 + LATE_S)
    assert space.probe(KEYS[:KEY_BYTES] + chain(2, 1)) == b"\0\0"


@pytest.mark.parametrize("wrong", [0.0, -1.0, 0.5, 1e9, float("nan"), -inf])
def test_a_ttl_that_is_never_right_is_named(wrong: float) -> None:
    rig, space = pool()
    message = BeginPut(
        bytes(16), space.id, (PutChain(bytes(32), KEYS),), (0,), (4096,), 1.0, ttl_s=wrong
    )
    reply = failure(rig.ask(rig.engine, message))
    assert reply.text == f"ttl_s: got {wrong!r}, want 1.0 to 604800.0 seconds, or inf"
