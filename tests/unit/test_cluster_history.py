"""The history checker finds what no right pool may answer, and lets through what one may."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.cluster.history import (
    MISSED,
    REFUSED,
    STORED,
    THERE,
    WAS_THERE,
    Began,
    Call,
    Ended,
    History,
    Op,
    Recorder,
    calls_of,
    digest,
    read_history,
)
from tests.fakes import ManualClock

if TYPE_CHECKING:
    from pathlib import Path

NEVER = math.inf


def put(
    began_s: float, ended_s: float, said: str, result: str = STORED, error: str = "", key: str = "k"
) -> Call:
    results = () if error or ended_s == NEVER else (result,)
    return Call(Op.PUT, began_s, ended_s, (key,), (said,), results, error)


def read(began_s: float, ended_s: float, result: str, key: str = "k") -> Call:
    return Call(Op.READ, began_s, ended_s, (key,), (), (result,), "")


def remove(began_s: float, ended_s: float, error: str = "") -> Call:
    results = () if error or ended_s == NEVER else (WAS_THERE,)
    return Call(Op.REMOVE, began_s, ended_s, ("k",), (), results, error)


RIGHT = {
    "a finished put's bytes": [put(1, 2, "a"), read(3, 4, "a")],
    "a miss": [put(1, 2, "a"), read(3, 4, MISSED)],
    "those of a put that runs": [put(1, 9, "a"), read(3, 4, "a")],
    "of one whose end nobody knows": [put(1, NEVER, "a"), read(30, 31, "a")],
    "of one that began while it was read": [read(1, 4, "a"), put(3, 9, "a")],
    "of one that was refused": [put(1, 2, "a", REFUSED), read(3, 4, "a")],
    "of one that failed": [put(1, 2, "a", error="unavailable"), read(3, 4, "a")],
    "of a put tried again that found its own page": [put(1, 2, "a", THERE), read(3, 4, "a")],
    "during the removal": [put(1, 2, "a"), remove(3, 6), read(4, 5, "a")],
    "begun before the removal ended": [put(1, 2, "a"), remove(3, 6), read(5, 8, "a")],
    "after a removal without an end": [put(1, 2, "a"), remove(3, NEVER), read(5, 8, "a")],
    "after a removal that failed": [put(1, 2, "a"), remove(3, 4, "unavailable"), read(5, 8, "a")],
    "put again": [put(1, 2, "a"), remove(3, 4), put(5, 6, "a"), read(7, 8, "a")],
    "put again otherwise": [put(1, 2, "a"), remove(3, 4), put(5, 6, "b"), read(7, 8, "b")],
    "put while it was removed": [put(1, 5, "a"), remove(3, 4), read(7, 8, "a")],
    "a put that was refused and is sealed late": [
        put(1, 2, "a", REFUSED),
        remove(3, 4),
        read(7, 8, "a"),
    ],
}
WRONG = {
    "bytes that nobody put": [put(1, 2, "a"), read(3, 4, "b")],
    "bytes of another page": [put(1, 2, "a", key="other"), read(3, 4, "a")],
    "before the put began": [read(1, 2, "a"), put(3, 4, "a")],
    "after the removal": [put(1, 2, "a"), remove(3, 4), read(5, 6, "a")],
    "after the last of two removals": [put(1, 2, "a"), remove(3, 4), remove(5, 6), read(7, 8, "a")],
    "removed before another removal began": [
        put(1, 2, "a"),
        remove(3, 4),
        remove(3.5, NEVER),
        read(5, 6, "a"),
    ],
    "the old bytes after a new put": [
        put(1, 2, "a"),
        remove(3, 4),
        put(5, 6, "b"),
        read(7, 8, "a"),
    ],
    "found there before it was removed": [put(1, 2, "a", THERE), remove(3, 4), read(7, 8, "a")],
}


@pytest.mark.parametrize("story", RIGHT)
def test_what_a_right_pool_may_answer(story: str) -> None:
    findings = History(RIGHT[story]).check()
    assert findings.wrong == 0, findings.stories


@pytest.mark.parametrize("story", WRONG)
def test_what_no_pool_may_answer(story: str) -> None:
    findings = History(WRONG[story]).check()
    assert findings.wrong == 1
    assert "page k: read from" in findings.stories[0]


def test_a_story_tells_when_the_bytes_were_put_and_removed() -> None:
    gone = [put(1, 2, "a"), remove(3, 4), put(5, 6, "b"), remove(7, 8), read(9, 10, "a")]
    (story,) = History(gone).check().stories
    assert "with bytes a, which were put 1.000 to 2.000; last removed from 7.000 to 8.000" in story
    (story,) = History([put(1, 2, "a"), read(3, 4, "b")]).check().stories
    assert "which were put never; last kept; bytes put of that page: 1" in story


EXPECTED = {
    "stored": ([put(1, 2, "a")], True),
    "found": ([put(1, 2, "a", THERE)], True),
    "refused": ([put(1, 2, "a", REFUSED)], False),
    "never answered": ([put(1, NEVER, "a")], False),
    "removed": ([put(1, 2, "a"), remove(3, 4)], False),
    "perhaps removed": ([put(1, 2, "a"), remove(3, NEVER)], False),
    "perhaps removed, by a failure": ([put(1, 2, "a"), remove(3, 4, "unavailable")], False),
    "removed and stored again": ([put(1, 2, "a"), remove(3, 4), put(5, 6, "a")], True),
    "removed while it was stored": ([put(1, 4, "a"), remove(3, 5)], False),
}


@pytest.mark.parametrize("story", EXPECTED)
def test_what_has_to_be_there_in_the_end(story: str) -> None:
    calls, is_expected = EXPECTED[story]
    assert History(calls).expected() == (["k"] if is_expected else [])


def test_what_is_counted() -> None:
    findings = History(
        [
            put(1, 2, "a"),
            put(2, 3, "a", THERE),
            put(3, 9, "b", REFUSED),
            put(4, 5, "b", error="out_of_space"),
            read(6, 7, "a"),
            read(7, 8, MISSED),
            read(10, 11.5, "a"),
            remove(12, 13),
        ]
    ).check()
    assert (findings.puts, findings.refused) == (2, 2)
    assert (findings.reads, findings.misses, findings.removals) == (2, 1, 1)
    assert findings.errors == {"out_of_space": 1}
    assert findings.longest_s == 6
    assert (findings.put_gap_s, findings.read_gap_s) == (1, 4.5)


def test_a_history_is_read_as_it_was_written(tmp_path: Path) -> None:
    clock = ManualClock(5.0)
    recorder = Recorder(tmp_path / "client", clock)
    first = recorder.began(Op.PUT, ["k", "l"], [digest(b"1"), digest(b"2")])
    clock.advance(1)
    recorder.ended(first, [STORED, REFUSED])
    failing = recorder.began(Op.REMOVE, ["k"])
    recorder.failed(failing, "unavailable")
    recorder.began(Op.READ, ["l"])
    recorder.close()
    with (tmp_path / "client").open("ab") as file:
        file.write(b'{"type":"Ended","numb')  # killed while it wrote
    assert read_history(tmp_path / "client") == [
        Call(Op.PUT, 5, 6, ("k", "l"), (digest(b"1"), digest(b"2")), (STORED, REFUSED), ""),
        Call(Op.REMOVE, 6, 6, ("k",), (), (), "unavailable"),
        Call(Op.READ, 6, NEVER, ("l",), (), (), ""),
    ]
    assert digest(b"1") != digest(b"2")


def test_results_that_do_not_match_their_keys_are_a_fault_of_the_client() -> None:
    began, ended = Began(1, Op.READ, 1.0, ("k", "l")), Ended(1, 2.0, ("a",))
    with pytest.raises(AssertionError):
        list(calls_of([began, ended]))


@given(st.lists(st.tuples(st.booleans(), st.booleans()), min_size=1, max_size=12))
def test_a_register_that_is_used_by_one_client_is_right(steps: list[tuple[bool, bool]]) -> None:
    """One client after another step, each ended before the next: a model of one place agrees."""
    calls: list[Call] = []
    holds, now_s = MISSED, 0.0
    for version, (is_put, is_other) in enumerate(steps):
        now_s += 10
        if is_put and holds == MISSED:
            holds = f"v{version}"
            calls.append(put(now_s, now_s + 1, holds))
        elif is_other:
            holds = MISSED
            calls.append(remove(now_s, now_s + 1))
        calls.append(read(now_s + 2, now_s + 3, holds))
    history = History(calls)
    assert history.check().wrong == 0
    assert history.expected() == (["k"] if holds else [])
    old = {call.digests[0] for call in calls if call.op is Op.PUT} - {holds}
    stale = [read(now_s + 5, now_s + 6, each) for each in sorted(old)]
    assert History([*calls, *stale]).check().wrong == len(stale)
