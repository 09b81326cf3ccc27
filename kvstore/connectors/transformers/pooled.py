"""The longest known prefix of a prompt as a DynamicCache, and a cache's tokens into the pool.

Owns what is fetched and kept of a model's layers together: pages of those that have all tokens,
and of a model that has others their states behind some page. Such a model's prefix is restored
only where both are. Pages, leases and trouble with the pool are kvstore.client.prefix's.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, NamedTuple, Protocol

import torch
from transformers import DynamicCache

from kvstore import limits
from kvstore.client.prefix import Fetched, Kept, PageStore, PrefixCache
from kvstore.client.staging import STAGING_BYTES
from kvstore.client.tensors import ORDER
from kvstore.connectors.transformers.kinds import (
    KVShape,
    UnsupportedCache,
    check_classes,
    check_kind,
    check_layers,
    compute,
    layers_of,
)
from kvstore.connectors.transformers.naming import content, states_name, weights_digest
from kvstore.connectors.transformers.pages import Arriving, LayerCache, PagedLayers
from kvstore.connectors.transformers.states import ObjectStore, PooledStates, has_window
from kvstore.errors import CallerError, KVStoreError
from kvstore.namespace import Attention, Content, Layout

if TYPE_CHECKING:
    from collections.abc import Sequence

    from transformers import PreTrainedModel

    from kvstore.client.locations import Locations
    from kvstore.client.namespaces import OpenedNamespace
    from kvstore.client.prefix import CopyPages
    from kvstore.hints import Hints

PASS_TOKENS: Final = 2048
"""Of one forward pass of `prefill`; more would only need more memory."""


class NamespaceStore(PageStore, ObjectStore, Protocol):
    """What the connector needs of a store; `KVStore` is one."""

    @property
    def tenant(self) -> str:
        """Whose pages these are."""
        ...

    def open(self, content: Content, layout: Layout) -> OpenedNamespace:
        """Make a namespace known."""
        ...

    def open_opaque(self, name: str) -> OpenedNamespace:
        """Make a namespace of named objects known."""
        ...


class Prefilled(NamedTuple):
    """A cache of a prompt's full pages, but for its last token, and what the pool had and has."""

    cache: DynamicCache
    tokens: int
    """Of the prompt, in the cache."""
    fetched: Fetched
    kept: Kept


class _Pages(NamedTuple):
    """The pages of a model that has any."""

    prefix: PrefixCache
    layers: PagedLayers


class PooledPrefix:
    """The longest known prefix of a prompt as a cache for `model(..., cache=cache)`, and back.

    Thread-safe as the store is. A restored cache gives bit for bit the logits of the cache that
    was stored, when the rest of the prompt is computed in the same pieces.
    """

    def __init__(  # noqa: PLR0913 -- each is a wish of its own
        self,
        store: NamespaceStore,
        model: PreTrainedModel,
        model_id: str,
        *,
        revision: str | None = None,
        adapter: str = "",
        salt: str = "",
        page_tokens: int = limits.PAGE_TOKENS,
        layer_groups: int = 1,
        staging_bytes: int = STAGING_BYTES,
    ) -> None:
        """Open the model's namespaces: that of its pages, and that of its states if it has any.

        Pages have a part for each of `layer_groups`, as those of so many pipeline stages have, so
        that one can be stored and read before the others.

        `revision` names the weights; left out, it is a digest of them (about a second a
        gigabyte). Models that are equal in all of this share pages, in whatever process they run.
        Raises UnsupportedCache for a model whose cache cannot be restored.
        """
        self.layers: Final = layers_of(model)
        self.page_tokens: Final = page_tokens
        self._model = model
        self._config = model.config.get_text_config(decoder=True)
        kv = [(i, layer.kv) for i, layer in enumerate(self.layers) if layer.kv is not None]
        paged = [(i, shape) for i, shape in kv if not has_window(self.layers[i])]
        revision = weights_digest(model) if revision is None else revision

        def content_with(shapes: list[tuple[int, KVShape]]) -> Content:
            return content(
                self._config, [shape for _, shape in shapes], dtype=model.dtype,
                tenant=store.tenant, model_id=model_id, revision=revision, adapter=adapter,
                salt=salt,
            )  # fmt: skip

        self._states = self._pages = None
        opened: list[OpenedNamespace] = []
        if paged:
            layout = Layout(page_tokens, pipeline_parallel=layer_groups, order=ORDER)
            opened.append(store.open(content_with(paged), layout))
            layers = PagedLayers(opened[0].namespace, paged, model.device)
            self._pages = _Pages(PrefixCache(store, opened[0], staging_bytes), layers)
        if any(has_window(layer) or layer.states for layer in self.layers):
            name = states_name(content_with(kv), self.layers, page_tokens)
            opened.append(store.open_opaque(name))
            self._states = PooledStates(
                store, opened[-1], self.layers, model.dtype, page_tokens, model.device
            )
        self.namespace: Final = opened[0].namespace
        """Of the pages; of the states where there are no pages."""

    @property
    def has_tails(self) -> bool:
        """Whether a prefix can be cut anywhere, and every layer is alike: full attention alone."""
        return (
            self._states is None
            and len(self.namespace.content.groups) == 1
            and all(
                layer.kv is not None and layer.kv.attention is Attention.FULL
                for layer in self.layers
            )
        )

    def empty_cache(self) -> DynamicCache:
        """A cache of no tokens."""
        return DynamicCache(config=self._config)

    def zeros(self, shape: tuple[int, ...]) -> torch.Tensor:
        """A tensor as the model's KV is."""
        return torch.zeros(shape, dtype=self._model.dtype, device=self._model.device)

    def ends(self, tokens: Sequence[int]) -> list[int] | None:
        """At which lengths a prefix may be restored, ascending; None where at any that has come."""
        if self._states is None:
            return None
        return [page * self.page_tokens for page in self._states.find(tokens)]

    def fetch(
        self,
        tokens: Sequence[int],
        *,
        arrived: Arriving | None = None,
        hints: Hints | None = None,
    ) -> tuple[DynamicCache, Fetched]:
        """A cache that holds the first `Fetched.tokens` of `tokens`, at most all but the last.

        Compute the rest with it. Nothing known, or the pool in trouble: an empty cache. What has
        `arrived` of these tokens is in it, too, and is the cache's from now on. `hints` say what
        the caller knows of the chat's future, its turn for example.
        """
        cache = self.empty_cache()
        if self._states is not None:
            try:
                return cache, self._restore(cache, self._states, tokens, hints)
            except CallerError:
                raise
            except KVStoreError as error:
                return self.empty_cache(), Fetched(trouble=f"{error.code}: {error}")
        layers, fetched = self._bring(tokens, arrived, hints)
        if fetched.pages:
            self._paged.layers.fill(cache, layers, fetched.tokens)
        return cache, fetched

    def store(
        self, tokens: Sequence[int], cache: DynamicCache, *, hints: Hints | None = None
    ) -> Kept:
        """Keep the full pages of `tokens` whose KV is in `cache`, prompt and generated alike.

        The cache may hold fewer tokens (the last generated one was not computed) or more. Where
        layers hold a window or a recurrent state, it has to end where a page ends, or nothing is
        kept: `prefill` leaves it so. Raises UnsupportedCache when its layers are not this model's.
        """
        held = self.tokens_in(cache)
        return self._keep(tokens[:held], cache, held, hints)

    def tokens_in(self, cache: DynamicCache) -> int:
        """How many tokens, or columns, a cache of this model holds. Raises UnsupportedCache."""
        check_classes(check_kind(cache), self.layers)
        if not any(layer.kv for layer in self.layers):
            raise UnsupportedCache(
                "got recurrent states alone, which do not tell of how many tokens they are; "
                "want `prefill`, which keeps them"
            )
        return int(cache.get_seq_length())

    def prefill(
        self,
        tokens: Sequence[int],
        *,
        also_at: Sequence[int] = (),
        hints: Hints | None = None,
    ) -> Prefilled:
        """A cache of all full pages of `tokens` but for their last token: fetched, or computed.

        What had to be computed is kept in the pool. Layers with windows or recurrent states can be
        restored only where they were kept: at the end, and at the last full page before each of
        `also_at`, say the length of a document that other prompts begin with. Compute the rest,
        or hand `generate` all of `tokens` and this cache.
        """
        cache, fetched = self.fetch(tokens, hints=hints)
        wanted = (*also_at, len(tokens)) if self._states is not None else (len(tokens),)
        stops = {self._whole(min(wish, len(tokens) - 1)) for wish in wanted}
        done, kept = fetched.tokens, Kept(present=fetched.pages)
        for stop in sorted(stop for stop in stops if stop > done):
            for start in range(done, stop, PASS_TOKENS):
                compute(self._model, tokens[start : min(start + PASS_TOKENS, stop)], cache)
            done = stop
            kept = self._keep(tokens[:done], cache, done, hints)
        return Prefilled(cache, done, fetched, kept)

    def expect(self, tokens: Sequence[int]) -> Arriving:
        """Memory for the pages of a prompt that is being computed elsewhere."""
        pages = len(tokens) // self.page_tokens
        layers = self._paged.layers.allocate(pages)
        return Arriving(layers, pages, [0] * len(self.namespace.parts))

    def bring_part(self, arriving: Arriving, part: int, located: Locations) -> int:
        """Bring one part of the located pages, which follow those that have come: how many did.

        At most `part_pages` can be located at once.
        """
        first, pages = arriving.pages[part], self._paged
        layers = pages.layers.part(arriving.layers, part)

        def unpack(count: int, memory: memoryview) -> None:
            pages.layers.unpack(layers, first, count, memory, part)

        came = pages.prefix.read_part(located, part, unpack)
        arriving.pages[part] += came
        return came

    def part_pages(self, part: int) -> int:
        """Pages of which one part can be moved at once."""
        return self._paged.prefix.part_pages(part)

    def store_part(
        self, tokens: Sequence[int], part: int, first: int, layers: list[LayerCache]
    ) -> None:
        """Keep one part of the full pages of `tokens` from page `first` on, as far as possible.

        `layers` are those of this part alone, with the KV of these pages. `store` keeps what is
        left out, and costs little where nothing is.
        """
        pages = self._paged
        pages.prefix.store_part(
            tokens, part, first,
            lambda start, count, memory: pages.layers.pack(
                layers, start - first, count, memory, part
            ),
        )  # fmt: skip

    def hint(self, tokens: Sequence[int], hints: Hints) -> None:
        """Say what is known of the chat of these tokens: that it is over, or waits for a tool.

        Hints(session_closed=True) lets its pages go before others, Hints(tool_call_s=20.0) keeps
        them for about so long. Saved states of linear layers are not told.
        """
        if self._pages is not None:
            self._pages.prefix.hint(tokens, hints)

    def close(self) -> None:
        """Give staging memory back; the store stays open."""
        if self._pages is not None:
            self._pages.prefix.close()
        if self._states is not None:
            self._states.close()

    @property
    def _paged(self) -> _Pages:
        if self._pages is None:
            raise UnsupportedCache("got a model whose layers hold no tokens, want one with pages")
        return self._pages

    def _whole(self, tokens: int) -> int:
        """Of so many tokens those in full pages."""
        return max(0, tokens) // self.page_tokens * self.page_tokens

    def _bring(
        self, tokens: Sequence[int], arrived: Arriving | None, hints: Hints | None
    ) -> tuple[list[LayerCache], Fetched]:
        """The pages of the longest known prefix."""
        pages = self._paged
        layers: list[LayerCache] = []
        has = 0
        if arrived is not None:
            layers, has = arrived.layers, arrived.whole_pages
            tokens = tokens[: arrived.pages_max * self.page_tokens + 1]

        def begin(count: int) -> CopyPages:
            if arrived is None:
                layers.extend(pages.layers.allocate(count))
            return lambda first, some, memory: pages.layers.unpack(layers, first, some, memory)

        return layers, pages.prefix.fetch(tokens, begin, first=has, hints=hints)

    def _restore(
        self,
        cache: DynamicCache,
        states: PooledStates,
        tokens: Sequence[int],
        hints: Hints | None,
    ) -> Fetched:
        """Fill the cache up to the last page that has come and behind which states come, too."""
        known = states.find(tokens[: max(0, len(tokens) - 1)])
        if not known:
            return Fetched()
        layers: list[LayerCache] = []
        fetched = Fetched(known[-1], known[-1] * self.page_tokens)
        if self._pages is not None:
            layers, fetched = self._bring(tokens[: fetched.tokens + 1], None, hints)
        for page in reversed([page for page in known if page <= fetched.pages]):
            end = page * self.page_tokens
            moved = states.read(tokens[:end], cache)
            if moved:
                if self._pages is not None:
                    self._pages.layers.fill(cache, layers, end)
                return Fetched(page, end, fetched.bytes_moved + moved, fetched.trouble)
        return Fetched(0, 0, fetched.bytes_moved, fetched.trouble or "evicted meanwhile")

    def _keep(
        self, tokens: Sequence[int], cache: DynamicCache, held: int, hints: Hints | None
    ) -> Kept:
        """Keep what can be kept of `tokens`, of a cache that has so many or more."""
        if not held:
            return Kept()
        check_layers(cache, self.layers, self._model.dtype, held)
        if self._states is None:
            return self._keep_pages(tokens, cache, hints)
        end = self._whole(len(tokens))
        if not end:
            return Kept()
        if not self._states.are_in(cache, held, end):
            return Kept(trouble=f"no_state: got a cache of {held} tokens, want one of {end}")
        kept = Kept()
        if self._pages is not None:
            kept = self._keep_pages(tokens[:end], cache, hints)
            if kept.trouble:
                return kept
        try:
            moved, trouble = self._states.put(tokens[:end], cache, held, hints=hints)
        except CallerError:
            raise
        except KVStoreError as error:
            moved, trouble = 0, f"{error.code}: {error}"
        if self._pages is None and not trouble:
            pages = end // self.page_tokens
            kept = Kept(stored=pages) if moved else Kept(present=pages)
        return Kept(kept.stored, kept.present, kept.bytes_moved + moved, trouble)

    def _keep_pages(self, tokens: Sequence[int], cache: DynamicCache, hints: Hints | None) -> Kept:
        pages = self._paged
        layers = pages.layers.of(cache)
        return pages.prefix.store(
            tokens,
            lambda first, count, memory: pages.layers.pack(layers, first, count, memory),
            hints=hints,
        )
