"""Who goes on from a prompt's KV, and which request is served first."""

from __future__ import annotations

from random import Random
from statistics import mean
from typing import TYPE_CHECKING

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from kvstore.errors import BadValue
from policies import registry
from policies.parameters import Parameters
from policies.routing.deadline_aware import DeadlineAware, DeadlineAwareParameters
from policies.routing.kv_aware import KvAware, KvAwareParameters, times_s
from policies.routing.least_loaded import LeastLoaded
from policies.routing.protocol import DecodeOffer, DecodePolicy, Place
from policies.routing.same_prefix import SamePrefix
from policies.routing.shortest_first import ShortestFirst, ShortestFirstParameters
from policies.routing.transfer_balance import TransferBalance
from tests.unit.routing_fleet import LINK_BYTES_PER_S, Fleet, Served, requests
from tests.unit.routing_offers import decode, wish

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from policies.routing.protocol import Wish

NOW_S = 11.0
NAMES = tuple(registry.DECODE_ROUTING)
IN_TURN = ("kv_aware", "least_loaded", "same_prefix")

WISHES = st.lists(
    st.builds(
        wish,
        ready_s=st.floats(0, 60), deadline_s=st.floats(0, 60), new_tokens=st.integers(1, 5000),
        bytes_total=st.integers(1, 10**9),
        place=st.builds(Place, st.sampled_from(["h0", "h1", "h2"])),
    ),
    max_size=12,
)  # fmt: skip
OFFERS = st.lists(
    st.builds(
        DecodeOffer,
        st.just(""), st.sampled_from(["h0", "h1"]), st.sampled_from(["r0", "r1"]),
        st.sampled_from(["z0", "z1"]), st.integers(1100, 20_000), st.just(20_000),
        st.integers(0, 7), st.just(8), st.sampled_from([0.0, 0.01, 0.5]),
        prefix_tokens=st.integers(0, 1000), same_prefix=st.integers(0, 3),
        link_bytes=st.integers(0, 10**6), link_bytes_per_s=st.sampled_from([0.0, 1e6, 1e9]),
        source_link_bytes=st.integers(0, 10**6),
    ),
    min_size=1, max_size=6,
)  # fmt: skip


class Chance(DecodePolicy):
    """What every policy has to be better than."""

    def __init__(self, dice: Random) -> None:
        """Whatever the dice say."""
        self.parameters = Parameters()
        self.dice = dice

    def order(self, wishes: Sequence[Wish], now_s: float) -> list[int]:
        """Mixed."""
        return self.dice.sample(range(len(wishes)), len(wishes))

    def choose(self, wish: Wish, offers: Sequence[DecodeOffer], now_s: float) -> int | None:
        """Any."""
        return self.dice.randrange(len(offers)) if offers else None


MEASURES: dict[str, Callable[[Served], float]] = {
    "deadline_aware": lambda s: s.first_s > s.request.wish.deadline_s,
    "kv_aware": lambda s: s.done_s - s.routed_s,
    "least_loaded": lambda s: s.load,
    "same_prefix": lambda s: -s.same_prefix,
    "shortest_first": lambda s: s.routed_s - s.request.wish.ready_s,
    "transfer_balance": lambda s: s.first_s - s.routed_s,
}
"""What each policy is to make small."""


def made(name: str) -> DecodePolicy:
    """As it is by default, but for what links carry in these tests."""
    links = {"link_bytes_per_s": LINK_BYTES_PER_S} if name == "deadline_aware" else {}
    return registry.decode_routing(name, links)


def result(name: str, policy: DecodePolicy, seed: int, per_s: float) -> float:
    """Of three hundred requests, so many a second; 5 a second are more than the fleet can bear."""
    served = Fleet(Random(seed)).serve(policy, requests(Random(seed), 300, per_s))
    assert len(served) == 300
    return mean(MEASURES[name](each) for each in served)


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("per_s", [4.0, 5.0])
@pytest.mark.parametrize("name", NAMES)
def test_each_is_better_than_chance_by_its_own_measure(name: str, per_s: float, seed: int) -> None:
    ours = result(name, made(name), seed, per_s)
    chance = result(name, Chance(Random(seed)), seed, per_s)
    print(f"{name}, seed {seed}, {per_s}/s: {ours:.3f}, by chance {chance:.3f}")
    assert ours < chance


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize(
    ("name", "other"), [("shortest_first", "least_loaded"), ("deadline_aware", "kv_aware")]
)
def test_an_order_of_its_own_is_better_than_that_of_readiness(
    name: str, other: str, seed: int
) -> None:
    ours, theirs = (result(name, made(each), seed, 5.0) for each in (name, other))
    print(f"seed {seed}: {name} {ours:.3f}, {other} {theirs:.3f}")
    assert ours < theirs


@pytest.mark.parametrize("name", NAMES)
def test_without_workers_there_is_none(name: str) -> None:
    assert registry.decode_routing(name).choose(wish(), [], NOW_S) is None


@given(st.sampled_from(NAMES), OFFERS, st.randoms(use_true_random=False), st.floats(0, 30))
def test_the_choice_does_not_depend_on_the_order(
    name: str, offers: list[DecodeOffer], dice: Random, now_s: float
) -> None:
    policy = registry.decode_routing(name)
    named = [replace(offer, worker=f"d{at}") for at, offer in enumerate(offers)]
    mixed = dice.sample(named, len(named))
    one, other = policy.choose(wish(), named, now_s), policy.choose(wish(), mixed, now_s)
    assert one is not None
    assert other is not None
    assert named[one] == mixed[other]


@given(st.sampled_from(NAMES), WISHES, st.floats(0, 100))
def test_an_order_names_every_request_once(name: str, wishes: list[Wish], now_s: float) -> None:
    order = registry.decode_routing(name).order(wishes, now_s)
    assert sorted(order) == list(range(len(wishes)))


@given(st.sampled_from(IN_TURN), WISHES, st.floats(0, 100))
def test_where_length_and_deadline_do_not_count_nobody_overtakes(
    name: str, wishes: list[Wish], now_s: float
) -> None:
    order = registry.decode_routing(name).order(wishes, now_s)
    ready = [wishes[at].ready_s for at in order]
    assert ready == sorted(ready)


@given(WISHES, st.floats(0, 100), st.sampled_from([0.0, 3.0, 10.0]))
def test_nobody_is_overtaken_by_those_who_come_so_much_later(
    wishes: list[Wish], now_s: float, bound_s: float
) -> None:
    policy = ShortestFirst()
    policy.parameters = ShortestFirstParameters(overtaken_s=bound_s)
    ready = [wishes[at].ready_s for at in policy.order(wishes, now_s)]
    assert all(before <= after + bound_s for after, before in _pairs(ready))


@given(WISHES, st.floats(0, 100), st.sampled_from([0.0, 3.0, 10.0]))
def test_the_late_let_pass_those_with_little_more_time_only(
    wishes: list[Wish], now_s: float, bound_s: float
) -> None:
    policy = DeadlineAware()
    policy.parameters = DeadlineAwareParameters(late_s=bound_s, link_bytes_per_s=1e9)
    order = policy.order(wishes, now_s)
    starts = [wishes[at].deadline_s - wishes[at].bytes_total / 1e9 for at in order]
    assert all(before <= after + bound_s for after, before in _pairs(starts))


@given(WISHES, st.floats(0, 100))
def test_who_was_ready_first_is_first_whatever_its_host_has_to_send(
    wishes: list[Wish], now_s: float
) -> None:
    order = TransferBalance().order(wishes, now_s)
    ready = [wishes[at].ready_s for at in order]
    assert ready[:1] == sorted(ready)[:1]
    for host in ("h0", "h1", "h2"):
        own = [wishes[at].ready_s for at in order if wishes[at].place.host == host]
        assert own == sorted(own)


def _pairs(values: list[float]) -> list[tuple[float, float]]:
    """Each, and every one in front of it."""
    return [(after, before) for at, after in enumerate(values) for before in values[:at]]


def test_hosts_send_in_turns() -> None:
    hosts = ["h0", "h0", "h0", "h1"]
    wishes = [wish(ready_s=at, place=Place(host)) for at, host in enumerate(hosts)]
    assert TransferBalance().order(wishes, NOW_S) == [0, 3, 1, 2]


def test_the_shortest_answer_is_first_unless_another_has_waited() -> None:
    long, short = wish(new_tokens=500), wish(new_tokens=10)
    assert ShortestFirst().order([long, short], NOW_S) == [1, 0]
    # 490 tokens are 4.9 seconds.
    assert ShortestFirst().order([long, replace(short, ready_s=14.8)], NOW_S) == [1, 0]
    assert ShortestFirst().order([long, replace(short, ready_s=15.0)], NOW_S) == [0, 1]
    huge = wish(new_tokens=1_000_000)
    assert ShortestFirst().order([huge, replace(short, ready_s=19.8)], NOW_S) == [1, 0]
    assert ShortestFirst().order([huge, replace(short, ready_s=20.0)], NOW_S) == [0, 1]


def test_the_least_slack_is_first_and_the_late_let_pass() -> None:
    soon, late = wish(deadline_s=20.0, bytes_total=1), wish(deadline_s=10.9)
    big = wish(deadline_s=21.0, bytes_total=2 * 10**9)
    assert DeadlineAware().order([soon, big, late], NOW_S) == [1, 0, 2]
    assert DeadlineAware().order([replace(soon, deadline_s=20.95), late], NOW_S) == [1, 0]
    by_deadline = registry.decode_routing("deadline_aware", {"late_s": 0})
    assert by_deadline.order([soon, big, late], NOW_S) == [2, 1, 0]


def test_in_time_is_soon_enough_and_then_the_least_harm_counts() -> None:
    # A second of transfer and a step of 20 ms, against a busy worker that has the KV.
    near, far = decode("near", prefix_tokens=1000, running=31, step_s=0.04), decode("far")
    in_time, hurried = wish(deadline_s=NOW_S + 1.1), wish(deadline_s=NOW_S + 0.9)
    assert DeadlineAware().choose(in_time, [near, far], NOW_S) == 1
    assert DeadlineAware().choose(hurried, [near, far], NOW_S) == 0
    before_the_step = wish(deadline_s=NOW_S + 1.01)
    assert DeadlineAware().choose(before_the_step, [near, far], NOW_S) == 0
    late = wish(deadline_s=0.0)
    assert DeadlineAware().choose(late, [far, near], NOW_S) == 1, "the soonest"


def test_load_is_what_is_scarcer_of_batch_and_tokens() -> None:
    half_full = decode("a", free_tokens=50_000)
    few_free = decode("b", running=20)
    assert LeastLoaded().choose(wish(), [half_full, few_free], NOW_S) == 0
    assert LeastLoaded().choose(wish(), [decode("a", free_tokens=20_000), few_free], NOW_S) == 1


def test_of_equally_loaded_ones_the_nearest() -> None:
    places = [{"host": "h0"}, {"rack": "r0", "zone": "z0"}, {"zone": "z0"}, {}]
    offers = [decode(f"d{9 - at}", **place) for at, place in enumerate(places)]
    for name in ("least_loaded", "shortest_first", "same_prefix"):
        policy = registry.decode_routing(name)
        for away in range(4):
            assert policy.choose(wish(), offers[away:][::-1], NOW_S) == 3 - away


def test_alike_ones_go_together_until_that_makes_one_much_fuller() -> None:
    alike, empty = decode("z", running=8, same_prefix=3), decode("a")
    assert SamePrefix().choose(wish(), [empty, alike], NOW_S) == 1
    assert SamePrefix().choose(wish(), [empty, replace(alike, running=9)], NOW_S) == 0
    more = decode("y", running=8, same_prefix=4)
    assert SamePrefix().choose(wish(), [alike, more], NOW_S) == 1
    bold = registry.decode_routing("same_prefix", {"fuller_max": 1})
    assert bold.choose(wish(), [empty, replace(alike, running=31)], NOW_S) == 1


def test_both_ends_of_a_transfer_count() -> None:
    busy, calm = decode("a", link_bytes=900_000), decode("b", link_bytes=100_000)
    assert TransferBalance().choose(wish(), [busy, calm], NOW_S) == 1
    # Where the source is the fuller end of both, the calmer worker still.
    full = [replace(each, source_link_bytes=10**7) for each in (busy, calm)]
    assert TransferBalance().choose(wish(), full, NOW_S) == 1
    assert TransferBalance().choose(wish(), [full[1], busy], NOW_S) == 1
    even = decode("d", link_bytes=899_999, source_link_bytes=899_999)
    assert TransferBalance().choose(wish(), [busy, even], NOW_S) == 1, "the fuller end first"
    local = decode("c", prefix_tokens=1000, link_bytes=10**8, running=31)
    assert TransferBalance().choose(wish(), [calm, local], NOW_S) == 1


def test_bytes_and_load_are_weighed_in_seconds() -> None:
    # 100 steps of 20 ms that are half as long again, or a second of transfer.
    here, there = decode("here", prefix_tokens=1000, running=15), decode("there")
    assert times_s(wish(), [here, there], KvAwareParameters()) == pytest.approx(
        [2 * (1 + 16 / 32), 1 + 2 * (1 + 1 / 32)]
    )
    assert KvAware().choose(wish(), [here, there], NOW_S) == 0
    chatty = wish(new_tokens=250)
    assert KvAware().choose(chatty, [here, there], NOW_S) == 1
    for weighed in ({"steps_max": 100}, {"fill_cost": 0}):
        policy = registry.decode_routing("kv_aware", weighed)
        assert policy.choose(chatty, [here, there], NOW_S) == 0


def test_a_link_with_much_on_its_way_is_slow_and_one_that_is_not_needed_is_not() -> None:
    for end in ("link_bytes", "source_link_bytes"):
        busy = decode("busy", **{end: 500_000})
        assert KvAware().choose(wish(), [busy, decode("calm")], NOW_S) == 1
        local = decode("local", prefix_tokens=1000, **{end: 10**7})
        assert KvAware().choose(wish(), [decode("calm"), local], NOW_S) == 1


def test_scarce_kv_tokens_are_load_as_well() -> None:
    full = decode("full", free_tokens=1100)
    assert KvAware().choose(wish(), [full, decode("half", running=16)], NOW_S) == 1


def test_what_has_not_measured_counts_as_the_fastest() -> None:
    slow, fast = decode("slow", step_s=0.5, link_bytes_per_s=1e3), decode("fast")
    new = decode("new", step_s=0.0, link_bytes_per_s=0.0)
    times = times_s(wish(), [slow, fast, new], KvAwareParameters())
    assert times[2] == times[1] < times[0]
    assert KvAware().choose(wish(), [new], NOW_S) == 0


@pytest.mark.parametrize(("name", "wrong", "want"), [
    ("kv_aware", {"fill_cost": -1}, "fill_cost: got -1, want a number >= 0"),
    ("kv_aware", {"steps_max": 0}, "steps_max: got 0, want a whole number >= 1"),
    ("kv_aware", {"x": 1}, "got 'x', want one of fill_cost, steps_max"),
    ("same_prefix", {"fuller_max": 1.5}, r"fuller_max: got 1\.5, want a number <= 1"),
    ("shortest_first", {"tokens_per_s": 0}, "tokens_per_s: got 0, want a number > 0"),
    ("shortest_first", {"overtaken_s": -1}, "overtaken_s: got -1, want a number >= 0"),
    ("deadline_aware", {"late_s": "soon"}, "late_s: got 'soon', want a number"),
    ("deadline_aware", {"link_bytes_per_s": 0}, "link_bytes_per_s: got 0, want a number >= 1"),
    ("least_loaded", {"x": 1}, "parameter: got 'x', want none"),
    ("best", {}, "decode_routing: got 'best', want one of deadline_aware, kv_aware, least_loaded"),
])  # fmt: skip
def test_wrong_names_and_parameters_are_named(
    name: str, wrong: dict[str, object], want: str
) -> None:
    with pytest.raises(BadValue, match=want):
        registry.decode_routing(name, wrong)
