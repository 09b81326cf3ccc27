"""Rows that a tier is asked for one by one: answered from memory, in time, and never in circles."""

from __future__ import annotations

from kvstore.connectors.engine_lookups import DEADLINE_S, MEMO_S
from kvstore.connectors.row_lookups import RowAnswer, RowLookups, RowQuestion

A, B, C = b"a", b"b", b"c"


def ask(lookups: RowLookups, *keys: bytes, request: str = "r", now_s: float = 0.0) -> list[object]:
    return [lookups.is_there(request, key, now_s, hold=True) for key in keys]


def answered(lookups: RowLookups, *there: bool, now_s: float = 0.0) -> RowQuestion:
    """Have what was asked for answered so."""
    question = lookups.question()
    assert question is not None
    lookups.hear(RowAnswer(question, there, 0), now_s)
    return question


def test_rows_of_all_requests_are_one_question_and_its_answer_is_remembered() -> None:
    lookups = RowLookups()
    assert ask(lookups, A, B) == [None, None]
    assert ask(lookups, B, C, request="other") == [None, None]
    assert answered(lookups, True, False, True).keys == (A, B, C)
    assert ask(lookups, A, B, C) == [True, False, True]
    assert lookups.question() is None


def test_no_answer_by_the_deadline_is_a_miss_and_a_late_one_is_of_use_later() -> None:
    lookups = RowLookups()
    assert ask(lookups, A) == [None]
    question = lookups.question()
    assert question is not None
    assert ask(lookups, A, now_s=DEADLINE_S * 0.9) == [None]
    assert ask(lookups, A, now_s=DEADLINE_S) == [False]
    lookups.hear(RowAnswer(question, [True], 0), DEADLINE_S)
    assert ask(lookups, A, now_s=DEADLINE_S) == [True]


def test_trouble_is_a_miss_and_nobody_waits_for_a_pool_in_trouble() -> None:
    lookups = RowLookups()
    ask(lookups, A)
    question = lookups.question()
    assert question is not None
    lookups.hear(RowAnswer(question, None, 0), 0.0)
    assert ask(lookups, A) == [False]
    assert lookups.is_there("r", B, 0.0, hold=False) is False
    answered(lookups, True)
    # What is known to be there cannot be had while the pool is in trouble.
    assert lookups.is_there("r", B, 0.0, hold=False) is False
    assert ask(lookups, B) == [True]


def test_a_row_whose_load_failed_is_missing_for_good_while_anybody_may_ask() -> None:
    lookups = RowLookups()
    ask(lookups, A, B)
    answered(lookups, True, True)
    lookups.load_failed([A, b"never heard of"])
    assert ask(lookups, A, B) == [False, True]
    assert ask(lookups, A, now_s=2 * MEMO_S) == [False]
    assert lookups.question() is None
    assert ask(lookups, A, request="later") == [False]
    lookups.end("r")
    assert ask(lookups, A, request="later") == [False]
    lookups.end("later")
    assert ask(lookups, A, request="last") == [None]  # a new question, not a circle


def test_what_was_there_long_ago_is_asked_for_again_and_what_was_not_is_not() -> None:
    lookups = RowLookups()
    ask(lookups, A, B)
    answered(lookups, True, False)
    assert ask(lookups, A, B, now_s=MEMO_S) == [True, False]
    late_s = MEMO_S + 0.1
    assert ask(lookups, A, B, now_s=late_s) == [None, False]
    assert answered(lookups, False, now_s=late_s).keys == (A,)
    assert ask(lookups, A, now_s=late_s) == [False]


def test_rows_are_forgotten_with_the_last_request_that_asked() -> None:
    lookups = RowLookups()
    ask(lookups, A, B)
    ask(lookups, B, request="other")
    lookups.end("r")
    assert (A in lookups, B in lookups, len(lookups)) == (False, True, 1)
    question = lookups.question()
    assert question is not None
    assert question.keys == (B,)
    lookups.end("other")
    lookups.end("other")
    lookups.hear(RowAnswer(question, [True], 0), 0.0)
    assert len(lookups) == 0
    assert ask(lookups, B) == [None]
    lookups.hear(RowAnswer(question, [True], 0), 0.0)  # of before it was forgotten
    assert ask(lookups, B) == [None]
