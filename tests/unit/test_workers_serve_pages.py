"""Which pages of an answer are put while it grows."""

from __future__ import annotations

import asyncio
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import pytest

from workers.engine import Taken
from workers.serve_pages import AnswerPages

if TYPE_CHECKING:
    from collections.abc import Coroutine, Sequence

PAGE_TOKENS = 64
PROMPT = tuple(range(3 * PAGE_TOKENS))


class Pool:
    """A batch with one row, and a pool that keeps of it what it is given."""

    def __init__(self, tokens: tuple[int, ...]) -> None:
        self.tokens = tokens
        self.kept: list[int] = []
        self.opened = self.namespace = self.layout = self
        self.page_tokens = PAGE_TOKENS

    def look(self, request_id: str) -> Future[Taken | None]:
        assert request_id == "r"
        row: Future[Taken | None] = Future()
        cache: Any = None
        row.set_result(Taken(self.tokens, 1, cache))
        return row

    def keep(self, tokens: Sequence[int], _cache: object) -> int:
        self.kept.append(len(tokens))
        return len(tokens) // PAGE_TOKENS


@pytest.mark.parametrize(("pooled", "puts"), [(0, 1), (PAGE_TOKENS, 1), (len(PROMPT), 0)])
def test_a_prompt_that_was_computed_here_is_put_with_its_first_token(
    pooled: int, puts: int
) -> None:
    async def grow() -> list[int]:
        tokens = (*PROMPT, 7)
        pool: Any = Pool(tokens)
        under_way: list[asyncio.Future[None]] = []

        def beside(work: Coroutine[None, None, None]) -> asyncio.Future[None]:
            under_way.append(asyncio.ensure_future(work))
            return under_way[-1]

        with ThreadPoolExecutor(1) as threads:
            AnswerPages(pool, pool, "r", pooled, beside, threads).grown(len(tokens))
            await asyncio.gather(*under_way)
        return list(pool.kept)

    assert asyncio.run(grow()) == [len(PROMPT)] * puts
