"""What one process with the model answers, without a pool: what every drill's answers must be."""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING, Final

import torch

from workers.engine import Engine, EngineRequest
from workers.engine_options import load_model
from workers.one_by_one import OneByOne

if TYPE_CHECKING:
    from workers.drills.load import Question
    from workers.generation import LanguageModel

ROOM_TOKENS: Final = 1 << 16


@cache
def alone(model: str, question: Question) -> str:
    """The text of the answer of a model whose tokens are bytes."""
    language = _loaded(model)
    encoded = tuple(question.prompt.encode())
    stop = frozenset({language.chat.end_token})
    engine = Engine(OneByOne(language.model), capacity_tokens=ROOM_TOKENS)
    how = question.temperature, question.top_p, question.seed
    engine.add(EngineRequest("alone", encoded, question.max_tokens, *how, stop))
    made: list[int] = []
    while engine.running:
        made += [one.token for one in engine.step()]
    return language.chat.text(made)


@cache
def _loaded(model: str) -> LanguageModel:
    torch.set_num_threads(1)  # others may be at work, and threads that spin slow all of them down
    return load_model(model)
