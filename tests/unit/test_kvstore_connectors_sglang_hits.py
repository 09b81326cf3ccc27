"""Prefixes that can be restored with all that they need, and no others."""

from __future__ import annotations

from itertools import product

from kvstore.connectors.sglang.hits import Kind, leading, lengths, restorable


def enough(length: int, kind: Kind) -> bool:
    """What the lengths mean, said another way."""
    first = max(0, length - kind.window) if kind.window else 0
    return all(kind.there[first:length])


def test_every_prefix_is_told_right_whatever_is_there() -> None:
    for kv in product([False, True], repeat=4):
        for there in product([False, True], repeat=4):
            for window in (0, 1, 2, 3):
                kind = Kind("swa", there, window)
                found = restorable("kv", kv, [kind])
                right = [n for n in range(1, 5) if all(kv[:n]) and enough(n, kind)]
                assert found.lengths == right, (kv, there, window)


def test_two_kinds_must_agree_on_a_length() -> None:
    states = Kind("mamba", [False, True, False, True], 1)
    windows = Kind("swa", [True, True, True, False], 2)
    found = restorable("kv", [True] * 4, [states, windows])
    assert found.lengths == [2]
    assert found.longest == {"kv": 4, "mamba": 4, "swa": 3}


def test_a_kind_of_which_nothing_is_there_has_no_verdict() -> None:
    found = restorable("kv", [True, True], [Kind("indexer", [False, True], 0)])
    assert found == ([], {"kv": 2})
    assert restorable("kv", [False, True], []) == ([], {})


def test_a_window_before_the_first_page_is_cut_there() -> None:
    assert lengths(3, Kind("swa", [True, True, True], 8)) == [1, 2, 3]
    assert leading([]) == 0
