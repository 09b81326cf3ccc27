"""Running a causal language model: prefill in pieces, then greedy decoding.

Owns how a prompt is cut into forward passes. Two runs give the same bits only if they cut it
alike, so every program here computes through `append`. Knows no pool and no particular model.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, Protocol

import torch
from transformers import DynamicCache

if TYPE_CHECKING:
    from collections.abc import Sequence

    from transformers import PreTrainedModel

PIECE_TOKENS: Final = 512
"""Tokens of one forward pass of a prefill; more would only need more memory."""
WARM_UP_TOKENS: Final = 64
SENTENCE_END: Final = re.compile(r"(?m)(?<!^\d)[.!?](?=\s)")
"""The number of a list's entry ends no sentence."""


class Chat(Protocol):
    """A tokenizer that knows its model's chat format."""

    @property
    def end_token(self) -> int:
        """What the model writes when its answer is complete."""
        ...

    def prompt(self, content: str) -> list[int]:
        """Tokens of a chat that opens with this message of the user, up to the answer."""
        ...

    def follow_up(self, content: str) -> list[int]:
        """Tokens from the end of an answer, over the user's next message, to the next answer."""
        ...

    def text(self, tokens: Sequence[int]) -> str:
        """The text of an answer's tokens."""
        ...


@dataclass(frozen=True)
class LanguageModel:
    """A model in memory, the name under which its pages are kept, and its chat format."""

    model_id: str
    model: PreTrainedModel
    chat: Chat

    def empty_cache(self) -> DynamicCache:
        """A cache of no tokens."""
        return DynamicCache(config=self.model.config)


@dataclass(frozen=True)
class Answer:
    """What was generated, and how much of it the answer is: the rest only showed its end."""

    generated: list[int]
    tokens: list[int]
    """Leading part of `generated`, all of whose KV was computed but perhaps for its last."""
    text: str


def append(model: PreTrainedModel, cache: DynamicCache, tokens: Sequence[int]) -> int:
    """Compute `tokens` after what the cache holds; the most likely token after the last."""
    assert tokens
    logits = torch.empty(0)
    for start in range(0, len(tokens), PIECE_TOKENS):
        logits = logits_after(model, cache, tokens[start : start + PIECE_TOKENS])
    return int(logits.argmax())


@torch.no_grad()
def logits_after(
    model: PreTrainedModel, cache: DynamicCache, tokens: Sequence[int]
) -> torch.Tensor:
    """Compute `tokens` after what the cache holds, in one pass; the last one's logits,
    [vocabulary]."""
    piece = torch.tensor([list(tokens)], device=model.device)
    logits: torch.Tensor = model(
        input_ids=piece, cache=cache, use_cache=True, logits_to_keep=1
    ).logits
    return logits[0, -1]


def generate(language: LanguageModel, cache: DynamicCache, first: int, tokens_max: int) -> Answer:
    """Go on from `first`, the token after what the cache holds, as the model likes best.

    Ends at the model's end token, at `tokens_max` tokens, or after the first sentence: a small
    model only repeats itself after that.
    """
    generated = [first]
    while generated[-1] != language.chat.end_token:
        text = language.chat.text(generated)
        end = SENTENCE_END.search(text)
        if end is not None:
            return Answer(generated, generated[:-1], text[: end.end()].strip())
        if len(generated) == tokens_max:
            return Answer(generated, list(generated), text.strip())
        generated.append(append(language.model, cache, generated[-1:]))
    tokens = generated[:-1]
    return Answer(generated, tokens, language.chat.text(tokens).strip())


def warm_up(language: LanguageModel) -> None:
    """Pay once for what only the first forward passes pay: page faults, chosen kernels."""
    cache = language.empty_cache()
    for count in (WARM_UP_TOKENS, WARM_UP_TOKENS, 1):
        append(language.model, cache, [0] * count)
