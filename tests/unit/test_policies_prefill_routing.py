"""Who computes a prompt."""

from __future__ import annotations

from random import Random
from typing import TYPE_CHECKING

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from kvstore.errors import BadValue
from policies import registry
from policies.routing.least_queued import LeastQueued
from policies.routing.prefix_load import PrefixLoad, times_s
from policies.routing.protocol import Place, PrefillOffer
from tests.unit.routing_offers import prefill, wish

if TYPE_CHECKING:
    from collections.abc import Callable

    from policies.routing.protocol import Wish

NAMES = tuple(registry.PREFILL_ROUTING)


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
    unknown = wish(place=Place("h0"))
    apart = [prefill("b", rack="", zone=""), prefill("a", rack="", zone="z1")]
    assert PrefixLoad().choose(unknown, apart) == 1, "unknown ones are not near each other"


def test_what_has_not_measured_counts_as_the_fastest() -> None:
    new = prefill("new", tokens_per_s=0.0, queued_tokens=10)
    offers = [prefill("a", tokens_per_s=500.0), new, prefill("b", tokens_per_s=2000.0)]
    assert times_s(wish(), offers) == pytest.approx([2.0, 0.505, 0.5])
    assert PrefixLoad().choose(wish(), [new]) == 0


def total_s(seed: int, choose: Callable[[Wish, list[PrefillOffer]], int | None]) -> float:
    """Of many prompts, each behind those before it; other work ends meanwhile."""
    dice = Random(seed)
    offers = [prefill(f"p{at}", tokens_per_s=dice.uniform(500, 4000)) for at in range(4)]
    total_s = 0.0
    for _ in range(200):
        prefix, owner = dice.randint(0, 999), dice.randrange(4)
        offers = [
            replace(
                offer,
                prefix_tokens=prefix if at == owner else 0,
                queued_tokens=max(0, offer.queued_tokens - round(offer.tokens_per_s * 0.1)),
            )
            for at, offer in enumerate(offers)
        ]
        asked = wish(prefix_tokens=prefix)
        chosen = choose(asked, offers)
        assert chosen is not None
        total_s += times_s(asked, offers)[chosen]
        queued = offers[chosen].queued_tokens + 1000 - prefix
        offers[chosen] = replace(offers[chosen], queued_tokens=queued)
    return total_s


@pytest.mark.parametrize("seed", range(4))
def test_prompts_are_through_sooner_than_by_queues_and_by_chance(seed: int) -> None:
    dice = Random(seed)
    ours = total_s(seed, PrefixLoad().choose)
    queues = total_s(seed, LeastQueued().choose)
    chance = total_s(seed, lambda _, offers: dice.randrange(len(offers)))
    print(f"seed {seed}: {ours:.0f} s, by queues {queues:.0f} s, by chance {chance:.0f} s")
    assert ours < queues < chance


def test_the_reference_looks_at_queues_alone() -> None:
    asked = wish(prefix_tokens=900)
    near = prefill("near", prefix_tokens=900, queued_tokens=1)
    assert LeastQueued().choose(asked, [near, prefill("far", tokens_per_s=1.0)]) == 1
    assert LeastQueued().choose(asked, [prefill("b"), prefill("c", host="h0"), near]) == 1
    assert LeastQueued().choose(asked, [prefill("b"), prefill("a")]) == 1


@pytest.mark.parametrize("name", NAMES)
def test_a_needed_adapter_is_a_condition(name: str) -> None:
    policy = registry.prefill_routing(name)
    idle = prefill("idle", has_adapter=False)
    busy = prefill("busy", queued_tokens=10_000)
    assert policy.choose(wish(), [idle, busy]) == 0
    assert policy.choose(wish(needs_adapter=True), [idle, busy]) == 1
    assert policy.choose(wish(needs_adapter=True), [idle]) is None
    assert policy.choose(wish(), []) is None


OFFERS = st.lists(
    st.builds(
        PrefillOffer,
        st.just(""), st.sampled_from(["h0", "h1"]), st.sampled_from(["r0", "r1"]),
        st.sampled_from(["z0", "z1"]), st.integers(0, 1000), st.integers(0, 5000),
        st.sampled_from([0.0, 1.0, 1000.0]), st.booleans(), st.sampled_from([0.0, 1.0, 1e9]),
    ),
    min_size=1, max_size=6,
)  # fmt: skip


@given(st.sampled_from(NAMES), OFFERS, st.randoms(use_true_random=False), st.booleans())
def test_the_choice_does_not_depend_on_the_order(
    name: str, offers: list[PrefillOffer], dice: Random, needs_adapter: bool
) -> None:
    policy = registry.prefill_routing(name)
    asked = wish(prefix_tokens=600, needs_adapter=needs_adapter)
    named = [replace(offer, worker=f"p{at}") for at, offer in enumerate(offers)]
    mixed = dice.sample(named, len(named))
    one, other = policy.choose(asked, named), policy.choose(asked, mixed)
    if one is None or other is None:
        assert one is other is None
        assert needs_adapter
        assert not any(offer.has_adapter for offer in offers)
    else:
        assert named[one] == mixed[other]
        assert named[one].has_adapter or not needs_adapter


def test_unknown_names_and_parameters_are_named() -> None:
    with pytest.raises(BadValue, match="prefill_routing: got 'best', want one of"):
        registry.prefill_routing("best")
    with pytest.raises(BadValue, match="parameter: got 'x', want none"):
        registry.prefill_routing("prefix_load", {"x": 1})
