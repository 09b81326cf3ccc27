"""Who goes on from a prompt's KV, and which request is served first."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstore.errors import BadValue
from policies import registry
from policies.routing.kv_aware import KvAware
from tests.unit.routing_offers import decode, wish

NAMES = tuple(registry.DECODE_ROUTING)


@pytest.mark.parametrize("name", NAMES)
def test_without_workers_there_is_none(name: str) -> None:
    assert registry.decode_routing(name).choose(wish(), [], 11.0) is None


@given(st.sampled_from(NAMES), st.lists(st.floats(0, 100), max_size=20))
def test_an_order_names_every_request_once(name: str, ready: list[float]) -> None:
    wishes = [wish(ready_s=each) for each in ready]
    order = registry.decode_routing(name).order(wishes, 100.0)
    assert sorted(order) == list(range(len(wishes)))


def test_bytes_and_load_are_weighed_in_seconds() -> None:
    # One second of transfer, or 100 steps of 20 ms that are half as long again.
    here = decode("here", prefix_tokens=1000, running=15)
    there = decode("there", running=0)
    there_load, here_load = 1 / 32, 16 / 32
    assert KvAware().times_s(wish(), [here, there]) == pytest.approx(
        [2 * (1 + here_load), 1 + 2 * (1 + there_load)]
    )
    assert KvAware().choose(wish(), [here, there], 11.0) == 0
    chatty = wish(new_tokens=250)
    assert KvAware().choose(chatty, [here, there], 11.0) == 1
    assert registry.decode_routing("kv_aware", {"steps_max": 100}).choose(
        chatty, [here, there], 11.0
    ) == 0  # fmt: skip
    assert registry.decode_routing("kv_aware", {"fill_cost": 0}).choose(
        chatty, [here, there], 11.0
    ) == 0  # fmt: skip


def test_a_link_with_much_on_its_way_is_slow_and_one_that_is_not_needed_is_not() -> None:
    busy = decode("busy", link_bytes=500_000)
    assert KvAware().choose(wish(), [busy, decode("calm")], 11.0) == 1
    local = decode("local", link_bytes=500_000, prefix_tokens=1000)
    assert KvAware().choose(wish(), [decode("calm"), local], 11.0) == 1


def test_scarce_kv_tokens_are_load_as_well() -> None:
    full = decode("full", free_tokens=1100)
    assert KvAware().choose(wish(), [full, decode("half", running=16)], 11.0) == 1


def test_what_has_not_measured_counts_as_the_fastest() -> None:
    slow, fast = decode("slow", step_s=0.5, link_bytes_per_s=1e3), decode("fast")
    new = decode("new", step_s=0.0, link_bytes_per_s=0.0)
    times = KvAware().times_s(wish(), [slow, fast, new])
    assert times[2] == times[1] < times[0]
    assert KvAware().choose(wish(), [new], 11.0) == 0


def test_the_default_serves_in_the_order_of_readiness() -> None:
    wishes = [wish(ready_s=3.0), wish(ready_s=1.0), wish(ready_s=2.0)]
    assert KvAware().order(wishes, 11.0) == [1, 2, 0]


def test_unknown_names_and_parameters_are_named() -> None:
    with pytest.raises(BadValue, match="decode_routing: got 'best', want one of"):
        registry.decode_routing("best")
    with pytest.raises(BadValue, match="got 'x', want one of fill_cost, steps_max"):
        registry.decode_routing("kv_aware", {"x": 1})
    with pytest.raises(BadValue, match="fill_cost: got -1, want a number >= 0"):
        registry.decode_routing("kv_aware", {"fill_cost": -1})
    with pytest.raises(BadValue, match="steps_max: got 0, want a whole number >= 1"):
        registry.decode_routing("kv_aware", {"steps_max": 0})
