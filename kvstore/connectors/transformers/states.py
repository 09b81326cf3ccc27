"""What is not kept of every token: the windows and recurrent states behind one token, as objects.

A cache holds these for its present length alone, so that they are kept at ends of pages only, and
a prefix can be restored there and nowhere else. They lie in an opaque namespace, named by the key
of the page that ends there, cut into pieces that fit staging memory; the first piece is put last,
so that where it is the others were. The tensors' sizes follow from the namespace's name and the
number of tokens: nothing that was read says how long it is.
"""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING, Final, NamedTuple, Protocol

import torch

from kvstore import limits
from kvstore.client.outcomes import Hit, Refused
from kvstore.client.staging import SpareBuffers
from kvstore.connectors.transformers.kinds import set_kv, set_state
from kvstore.namespace import Attention
from kvstore.page import PageChain

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from transformers import DynamicCache

    from kvstore.client.locations import Found, Locations
    from kvstore.client.namespaces import OpenedNamespace
    from kvstore.client.outcomes import PutOutcome, ReadOutcome
    from kvstore.connectors.transformers.kinds import LayerShape
    from kvstore.hints import Hints
    from kvstore.ids import PageKey
    from kvstore.transfer.buffer import Buffer

PIECE_BYTES: Final = 16 * limits.MIB


class ObjectStore(Protocol):
    """What states need of a store; `KVStore` is one."""

    def buffer(self, size_bytes: int) -> Buffer:
        """Memory that the pool's workers can reach."""
        ...

    def probe(self, opened: OpenedNamespace, chain: PageChain) -> list[bool]:
        """Tell which objects are there."""
        ...

    def lookup(self, opened: OpenedNamespace, chain: PageChain) -> Found:
        """Find objects, and lease them."""
        ...

    def read(self, locations: Locations, into: object, offsets: Sequence[int]) -> list[ReadOutcome]:
        """Copy objects out, verified."""
        ...

    def put_objects(
        self,
        opened: OpenedNamespace,
        names: PageChain,
        source: object,
        offsets: Sequence[int],
        size_bytes: int,
        *,
        hints: Hints | None = None,
    ) -> list[PutOutcome]:
        """Store objects."""
        ...


class PutStates(NamedTuple):
    """What became of a put of states."""

    bytes_moved: int = 0
    trouble: str = ""
    """Why they are not in the pool; empty when they are."""


class PooledStates:
    """Windows and recurrent states of one model in one store."""

    def __init__(
        self,
        store: ObjectStore,
        opened: OpenedNamespace,
        layers: Sequence[LayerShape],
        dtype: torch.dtype,
        page_tokens: int,
        device: torch.device,
    ) -> None:
        """`layers` are all of the model's; those without such states are passed over."""
        self._store = store
        self._opened = opened
        self._layers = layers
        self._dtype = dtype
        self._page_tokens = page_tokens
        self._device = device
        self._staging = SpareBuffers(store.buffer)

    def find(self, tokens: Sequence[int]) -> list[int]:
        """Behind which pages of `tokens` there are states, counted from 1, ascending."""
        firsts = self._opened.names(_name(key, 0) for key in self._chain(tokens))
        present = self._store.probe(self._opened, firsts) if len(firsts) else []
        return [page for page, there in enumerate(present, 1) if there]

    def are_in(self, cache: DynamicCache, held: int, end: int) -> bool:
        """Whether a cache of `held` tokens has the states behind its first `end`."""
        for layer, shape in zip(cache.layers, self._layers, strict=True):
            if shape.states and end != held:
                return False
            if has_window(shape) and held - layer.keys.shape[2] > end - _kept(shape, end):
                return False
        return True

    def put(
        self, tokens: Sequence[int], cache: DynamicCache, held: int, *, hints: Hints | None
    ) -> PutStates:
        """Store the states behind the last of `tokens`, which ends a page and which they are in.

        `held` is how many tokens the cache has.
        """
        key = self._key(tokens)
        flat = [_bytes(each) for each in self._taken(cache, held, len(tokens))]
        sizes = _pieces(flat)
        names = self._opened.names(_name(key, piece) for piece in range(len(sizes)))
        present = self._store.probe(self._opened, names)
        moved = 0
        with self._staging.take(sizes[0]) as buffer:
            for piece in reversed([i for i, there in enumerate(present) if not there]):
                for there, states in _cut(flat, piece):
                    _seen(buffer, there).copy_(states)
                name = names.slice(piece, piece + 1)
                (outcome,) = self._store.put_objects(
                    self._opened, name, buffer, [0], sizes[piece], hints=hints
                )
                if isinstance(outcome, Refused):
                    return PutStates(moved, outcome.reason.value)
                moved += sizes[piece]
        return PutStates(moved)

    def read(self, tokens: Sequence[int], cache: DynamicCache) -> int:
        """Give a cache the states behind the last of `tokens`: bytes moved; 0 if not all came.

        The cache is as it was, then.
        """
        made = self._made(len(tokens))
        flat = [_bytes(each) for each in made]
        key, sizes = self._key(tokens), _pieces(flat)
        with self._staging.take(sizes[0]) as buffer:
            for piece in range(len(sizes)):
                found = self._store.lookup(self._opened, self._opened.names([_name(key, piece)]))
                (outcome,) = self._store.read(found, buffer, [0])
                if not isinstance(outcome, Hit):
                    return 0
                for there, states in _cut(flat, piece):
                    states.copy_(_seen(buffer, there))
        self._give(cache, made, len(tokens))
        return sum(sizes)

    def close(self) -> None:
        """Give staging memory back."""
        self._staging.close()

    def _chain(self, tokens: Sequence[int]) -> PageChain:
        return PageChain.of_tokens(self._opened.namespace.id, tokens, self._page_tokens)

    def _key(self, tokens: Sequence[int]) -> PageKey:
        chain = self._chain(tokens)
        return chain.key(len(chain) - 1)

    def _taken(self, cache: DynamicCache, held: int, end: int) -> list[torch.Tensor]:
        """The states behind the first `end` tokens: of each layer its window, then its states."""
        taken: list[torch.Tensor] = []
        for layer, shape in zip(cache.layers, self._layers, strict=True):
            if has_window(shape):
                stop = layer.keys.shape[2] - (held - end)
                kept = slice(stop - _kept(shape, end), stop)
                taken += (layer.keys[:, :, kept], layer.values[:, :, kept])
            taken += (getattr(layer, f"{each.name}_states")[each.number] for each in shape.states)
        return taken

    def _made(self, end: int) -> list[torch.Tensor]:
        """Memory for what `_taken` takes."""
        made: list[torch.Tensor] = []
        for shape in self._layers:
            if shape.kv is not None and has_window(shape):
                for dim in (shape.kv.key_dim, shape.kv.value_dim):
                    sizes = (1, shape.kv.kv_heads, _kept(shape, end), dim)
                    made.append(torch.empty(sizes, dtype=self._dtype, device=self._device))
            made += (
                torch.empty(each.shape, dtype=each.dtype, device=self._device)
                for each in shape.states
            )
        return made

    def _give(self, cache: DynamicCache, made: Sequence[torch.Tensor], end: int) -> None:
        """The reverse of `_taken`, into an empty cache."""
        left = iter(made)
        for layer, shape in zip(cache.layers, self._layers, strict=True):
            if has_window(shape):
                set_kv(layer, next(left), next(left), end)
            for each in shape.states:
                set_state(layer, each, next(left))


def has_window(shape: LayerShape) -> bool:
    """Whether such a layer has keys and values of the last tokens alone."""
    return shape.kv is not None and shape.kv.attention is Attention.SLIDING


def _kept(shape: LayerShape, end: int) -> int:
    """How many of `end` tokens a window needs, to go on behind them."""
    return min(end, shape.kv.window_tokens - 1) if shape.kv is not None else 0


def _name(key: bytes, piece: int) -> bytes:
    return key + struct.pack("<I", piece)


def _bytes(states: torch.Tensor) -> torch.Tensor:
    return states.contiguous().reshape(-1).view(torch.uint8)


def _pieces(flat: Sequence[torch.Tensor]) -> list[int]:
    """Sizes of the pieces that all of these bytes are cut into."""
    whole, rest = divmod(sum(map(len, flat)), PIECE_BYTES)
    return [PIECE_BYTES] * whole + ([rest] if rest else [])


def _cut(flat: Sequence[torch.Tensor], piece: int) -> Iterator[tuple[slice, torch.Tensor]]:
    """What of each tensor is in a piece, as bytes, and where in the piece that lies."""
    at = -piece * PIECE_BYTES
    for states in flat:
        start, stop = max(0, -at), min(len(states), PIECE_BYTES - at)
        if start < stop:
            yield slice(at + start, at + stop), states[start:stop]
        at += len(states)


def _seen(buffer: Buffer, there: slice) -> torch.Tensor:
    return torch.frombuffer(buffer.view[there], dtype=torch.uint8)
