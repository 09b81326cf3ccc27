"""What is read of SGLang's configuration, and what is refused by its name."""

from __future__ import annotations

from types import SimpleNamespace
from typing import TYPE_CHECKING

import pytest
import torch

from kvstore.connectors.engine_namespace import (
    as_text,
    check_fields,
    differences,
    namespaces,
    of_text,
)
from kvstore.connectors.sglang.fields import ENGINES, Facts, check_served, engine_fields
from kvstore.connectors.sglang.settings import Settings, settings_of
from kvstore.errors import BadValue
from tests.unit.sglang_pools import config_of

if TYPE_CHECKING:
    from pathlib import Path

    from kvstore.connectors.engine_namespace import EngineFields
    from kvstore.connectors.sglang.foreign import Sglang

COMMIT = "0123456789abcdef0123456789abcdef01234567"
ARGUMENTS: dict[str, Sglang] = {
    "model_path": "org/model", "revision": COMMIT, "attention_backend": "fa3",
    "prefill_attention_backend": None, "decode_attention_backend": None,
    "quantization_param_path": None, "speculative_algorithm": None,
    "speculative_draft_model_path": None, "speculative_draft_model_revision": None,
    "lora_paths": [], "kv_cache_dtype": "auto", "speculative_draft_kv_cache_dtype": None,
}  # fmt: skip


def model_of(**config: object) -> Sglang:
    return SimpleNamespace(
        dtype=torch.bfloat16, quantization=None,
        hf_config=SimpleNamespace(to_dict=lambda: {"rope_theta": 1e4, **config}),
    )  # fmt: skip


def fields_of(
    model: Sglang = None, settings: Settings | None = None, **changed: Sglang
) -> EngineFields:
    facts = Facts(
        "0.5.23", model or model_of(), SimpleNamespace(**ARGUMENTS), 2, 1, 1, 64, "bfloat16",
        "page_first in pieces", "MHATokenToKVPoolHost -", 1 << 20,
    )  # fmt: skip
    arguments = {**ARGUMENTS, **{n: v for n, v in changed.items() if n in ARGUMENTS}}
    facts = facts._replace(arguments=SimpleNamespace(**arguments))
    facts = facts._replace(**{n: v for n, v in changed.items() if n not in ARGUMENTS})
    return engine_fields(facts, settings or Settings())


def test_all_of_it_is_read_and_told_to_doctor() -> None:
    fields = fields_of()
    assert fields.engine == "sglang 0.5.23"
    assert (fields.model, fields.revision, fields.block_tokens) == ("org/model", COMMIT, 64)
    assert (fields.kv_dtype, fields.compute_dtype) == ("bfloat16", "bfloat16")
    assert of_text(as_text(fields)) == fields
    (namespace,) = namespaces(fields)
    assert namespace.is_opaque


@pytest.mark.parametrize(
    ("field", "changed"),
    [
        ("kv_dtype", {"kv_dtype": "float8_e4m3fn"}),
        ("block_tokens", {"page_tokens": 32}),
        ("tensor_parallel", {"ranks": 4}),
        ("pipeline_parallel", {"stages": 2}),
        ("context_parallel", {"context_ranks": 2}),
        ("block_order", {"layout": "layer_first in pieces"}),
        ("pool", {"pool": "MLATokenToKVPoolHost -"}),
        ("page_bytes", {"page_bytes": 1}),
        ("attention_backends", {"decode_attention_backend": "flashinfer"}),
        ("draft", {"speculative_algorithm": "NGRAM"}),
        ("kv_cache_dtypes", {"kv_cache_dtype": "fp8_e5m2"}),
        ("kv_cache_dtypes", {"speculative_draft_kv_cache_dtype": "bf16"}),
        ("config_digest", {"model": model_of(rope_scaling=2)}),
        ("revision", {"settings": Settings(revision="mine")}),
    ],
)
def test_what_decides_on_bytes_is_another_namespace_and_named(
    field: str, changed: dict[str, Sglang]
) -> None:
    one, other = fields_of(), fields_of(**changed)
    assert namespaces(one) != namespaces(other)
    (difference,) = differences(one, other)
    assert difference.startswith(f"{field}: ")


def test_draft_models_are_told_apart_by_their_weights() -> None:
    drafts = {
        fields_of(
            speculative_algorithm="EAGLE", speculative_draft_model_path="org/draft",
            speculative_draft_model_revision=commit,
        ).rows["draft"]
        for commit in (COMMIT, COMMIT[::-1])
    }  # fmt: skip
    assert drafts == {f"EAGLE {COMMIT}", f"EAGLE {COMMIT[::-1]}"}


def test_adapters_of_one_name_and_path_are_told_apart_by_what_is_there(tmp_path: Path) -> None:
    weights, config = tmp_path / "adapter_model.safetensors", tmp_path / "adapter_config.json"
    adapters = [SimpleNamespace(lora_name="mine", lora_path=str(tmp_path))]
    seen = {fields_of().rows["adapters"]: "none"}
    for one, alpha in ((b"1", "{8}"), (b"2", "{8}"), (b"2", "{16}")):
        weights.write_bytes(one)
        config.write_text(alpha)
        seen[fields_of(lora_paths=adapters).rows["adapters"]] = alpha
    assert len(seen) == 4
    hub = [SimpleNamespace(lora_name="mine", lora_path="org/adapter")]
    with pytest.raises(BadValue, match="a revision of your own"):
        fields_of(lora_paths=hub)
    assert "v7" in fields_of(lora_paths=hub, settings=Settings(revision="v7")).rows["adapters"]


def test_scales_are_told_apart_by_what_is_in_their_file(tmp_path: Path) -> None:
    told: list[str] = []
    for folder, scales in (("a", "{1}"), ("a", "{2}"), ("b", "{2}")):
        path = tmp_path / folder / "scales.json"
        path.parent.mkdir(exist_ok=True)
        path.write_text(scales)
        told.append(fields_of(quantization_param_path=str(path)).rows["kv_scales"])
    assert told[0] != told[1] == told[2]
    assert fields_of().rows["kv_scales"] == "none"


def test_unknown_versions_are_refused_with_those_that_are_known() -> None:
    check_fields(fields_of(), ENGINES)
    with pytest.raises(BadValue, match=r"sglang 0\.5\.99.*sglang 0\.5\.23"):
        check_fields(fields_of(version="0.5.99"), ENGINES)


@pytest.mark.parametrize(
    ("field", "changed"),
    [("dcp_size", {"dcp_size": 2}), ("tp_lcm_size", {"should_split_heads": True})],
)
def test_pages_that_are_cut_otherwise_are_refused(field: str, changed: dict[str, object]) -> None:
    check_served(config_of())
    with pytest.raises(BadValue, match=field):
        check_served(config_of(**changed))  # type: ignore[arg-type]  # by their names


def test_settings_have_defaults_and_unknown_ones_are_refused() -> None:
    assert settings_of({}) == Settings()
    assert settings_of({"masters": "a:1", "revision": "v1"}).revision == "v1"
    with pytest.raises(BadValue, match="mastre"):
        settings_of({"mastre": "a:1"})
