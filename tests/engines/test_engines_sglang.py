"""Real SGLang engines with a pool: their tokens are those of an engine without one, always."""

from __future__ import annotations

import os
import signal
from typing import TYPE_CHECKING, Final

import pytest

from kvstore.client.store import KVStore
from tests.cluster.servers import until
from tests.engines.models import text
from tests.engines.sglang_engine import PAGE, Generated, SglangEngine, hicache, linked

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from tests.cluster.up import Up

LENGTH: Final = 200
PROMPT: Final = text(LENGTH)
PAGES: Final = (LENGTH - 1) // PAGE
HIT: Final = PAGES * PAGE
OTHERS: Final = [text(100 + 30 * i, seed=i + 1) for i in range(4)]
FAILURES: Final = {"SGLANG_TEST_HICACHE_BACKEND_RANDOM_FAILURE": "0.4"}


@pytest.fixture(scope="module")
def alone(
    model_of: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory
) -> list[Generated]:
    """What an engine without a pool makes of PROMPT, cold and warm, and of OTHERS one by one."""
    with SglangEngine(model_of("grouped"), folder=tmp_path_factory.mktemp("alone")) as engine:
        return [engine.generate([each]) for each in (PROMPT, PROMPT, *OTHERS)]


def test_tokens_are_the_same_cold_warm_and_in_another_engine(
    alone: list[Generated], model_of: Callable[[str], Path], pool: Up, tmp_path: Path
) -> None:
    """Pages in pieces of the host's memory, each page whole; and the pool emptied by the engine."""
    cache = hicache(pool.master, layout="page_first_direct")
    cold, local, *_ = alone
    assert local.cached == [HIT]
    with SglangEngine(model_of("grouped"), cache, folder=tmp_path) as first:
        assert first.generate([PROMPT]) == cold
        until("its pages are in the pool", lambda: pages_of(pool.master) >= PAGES)
    with SglangEngine(model_of("grouped"), cache, folder=tmp_path) as second:
        warm = second.generate([PROMPT])
        assert warm == Generated(local.tokens, [HIT], [HIT])
        salted = second.generate([PROMPT], salt="another tenant")
        assert salted == cold
        until("those as well", lambda: pages_of(pool.master) >= 2 * PAGES)
        second.clear()
        until("none is left", lambda: pages_of(pool.master) == 0)
        second.forget()
        assert second.generate([PROMPT]) == cold
        until("its pages are there again", lambda: pages_of(pool.master) >= PAGES)
        second.reload(model_of("grouped"))
        # The weights are the same, which nobody knows: those of the pool may be others' by now.
        assert second.generate([PROMPT]) == cold


def test_tokens_are_the_same_with_flat_pages_and_layers_apart(
    alone: list[Generated], model_of: Callable[[str], Path], pool: Up, tmp_path: Path
) -> None:
    """Also while the pool is away, and once it is back."""
    cache = hicache(pool.master, layout="layer_first", in_pieces=False)
    cold, local, *others = alone
    with SglangEngine(model_of("grouped"), cache, folder=tmp_path) as engine:
        assert engine.generate([PROMPT]) == cold
        until("its pages are in the pool", lambda: pages_of(pool.master) >= PAGES)
        engine.forget()
        assert engine.generate([PROMPT]) == Generated(local.tokens, [HIT], [HIT])
        engine.forget()
        pool.stop("master")
        assert engine.generate([PROMPT]) == cold
        for prompt, right in zip(OTHERS, others, strict=True):
            assert engine.generate([prompt]).tokens == right.tokens
        os.kill(pool.pid("master"), signal.SIGCONT)

        def finds_it_again() -> bool:
            engine.forget()
            told = engine.generate([PROMPT])
            assert told.tokens in (cold.tokens, local.tokens)
            return told.storage == [HIT]

        until("the engine finds the pool again", finds_it_again)


def test_tokens_are_the_same_when_four_calls_in_ten_fail(
    alone: list[Generated], model_of: Callable[[str], Path], pool: Up, tmp_path: Path
) -> None:
    """Calls that say they failed; and layers apart, in pieces of one layer each."""
    cache = hicache(pool.master, layout="layer_first")
    prompts = (PROMPT, *OTHERS)
    right = [each.tokens for each in (alone[0], *alone[2:])]
    engine = SglangEngine(model_of("grouped"), cache, folder=tmp_path, environment=FAILURES)
    with engine:
        from_storage = 0
        for _ in range(6):
            told = [engine.generate([each]) for each in prompts]
            assert [each.tokens for each in told] == right
            from_storage += sum(each.storage[0] for each in told)
            engine.forget()
        assert from_storage > 0


def test_ranks_have_shares_of_their_own(
    model_of: Callable[[str], Path], pool: Up, tmp_path: Path
) -> None:
    cache = hicache(pool.master)
    with SglangEngine(model_of("grouped"), cache, folder=tmp_path, ranks=2) as engine:
        cold, local = engine.generate([PROMPT]), engine.generate([PROMPT])
        assert (cold.cached, local.cached) == ([0], [HIT])
        until("both ranks' pages are there", lambda: pages_of(pool.master) >= 2 * PAGES)
        engine.forget()
        assert engine.generate([PROMPT]) == Generated(local.tokens, [HIT], [HIT])


@pytest.mark.parametrize("ranks", [1, 2])
def test_tokens_are_the_same_without_a_cache_of_the_hosts(
    ranks: int, model_of: Callable[[str], Path], pool: Up, tmp_path: Path
) -> None:
    """The linker; a pool that stops is a miss to it as well, and so is one with other weights."""
    cache = linked(pool.master)
    with SglangEngine(model_of("grouped"), cache, folder=tmp_path, ranks=ranks) as engine:
        cold, local = engine.generate([PROMPT]), engine.generate([PROMPT])
        assert (cold.cached, local.cached) == ([0], [HIT])
        until("all pages are there", lambda: pages_of(pool.master) >= ranks * PAGES)
        engine.forget()
        warm = engine.generate([PROMPT])
        assert (warm.tokens, warm.cached) == (local.tokens, [HIT])
        engine.forget()
        pool.stop("master")
        away = engine.generate([PROMPT])
        assert (away.tokens, away.cached) == (cold.tokens, [0])
        os.kill(pool.pid("master"), signal.SIGCONT)

        def finds_it_again() -> bool:
            engine.forget()
            return engine.generate([PROMPT]).cached == [HIT]

        until("the engine finds the pool again", finds_it_again)
        engine.reload(model_of("grouped"))
        assert engine.generate([PROMPT]) == cold


def pages_of(master: str) -> int:
    """How many pages the pool has."""
    with KVStore.connect(master) as store:
        return store.stat().pages
