"""Rows of a Llama computed together, each with the bits that it would have alone.

A matrix product of several rows sums in another order than that of one, so that a token may come
out differently beside others than alone. Here every product is computed in a form that gives each
row its own bits: all rows at once where the kernels of this machine do so (as those for bfloat16
may), else block by block of the weights, which memory then sends once for all rows (float32). Which
form does is tried out on the model itself; a model for which none does runs one by one. Attention
is computed for each row.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final, Protocol

import torch
from transformers import LlamaForCausalLM
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb, eager_attention_forward

from workers.engine import CHUNK_TOKENS, ROWS_MAX, AnyEngine, Engine
from workers.generation import logits_after
from workers.one_by_one import OneByOne
from workers.row_kv import RowKV

if TYPE_CHECKING:
    from collections.abc import Sequence

    from transformers import DynamicCache, PreTrainedModel

BLOCK_BYTES: Final = 1280 << 10
"""Of a weight, while every row is multiplied with it: less than a core's second cache."""
BLOCK_STEP: Final = 64
"""Blocks are multiples of so many rows of a weight: kernels treat their last rows apart."""
FIXED_ROPE: Final = ("default", "linear", "llama3", "yarn")
"""Rotations that do not depend on how long the row is."""


class Multiply(Protocol):
    """rows [rows, 1, inputs] times a weight [outputs, inputs], as `torch.nn.functional.linear`."""

    def __call__(self, rows: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        """[rows, 1, outputs]."""
        ...


def at_once(rows: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """One product of matrices."""
    return torch.nn.functional.linear(rows, weight)


def in_blocks(rows: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """A product of matrix and vector for each block of the weight and each row."""
    if len(rows) == 1:
        return at_once(rows, weight)
    outputs, inputs = weight.shape
    fitting = BLOCK_BYTES // (inputs * weight.element_size())
    step = max(fitting // BLOCK_STEP, 1) * BLOCK_STEP
    results = rows.new_empty((len(rows), 1, outputs))
    pairs = list(zip(rows[:, 0], results[:, 0], strict=True))
    for start in range(0, outputs, step):
        block = weight[start : start + step]
        for row, result in pairs:
            torch.mv(block, row, out=result[start : start + step])
    return results


FORMS: Final[tuple[Multiply, ...]] = (at_once, in_blocks)
"""Fastest first."""


class Batched:
    """A `Forward` of a Llama whose decoding rows share each pass over the weights."""

    def __init__(self, model: LlamaForCausalLM, multiply: Multiply) -> None:
        """Hold no row yet."""
        self._model: Final = model
        self._multiply: Final = multiply
        self._attend: Final = ALL_ATTENTION_FUNCTIONS.get_interface(
            model.config._attn_implementation,  # noqa: SLF001 - there is no other way to ask
            eager_attention_forward,
        )

    def hold(self, cache: DynamicCache | None) -> RowKV:
        """A copy of the cache in memory that grows."""
        row = RowKV(self._model.config, self._model.dtype, self._model.device)
        if cache is not None:
            row.take_in(cache)
        return row

    def held_tokens(self, kv: RowKV) -> int:
        """Tokens of the row."""
        return kv.tokens

    def extend(self, kv: RowKV, tokens: Sequence[int]) -> torch.Tensor:
        """One forward pass of the model itself."""
        cache = kv.cache()
        logits = logits_after(self._model, cache, tokens)
        kv.take_in(cache)
        return logits

    @torch.no_grad()
    def decode(self, rows: Sequence[RowKV], tokens: Sequence[int]) -> torch.Tensor:
        """One pass over the weights for all rows."""
        decoder = self._model.model
        hidden = decoder.embed_tokens(torch.tensor(tokens, device=self._model.device)[:, None])
        # Each row's own: so short a vector's cosines are not those of a longer one, bit for bit.
        turns = [decoder.rotary_emb(hidden, position_ids=at) for at in self._positions(rows)]
        cos, sin = (torch.cat(parts) for parts in zip(*turns, strict=True))
        for row in rows:
            row.reserve(row.tokens + 1)
        for i, layer in enumerate(decoder.layers):
            normed = layer.input_layernorm(hidden)
            hidden = hidden + self._attention(layer.self_attn, i, normed, rows, (cos, sin))
            hidden = hidden + self._mlp(layer.mlp, layer.post_attention_layernorm(hidden))
        for row in rows:
            row.tokens += 1
        return self._multiply(decoder.norm(hidden), self._model.lm_head.weight)[:, 0]

    def cache(self, kv: RowKV) -> DynamicCache:
        """The row's own memory, which is not written again where it counts."""
        return kv.cache()

    def _positions(self, rows: Sequence[RowKV]) -> list[torch.Tensor]:
        return [torch.tensor([[row.tokens]], device=self._model.device) for row in rows]

    def _attention(
        self,
        module: Any,  # noqa: ANN401 - transformers' classes are not read by the checker
        layer: int,
        hidden: torch.Tensor,
        rows: Sequence[RowKV],
        turn: tuple[torch.Tensor, torch.Tensor],
    ) -> torch.Tensor:
        heads = (len(rows), 1, -1, module.head_dim)
        queries, keys, values = (
            self._multiply(hidden, of.weight).view(heads).transpose(1, 2)
            for of in (module.q_proj, module.k_proj, module.v_proj)
        )
        queries, keys = apply_rotary_pos_emb(queries, keys, *turn)
        new = torch.stack((keys, values), dim=1)[:, :, :, 0]
        results = []
        for i, row in enumerate(rows):
            k, v = row.put(layer, new[i])
            attended, _ = self._attend(
                module, queries[i : i + 1], k, v, None, dropout=0.0, scaling=module.scaling
            )
            results.append(attended)
        together = torch.cat(results).reshape(len(rows), 1, -1)
        return self._multiply(together, module.o_proj.weight)

    def _mlp(self, module: Any, hidden: torch.Tensor) -> torch.Tensor:  # noqa: ANN401 - as above
        gate = module.act_fn(self._multiply(hidden, module.gate_proj.weight))
        up = self._multiply(hidden, module.up_proj.weight)
        return self._multiply(gate * up, module.down_proj.weight)


def engine_of(
    model: PreTrainedModel,
    *,
    capacity_tokens: int,
    rows_max: int = ROWS_MAX,
    chunk_tokens: int = CHUNK_TOKENS,
) -> AnyEngine:
    """An engine that computes rows together where that gives each the bits it has alone.

    Set torch's number of threads before: with another, kernels may sum in another order.
    """
    multiply = exact_form(model, rows_max)
    forward = OneByOne(model) if multiply is None else Batched(model, multiply)
    limits = {"rows_max": rows_max, "chunk_tokens": chunk_tokens}
    return Engine[Any](forward, capacity_tokens=capacity_tokens, **limits)


def exact_form(
    model: PreTrainedModel, rows_max: int, forms: Sequence[Multiply] = FORMS
) -> Multiply | None:
    """The first form in which rows of this model have their own bits, however many there are.

    Tried out with every number of rows up to `rows_max`; seconds for a model of half a gigabyte.
    None: no form does, or the model is no plain Llama.
    """
    if not _is_plain_llama(model):
        return None
    return next((form for form in forms if _is_exact(model, form, rows_max)), None)


def _is_plain_llama(model: PreTrainedModel) -> bool:
    config = model.config
    return (
        type(model) is LlamaForCausalLM
        and config.rope_parameters["rope_type"] in FIXED_ROPE
        and not (config.attention_bias or config.mlp_bias)
    )


def _is_exact(model: LlamaForCausalLM, form: Multiply, rows_max: int) -> bool:
    """Compare the logits of rows of unequal lengths with those of each alone (E1)."""
    batched, single = Batched(model, form), OneByOne(model)
    alone = [single.hold(None) for _ in range(rows_max)]
    for length, cache in enumerate(alone, start=1):
        single.extend(cache, _trial_tokens(model, length))
    rows = [[batched.hold(cache) for cache in alone[:count]] for count in range(1, rows_max + 1)]
    last = _trial_tokens(model, rows_max)
    expected = single.decode(alone, last)
    return all(
        torch.equal(batched.decode(some, last[: len(some)]), expected[: len(some)]) for some in rows
    )


def _trial_tokens(model: LlamaForCausalLM, count: int) -> list[int]:
    """Any will do, as long as rows differ."""
    return [(31 * i + 7) % model.config.vocab_size for i in range(count)]
