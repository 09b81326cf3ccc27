"""How answers are generated: in which pieces, and when they end."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch

from workers import generation, tiny_llama
from workers.chat_formats import END, ByteChat
from workers.generation import SENTENCE_END, LanguageModel, append, generate, warm_up

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

PROMPT = ByteChat().prompt("Why?")


@pytest.fixture(scope="module")
def language() -> Iterator[LanguageModel]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # For so small a model, more of them only wait for one another.
    yield tiny_llama.load()
    torch.set_num_threads(threads)


class Scripted(ByteChat):
    """A chat in which the n-th generated token reads as the n-th word."""

    def __init__(self, *words: str) -> None:
        self.words = words

    def text(self, tokens: Sequence[int]) -> str:
        return "".join(self.words[: len(tokens)])


def test_the_model_is_the_same_in_every_process(language: LanguageModel) -> None:
    other = tiny_llama.load().model
    for one, two in zip(language.model.parameters(), other.parameters(), strict=True):
        assert torch.equal(one, two)


def test_making_the_model_leaves_the_callers_randomness_alone() -> None:
    torch.manual_seed(1)
    want = torch.rand(3)
    torch.manual_seed(1)
    tiny_llama.load()
    assert torch.equal(torch.rand(3), want)


def test_a_prefill_is_cut_into_pieces(
    language: LanguageModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(generation, "PIECE_TOKENS", 4)
    tokens = list(range(1, 11))
    whole, pieces = language.empty_cache(), language.empty_cache()
    following = append(language.model, whole, tokens)
    last = [append(language.model, pieces, tokens[at : at + 4]) for at in (0, 4, 8)]
    assert whole.get_seq_length() == len(tokens)
    assert last[-1] == following
    for one, two in zip(whole.layers, pieces.layers, strict=True):
        assert torch.equal(one.keys, two.keys)
        assert torch.equal(one.values, two.values)


def test_an_answer_has_at_most_so_many_tokens(language: LanguageModel) -> None:
    cache = language.empty_cache()
    first = append(language.model, cache, PROMPT)
    answer = generate(language, cache, first, 7)
    assert len(answer.generated) == 7
    assert answer.tokens == answer.generated
    # The last token was chosen, but not computed.
    assert cache.get_seq_length() == len(PROMPT) + 6


def test_an_answer_ends_after_a_sentence(language: LanguageModel) -> None:
    scripted = LanguageModel("m", language.model, Scripted("So", " it", " is.", " But", " more"))
    cache = language.empty_cache()
    answer = generate(scripted, cache, append(language.model, cache, PROMPT), 5)
    assert answer.text == "So it is."
    assert len(answer.generated) == 4
    assert answer.tokens == answer.generated[:3]
    assert cache.get_seq_length() == len(PROMPT) + 3


def test_an_answer_ends_where_the_model_ends_it(language: LanguageModel) -> None:
    cache = language.empty_cache()
    append(language.model, cache, PROMPT)
    answer = generate(language, cache, END, 5)
    assert (answer.generated, answer.tokens, answer.text) == ([END], [], "")


@pytest.mark.parametrize(
    ("text", "end"),
    [
        ("It is version 2.0 of it", None),
        ("It is version 2.0.", None),
        ("It is version 2.0.\n", 18),
        ("1. The master\n2. The worker", None),
        ("Yes! And", 4),
        ("Who? Me.", 4),
        ("", None),
    ],
)
def test_where_sentences_end(text: str, end: int | None) -> None:
    found = SENTENCE_END.search(text)
    assert (found.end() if found else None) == end


def test_warming_up_leaves_nothing_behind(language: LanguageModel) -> None:
    cache = language.empty_cache()
    want = append(language.model, cache, PROMPT)
    warm_up(language)
    assert append(language.model, language.empty_cache(), PROMPT) == want
