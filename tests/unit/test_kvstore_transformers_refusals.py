"""Models whose first tokens do not say what their keys are: a pool would mix them up."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

import pytest
import torch
from transformers import LlavaConfig, LlavaForConditionalGeneration

from kvstore.connectors.transformers import PooledPrefix, UnsupportedCache
from tests.fake_store import FakeStore
from tests.tiny_model import PAGE, computed, config, text, tiny
from tests.tiny_models import gemma3

if TYPE_CHECKING:
    from collections.abc import Callable

    from transformers import PreTrainedModel


def llava() -> PreTrainedModel:
    sees = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1}
    sees |= {"num_attention_heads": 2, "image_size": 8, "patch_size": 4, "projection_dim": 8}
    vision = {"model_type": "clip_vision_model", **sees}
    text_config = config(num_hidden_layers=1).to_dict()
    return LlavaForConditionalGeneration(
        LlavaConfig(text_config=text_config, vision_config=vision, image_token_index=90)
    )


def with_rope(kind: str, **more: object) -> PreTrainedModel:
    rope = {"rope_type": kind, "rope_theta": 1e4, "factor": 4.0, **more}
    return tiny(max_position_embeddings=32, rope_parameters=rope)


def with_long_rope() -> PreTrainedModel:
    factors = {"short_factor": [1.0] * 4, "long_factor": [8.0] * 4}
    return with_rope("longrope", original_max_position_embeddings=32, **factors)


def in_both_directions() -> PreTrainedModel:
    model = gemma3()
    model.config.use_bidirectional_attention = True
    return model


@pytest.mark.parametrize(
    ("model", "said"),
    [
        (llava, "llava: got a model whose tokens may stand for images or sounds, want"),
        (partial(with_rope, "dynamic"), "llama: got rope of type dynamic, .* want default"),
        (with_long_rope, "llama: got rope of type longrope"),
        (in_both_directions, "gemma3_text: got attention in both directions"),
    ],
    ids=["images", "dynamic", "longrope", "both directions"],
)
def test_models_whose_tokens_do_not_say_all_are_refused(
    model: Callable[[], PreTrainedModel], said: str
) -> None:
    with pytest.raises(UnsupportedCache, match=said):
        PooledPrefix(FakeStore(), model(), "tiny", page_tokens=PAGE)


@pytest.mark.parametrize("model", [partial(with_rope, "dynamic"), with_long_rope])
def test_keys_by_length_do_depend_on_what_comes_behind(
    model: Callable[[], PreTrainedModel],
) -> None:
    """Once they do not, such models need not be refused."""
    short, long = (computed(model(), text(length)).layers[0].keys for length in (PAGE, 4 * PAGE))
    assert not torch.allclose(short, long[:, :, :PAGE], atol=0.1)
    plain = [computed(tiny(), text(length)).layers[0].keys for length in (PAGE, 4 * PAGE)]
    assert torch.allclose(plain[0], plain[1][:, :, :PAGE], atol=1e-4)
