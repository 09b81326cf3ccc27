"""Several prompts in one cache: different prefixes, padded on the left, through a store."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch
from transformers import DynamicCache

from kvstore.client.outcomes import MissReason
from kvstore.connectors.transformers import (
    PooledPrefix,
    PooledRows,
    UnsupportedCache,
    left_padded,
)
from kvstore.errors import BadValue, Unavailable
from tests.fake_store import FakeStore
from tests.tiny_model import PAGE, text, tiny
from tests.tiny_models import model_of

if TYPE_CHECKING:
    from collections.abc import Iterator

    from transformers import PreTrainedModel

PAD = 0
LONG = text(3 * PAGE + 6)
MIDDLE = text(2 * PAGE + 3)[::-1]
SHORT = text(PAGE - 4)
ROWS = [MIDDLE, LONG, SHORT]


@pytest.fixture
def store() -> Iterator[FakeStore]:
    made = FakeStore()
    yield made
    for buffer in made.buffers:
        buffer.close()


def llama() -> PreTrainedModel:
    return tiny(pad_token_id=PAD)


def pooled(store: FakeStore, model: PreTrainedModel) -> PooledPrefix:
    return PooledPrefix(store, model, "tiny", page_tokens=PAGE)


def answers(
    model: PreTrainedModel, rows: list[list[int]], cache: DynamicCache | None = None
) -> torch.Tensor:
    """Six more tokens of each row, and the padding before it."""
    cache = DynamicCache(config=model.config) if cache is None else cache
    made: torch.Tensor = model.generate(
        **left_padded(rows, PAD)._asdict(), cache=cache, max_new_tokens=6, do_sample=False
    )
    return made


def test_rows_are_padded_on_the_left() -> None:
    padded = left_padded([[5, 6, 7], [8]], PAD)
    assert padded.input_ids.tolist() == [[5, 6, 7], [PAD, PAD, 8]]
    assert padded.attention_mask.tolist() == [[1, 1, 1], [0, 0, 1]]


@pytest.mark.parametrize("name", ["llama", "deepseek_v3"])
def test_rows_reuse_what_each_of_them_has(store: FakeStore, name: str) -> None:
    model = llama() if name == "llama" else model_of(name)
    prefix = pooled(store, model)
    want = answers(model, ROWS)
    single = {len(row): prefix.prefill(row) for row in (MIDDLE, LONG)}
    fetched = PooledRows(prefix).fetch(ROWS)
    # The long row has 48 of 54; the middle one 32 of 35, behind 19 columns of padding; the short
    # one nothing, and it begins in column 42.
    assert (fetched.columns, fetched.trouble) == (42, "")
    for number, row in enumerate(ROWS[:2]):
        pad = len(LONG) - len(row)
        for layer, own in zip(fetched.cache.layers, single[len(row)].cache.layers, strict=True):
            assert torch.equal(layer.keys[number, :, pad:], own.keys[0, :, : 42 - pad])
            assert torch.equal(layer.values[number, :, pad:], own.values[0, :, : 42 - pad])
            assert not layer.keys[number, :, :pad].any()
    assert not fetched.cache.layers[0].keys[2].any()
    assert torch.equal(answers(model, ROWS, fetched.cache), want)


def test_one_row_of_which_nothing_is_known_holds_all_back(store: FakeStore) -> None:
    prefix = pooled(store, llama())
    prefix.prefill(MIDDLE)
    fetched = PooledRows(prefix).fetch([MIDDLE, LONG])
    assert (fetched.columns, fetched.cache.get_seq_length()) == (0, 0)


@pytest.mark.parametrize("call", ["probe", "lookup", "read"])
def test_a_pool_in_trouble_is_nothing_known_of_any_row(store: FakeStore, call: str) -> None:
    rows = PooledRows(pooled(store, model_of("gemma3")))
    pooled(store, model_of("gemma3")).prefill(MIDDLE)
    store.fail[call] = Unavailable("away")
    fetched = rows.fetch([MIDDLE, MIDDLE])
    assert (fetched.columns, fetched.cache.get_seq_length()) == (0, 0)
    assert fetched.trouble.startswith("unavailable")


@pytest.mark.parametrize("name", ["llama", "gemma3", "mistral"])
def test_what_rows_computed_is_found_again(store: FakeStore, name: str) -> None:
    model = llama() if name == "llama" else model_of(name)
    rows = PooledRows(pooled(store, model))
    cache = DynamicCache(config=model.config)
    # 54 + 6 tokens without the last: 59 columns, 48 + 11 of the long row.
    whole = answers(model, ROWS, cache)
    full = [made[len(LONG) - len(row) :].tolist() for made, row in zip(whole, ROWS, strict=True)]
    kept = rows.store(full, cache, left_padded(ROWS, PAD))
    if name == "llama":
        assert [each.stored for each in kept] == [2, 3, 1]
        assert [rows.fetch([row]).columns for row in full] == [2 * PAGE, 3 * PAGE, PAGE]
        again = rows.fetch(full)
        assert again.columns == 3 * PAGE
        assert torch.equal(answers(model, full, again.cache), answers(model, full))
    else:  # only the short row's window reaches back to where a page begins
        assert [each.trouble[:8] for each in kept] == ["no_state", "no_state", ""]
        assert [rows.fetch([row]).columns for row in full] == [0, 0, PAGE]


@pytest.mark.parametrize("name", ["gemma3", "mistral"])
def test_windows_are_joined_where_all_rows_have_them(store: FakeStore, name: str) -> None:
    model = model_of(name)
    prefix = pooled(store, model)
    rows = [LONG, text(2 * PAGE + 6)[::-1], SHORT[: PAGE - 10]]
    want = answers(model, rows)
    prefix.prefill(LONG, also_at=[PAGE])
    prefix.prefill(rows[1])
    fetched = PooledRows(prefix).fetch(rows)
    assert fetched.columns == 3 * PAGE  # 48 + 0, 32 + 16, and all padding
    assert torch.equal(answers(model, rows, fetched.cache), want)
    # Behind 15 columns of padding no page of the second row ends where one of the first does.
    assert PooledRows(prefix).fetch([LONG, [*rows[1], 5]]).columns == 0


def test_a_window_that_is_lost_meanwhile_is_told(
    store: FakeStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    prefix = pooled(store, model_of("mistral"))
    prefix.prefill(LONG)
    monkeypatch.setitem(store.fail, "lookup", Unavailable("gone"))
    fetched = PooledRows(prefix).fetch([LONG])
    assert (fetched.columns, fetched.trouble) == (0, "unavailable: gone")


@pytest.mark.parametrize("name", ["gemma3", "lfm2"])
def test_rows_that_come_to_different_ends_are_not_joined(store: FakeStore, name: str) -> None:
    model = model_of(name)
    prefix = pooled(store, model)
    other = LONG[::-1]
    prefix.prefill(LONG, also_at=[PAGE])
    prefix.prefill(other, also_at=[PAGE])
    store.spoil[store.objects[-1]] = MissReason.STALE  # the other row comes to its first page
    fetched = PooledRows(prefix).fetch([LONG, other])
    assert fetched.columns == 0
    assert torch.equal(answers(model, [LONG, other], fetched.cache), answers(model, [LONG, other]))


@pytest.mark.parametrize("name", ["lfm2", "falcon_h1", "qwen3_next"])
def test_rows_with_recurrent_states_are_equally_long(store: FakeStore, name: str) -> None:
    model = model_of(name)
    prefix = pooled(store, model)
    other = LONG[::-1]
    want = answers(model, [LONG, other])
    for row in (LONG, other):
        prefix.prefill(row)
    rows = PooledRows(prefix)
    fetched = rows.fetch([LONG, other])
    assert fetched.columns == 3 * PAGE
    both = [LONG, other]
    elsewhere = PooledRows(pooled(FakeStore(), model))
    kept = elsewhere.store(both, fetched.cache, left_padded(both, PAD))
    assert [(each.stored, each.trouble) for each in kept] == [(3, ""), (3, "")]
    assert torch.equal(answers(model, [LONG, other], fetched.cache), want)
    with pytest.raises(UnsupportedCache, match="got rows with 19 columns of padding, want equally"):
        rows.fetch([LONG, MIDDLE])


def test_rows_that_ended_at_different_times_are_kept_where_they_began(store: FakeStore) -> None:
    model = llama()
    rows = PooledRows(pooled(store, model))
    prompts, cache = [LONG[: 2 * PAGE], LONG[:PAGE]], DynamicCache(config=model.config)
    whole = answers(model, prompts, cache)
    ended = [whole[0].tolist(), whole[1, PAGE : 2 * PAGE + 1].tolist()]
    rows.store(ended, cache, left_padded(prompts, PAD))
    alone = DynamicCache(config=model.config)
    model(input_ids=torch.tensor([LONG[:PAGE]]), cache=alone)
    found = pooled(store, model).fetch(ended[1])[0]
    assert torch.allclose(found.layers[0].keys, alone.layers[0].keys, atol=1e-5)


def test_rows_have_to_be_those_of_the_prompts_and_of_the_cache(store: FakeStore) -> None:
    model = llama()
    rows = PooledRows(pooled(store, model))
    cache = DynamicCache(config=model.config)
    padded = left_padded(ROWS, PAD)
    assert [each.stored for each in rows.store(ROWS, cache, padded)] == [0, 0, 0]
    answers(model, ROWS, cache)
    with pytest.raises(BadValue, match="rows: got 2, want the 3 of the prompts"):
        rows.store(ROWS[:2], cache, padded)
    with pytest.raises(BadValue, match=r"rows\[1\].*begins with its prompt"):
        rows.store([MIDDLE, MIDDLE, SHORT], cache, padded)
    with pytest.raises(BadValue, match="rows: got 2, want the 3 of layer 0"):
        rows.store(ROWS[:2], cache, left_padded(ROWS[:2], PAD))
    with pytest.raises(BadValue, match="rows"):
        rows.fetch([])
    assert not store.held


def test_rows_of_states_alone_do_not_tell_their_length(store: FakeStore) -> None:
    model = model_of("mamba2")
    with pytest.raises(UnsupportedCache, match="want `prefill`"):
        PooledRows(pooled(store, model)).store(
            [LONG], DynamicCache(config=model.config), left_padded([LONG], PAD)
        )
