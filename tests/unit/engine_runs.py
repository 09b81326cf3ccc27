"""Requests on a tiny model, and what each generates when it runs alone. Not a test."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tests.tiny_model import text
from workers.engine import AnyEngine, Engine, EngineRequest, Generated
from workers.one_by_one import OneByOne

if TYPE_CHECKING:
    from collections.abc import Callable

    from transformers import PreTrainedModel

CHUNK = 8
CAPACITY = 400


def request(
    name: str, length: int, max_tokens: int = 6, *, temperature: float = 0.0, seed: int = 0
) -> EngineRequest:
    """A request whose prompt differs from those of other lengths."""
    tokens = tuple(text(2 * length)[length:])
    return EngineRequest(name, tokens, max_tokens, temperature, top_p=0.95, seed=seed)


def one_by_one(model: PreTrainedModel, **changes: int) -> AnyEngine:
    """An engine that computes rows alone."""
    limits = {"capacity_tokens": CAPACITY, "chunk_tokens": CHUNK} | changes
    return Engine(OneByOne(model), **limits)


def alone(model: PreTrainedModel, asked: EngineRequest) -> tuple[int, ...]:
    """Prompt and generated tokens of a request that nothing runs beside."""
    engine = one_by_one(model)
    engine.add(asked)
    (ended,) = [one for one in run(engine) if one.taken is not None]
    assert ended.taken is not None
    return ended.taken.tokens


def run(engine: AnyEngine, meanwhile: Callable[[int], None] = lambda _: None) -> list[Generated]:
    """Step until nothing runs; `meanwhile` is called with the number of steps before each."""
    generated: list[Generated] = []
    steps = 0
    meanwhile(steps)
    while engine.running:
        generated += engine.step()
        steps += 1
        meanwhile(steps)
    return generated
