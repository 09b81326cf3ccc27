"""An engine whose weights were changed goes on without the pool, and says so once."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch

from kvstore.connectors.sglang.pages import KV
from kvstore.connectors.sglang.rows import Rows
from kvstore.connectors.sglang.weights import Weights
from tests.unit.sglang_pools import PAGE, Rank

if TYPE_CHECKING:
    from collections.abc import Mapping

pytestmark = pytest.mark.usefixtures("leases_end_at_once")


@pytest.mark.parametrize(
    "change",
    [
        {"model_path": "the same", "load_format": "auto"},
        {"weight_version": "step 2"},
    ],
)
def test_weights_that_were_changed_are_never_again_those_that_are_named(
    change: Mapping[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    changes: list[tuple[str, Mapping[str, Any]]] = [("of no weights", {"ep_size": 2})]
    weights = Weights(lambda: changes)
    assert weights.are_named()
    changes.append(("an update", change))
    assert [weights.are_named(), weights.are_named()] == [False, False]
    changes.clear()
    assert not weights.are_named()
    assert len(caplog.records) == 1


def test_nothing_is_found_loaded_or_saved_for_an_engine_with_other_weights() -> None:
    rank = Rank()
    is_right = True
    rank.tier.open(Rows(rank.pool, rank.namespace, rank.clock, 1.0, lambda: is_right))
    place = torch.arange(PAGE)
    assert rank.tier.save(KV, ["a"], place) == [True]
    assert rank.tier.leading(["a"]) == 1
    is_right = False
    before = rank.kv.kv_buffer.clone()
    assert rank.tier.leading(["a"]) == 0
    assert rank.tier.load(KV, ["a"], place + PAGE) == [False]
    assert torch.equal(rank.kv.kv_buffer, before)
    assert rank.tier.save(KV, ["b"], place) == [False]
    assert len(rank.store.held) == 1
