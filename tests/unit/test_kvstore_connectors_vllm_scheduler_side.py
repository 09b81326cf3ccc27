"""The scheduler's half of the vLLM connector, driven in vLLM's order of calls."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import TYPE_CHECKING

import msgspec
import pytest

from kvstore.connectors.breaker import PAUSE_MIN_S
from kvstore.connectors.engine_lookups import DEADLINE_S, MEMO_S, QUIET_S
from kvstore.connectors.engine_namespace import EngineFields, EngineGroup, namespaces
from kvstore.connectors.engine_pool import EnginePool
from kvstore.connectors.vllm.hints import HINTS
from kvstore.connectors.vllm.scheduler_side import Orders, SchedulerSide
from kvstore.errors import Unavailable
from kvstore.hints import Hints
from kvstore.namespace import Attention
from kvstore.page import engine_key
from tests.fakes import ManualClock
from tests.unit.engine_store import EngineFakeStore

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from kvstore.client.locations import Match
    from kvstore.client.namespaces import OpenedNamespace
    from kvstore.page import PageChain

TOKENS = 16
HASHES = [bytes([i]) * 32 for i in range(1, 9)]
FULL = EngineGroup(Attention.FULL, ("l0",), 1, 8, 8)
SLIDING = EngineGroup(Attention.SLIDING, ("l1",), 1, 8, 8, 32)
FIELDS = EngineFields(
    engine="e", model="m", revision="r", tenant="t", kv_dtype="float32", compute_dtype="float32",
    quantization="", config_digest="", hash_algorithm="sha256_cbor", hash_seed="s",
    block_tokens=TOKENS, tensor_parallel=1, block_order="o", groups=(FULL, SLIDING),
)  # fmt: skip


class Request(msgspec.Struct):
    """As the scheduler has it."""

    request_id: str = "r"
    num_tokens: int = 8 * TOKENS
    block_hashes: list[bytes] = msgspec.field(default_factory=lambda: list(HASHES))
    kv_transfer_params: dict[str, object] | None = None


class New(msgspec.Struct):
    """A request that a step is the first for."""

    req_id: str
    block_ids: Sequence[Sequence[int]]
    num_computed_tokens: int


class GoingOn(msgspec.Struct, frozen=True):
    """Requests of earlier steps."""

    req_ids: Sequence[str] = ()
    new_block_ids: Sequence[Sequence[Sequence[int]] | None] = ()
    num_computed_tokens: Sequence[int] = ()
    resumed_req_ids: frozenset[str] = frozenset()


class Step(msgspec.Struct):
    """What the scheduler has planned."""

    num_scheduled_tokens: dict[str, int]
    scheduled_new_reqs: Sequence[New] = ()
    scheduled_cached_reqs: GoingOn = GoingOn()


class Rig:
    """A scheduler's half with a store that the test fills."""

    def __init__(self) -> None:
        self.store = EngineFakeStore()
        self.clock = ManualClock()
        self.namespaces = namespaces(FIELDS)
        self.pool = EnginePool(lambda: self.store, self.namespaces, self.clock)
        self.side = SchedulerSide(self.namespaces, self.pool, self.clock, 1.0, DEADLINE_S, 2.0)

    def hold(self, group: int, *places: int) -> None:
        """Have the pool hold these blocks of a group."""
        for place in places:
            key = engine_key(self.namespaces[group].id, HASHES[place])
            self.store.held[key, 0] = b"payload"

    def come(self, request: Request) -> None:
        """A request comes, and the pool has been asked."""
        self.side.on_new_request(request)
        self.answered()

    def answered(self) -> None:
        """Wait until the thread beside the scheduler has nothing left to do."""
        self.side._thread.close(30.0)  # noqa: SLF001 -- it has no other end
        self.side._thread._is_closed = False  # noqa: SLF001 -- and goes on afterwards


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


def promised(rig: Rig, request: Request) -> None:
    """The pool holds some of its prompt, the engine has made room for that and loads it."""
    rig.hold(0, 0, 1, 2, 3)
    rig.hold(1, 2, 3)
    rig.come(request)
    assert rig.side.matched_tokens(request, 0) == 4 * TOKENS
    assert rig.store.pages_leased == 6
    rig.side.allotted(request, [[9, 8, 7, 6, 5], [0, 0, 5, 4, 3]], 4 * TOKENS)
    rig.side.orders(Step({}))
    rig.answered()
    assert rig.store.pages_leased == 6


def load_has_come(rig: Rig) -> None:
    rig.side.orders(Step({"r": TOKENS}, [New("r", [[9, 8, 7, 6, 5]] * 2, 4 * TOKENS)]))


@pytest.mark.parametrize(
    "end",
    [
        pytest.param(load_has_come, id="loaded"),
        pytest.param(lambda rig: rig.side.finished("r"), id="aborted"),
        pytest.param(lambda rig: rig.side.loads_failed(["r"], []), id="failed"),
    ],
)
def test_what_was_leased_for_a_request_is_given_back(rig: Rig, end: Callable[[Rig], None]) -> None:
    request = Request()
    promised(rig, request)
    end(rig)
    rig.answered()
    assert rig.store.pages_leased == 0


def test_a_preempted_request_is_promised_nothing_that_is_not_leased(rig: Rig) -> None:
    request = Request()
    promised(rig, request)
    load_has_come(rig)
    assert rig.side.matched_tokens(request, 0) is None  # asked anew
    rig.answered()
    assert rig.side.matched_tokens(request, 0) == 4 * TOKENS
    assert rig.store.pages_leased == 6


def test_leases_that_cannot_be_given_back_lapse_and_harm_nobody(rig: Rig) -> None:
    request = Request()
    promised(rig, request)
    rig.store.fail["give_back_lease"] = Unavailable("away")
    rig.side.finished("r")
    rig.answered()
    rig.come(Request("other"))
    assert rig.side.matched_tokens(Request("other"), 0) == 0
    assert rig.side.open_requests == 1


def test_a_hole_in_the_window_makes_the_promise_shorter(rig: Rig) -> None:
    rig.hold(0, 0, 1, 2, 3)
    rig.hold(1, 0, 1, 3)
    request = Request()
    rig.come(request)
    assert rig.side.matched_tokens(request, 0) == 2 * TOKENS


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
