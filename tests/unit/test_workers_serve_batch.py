"""An engine in its thread: who joins, who leaves, and who hears of what."""

from __future__ import annotations

import queue
from typing import TYPE_CHECKING

import pytest
from transformers import DynamicCache

from kvstore.errors import OutOfSpace
from tests.tiny_model import config, text, tiny
from workers.engine import Engine, EngineRequest, Generated, Taken
from workers.one_by_one import OneByOne
from workers.serve_batch import Batch

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    import torch

Heard = queue.Queue[Generated]
WAIT_S = 60


@pytest.fixture
def failures() -> list[BaseException]:
    return []


@pytest.fixture
def batch(failures: list[BaseException]) -> Iterator[Batch]:
    made = Batch(Engine(OneByOne(tiny()), capacity_tokens=300, rows_max=2), failures.append)
    yield made
    made.close()
    assert not failures


def join(batch: Batch, name: str, tokens: int) -> Heard:
    heard: Heard = queue.Queue()
    request = EngineRequest(name, tuple(text(7)), tokens)

    def hear(one: Generated | Taken) -> None:
        assert isinstance(one, Generated)
        heard.put(one)

    batch.add(request, DynamicCache(config=config()), hear).result(WAIT_S)
    return heard


def all_of(heard: Heard) -> list[int]:
    found: list[int] = []
    while True:
        one = heard.get(timeout=WAIT_S)
        found.append(one.token)
        if one.finish is not None:
            return found


def alone(tokens: int) -> list[int]:
    engine = Engine(OneByOne(tiny()), capacity_tokens=300)
    engine.add(EngineRequest("alone", tuple(text(7)), tokens))
    found: list[int] = []
    while engine.running:
        found += [one.token for one in engine.step()]
    return found


def test_each_request_has_its_listener(batch: Batch) -> None:
    one, other = join(batch, "one", 5), join(batch, "other", 9)
    assert (all_of(one), all_of(other)) == (alone(5), alone(9))
    assert batch.step_s > 0
    batch.cancel("none").result(WAIT_S)
    assert batch.held == {}


def test_prompts_that_wait_are_counted_until_they_are_computed(batch: Batch) -> None:
    assert (batch.queued_tokens, batch.tokens_per_s) == (0, 0.0)
    all_of(join(batch, "one", 5))
    assert batch.queued_tokens == 0
    assert batch.tokens_per_s > 0


def test_who_does_not_fit_is_told_so(batch: Batch) -> None:
    join(batch, "one", 200)
    with pytest.raises(OutOfSpace):
        join(batch, "other", 200)
    batch.cancel("one").result(WAIT_S)
    assert all_of(join(batch, "other", 3)) == alone(3)


def test_a_request_that_is_taken_out_goes_on_elsewhere(batch: Batch) -> None:
    heard = join(batch, "one", 60)
    first = heard.get(timeout=WAIT_S)
    taken = batch.export("one").result(WAIT_S)
    assert taken is not None
    assert taken.tokens[7] == first.token
    assert list(taken.tokens[7:]) == alone(60)[: len(taken.tokens) - 7]
    assert batch.export("one").result(WAIT_S) is None


# The thread ends by the error, as threads with a bug do.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_failure_of_the_engine_is_told() -> None:
    class Broken(OneByOne):
        def extend(self, kv: DynamicCache, tokens: Sequence[int]) -> torch.Tensor:
            raise ZeroDivisionError

    failed: queue.Queue[BaseException] = queue.Queue()
    batch = Batch(Engine(Broken(tiny()), capacity_tokens=300), failed.put)
    join(batch, "one", 5)
    assert isinstance(failed.get(timeout=WAIT_S), ZeroDivisionError)
