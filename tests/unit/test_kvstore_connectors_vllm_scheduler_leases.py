"""What the scheduler's half of the vLLM connector gives back, and what it tells of its pages."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from kvstore.connectors.engine_events import PutBlock
from kvstore.errors import Unavailable
from tests.unit.scheduler_rig import HASHES, TOKENS, New, Request, Rig, Step

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


@pytest.fixture
def rig() -> Iterator[Rig]:
    made = Rig()
    yield made
    made.side.close()
    assert made.store.closed or made.pool.store is None


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


@pytest.mark.parametrize(
    ("requests", "blocks", "gone"),
    [
        pytest.param(["r"], [], [(0, 0), (0, 1), (0, 2), (0, 3), (1, 2), (1, 3)], id="a request"),
        pytest.param([], [7, 5], [(0, 2), (1, 2)], id="blocks"),
        pytest.param(["r"], [77], [], id="others"),
    ],
)
def test_what_did_not_come_is_told(
    rig: Rig, requests: list[str], blocks: list[int], gone: list[tuple[int, int]]
) -> None:
    promised(rig, Request())
    told = rig.side.loads_failed(requests, blocks)
    assert told == [PutBlock(group, HASHES[place]) for group, place in gone]


def test_whoever_wants_to_know_is_told_what_is_saved(rig: Rig) -> None:
    heard: list[tuple[str, int]] = []
    rig.side.on_save = lambda request, runs: heard.extend(
        (request.request_id, block) for run in runs for block in run.blocks
    )
    rig.come(Request())
    rig.side.orders(Step({"r": 2 * TOKENS}, [New("r", [[11, 12], [21, 22]], 0)]))
    assert heard == [("r", 11), ("r", 12), ("r", 21), ("r", 22)]


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
