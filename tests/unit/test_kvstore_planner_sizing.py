"""Sizes: worked examples as published, and that more of a cause is not less of its effect."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from kvstore.errors import BadValue
from kvstore.planner.checks import COUNT_MAX, LEAST
from kvstore.planner.sizing import (
    Plan,
    break_even_tokens,
    needed_bytes_per_s,
    plan,
    split,
    transfer_s,
    workers_for,
)
from kvstore.planner.traffic import Lengths, Traffic
from tests.unit.plans import HARDWARE, SEVEN_B, TRAFFIC

PLANNED = plan(SEVEN_B, TRAFFIC, HARDWARE)


def test_22_cards_are_split_10_to_12() -> None:
    """800 tokens in at 70 % use of the card, 200 out at 15 %: 11.4 : 13.3, about 1 : 1.2."""
    prefill, decode = 800 / 70, 200 / 15
    assert prefill == pytest.approx(11.4, abs=0.05)
    assert decode == pytest.approx(13.3, abs=0.05)
    assert decode / prefill == pytest.approx(1.2, abs=0.05)
    assert split(22, prefill, decode) == (10, 12)


def test_a_plan_splits_workers_by_the_same_rule() -> None:
    relative = replace(HARDWARE, prefill_tokens_per_s=70.0, decode_batch=15, step_s=1.0, workers=22)
    assert plan(SEVEN_B, TRAFFIC, relative).split == (10, 12)
    assert PLANNED.split is None


def test_32_requests_in_10_ms_need_3_4_terabytes_a_second() -> None:
    needed = needed_bytes_per_s(32 * SEVEN_B.bytes_of(2048), 0.010)
    assert needed == pytest.approx(3.4e12, rel=0.02)


def test_100_megabytes_in_5_ms_fit_a_link_of_200_gbit() -> None:
    assert transfer_s(100e6, replace(HARDWARE, link_bytes_per_s=25e9)) < 0.005


def test_a_long_context_over_10_gigabit_takes_more_than_200_ms() -> None:
    assert transfer_s(SEVEN_B.bytes_of(2048), replace(HARDWARE, link_bytes_per_s=1.25e9)) > 0.2


def test_a_transfer_costs_round_trip_and_bytes_by_bandwidth() -> None:
    assert PLANNED.transfer_s == 50e-6 + 800 * 524_288 / 12.5e9


def test_staging_holds_what_is_put_in_5_to_30_seconds() -> None:
    assert PLANNED.put_bytes_per_s == 4 * 800 * 524_288
    assert PLANNED.staging_bytes == (5 * PLANNED.put_bytes_per_s, 30 * PLANNED.put_bytes_per_s)


def test_reuse_spares_prefill_and_puts_but_not_what_decode_pulls() -> None:
    half = plan(SEVEN_B, replace(TRAFFIC, reused=0.5), HARDWARE)
    assert half.prefill_load_s == PLANNED.prefill_load_s / 2
    assert half.put_bytes_per_s == half.prefix_bytes_per_s == PLANNED.put_bytes_per_s / 2
    assert half.staging_bytes[0] == PLANNED.staging_bytes[0] / 2
    assert half.pull_bytes_per_s == PLANNED.pull_bytes_per_s
    assert half.prefill_p99_s == PLANNED.prefill_p99_s


def test_workers_are_busy_at_most_to_four_fifths() -> None:
    assert [workers_for(load) for load in (0.0, 0.8, 0.81, 8.0)] == [1, 1, 2, 10]
    assert PLANNED.running == 4 * 200 * 0.03
    assert (PLANNED.prefill_workers, PLANNED.decode_workers) == (1, 2)


def test_memory_and_links_ask_for_workers_too() -> None:
    small = plan(SEVEN_B, TRAFFIC, replace(HARDWARE, kv_bytes=1 << 30))
    assert small.capacity_requests == 2
    assert small.decode_workers == small.decode_workers_by_memory == 15
    slow = plan(SEVEN_B, TRAFFIC, replace(HARDWARE, link_bytes_per_s=1e9))
    assert slow.decode_workers == slow.decode_workers_by_link == 3
    assert slow.prefill_workers == slow.prefill_workers_by_link == 3


def test_capacity_in_tokens_is_memory_by_bytes_of_a_token() -> None:
    assert PLANNED.capacity_tokens == PLANNED.decode_workers * (40 << 30) // 524_288
    assert PLANNED.capacity_requests == (40 << 30) // (1000 * 524_288)


def test_break_even_is_where_holding_up_a_batch_costs_what_moving_costs() -> None:
    even = break_even_tokens(SEVEN_B, HARDWARE)
    assert even is not None

    def gained_s(tokens: int) -> float:
        held_up = HARDWARE.decode_batch * tokens / HARDWARE.prefill_tokens_per_s
        return held_up - transfer_s(tokens * 524_288, HARDWARE) - HARDWARE.hand_over_s

    assert gained_s(even - 1) < 0 <= gained_s(even)


def test_over_a_link_that_is_too_slow_no_prompt_is_worth_it() -> None:
    assert break_even_tokens(SEVEN_B, replace(HARDWARE, link_bytes_per_s=1e8)) is None


def test_a_prompt_that_just_fits_between_two_steps_holds_nobody_up() -> None:
    assert PLANNED.stall_tokens == 160
    assert plan(SEVEN_B, TRAFFIC, replace(HARDWARE, tpot_s=0.02)).stall_tokens == 0


def test_no_link_is_fast_enough_where_prefill_takes_all_the_time() -> None:
    assert PLANNED.link_needed_bytes_per_s == pytest.approx(800 * 524_288 / (0.4 - 50e-6))
    assert plan(SEVEN_B, TRAFFIC, replace(HARDWARE, ttft_s=0.1)).link_needed_bytes_per_s is None


@dataclass(frozen=True)
class Grows:
    """What does not get less when a cause gets more."""

    cause: str
    effects: tuple[str, ...]


@pytest.mark.parametrize(
    "grows",
    [
        Grows("peak_per_s", ("pull_bytes_per_s", "put_bytes_per_s", "running", "prefill_workers",
                             "decode_workers")),
        Grows("input", ("request_bytes", "transfer_s", "prefill_load_s", "decode_workers_by_memory",
                        "decode_workers_by_link", "prefill_workers")),
        Grows("output", ("decode_load_s", "running", "decode_workers")),
        Grows("reused", ("prefix_bytes_per_s",)),
    ],
    ids=lambda each: each.cause,
)  # fmt: skip
@given(st.floats(0.01, 0.99), st.floats(0.01, 0.99))
def test_more_traffic_never_needs_less(grows: Grows, one: float, other: float) -> None:
    less, more = (_planned(grows.cause, amount) for amount in sorted((one, other)))
    for effect in grows.effects:
        assert getattr(less, effect) <= getattr(more, effect), effect


def _planned(cause: str, amount: float) -> Plan:
    value: object = amount
    if cause in ("input", "output"):
        value = Lengths(1000 * amount, 1000 * amount)
    elif cause == "peak_per_s":
        value = 1000 * amount
    return plan(SEVEN_B, replace(TRAFFIC, **{cause: value}), HARDWARE)


@pytest.mark.parametrize("least", [True, False])
def test_the_widest_values_that_are_taken_give_figures(least: bool) -> None:
    low, high = (LEAST, float(COUNT_MAX)) if least else (float(COUNT_MAX), LEAST)
    wide = Traffic(high, high, Lengths(low, low), Lengths(high, high), 0.0)
    fast = replace(
        HARDWARE, prefill_tokens_per_s=low, decode_batch=1, step_s=high, kv_bytes=1 << 61,
        link_bytes_per_s=low,
    )  # fmt: skip
    assert plan(SEVEN_B, wide, fast).decode_workers >= 1


@given(st.integers(2, 10_000), st.floats(1e-6, 1e6), st.floats(1e-6, 1e6))
def test_a_split_gives_all_workers_and_at_least_one_each(
    workers: int, prefill: float, decode: float
) -> None:
    found = split(workers, prefill, decode)
    assert sum(found) == workers
    assert min(found) >= 1


@pytest.mark.parametrize("workers", [0, 1, -3, 2.5, True])
def test_one_worker_cannot_be_split(workers: int) -> None:
    with pytest.raises(BadValue, match=r"^workers: got"):
        split(workers, 1.0, 1.0)


def test_memory_that_a_long_request_does_not_fit_is_refused() -> None:
    want = r"^kv_memory: got 1000, want 524288000 bytes, a p99 request, or more"
    with pytest.raises(BadValue, match=want):
        plan(SEVEN_B, TRAFFIC, replace(HARDWARE, kv_bytes=1000))
