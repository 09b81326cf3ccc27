"""Which blocks are saved: full ones, once, also when requests are cut up, preempted and resumed."""

from __future__ import annotations

from kvstore.connectors.engine_lookups import Held
from kvstore.connectors.engine_saves import (
    AGAIN_S,
    BlockRun,
    Saves,
    Scheduled,
    loads_of,
)

HASHES = [bytes([i]) * 32 for i in range(1, 9)]


def planned(
    saves: Saves,
    full: int,
    held: Held | None = None,
    now_s: float = 0.0,
    request: str = "r",
    new_from: int = 0,
) -> list[tuple[int, tuple[int, ...]]]:
    """Group and blocks of each run."""
    runs = saves.plan(Scheduled(request, HASHES, new_from, full), held, now_s)
    for run in runs:
        places = [HASHES.index(each) for each in run.hashes]
        assert run.first == places[0]
        assert run.parent == (HASHES[places[0] - 1] if places[0] else b"")
    return [(run.group, run.blocks) for run in runs]


def test_blocks_are_saved_once_each_as_they_become_full() -> None:
    saves = Saves([True])
    saves.allot("r", [[11, 12]])
    assert planned(saves, 0) == []
    assert planned(saves, 2) == [(0, (11, 12))]
    saves.append("r", [[13]])
    assert planned(saves, 3) == [(0, (13,))]
    assert planned(saves, 3) == []


def test_what_has_no_hash_yet_is_not_saved() -> None:
    saves = Saves([True])
    saves.allot("r", [[11, 12, 13]])
    scheduled = Scheduled("r", HASHES[:1], 0, full_blocks=3)
    assert [run.blocks for run in saves.plan(scheduled, None, 0.0)] == [(11,)]


def test_what_the_pool_holds_is_not_saved() -> None:
    saves = Saves([True, False])
    saves.allot("r", [[11, 12, 13, 14], [21, 22, 23, 24]])
    held = Held(2, (b"\0\1",))
    assert planned(saves, 4, held) == [(0, (13, 14)), (1, (21,)), (1, (23, 24))]


def test_null_blocks_of_a_window_are_passed_over() -> None:
    saves = Saves([False])
    saves.allot("r", [[0, 0, 23, 24]])
    assert planned(saves, 4) == [(0, (23, 24))]


def test_blocks_that_may_have_left_a_window_are_never_saved() -> None:
    """They may be another request's by now: its bytes would be found by our key."""
    saves = Saves([True, False])
    saves.allot("r", [[11, 12, 13], [21, 22, 23]])
    assert planned(saves, 3, new_from=2) == [(0, (11, 12, 13)), (1, (23,))]


def test_a_preempted_request_goes_on_with_other_blocks() -> None:
    saves = Saves([True])
    saves.allot("r", [[11, 12]])
    assert planned(saves, 2) == [(0, (11, 12))]
    saves.allot("r", [[31, 32, 33]])
    assert planned(saves, 3) == [(0, (33,))]


def test_requests_with_one_prefix_save_it_once() -> None:
    saves = Saves([True])
    saves.allot("r", [[11, 12]])
    saves.allot("s", [[11, 12]])
    assert planned(saves, 2) == [(0, (11, 12))]
    assert planned(saves, 2, request="s", now_s=AGAIN_S - 0.1) == []
    saves.allot("t", [[11, 12]])
    assert planned(saves, 2, request="t", now_s=AGAIN_S) == [(0, (11, 12))]


def test_after_a_failed_load_all_is_saved_anew() -> None:
    saves = Saves([True])
    saves.allot("r", [[11, 12]])
    assert planned(saves, 2) == [(0, (11, 12))]
    saves.allot("s", [[21, 22, 23]])
    assert planned(saves, 3, Held(2), request="s") == [(0, (23,))]
    saves.start_over("s", HASHES)
    assert planned(saves, 3, request="s") == [(0, (21, 22, 23))]


def test_nothing_is_left_of_a_request_that_has_gone() -> None:
    saves = Saves([True])
    saves.allot("r", [[11]])
    saves.end("r")
    saves.end("never seen")
    assert not len(saves)


def test_loads_are_of_the_promised_blocks_of_all_groups() -> None:
    runs = loads_of(HASHES, [[11, 12, 13, 14], [0, 0, 23, 24]], 1, 4)
    assert runs == (
        BlockRun(0, 1, HASHES[0], tuple(HASHES[1:4]), (12, 13, 14)),
        BlockRun(1, 2, HASHES[1], tuple(HASHES[2:4]), (23, 24)),
    )
    assert loads_of(HASHES, [[0, 0]], 0, 2) == ()
