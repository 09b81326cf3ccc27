"""What a scheduler is told of the pool: at once, or not yet, or nothing after a deadline."""

from __future__ import annotations

import itertools
from random import Random

import pytest

from kvstore.connectors.engine_lookups import (
    DEADLINE_S,
    MEMO_S,
    NEXT,
    NOTHING_PROMISED,
    QUIET_S,
    SOON_S,
    Answer,
    Held,
    Knowledge,
    Lookups,
    News,
    Promised,
    Question,
    restorable,
)

HASHES = [bytes([i]) * 32 for i in range(1, 9)]
BLOCK = 16
NEVER = {
    # Only the scheduler's own look ages an answer, and it looks at KNOWN ones.
    *((each, News.AGED) for each in Knowledge if each is not Knowledge.KNOWN),
    # A question is out only while ASKED, or later: its answer cannot come to what is KNOWN.
    (Knowledge.KNOWN, News.ANSWERED),
    (Knowledge.KNOWN, News.NO_ANSWER),
}


class Asked:
    """Lookups without a pool: the test answers."""

    def __init__(self, *window_blocks: int, load_tokens_min: int = 0) -> None:
        self.questions: list[Question] = []
        self.lookups = Lookups(
            window_blocks, BLOCK, self.questions.append, load_tokens_min=load_tokens_min
        )

    def begin(
        self,
        request: str = "r",
        now_s: float = 0.0,
        *,
        hold: bool = True,
        promised: Promised = NOTHING_PROMISED,
    ) -> None:
        self.lookups.begin(request, HASHES, now_s, hold=hold, promised=promised)

    def answer(self, held: Held | None, now_s: float = 0.0, which: int = -1) -> None:
        question = self.questions[which]
        self.lookups.hear(Answer(question.request, question.number, held), now_s)

    def blocks(self, now_s: float = 0.0, first: int = 0, tokens: int = 8 * BLOCK) -> int | None:
        return self.lookups.blocks("r", HASHES, first, tokens, now_s)


def test_the_table_covers_what_can_happen() -> None:
    assert set(itertools.product(Knowledge, News)) - set(NEXT) == NEVER


def test_a_request_is_asked_for_once_and_answered_from_memory() -> None:
    asked = Asked()
    asked.begin()
    assert asked.blocks() is None
    asked.answer(Held(5))
    assert [asked.blocks(now_s) for now_s in (0.0, 1.0, MEMO_S)] == [5, 5, 5]
    assert [question.hashes for question in asked.questions] == [tuple(HASHES)]


def test_after_the_deadline_the_answer_is_nothing_and_stays_it() -> None:
    asked = Asked()
    asked.begin()
    assert asked.blocks(DEADLINE_S - 0.001) is None
    assert asked.blocks(DEADLINE_S) == 0
    assert asked.blocks(DEADLINE_S + 1) == 0


def test_a_late_answer_serves_the_request_when_it_is_asked_for_again() -> None:
    asked = Asked()
    asked.begin()
    assert asked.blocks(DEADLINE_S) == 0
    asked.answer(Held(5), now_s=1.0)
    assert asked.blocks(1.0) == 5


@pytest.mark.parametrize("is_answered", [True, False])
def test_what_is_leased_no_more_is_asked_for_again(is_answered: bool) -> None:
    asked = Asked()
    asked.begin()
    if is_answered:
        asked.answer(Held(5))
    asked.blocks(DEADLINE_S)
    asked.lookups.leases_ended("r")
    if not is_answered:
        asked.answer(Held(5), now_s=1.0)
    assert asked.lookups.held("r") == Held(5)  # which is what saves go by
    assert asked.blocks(1.0) is None
    asked.answer(Held(4), now_s=1.0)
    assert asked.blocks(1.0) == 4


def test_while_the_pool_is_in_trouble_nobody_is_held_back() -> None:
    asked = Asked()
    asked.begin(hold=False)
    assert asked.blocks() == 0
    assert len(asked.questions) == 1  # which may be the one that finds the pool well again


def test_trouble_is_no_answer() -> None:
    asked = Asked()
    asked.begin()
    asked.answer(None)
    assert asked.blocks() == 0
    assert asked.lookups.held("r") is None


def test_the_last_token_is_always_computed() -> None:
    asked = Asked()
    asked.begin()
    asked.answer(Held(8))
    assert asked.blocks(tokens=8 * BLOCK) == 7
    assert asked.blocks(tokens=8 * BLOCK + 1) == 8


def test_blocks_that_the_engine_has_are_not_promised() -> None:
    asked = Asked()
    asked.begin()
    asked.answer(Held(5))
    assert [asked.blocks(first=first) for first in (0, 3, 5, 6)] == [5, 2, 0, 0]


@pytest.mark.parametrize(("least", "found"), [(0, 3), (2 * BLOCK, 3), (3 * BLOCK, 3)])
def test_what_is_worth_a_load_is_promised_whole(least: int, found: int) -> None:
    asked = Asked(load_tokens_min=least)
    asked.begin()
    asked.answer(Held(5))
    assert asked.blocks(first=2) == found
    assert asked.lookups.short("r", 2, 8 * BLOCK) == 0


def test_what_saves_too_few_tokens_is_computed() -> None:
    asked = Asked(load_tokens_min=3 * BLOCK + 1)  # whole blocks: four
    asked.begin()
    asked.answer(Held(5))
    assert [asked.blocks(first=first) for first in (0, 1, 2, 4, 7)] == [5, 4, 0, 0, 0]
    assert [asked.lookups.short("r", first, 8 * BLOCK) for first in (0, 1, 2, 4, 7)] == [
        0, 0, 3, 1, 0,
    ]  # fmt: skip
    asked.lookups.load_failed("r", 0.0)
    assert asked.lookups.short("r", 2, 8 * BLOCK) == 0  # they may be gone
    assert asked.lookups.short("another", 2, 8 * BLOCK) == 0


def test_a_request_that_has_too_few_tokens_to_win_is_not_held_back() -> None:
    asked = Asked(load_tokens_min=4 * BLOCK)
    asked.begin()
    assert asked.blocks(tokens=4 * BLOCK) == 0  # the last of which is computed
    assert asked.blocks(first=5) == 0
    assert asked.blocks(tokens=4 * BLOCK + 1) is None
    asked.answer(Held(2))
    assert asked.blocks(tokens=4 * BLOCK + 1) == 0
    assert asked.lookups.held("r") == Held(2)  # which is what saves go by


def test_what_another_engine_has_computed_is_loaded_however_short() -> None:
    asked = Asked(load_tokens_min=4 * BLOCK)
    asked.begin(promised=Promised(2, 1.0))
    assert asked.blocks(tokens=2 * BLOCK + 1) is None
    asked.answer(Held(2))
    assert asked.blocks(tokens=2 * BLOCK + 1) == 2
    assert asked.lookups.short("r", 0, 2 * BLOCK + 1) == 0


def test_an_old_answer_is_asked_for_anew() -> None:
    asked = Asked()
    asked.begin()
    asked.answer(Held(5))
    assert asked.blocks(MEMO_S + 1) is None
    asked.answer(Held(8), MEMO_S + 1, which=0)  # to the first question, which is too late
    assert asked.blocks(MEMO_S + 1) is None
    asked.answer(Held(2), MEMO_S + 1)
    assert asked.blocks(MEMO_S + 1) == 2


def test_a_failed_load_is_remembered_for_good() -> None:
    """Or the scheduler asks again, is promised the same again, and fails again, for ever."""
    asked = Asked()
    asked.begin()
    asked.answer(Held(5))
    assert asked.blocks() == 5
    asked.lookups.load_failed("r", 0.0)
    assert [asked.blocks(now_s) for now_s in (0.0, MEMO_S + 1, 1000.0)] == [0, 0, 0]
    assert len(asked.questions) == 1
    assert asked.lookups.held("r") is None


def test_after_a_failed_load_nobody_is_promised_anything_for_a_while() -> None:
    asked = Asked()
    asked.begin()
    asked.answer(Held(5))
    asked.lookups.load_failed("another", 0.0)
    assert [asked.blocks(now_s) for now_s in (0.0, QUIET_S - 0.01, QUIET_S)] == [0, 0, 5]


def test_nothing_is_left_of_a_request_that_has_gone() -> None:
    asked = Asked()
    asked.begin()
    asked.lookups.end("r")
    asked.answer(Held(5))
    asked.lookups.load_failed("r", 0.0)
    assert asked.blocks() == 0
    assert not len(asked.lookups)


@pytest.mark.parametrize(
    ("flags", "first", "want"),
    [
        (b"\1\1\1\1\1\1", 0, 6),
        (b"\0\0\0\0\1\1", 0, 6),  # what is before the window need not be there
        (b"\0\0\0\1\0\1", 0, 0),  # a hole in every window
        (b"\1\1\0\1\1\0", 0, 5),
        (b"\1\1\1\0\1\0", 0, 3),
        (b"\0\0\0\1\0\0", 3, 4),  # the engine has the block before
        (b"\0\0\0\0\0\0", 3, 3),
    ],
)
def test_a_window_needs_its_last_blocks(flags: bytes, first: int, want: int) -> None:
    assert restorable(Held(6, (flags,)), (2,), first, 6) == want


def test_restorable_is_the_longest_prefix_that_all_groups_have() -> None:
    random = Random(7)
    for _ in range(2_000):
        pages = random.randrange(9)
        reach = [random.randrange(1, 4) for _ in range(random.randrange(3))]
        flags = tuple(bytes(random.randrange(2) for _ in range(pages)) for _ in reach)
        first, limit = random.randrange(6), random.randrange(10)
        want = first
        for n in range(first + 1, min(pages, limit) + 1):
            if all(all(f[max(first, n - r) : n]) for f, r in zip(flags, reach, strict=True)):
                want = n
        assert restorable(Held(pages, flags), reach, first, limit) == want, (flags, reach, first)


def test_what_was_promised_is_waited_for_and_asked_for_again() -> None:
    asked = Asked()
    asked.begin(promised=Promised(5, until_s=2.0))
    assert asked.blocks(DEADLINE_S) is None  # no answer yet
    asked.answer(Held(3), now_s=0.1)
    assert asked.blocks(0.1) is None
    assert len(asked.questions) == 1
    assert asked.blocks(0.1 + 2 * SOON_S) is None
    assert len(asked.questions) == 2
    asked.answer(Held(5), now_s=0.2)
    assert asked.blocks(0.2) == 5
    assert asked.blocks(0.2 + 2 * SOON_S) == 5
    assert len(asked.questions) == 2


def test_after_its_deadline_a_promise_is_worth_what_there_is() -> None:
    asked = Asked()
    asked.begin(promised=Promised(5, until_s=2.0))
    asked.answer(Held(3), now_s=1.99)
    assert asked.blocks(1.99) is None
    assert asked.blocks(2.0) == 3


def test_a_promise_without_any_answer_ends_as_well() -> None:
    asked = Asked()
    asked.begin(promised=Promised(5, until_s=2.0))
    assert asked.blocks(1.99) is None
    assert asked.blocks(2.0) == 0


def test_a_promise_holds_nobody_back_while_the_pool_is_in_trouble() -> None:
    asked = Asked()
    asked.begin(promised=Promised(5, until_s=2.0))
    asked.answer(None)
    assert asked.blocks(0.0) == 0


def test_a_promise_counts_what_the_engine_has_and_what_windows_lack() -> None:
    asked = Asked(2)
    asked.begin(promised=Promised(5, until_s=2.0))
    asked.answer(Held(5, (bytes([0, 0, 0, 1, 0]),)))
    assert asked.blocks(0.0, first=5) == 0  # all of it is the engine's own
    assert asked.blocks(0.0, first=1) is None  # the window's last block is on its way
    asked.blocks(2 * SOON_S, first=1)
    asked.answer(Held(5, (bytes([0, 0, 0, 1, 1]),)), now_s=2 * SOON_S)
    assert asked.blocks(2 * SOON_S, first=1) == 4


def test_a_promise_of_more_than_can_be_loaded_is_not_waited_for() -> None:
    asked = Asked()
    asked.begin(promised=Promised(8, until_s=2.0))
    asked.answer(Held(8))
    assert asked.blocks(0.0, tokens=8 * BLOCK) == 7
