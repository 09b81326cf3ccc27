"""What is read of vLLM's configuration, and what is refused by its name."""

from __future__ import annotations

from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
import torch

from kvstore.connectors.engine_namespace import EngineFields, namespaces
from kvstore.connectors.vllm.fields import DEFAULT_SEED, MEDIA, engine_fields
from kvstore.connectors.vllm.settings import LOAD_TOKENS_MIN, Settings, least_load, settings_of
from kvstore.errors import BadValue
from kvstore.namespace import Attention

if TYPE_CHECKING:
    from kvstore.connectors.vllm.foreign import Vllm

HEADS, DIM, BLOCK = 4, 32, 32
COMMIT = "0123456789abcdef0123456789abcdef01234567"


class FullAttentionSpec(SimpleNamespace):
    """As vLLM calls it."""


class SlidingWindowSpec(SimpleNamespace):
    """As vLLM calls it."""


class MLAAttentionSpec(SimpleNamespace):
    """As vLLM calls it."""


class MambaSpec(SimpleNamespace):
    """As vLLM calls it."""


def spec_of(kind: type = FullAttentionSpec, heads: int = HEADS, **fields: object) -> Vllm:
    values: dict[str, Any] = {
        "block_size": BLOCK,
        "num_kv_heads": heads,
        "head_size": DIM,
        "head_size_v": DIM,
        "dtype": torch.bfloat16,
        **fields,
    }
    values.setdefault(
        "page_size_bytes", BLOCK * heads * (values["head_size"] + values["head_size_v"]) * 2
    )
    return kind(**values)


class Config:
    """The parts of vLLM's configuration that are read."""

    def __init__(self, *specs: SimpleNamespace) -> None:
        self.model = SimpleNamespace(
            model="org/model", revision=COMMIT, dtype=torch.bfloat16, quantization=None,
            hf_config=SimpleNamespace(to_dict=lambda: {"rope_theta": 1e4}),
            get_total_num_kv_heads=lambda: HEADS, multimodal_config=None, max_model_len=4096,
        )  # fmt: skip
        self.caching = SimpleNamespace(
            block_size=BLOCK, cache_dtype="auto", enable_prefix_caching=True,
            prefix_caching_hash_algo="sha256_cbor",
        )  # fmt: skip
        self.parallel = SimpleNamespace(
            tensor_parallel_size=1, pipeline_parallel_size=1,
            decode_context_parallel_size=1, prefill_context_parallel_size=1,
        )  # fmt: skip
        groups = [
            SimpleNamespace(layer_names=[f"layers.{i}"], kv_cache_spec=spec)
            for i, spec in enumerate(specs or [spec_of()])
        ]
        self.cache = SimpleNamespace(
            kv_cache_groups=groups, kv_cache_layout="NHD", hash_block_size=None
        )
        self.guessing: SimpleNamespace | None = None
        self.environment: dict[str, str] = {}

    def fields(self, settings: Settings | None = None) -> EngineFields:
        whole = SimpleNamespace(
            model_config=self.model, cache_config=self.caching, parallel_config=self.parallel,
            speculative_config=self.guessing,
        )  # fmt: skip
        return engine_fields(
            whole, self.cache, "0.32.0+cpu", settings or Settings(), self.environment
        )


def refusal(config: Config) -> str:
    with pytest.raises(BadValue) as caught:
        config.fields()
    return caught.value.field


def test_all_of_it_is_read() -> None:
    fields = Config(spec_of(), spec_of(SlidingWindowSpec, sliding_window=64,
                    extra_retained_tokens=2)).fields()  # fmt: skip
    assert fields.engine == "vllm 0.32"
    assert (fields.model, fields.revision) == ("org/model", COMMIT)
    assert (fields.kv_dtype, fields.quantization) == ("bfloat16", "none")
    assert (fields.hash_algorithm, fields.hash_seed) == ("sha256_cbor", DEFAULT_SEED)
    full, sliding = fields.groups
    assert (full.attention, full.kv_heads, full.window_tokens) == (Attention.FULL, HEADS, 0)
    assert (sliding.attention, sliding.window_tokens) == (Attention.SLIDING, 66)


def test_sizes_are_the_engines() -> None:
    (namespace,) = namespaces(Config().fields())
    assert namespace.page_bytes == BLOCK * HEADS * 2 * DIM * 2


def test_heads_are_counted_over_all_ranks() -> None:
    config = Config(spec_of(heads=HEADS // 2))
    config.parallel.tensor_parallel_size = 2
    assert config.fields().groups[0].kv_heads == HEADS
    config = Config(spec_of(heads=1))
    config.parallel.tensor_parallel_size = 2 * HEADS
    assert config.fields().groups[0].kv_heads == HEADS


def test_a_latent_is_one_head_on_all_ranks() -> None:
    config = Config(spec_of(MLAAttentionSpec, heads=1, head_size=576, head_size_v=0))
    config.parallel.tensor_parallel_size = 2
    (group,) = config.fields().groups
    assert (group.attention, group.kv_heads, group.key_dim, group.value_dim) == (
        Attention.LATENT, 1, 576, 0,
    )  # fmt: skip


def test_a_draft_model_of_its_own_is_part_of_it() -> None:
    config = Config()
    assert config.fields().draft == ""
    for draft in (None, config.model):  # guessed by n-grams, or by layers of the model itself
        config.guessing = SimpleNamespace(draft_model_config=draft)
        assert config.fields().draft == ""
    config.guessing = SimpleNamespace(
        draft_model_config=SimpleNamespace(model="org/draft", revision=COMMIT)
    )
    assert config.fields().draft == f"org/draft {COMMIT}"
    config.guessing.draft_model_config.revision = None
    assert refusal(config) == "revision"
    assert config.fields(Settings(revision="r")).draft == "org/draft r"


def test_how_pictures_are_read_is_part_of_it_where_the_model_takes_any() -> None:
    config = Config()
    assert config.fields().media == ""
    plain: dict[str, object] = dict.fromkeys(MEDIA)
    found: list[str] = []
    for name in MEDIA:
        config.model.multimodal_config = SimpleNamespace(**{**plain, name: {"num_crops": 4}})
        found.append(config.fields().media)
        assert name in found[-1]
    assert len(set(found)) == len(MEDIA)


@pytest.mark.parametrize(
    ("values", "lengths"),
    [
        ({"rope_theta": 1e4}, []),
        ({"rope_scaling": {"type": "longrope", "original_max_position_embeddings": 4096}}, [4096]),
        ({"text_config": {"attn_temperature_tuning": True}}, [32768]),
        ({"original_max_position_embeddings": 8192, "attn_temperature_tuning": 4}, [8192, 32768]),
    ],
)
def test_the_side_of_a_length_that_changes_a_model_is_part_of_it(
    values: dict[str, object], lengths: list[int]
) -> None:
    """Not the length of the longest request itself: engines of others share."""
    config = Config()
    config.model.hf_config = SimpleNamespace(to_dict=lambda: values)
    told: list[str] = []
    for longest in sorted({1, *lengths, *(each + 1 for each in lengths), 1 << 20}):
        config.model.max_model_len = longest
        told.append(config.fields().reach)
    assert len(set(told)) == 1 + len(lengths)


def test_a_seed_of_the_environment_is_part_of_it() -> None:
    config = Config()
    config.environment = {"PYTHONHASHSEED": "7"}
    assert config.fields().hash_seed == "PYTHONHASHSEED=7"


def test_xxhash_has_a_seed_only_where_one_is_given() -> None:
    config = Config()
    config.caching.prefix_caching_hash_algo = "xxhash_cbor"
    assert config.fields().hash_seed == ""
    config.environment = {"PYTHONHASHSEED": "0"}
    assert config.fields().hash_seed == "PYTHONHASHSEED=0"


@pytest.mark.parametrize(
    ("part", "field", "value"),
    [
        ("parallel", "pipeline_parallel_size", 2),
        ("parallel", "decode_context_parallel_size", 2),
        ("parallel", "prefill_context_parallel_size", 2),
        ("caching", "enable_prefix_caching", False),
    ],
)
def test_what_has_no_pages_is_refused_by_name(part: str, field: str, value: object) -> None:
    config = Config()
    setattr(getattr(config, part), field, value)
    assert refusal(config) == field


def test_quantised_caches_are_refused() -> None:
    config = Config()
    config.caching.cache_dtype = "fp8"
    assert refusal(config) == "kv_cache_dtype"


@pytest.mark.parametrize(
    ("spec", "field"),
    [
        (spec_of(MambaSpec), "groups[0]"),
        (spec_of(block_size=16), "groups[0].block_size"),
        (spec_of(page_size_bytes=1), "page_size_bytes"),
    ],
)
def test_groups_that_are_not_keys_and_values_are_refused(spec: Vllm, field: str) -> None:
    assert refusal(Config(spec)) == field


def test_weights_that_have_no_name_are_refused() -> None:
    config = Config()
    config.model.revision = "main"  # which is another commit tomorrow
    assert refusal(config) == "revision"
    assert config.fields(Settings(revision="v1")).revision == "v1"


def test_settings_have_defaults_and_unknown_ones_are_refused() -> None:
    assert settings_of({}) == Settings()
    assert settings_of({"masters": "a:1,b:2", "timeout_s": 2}).masters == "a:1,b:2"
    with pytest.raises(BadValue, match="mastre"):
        settings_of({"mastre": "a:1"})


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("timeout_s", 0),
        ("timeout_s", 1e9),
        ("lookup_deadline_s", 2.0),
        ("load_tokens_min", -1),
        ("save_buffer_bytes", -1),
    ],
)
def test_settings_out_of_range_are_refused(name: str, value: object) -> None:
    with pytest.raises(BadValue, match=name):
        settings_of({name: value})


@pytest.mark.parametrize(
    ("told", "device", "least"),
    [
        ({}, "cuda", LOAD_TOKENS_MIN),
        ({}, "cpu", 0),
        ({"load_tokens_min": 0}, "cuda", 0),
        ({"load_tokens_min": 100}, "cpu", 100),
    ],
)
def test_short_loads_are_left_out_where_tokens_cost_little(
    told: dict[str, object], device: str, least: int
) -> None:
    assert least_load(settings_of(told), device) == least
