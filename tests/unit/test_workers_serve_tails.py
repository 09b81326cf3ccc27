"""The KV behind the last full page, packed and unpacked."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from transformers import DynamicCache

from kvstore.connectors.transformers import PooledPrefix, UnsupportedCache, content_of
from kvstore.errors import LayoutMismatch
from kvstore.namespace import Layout, open_layout
from tests.fake_store import FakeStore
from tests.tiny_model import PAGE, computed, config, same, text, tiny
from tests.tiny_models import model_of
from workers.serve_kv import TicketKV
from workers.serve_tails import append_tail, pack_tail, tail_bytes

CONTENT = content_of(config(), dtype=torch.float32, tenant="t", model_id="m", revision="r")
NAMESPACE = open_layout(CONTENT, Layout(page_tokens=PAGE))


@dataclass
class _Split:
    whole: DynamicCache
    begun: DynamicCache
    packed: bytearray


def split(tokens: int, at: int) -> _Split:
    """A cache, the same one up to `at`, and the tail between."""
    whole, begun = (computed(tiny(), text(tokens)) for _ in range(2))
    begun.crop(at - tokens)
    return _Split(whole, begun, bytearray(pack_tail(whole, at, tokens)))


@pytest.mark.parametrize(("tokens", "at"), [(PAGE + 5, PAGE), (2 * PAGE - 1, PAGE), (3, 0)])
def test_a_cache_is_whole_again_with_its_tail(tokens: int, at: int) -> None:
    case = split(tokens, at)
    assert len(case.packed) == tail_bytes(NAMESPACE, tokens - at)
    begun = case.begun if at else DynamicCache(config=config())
    append_tail(begun, case.packed, NAMESPACE, tokens - at)
    assert same(begun, case.whole)


@pytest.mark.parametrize("name", ["gemma3", "mamba2", "deepseek_v3"])
def test_tickets_are_of_models_with_full_attention_alone(name: str) -> None:
    store = FakeStore()
    prefix = PooledPrefix(store, model_of(name), "tiny", page_tokens=PAGE)
    with pytest.raises(UnsupportedCache, match="tickets are of models with full attention"):
        TicketKV(store, prefix)  # type: ignore[arg-type]  # it is refused before it is used


def test_a_tail_of_another_size_is_refused() -> None:
    case = split(PAGE + 5, PAGE)
    with pytest.raises(LayoutMismatch, match="tail of 4 tokens"):
        append_tail(case.begun, case.packed, NAMESPACE, 4)
    assert case.begun.get_seq_length() == PAGE
