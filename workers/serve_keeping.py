"""What a prompt has of full pages, handed to the pool while the rest of it is being computed.

Each chunk's pages go as soon as they are computed, part by part where they have parts: one for each
group of layers. A thread of its own packs and puts them, in order, and then tells how far the
prompt has come. What the pool has no room for is left out, and noticed at the end.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Self

from kvstore.connectors.transformers import LayerCache

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from concurrent.futures import Future
    from types import TracebackType

    from transformers import DynamicCache

    from workers.chunked_prefill import LayerStates
    from workers.serve_kv import TicketKV


class Keeping:
    """One prompt's pages on their way. Use it in a `with`; `finish` before its last use."""

    def __init__(
        self,
        kv: TicketKV,
        tokens: Sequence[int],
        cache: DynamicCache,
        tell: Callable[[int], None],
    ) -> None:
        """The cache has what the pool had. `tell` is called with the tokens that are left."""
        self._kv = kv
        self._tokens = tokens
        self._cache = cache
        self._tell = tell
        self._parts = kv.opened.namespace.parts
        self._page_tokens = kv.opened.namespace.layout.page_tokens
        self._pages = int(cache.get_seq_length()) // self._page_tokens
        self._last_layers = {part.layer_stop - 1: part.index for part in self._parts}
        self._thread = ThreadPoolExecutor(1, "keeping")
        self._jobs: list[Future[None]] = []

    def __enter__(self) -> Self:
        self._told(int(self._cache.get_seq_length()))
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._thread.shutdown(cancel_futures=True)

    @property
    def by_layer(self) -> Callable[[LayerStates], None] | None:
        """Who has to hear of each layer; nobody where a chunk's layers go together."""
        return self._layer if len(self._parts) > 1 else None

    def chunk(self, done: int) -> None:
        """So many tokens are computed."""
        if len(self._parts) == 1:
            self._hand_over(0, done)
        self._pages = done // self._page_tokens
        if done < len(self._tokens):
            self._told(done)

    def finish(self) -> None:
        """Wait until all of it is there. Raises what any of it has raised."""
        for job in self._jobs:
            job.result()

    def _layer(self, states: LayerStates) -> None:
        part = self._last_layers.get(states.layer)
        if part is not None:
            self._hand_over(part, states.first + states.keys.shape[2])

    def _hand_over(self, part: int, done: int) -> None:
        spec, pages = self._parts[part], done // self._page_tokens
        if pages == self._pages:
            return
        # Copies: behind a slow pool all that waits is the prompt's KV once, and not with each
        # chunk that of all before it.
        span = slice(self._pages * self._page_tokens, pages * self._page_tokens)
        layers = [
            LayerCache(each.keys[:, :, span].clone(), each.values[:, :, span].clone())
            for each in self._cache.layers[spec.layer_start : spec.layer_stop]
        ]
        tokens = self._tokens[:done]
        job = self._thread.submit(self._kv.keep_part, tokens, part, self._pages, layers)
        self._jobs.append(job)

    def _told(self, done: int) -> None:
        self._jobs.append(self._thread.submit(self._tell, len(self._tokens) - done))
