"""Several prompts in one cache: rows of different lengths, padded on the left.

Owns how single rows become one cache and the reverse; each row is fetched and kept by itself. The
rows end in the same column, so that a column of the cache is another token of each.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, NamedTuple

import torch

from kvstore.client.prefix import Kept
from kvstore.connectors.transformers.kinds import (
    UnsupportedCache,
    set_kv,
    set_state,
)
from kvstore.errors import BadValue, CallerError, KVStoreError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from transformers import DynamicCache
    from transformers.cache_utils import CacheLayerMixin

    from kvstore.connectors.transformers.kinds import KVShape
    from kvstore.connectors.transformers.pooled import PooledPrefix
    from kvstore.hints import Hints


class Padded(NamedTuple):
    """What `generate` wants beside a cache of rows: [rows, longest] each."""

    input_ids: torch.Tensor
    attention_mask: torch.Tensor


class FetchedRows(NamedTuple):
    """A cache of the first columns of all rows, padding and tokens."""

    cache: DynamicCache
    columns: int
    bytes_moved: int
    trouble: str
    """Of the first row that had any."""


def left_padded(rows: Sequence[Sequence[int]], pad: int) -> Padded:
    """The rows as `generate` takes them."""
    longest = max(map(len, rows), default=0)
    ids = [[pad] * (longest - len(row)) + list(row) for row in rows]
    mask = [[0] * (longest - len(row)) + [1] * len(row) for row in rows]
    return Padded(torch.tensor(ids), torch.tensor(mask))


class PooledRows:
    """As PooledPrefix, for several prompts that are computed together."""

    def __init__(self, prefix: PooledPrefix) -> None:
        """Use its namespaces; whoever made it closes it."""
        self._prefix: Final = prefix
        self._has_states: Final = any(layer.states for layer in prefix.layers)

    def fetch(self, rows: Sequence[Sequence[int]], *, hints: Hints | None = None) -> FetchedRows:
        """A cache of as many first columns as can be had of every row, and of no row all tokens.

        `generate` goes on from it, given the rows `left_padded`. Where layers hold windows or
        recurrent states, it ends where all rows have them kept. Raises UnsupportedCache for rows
        of different lengths in a model with recurrent states, which padding would change.
        """
        pads = self._pads(rows)
        try:
            columns = self._kept_at(rows, pads)
        except CallerError:
            raise
        except KVStoreError as error:
            trouble = f"{error.code}: {error}"
            return FetchedRows(self._prefix.empty_cache(), 0, 0, trouble)
        got = [
            self._prefix.fetch(
                row if columns is None else row[: max(0, columns - pad) + 1], hints=hints
            )
            for row, pad in zip(rows, pads, strict=True)
        ]
        common = min(pad + each.tokens for pad, (_, each) in zip(pads, got, strict=True))
        if columns is not None:  # There or nowhere; rows that are all padding are no bound.
            common = columns if common >= columns else 0
        cache = self._prefix.empty_cache()
        if common:
            self._join(cache, [each for each, _ in got], pads, common)
        moved = sum(each.bytes_moved for _, each in got)
        troubles = [each.trouble for _, each in got if each.trouble]
        return FetchedRows(cache, common, moved, troubles[0] if troubles else "")

    def store(
        self,
        rows: Sequence[Sequence[int]],
        cache: DynamicCache,
        prompts: Padded,
        *,
        hints: Hints | None = None,
    ) -> list[Kept]:
        """Keep each row's full pages, as `PooledPrefix.store` does: one result a row.

        `rows` are prompts and what was generated, without padding, each as far as it is wanted;
        `prompts` is what `generate` was given, and `cache` what it filled.
        """
        pads = [int(each) for each in (prompts.attention_mask == 0).sum(1)]
        self._check_rows(rows, prompts, pads)
        columns = self._prefix.tokens_in(cache)
        if not columns:
            return [Kept()] * len(rows)
        for i, (layer, shape) in enumerate(zip(cache.layers, self._prefix.layers, strict=True)):
            if shape.kv is not None and layer.keys.shape[0] != len(rows):
                raise BadValue("rows", len(rows), f"the {layer.keys.shape[0]} of layer {i}")
        return [
            self._prefix.store(row, self._row(cache, number, pad, columns - pad), hints=hints)
            if pad < columns
            else Kept()
            for number, (row, pad) in enumerate(zip(rows, pads, strict=True))
        ]

    def _check_rows(
        self, rows: Sequence[Sequence[int]], prompts: Padded, pads: Sequence[int]
    ) -> None:
        """Refuse rows that did not come of these prompts: their KV is another's."""
        if len(rows) != len(pads):
            raise BadValue("rows", len(rows), f"the {len(pads)} of the prompts")
        for i, (row, ids, pad) in enumerate(zip(rows, prompts.input_ids, pads, strict=True)):
            prompt = ids[pad:].tolist()
            if list(row[: len(prompt)]) != prompt[: len(row)]:
                raise BadValue(f"rows[{i}]", "other tokens", "what begins with its prompt")
        self._check_padding(pads)

    def _check_padding(self, pads: Sequence[int]) -> None:
        """Refuse to pad what padding would change."""
        if self._has_states and any(pads):
            raise UnsupportedCache(
                f"got rows with {max(pads)} columns of padding, want equally long ones for "
                "recurrent states"
            )

    def _pads(self, rows: Sequence[Sequence[int]]) -> list[int]:
        """Columns before each row's first token."""
        if not rows:
            raise BadValue("rows", 0, "at least one")
        longest = max(map(len, rows))
        pads = [longest - len(row) for row in rows]
        self._check_padding(pads)
        return pads

    def _kept_at(self, rows: Sequence[Sequence[int]], pads: Sequence[int]) -> int | None:
        """The last column at which all rows can be restored; None where they can at any."""
        known = [self._prefix.ends(row[: max(0, len(row) - 1)]) for row in rows]
        columns: list[set[int]] = []
        for pad, ends in zip(pads, known, strict=True):
            if ends is None:
                return None
            columns.append({pad + end for end in ends})
        # Of a row that begins later there is nothing but padding.
        good = (
            column
            for column in set().union(*columns)
            if all(column <= pad or column in own for pad, own in zip(pads, columns, strict=True))
        )
        return max(good, default=0)

    def _join(
        self,
        cache: DynamicCache,
        caches: Sequence[DynamicCache],
        pads: Sequence[int],
        columns: int,
    ) -> None:
        """Give an empty cache the rows' first columns."""
        for i, shape in enumerate(self._prefix.layers):
            parts = [each.layers[i] for each in caches]
            if shape.kv is not None:
                keys, values = (
                    torch.cat(
                        [
                            self._padded(part, name, shape.kv, columns - pad, columns)
                            for part, pad in zip(parts, pads, strict=True)
                        ]
                    )
                    for name in ("keys", "values")
                )
                set_kv(cache.layers[i], keys, values, columns)
            for state in shape.states:
                states = [getattr(part, f"{state.name}_states")[state.number] for part in parts]
                set_state(cache.layers[i], state, torch.cat(states))

    def _padded(
        self, layer: CacheLayerMixin, name: str, shape: KVShape, tokens: int, columns: int
    ) -> torch.Tensor:
        """A row's first `tokens`, behind as much nothing as these columns want; it may be all."""
        width = min(columns, shape.window_tokens - 1) if shape.window_tokens else columns
        dim = shape.key_dim if name == "keys" else shape.value_dim
        padded = self._prefix.zeros((1, shape.kv_heads, width, dim))
        taken = min(tokens, width)
        if taken > 0:
            padded[:, :, width - taken :] = getattr(layer, name)[:, :, :taken]
        return padded

    def _row(self, cache: DynamicCache, number: int, pad: int, held: int) -> DynamicCache:
        """One row of a cache, without its padding, as a cache of its own."""
        made = self._prefix.empty_cache()
        row = slice(number, number + 1)
        for layer, target, shape in zip(
            cache.layers, made.layers, self._prefix.layers, strict=True
        ):
            if shape.kv is not None:
                kept = slice(max(0, layer.keys.shape[2] - held), None)
                set_kv(target, layer.keys[row, :, kept], layer.values[row, :, kept], held)
            for state in shape.states:
                own = getattr(layer, f"{state.name}_states")[state.number][row]
                set_state(target, state, own)
        return made
