"""Real vLLM engines whose pool fails them at the worst moment: recomputed, never wrong, no hang."""

from __future__ import annotations

import os
import signal
from typing import TYPE_CHECKING, Final

import pytest

from tests.cluster.servers import until
from tests.cluster.up import Up, remove_segments
from tests.engines.conftest import DRAM
from tests.engines.vllm_engine import BLOCK, VllmEngine
from tests.engines.worst import LENGTH, PROMPT, RETRY_S, Pausing, spoil
from workers.drills.ports import free_port

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path


HIT: Final = (LENGTH - 1) // BLOCK * BLOCK
PAGES: Final = HIT // BLOCK
FAULTS: Final = "tests.engines.vllm_faults"


class Stopping(Pausing):
    """An engine that stops before a load."""

    def engine(self, model: Path, masters: str, connector: str = "PausingConnector") -> VllmEngine:
        return VllmEngine(
            model, masters, folder=self.pause.parent, connector=(connector, FAULTS),
            environment=self.environment,
        )  # fmt: skip


@pytest.fixture(scope="module", params=["grouped", "windows"])
def kind(request: pytest.FixtureRequest) -> str:
    """One cache group, whose failures are told by block, and several, by request."""
    return str(request.param)


@pytest.fixture(scope="module")
def cold(
    kind: str, model_of: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory
) -> list[list[int]]:
    """Tokens of an engine without a pool."""
    with VllmEngine(model_of(kind), folder=tmp_path_factory.mktemp("alone")) as alone:
        return alone.generate([PROMPT]).tokens


def spoil_all(up: Up) -> None:
    """Spoil at least every page of the prompt."""
    assert spoil(up) >= PAGES


def is_warm(engine: VllmEngine, cold: list[list[int]]) -> bool:
    """Whether the pool gives the engine the whole prompt; its tokens are right either way."""
    engine.forget()
    came = engine.generate([PROMPT])
    assert came.tokens == cold
    return came.cached == [HIT]


def test_what_happens_between_lookup_and_load_costs_time_alone(
    kind: str,
    cold: list[list[int]],
    model_of: Callable[[str], Path],
    pool: Up,
    tmp_path: Path,
) -> None:
    stopping = Stopping(tmp_path)
    with stopping.engine(model_of(kind), pool.master) as engine:

        def failed(do_worst: Callable[[], object]) -> int:
            """Loads that fail of one, when the worst happens to a pool that has all of it."""
            until("all is in the pool", lambda: is_warm(engine, cold), RETRY_S)
            before = engine.counts()["failed_loads"]
            assert stopping.generate(engine, do_worst).tokens == cold
            return engine.counts()["failed_loads"] - before

        assert engine.generate([PROMPT]).tokens == cold
        assert failed(lambda: None) == 0
        assert failed(stopping.remove.touch) == 1  # all pages but the first are removed
        stopping.remove.unlink()
        # A worker's memory is read without its help; a master that says nothing is one timeout.
        assert failed(lambda: pool.stop("worker")) == 0
        os.kill(pool.pid("worker"), signal.SIGCONT)
        assert failed(lambda: pool.stop("master")) == 1
        assert engine.counts()["circuit_opened"] >= 1
        os.kill(pool.pid("master"), signal.SIGCONT)
        assert failed(lambda: spoil_all(pool)) == 1
        until("what was spoilt is there anew", lambda: is_warm(engine, cold), RETRY_S)
        assert engine.counts()["open_requests"] == 0


def test_an_engine_serves_without_its_pool_and_finds_it_again(
    cold: list[list[int]], kind: str, model_of: Callable[[str], Path], tmp_path: Path
) -> None:
    port, data_dir = free_port(), tmp_path / "pool"
    options = (f"--listen=127.0.0.1:{port}",)
    with VllmEngine(model_of(kind), f"127.0.0.1:{port}", folder=tmp_path) as engine:
        assert not is_warm(engine, cold)
        try:
            for _ in range(2):
                with Up(data_dir, *options, dram=DRAM):
                    until("the pool is of use", lambda: is_warm(engine, cold), RETRY_S)
                assert not is_warm(engine, cold)
        finally:
            remove_segments(data_dir)
        assert engine.counts()["open_requests"] == 0
    assert "serving goes on without the pool" in engine.log()
    assert "the pool answers again" in engine.log()


def test_a_connector_that_forgets_a_failed_load_is_caught(
    model_of: Callable[[str], Path], pool: Up, tmp_path: Path
) -> None:
    """The mutant fails the same load again and again; the connector fails it once, see above."""
    stopping = Stopping(tmp_path)
    with stopping.engine(model_of("windows"), pool.master, "ForgetfulConnector") as engine:
        engine.generate([PROMPT])
        engine.await_saved(2 * PAGES)
        stopping.remove.touch()
        stopping.generate(engine, lambda: None)
        assert engine.counts()["failed_load_pages"] > 10 * PAGES


def test_a_connector_that_ignores_groups_is_caught(
    model_of: Callable[[str], Path], pool: Up, tmp_path: Path
) -> None:
    """The mutant's tokens are others; the connector's are equal, see test_engines_vllm."""
    mutant = ("FirstGroupConnector", FAULTS)
    with VllmEngine(
        model_of("windows"), pool.master, folder=tmp_path, connector=mutant
    ) as engine:  # fmt: skip
        right = engine.generate([PROMPT])
        engine.await_saved(2 * PAGES)
        engine.forget()
        assert engine.generate([PROMPT]).tokens != right.tokens
