"""A prompt computed chunk by chunk, so that its pages can be handed over while the rest computes.

Works with any causal model of transformers. Who wants a layer's KV before the chunk's other layers
are computed says so by `on_layer`. Knows no pool.
"""

from __future__ import annotations

import threading
from contextlib import contextmanager
from typing import TYPE_CHECKING, NamedTuple

from kvstore.errors import BadValue
from workers.engine import CHUNK_TOKENS, chunk_end
from workers.generation import logits_after

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    import torch
    from transformers import DynamicCache, PreTrainedModel


class Chunk(NamedTuple):
    """What is done once a chunk is computed."""

    tokens: int
    """Of the prompt, from its beginning: their KV is in the cache."""
    logits: torch.Tensor | None
    """After the prompt's last token, [vocabulary]; None while there is more to compute."""


class LayerStates(NamedTuple):
    """One layer's KV of one chunk: [1, kv_heads, tokens, head_dim] each, views of the cache's."""

    layer: int
    first: int
    """Index in the prompt of the chunk's first token."""
    keys: torch.Tensor
    values: torch.Tensor


def prefill(
    model: PreTrainedModel,
    cache: DynamicCache,
    tokens: Sequence[int],
    *,
    chunk_tokens: int = CHUNK_TOKENS,
    on_layer: Callable[[LayerStates], None] | None = None,
) -> Iterator[Chunk]:
    """Compute what the cache does not have of a prompt; what is yielded is in the cache.

    Chunks end where `Engine` lets them end. Stop asking to cancel. `on_layer` is called as each
    layer of a chunk is computed; if it raises, so does this, and a cache of full attention is as
    after the chunk before. Raises BadValue where the cache leaves nothing to compute.
    """
    done = int(cache.get_seq_length())
    if done >= len(tokens):
        raise BadValue("cache", f"{done} tokens", f"fewer than the prompt's {len(tokens)}")
    if chunk_tokens < 1:
        raise BadValue("chunk_tokens", chunk_tokens, "at least 1")
    return _chunks(model, cache, tokens, chunk_tokens, on_layer)


def _chunks(
    model: PreTrainedModel,
    cache: DynamicCache,
    tokens: Sequence[int],
    chunk_tokens: int,
    on_layer: Callable[[LayerStates], None] | None,
) -> Iterator[Chunk]:
    done = int(cache.get_seq_length())
    while done < len(tokens):
        end = chunk_end(done, len(tokens), chunk_tokens)
        with _undone_if_it_fails(cache, done), _told(model, cache, done, on_layer):
            logits = logits_after(model, cache, tokens[done:end])
        done = end
        yield Chunk(done, logits if done == len(tokens) else None)


@contextmanager
def _undone_if_it_fails(cache: DynamicCache, tokens: int) -> Iterator[None]:
    """Some layers have a chunk that failed, others do not: crop each by itself (E4)."""
    try:
        yield
    except BaseException:
        for layer in cache.layers:
            layer.crop(tokens - layer.get_seq_length())
        raise


@contextmanager
def _told(
    model: PreTrainedModel,
    cache: DynamicCache,
    first: int,
    on_layer: Callable[[LayerStates], None] | None,
) -> Iterator[None]:
    """Hook the layers for one chunk only: others may use the model between chunks, and in other
    threads at any time, whose passes are nothing to tell of.
    """
    if on_layer is None:
        yield
        return
    own = threading.get_ident()

    def hook(layer: int) -> Callable[..., None]:
        def tell(*_: object) -> None:
            if threading.get_ident() != own:
                return
            states = cache.layers[layer]
            keys, values = states.keys[:, :, first:], states.values[:, :, first:]
            on_layer(LayerStates(layer, first, keys, values))

        return tell

    layers = model.get_decoder().layers
    handles = [layer.register_forward_hook(hook(i)) for i, layer in enumerate(layers)]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
