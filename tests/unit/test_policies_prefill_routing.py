"""Who computes a prompt."""

from __future__ import annotations

import pytest

from kvstore.errors import BadValue
from policies import registry
from policies.routing.prefix_load import PrefixLoad, times_s
from tests.unit.routing_offers import prefill, wish


def test_the_prefix_counts_as_much_as_it_takes_to_bring_it() -> None:
    asked = wish(prefix_tokens=800)
    near = prefill("near", prefix_tokens=800, queued_tokens=799)
    far = prefill("far")
    # 200 tokens at 1000/s, behind 799 or behind a transfer of 800 kB at 1 MB/s.
    assert times_s(asked, [near, far]) == pytest.approx([0.999, 1.0])
    assert PrefixLoad().choose(asked, [far, near]) == 1
    busier = prefill("near", prefix_tokens=800, queued_tokens=801)
    assert PrefixLoad().choose(asked, [far, busier]) == 0


def test_speed_counts_with_what_waits() -> None:
    slow, fast = prefill("slow"), prefill("fast", tokens_per_s=4000.0, queued_tokens=2900)
    assert PrefixLoad().choose(wish(), [slow, fast]) == 1
    assert PrefixLoad().choose(wish(tokens=900), [slow, fast]) == 0


def test_of_equal_ones_the_nearest_then_by_name() -> None:
    places = [{"host": "h0"}, {"rack": "r0", "zone": "z0"}, {"zone": "z0"}, {}]
    offers = [prefill(f"p{9 - at}", **place) for at, place in enumerate(places)]
    for away in range(4):
        assert PrefixLoad().choose(wish(), offers[away:][::-1]) == 3 - away
    assert PrefixLoad().choose(wish(), [prefill("b"), prefill("a"), prefill("c")]) == 1
    other_rack = prefill("a", rack="r0", zone="z9")
    assert PrefixLoad().choose(wish(), [other_rack, offers[2]]) == 1, "racks of a zone"


def test_what_has_not_measured_counts_as_the_fastest() -> None:
    new = prefill("new", tokens_per_s=0.0, queued_tokens=10)
    offers = [prefill("a", tokens_per_s=500.0), new, prefill("b", tokens_per_s=2000.0)]
    assert times_s(wish(), offers) == pytest.approx([2.0, 0.505, 0.5])
    assert PrefixLoad().choose(wish(), [new]) == 0


def test_a_needed_adapter_is_a_condition() -> None:
    idle = prefill("idle", has_adapter=False)
    busy = prefill("busy", queued_tokens=10_000)
    assert PrefixLoad().choose(wish(), [idle, busy]) == 0
    assert PrefixLoad().choose(wish(needs_adapter=True), [idle, busy]) == 1
    assert PrefixLoad().choose(wish(needs_adapter=True), [idle]) is None


@pytest.mark.parametrize("name", list(registry.PREFILL_ROUTING))
def test_without_workers_there_is_none(name: str) -> None:
    assert registry.prefill_routing(name).choose(wish(), []) is None


def test_unknown_names_and_parameters_are_named() -> None:
    with pytest.raises(BadValue, match="prefill_routing: got 'best', want one of"):
        registry.prefill_routing("best")
    with pytest.raises(BadValue, match="parameter: got 'x', want none"):
        registry.prefill_routing("prefix_load", {"x": 1})
