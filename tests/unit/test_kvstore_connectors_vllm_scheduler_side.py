"""The scheduler's half of the vLLM connector, driven in vLLM's order of calls."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

import pytest

from kvstore.connectors.breaker import PAUSE_MIN_S
from kvstore.connectors.engine_lookups import DEADLINE_S, MEMO_S, QUIET_S
from kvstore.connectors.vllm.handover import HERE
from kvstore.connectors.vllm.hints import HINTS
from kvstore.errors import Unavailable
from kvstore.hints import Hints
from kvstore.page import engine_key
from tests.unit.scheduler_rig import HASHES, TOKENS, GoingOn, New, Request, Rig, Step

if TYPE_CHECKING:
    from collections.abc import Iterator

    from kvstore.client.locations import Match
    from kvstore.client.namespaces import OpenedNamespace
    from kvstore.connectors.vllm.scheduler_side import Orders
    from kvstore.page import PageChain


@pytest.fixture
def rig() -> Iterator[Rig]:
    made = Rig()
    yield made
    made.side.close()
    assert made.store.closed or made.pool.store is None


def blocks_of(orders: Orders) -> list[tuple[int, tuple[int, ...]]]:
    return [(run.group, run.blocks) for run in orders.saves]


def test_what_all_groups_hold_is_promised_and_ordered(rig: Rig) -> None:
    rig.hold(0, 0, 1, 2, 3)
    rig.hold(1, 2, 3)
    request = Request()
    rig.come(request)
    assert rig.side.matched_tokens(request, TOKENS) == 3 * TOKENS
    rig.side.allotted(request, [[9, 8, 7, 6], [0, 0, 5, 4]], 3 * TOKENS)
    (load,) = rig.side.orders(Step({})).loads
    assert [(run.group, run.blocks) for run in load.runs] == [(0, (8, 7, 6)), (1, (5, 4))]
    assert load.runs[1].hashes == tuple(HASHES[2:4])
    assert rig.side.orders(Step({})).loads == ()


def test_a_hole_in_the_window_makes_the_promise_shorter(rig: Rig) -> None:
    rig.hold(0, 0, 1, 2, 3)
    rig.hold(1, 0, 1, 3)
    request = Request()
    rig.come(request)
    assert rig.side.matched_tokens(request, 0) == 2 * TOKENS


@pytest.mark.parametrize(("least", "short"), [(2 * TOKENS, 0), (2 * TOKENS + 1, 2 * TOKENS)])
def test_tokens_that_are_too_few_for_a_load_are_computed_and_counted_once(
    least: int, short: int
) -> None:
    rig = Rig(least)
    for group in (0, 1):
        rig.hold(group, 0, 1, 2)
    request = Request()
    rig.come(request)
    asked = {rig.side.matched_tokens(request, TOKENS) for _ in range(3)}
    assert asked == {2 * TOKENS - short}
    rig.side.finished("r")
    rig.side.finished("r")
    assert rig.side.totals["short_tokens"] == short
    rig.side.close()


def test_an_answer_that_nobody_waited_for_is_counted_all_the_same() -> None:
    rig = Rig(8 * TOKENS)  # more than a request of so many can be given
    for group in (0, 1):
        rig.hold(group, 0, 1)
    request = Request()
    rig.side.on_new_request(request)
    assert rig.side.matched_tokens(request, 0) == 0
    rig.answered()
    rig.side.finished("r")
    assert rig.side.totals["short_tokens"] == 2 * TOKENS
    assert rig.side.open_requests == 0
    rig.side.close()


def test_nothing_is_promised_before_the_answer_or_after_the_deadline(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    rig.hold(0, 0)
    rig.hold(1, 0)
    let_go, really = threading.Event(), rig.store.match_prefix

    def slowly(opened: OpenedNamespace, chain: PageChain, **_: object) -> Match:
        let_go.wait(30.0)
        return really(opened, chain)

    monkeypatch.setattr(rig.store, "match_prefix", slowly)
    request = Request()
    rig.side.on_new_request(request)
    assert rig.side.matched_tokens(request, 0) is None
    rig.clock.advance(2 * DEADLINE_S)
    assert rig.side.matched_tokens(request, 0) == 0
    let_go.set()
    rig.answered()
    assert rig.side.matched_tokens(request, 0) == TOKENS  # as it is asked once it was preempted


def test_asking_often_changes_nothing(rig: Rig) -> None:
    rig.hold(0, 0)
    rig.hold(1, 0)
    request = Request()
    rig.come(request)
    assert {rig.side.matched_tokens(request, 0) for _ in range(500)} == {TOKENS}
    assert rig.side.counts["lookups"] == 1


def test_new_blocks_are_saved_step_by_step_and_known_ones_are_not(rig: Rig) -> None:
    rig.hold(0, 0)
    request = Request()
    rig.come(request)
    assert rig.side.matched_tokens(request, 0) == 0
    tables = [[11, 12, 13], [21, 22, 23]]
    first = Step({"r": 40}, [New("r", tables, 0)])
    assert blocks_of(rig.side.orders(first)) == [(0, (12,)), (1, (21, 22))]
    more = GoingOn(["r"], [[[14], [24]]], [40])
    assert blocks_of(rig.side.orders(Step({"r": 24}, (), more))) == [(0, (13, 14)), (1, (23, 24))]
    still = GoingOn(["r"], [None], [64])
    assert blocks_of(rig.side.orders(Step({"r": 1}, (), still))) == []


def test_an_engine_that_is_told_to_forget_all_kv_neither_loads_nor_saves_any_more(
    rig: Rig, caplog: pytest.LogCaptureFixture
) -> None:
    """V7: its weights may be others by now, and the namespaces name those that it began with."""
    for group in (0, 1):
        rig.hold(group, 0, 1)
    known = Request("known", kv_transfer_params={HERE: True, HINTS: {"session_closed": True}})
    rig.come(known)
    assert rig.side.matched_tokens(known, 0) == 2 * TOKENS
    rig.side.leave()
    rig.side.leave()
    assert len(caplog.records) == 1
    for request in (known, Request("new", kv_transfer_params=dict(known.kv_transfer_params or {}))):
        if request is not known:
            rig.come(request)
        assert rig.side.matched_tokens(request, 0) == 0
        rig.side.allotted(request, [[11, 12, 13, 14]] * 2, 0)
        step = Step({request.request_id: 64}, [New(request.request_id, [[11, 12, 13, 14]] * 2, 0)])
        assert rig.side.orders(step) == ((), ())
        assert rig.side.finished(request.request_id) is None  # nobody is told to wait for its pages
    rig.answered()
    assert rig.side.counts["lookups"] == 1
    assert (rig.side.open_requests, rig.store.pages_leased) == (0, 0)


def test_a_preempted_request_is_resumed_with_other_blocks(rig: Rig) -> None:
    request = Request()
    rig.come(request)
    rig.side.matched_tokens(request, 0)
    rig.side.orders(Step({"r": 32}, [New("r", [[11, 12], [21, 22]], 0)]))
    resumed = GoingOn(["r"], [[[31, 32, 33], [41, 42, 43]]], [0], frozenset({"r"}))
    assert blocks_of(rig.side.orders(Step({"r": 48}, (), resumed))) == [(0, (33,)), (1, (43,))]


def test_a_preempted_request_finds_what_it_had_saved(rig: Rig) -> None:
    request = Request()
    rig.come(request)
    assert rig.side.matched_tokens(request, 0) == 0
    rig.hold(0, 0, 1)
    rig.hold(1, 0, 1)
    rig.clock.advance(MEMO_S + 1)
    assert rig.side.matched_tokens(request, 0) is None
    rig.answered()
    assert rig.side.matched_tokens(request, 0) == 2 * TOKENS


@pytest.mark.parametrize("told", [("r", ()), ("", (9,))])
def test_a_failed_load_is_not_asked_for_again(rig: Rig, told: tuple[str, tuple[int, ...]]) -> None:
    rig.hold(0, 0, 1)
    rig.hold(1, 0, 1)
    request = Request()
    rig.come(request)
    rig.side.matched_tokens(request, 0)
    rig.side.allotted(request, [[9, 8], [7, 6]], 2 * TOKENS)
    rig.side.orders(Step({}))
    rig.side.loads_failed([told[0]] if told[0] else [], told[1])
    assert rig.side.matched_tokens(request, 0) == 0
    rig.clock.advance(MEMO_S + 1)
    assert rig.side.matched_tokens(request, 0) == 0
    # What the pool was thought to hold is saved anew.
    first = Step({"r": 32}, [New("r", [[11, 12], [21, 22]], 0)])
    assert blocks_of(rig.side.orders(first)) == [(0, (11, 12)), (1, (21, 22))]


def test_a_failure_of_another_requests_blocks_is_not_ours(rig: Rig) -> None:
    rig.hold(0, 0)
    rig.hold(1, 0)
    request = Request()
    rig.come(request)
    rig.side.matched_tokens(request, 0)
    rig.side.allotted(request, [[9], [7]], TOKENS)
    rig.side.loads_failed(["another"], [8])
    rig.clock.advance(QUIET_S)
    assert rig.side.matched_tokens(request, 0) == TOKENS


def test_while_the_pool_is_in_trouble_requests_wait_for_nothing(rig: Rig) -> None:
    rig.store.fail["match_prefix"] = Unavailable("gone")
    request = Request()
    rig.come(request)
    assert rig.side.matched_tokens(request, 0) == 0
    second = Request("s")
    rig.side.on_new_request(second)
    assert rig.side.matched_tokens(second, 0) == 0  # at once
    assert rig.side.orders(Step({"r": 32}, [New("r", [[11, 12], [21, 22]], 0)])).saves == ()
    # Once it is well again, what was computed meanwhile is saved, too; of windows the new alone.
    rig.store.fail.clear()
    rig.clock.advance(PAUSE_MIN_S)
    rig.come(Request("t"))
    still = GoingOn(["r"], [None], [32])
    orders = rig.side.orders(Step({"r": 1}, (), still))
    assert blocks_of(orders) == [(0, (11, 12))]


def test_nothing_is_left_of_requests_that_have_ended(rig: Rig) -> None:
    request = Request()
    rig.come(request)
    rig.side.matched_tokens(request, 0)
    rig.side.orders(Step({"r": 32}, [New("r", [[11, 12], [21, 22]], 0)]))
    rig.side.finished("r")
    rig.side.finished("never seen")
    assert rig.side.open_requests == 0
    rig.side.loads_failed(["r"], [])


def test_a_prompt_without_a_full_block_asks_nobody(rig: Rig) -> None:
    request = Request(block_hashes=[], num_tokens=3)
    rig.come(request)
    assert rig.side.matched_tokens(request, 0) == 0
    assert rig.pool.store is None


def test_hints_go_with_what_is_saved_and_once_more_at_the_end(rig: Rig) -> None:
    hints = Hints(tool_call_s=20.0)
    asked: dict[str, object] = {HINTS: {"tool_call_s": 20.0}}
    for request in (Request("r", kv_transfer_params=asked), Request("other")):
        rig.come(request)
    step = Step(
        {"r": 16, "other": 32},
        [New("r", [[11], [21]], 0), New("other", [[13, 14], [23, 24]], 0)],
    )
    assert [(run.blocks, run.hints) for run in rig.side.orders(step).saves] == [
        ((11,), hints), ((21,), hints), ((14,), None), ((24,), None),
    ]  # fmt: skip
    rig.store.heard.clear()
    rig.side.finished("other")
    rig.side.finished("r")
    rig.answered()
    keys = [b"".join(engine_key(each.id, h) for h in HASHES) for each in rig.namespaces]
    assert [(chain.packed, told) for chain, _, told in rig.store.heard] == [
        (each, hints) for each in keys
    ]
    assert rig.side.open_requests == 0


def test_a_hint_that_the_pool_does_not_hear_is_no_trouble(rig: Rig) -> None:
    asked: dict[str, object] = {HINTS: {"session_closed": True}}
    for request in (
        Request("a", 3, [], kv_transfer_params=asked),
        Request("b", kv_transfer_params=asked),
    ):
        rig.come(request)
    rig.store.fail["hint"] = Unavailable("no master")
    rig.store.heard.clear()
    for name in ("a", "b"):
        assert rig.side.finished(name) is None
    rig.answered()
    assert rig.pool.troubles == 1, "of the one that has blocks"
    assert not rig.store.heard
