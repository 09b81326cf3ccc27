"""Prefill and decode worker in one process, on a store in a dict: turns, splits, reuse."""

from __future__ import annotations

from itertools import groupby
from typing import TYPE_CHECKING

import pytest
import torch

from kvstore.connectors.transformers import PooledPrefix
from kvstore.errors import Unavailable
from tests.fake_store import FakeStore
from workers import tiny_llama
from workers.decode import Alone, FromPool, Talk
from workers.demo_reports import PrefillReport
from workers.prefill import hand_over

if TYPE_CHECKING:
    from collections.abc import Iterator

    from workers.decode import Prefixes
    from workers.demo_reports import Turn
    from workers.generation import LanguageModel

DOCUMENT = "The harbour master knows where every ship lies. " * 8
ANSWER_TOKENS = 40
PAGE = 64


@pytest.fixture(scope="module")
def language() -> Iterator[LanguageModel]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # For so small a model, more of them only wait for one another.
    yield tiny_llama.load()
    torch.set_num_threads(threads)


@pytest.fixture
def store() -> Iterator[FakeStore]:
    made = FakeStore()
    yield made
    for buffer in made.buffers:
        buffer.close()


@pytest.fixture
def prefix(store: FakeStore, language: LanguageModel) -> PooledPrefix:
    return PooledPrefix(store, language.model, language.model_id)


def talked(language: LanguageModel, prefixes: Prefixes) -> list[Turn]:
    """Two chats about the document; the second has three turns."""
    first = Talk(language, prefixes, ANSWER_TOKENS).ask(DOCUMENT, "Who?")
    talk = Talk(language, prefixes, ANSWER_TOKENS)
    return [first, talk.ask(DOCUMENT, "Where?"), talk.go_on("When?"), talk.go_on("Why?")]


def test_a_prefill_worker_hands_whole_pages_over(
    store: FakeStore, language: LanguageModel, prefix: PooledPrefix
) -> None:
    report = hand_over(language, prefix, DOCUMENT)
    assert report.tokens > 0
    assert report.tokens % PAGE == 0
    assert len(store.held) == report.pages_stored == report.tokens // PAGE
    assert report.bytes_moved == report.pages_stored * prefix.namespace.page_bytes


def test_what_the_pool_has_is_not_computed_again(
    language: LanguageModel, prefix: PooledPrefix
) -> None:
    first, second = (hand_over(language, prefix, DOCUMENT) for _ in range(2))
    assert isinstance(first, PrefillReport)
    assert (first.reused_tokens, second.reused_tokens) == (0, first.tokens)
    assert second.pages_stored == 0


def test_a_document_shorter_than_a_page_hands_nothing_over(
    store: FakeStore, language: LanguageModel, prefix: PooledPrefix
) -> None:
    assert hand_over(language, prefix, "Short.").tokens == 0
    assert not store.held


def test_answers_from_the_pool_are_those_of_a_process_alone(
    language: LanguageModel, prefix: PooledPrefix
) -> None:
    handed = hand_over(language, prefix, DOCUMENT)
    pooled = talked(language, FromPool(prefix))
    assert [turn.reused_tokens for turn in pooled[:2]] == [handed.tokens] * 2
    alone = talked(language, Alone(language, [turn.reused_tokens for turn in pooled]))
    for got, want in zip(pooled, alone, strict=True):
        assert got.generated == want.generated
        assert (got.text, got.prompt_tokens) == (want.text, want.prompt_tokens)
        assert (want.bytes_moved, want.pages_stored) == (0, 0)


def test_the_next_turn_reuses_what_was_generated(
    language: LanguageModel, prefix: PooledPrefix
) -> None:
    hand_over(language, prefix, DOCUMENT)
    _, opening, second, third = talked(language, FromPool(prefix))
    assert opening.reused_generated_tokens == 0
    answered = opening.prompt_tokens + len(opening.generated)
    assert opening.prompt_tokens < third.reused_tokens
    assert third.reused_tokens >= second.prompt_tokens // PAGE * PAGE
    assert 0 < third.reused_generated_tokens <= len(opening.generated) + len(second.generated)
    if second.reused_tokens >= opening.prompt_tokens:
        assert second.reused_tokens <= answered


def test_each_chat_says_which_of_its_turns_this_is(
    store: FakeStore, language: LanguageModel, prefix: PooledPrefix
) -> None:
    talked(language, FromPool(prefix))
    turns = [hints.turn for _, _, hints in store.heard if hints is not None]
    assert [turn for turn, _ in groupby(turns)] == [1, 2, 3]


def test_a_pool_in_trouble_changes_no_answer(store: FakeStore, language: LanguageModel) -> None:
    prefix = PooledPrefix(store, language.model, language.model_id)
    store.fail = dict.fromkeys(("match_prefix", "probe"), Unavailable("gone"))
    pooled = talked(language, FromPool(prefix))
    assert [turn.reused_tokens for turn in pooled] == [0] * 4
    assert all(turn.trouble == "unavailable: gone" for turn in pooled)
    alone = talked(language, Alone(language, [0] * 4))
    assert [turn.generated for turn in pooled] == [turn.generated for turn in alone]


def test_pages_of_a_wrong_prefix_would_be_noticed(
    store: FakeStore, language: LanguageModel, prefix: PooledPrefix
) -> None:
    """The comparison is worth something: damaged KV gives other tokens."""
    hand_over(language, prefix, DOCUMENT)
    for held, data in store.held.items():
        store.held[held] = data[len(data) // 2 :] + data[: len(data) // 2]
    pooled = talked(language, FromPool(prefix))
    alone = talked(language, Alone(language, [turn.reused_tokens for turn in pooled]))
    assert [turn.generated for turn in pooled] != [turn.generated for turn in alone]
