"""What a vLLM tier's rows depend on: everything that vLLM tells of them, each by its name."""

from __future__ import annotations

import dataclasses
import json
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest

from kvstore import limits
from kvstore.connectors.engine_namespace import (
    as_text,
    check_fields,
    differences,
    namespaces,
    of_text,
)
from kvstore.connectors.vllm.fields import DEFAULT_SEED, ENGINES
from kvstore.connectors.vllm.tier_fields import (
    TierSettings,
    tier_fields,
    tier_settings,
    with_hash,
)
from kvstore.errors import BadValue

if TYPE_CHECKING:
    from pathlib import Path

    from kvstore.connectors.engine_namespace import EngineFields

ROW = 32768
NAMED = TierSettings(revision="r")


@dataclasses.dataclass
class Told:
    """As much as vLLM tells of an engine, flat."""

    name: str = "org/model"
    dtype: str = "bfloat16"
    tokens_per_hash: int = 32
    blocks_per_chunk: int = 1
    tp_size: int = 1
    pp_size: int = 1
    pcp_size: int = 1
    dcp_size: int = 1
    world_size: int = 1
    replicated_layout: bool = False
    canonical_layout: bool = False
    kv_cache_layout: str = "NHD"
    groups: tuple[Any, ...] = (SimpleNamespace(tokens_per_block=32, layer_names=("l0", "l1")),)

    def fields(self, settings: TierSettings = NAMED, row_bytes: int = ROW) -> EngineFields:
        config = SimpleNamespace(
            model=self, cache=self, parallel=self, groups=self.groups,
            replicated_layout=self.replicated_layout, canonical_layout=self.canonical_layout,
            kv_cache_layout=self.kv_cache_layout,
        )  # fmt: skip
        return with_hash(tier_fields(config, row_bytes, "0.32.0+cpu", settings), "sha256_cbor", {})


OTHERS: dict[str, tuple[dict[str, Any], str]] = {
    "name": ({"name": "org/other"}, "model"),
    "dtype": ({"dtype": "float16"}, "kv_dtype"),
    "tokens_per_hash": ({"tokens_per_hash": 16}, "block_tokens"),
    "blocks_per_chunk": ({"blocks_per_chunk": 4}, "blocks_per_chunk"),
    "tp_size": ({"tp_size": 2}, "tensor_parallel"),
    "pp_size": ({"pp_size": 2}, "pipeline_parallel"),
    "pcp_size": ({"pcp_size": 2}, "prefill_context_parallel"),
    "dcp_size": ({"dcp_size": 2}, "decode_context_parallel"),
    "world_size": ({"world_size": 2}, "world_size"),
    "replicated_layout": ({"replicated_layout": True}, "replicated_layout"),
    "canonical_layout": ({"canonical_layout": True}, "canonical_layout"),
    "kv_cache_layout": ({"kv_cache_layout": "HND"}, "block_order"),
    "groups": (
        {"groups": (SimpleNamespace(tokens_per_block=32, layer_names=("l1", "l0")),)},
        "groups[0].layers",
    ),
}


def test_everything_that_is_told_is_tried() -> None:
    assert set(OTHERS) == {each.name for each in dataclasses.fields(Told)}


@pytest.mark.parametrize("what", sorted(OTHERS))
def test_another_value_of_anything_is_another_namespace_and_is_named(what: str) -> None:
    changes, name = OTHERS[what]
    ours, other = Told().fields(), Told(**changes).fields()
    assert namespaces(ours)[0].id != namespaces(other)[0].id
    assert [each.partition(":")[0] for each in differences(ours, other)] == [name]


def test_what_users_name_and_the_size_of_a_row_keep_engines_apart_as_well() -> None:
    ours = Told().fields()
    for settings, row_bytes, name in (
        (TierSettings(revision="other"), ROW, "revision"),
        (TierSettings(revision="r", tenant="other"), ROW, "tenant"),
        (TierSettings(revision="r", variant="fp8 weights"), ROW, "variant"),
        (NAMED, 2 * ROW, "row_bytes"),
    ):
        other = Told().fields(settings, row_bytes)
        assert namespaces(ours)[0].id != namespaces(other)[0].id
        assert [each.partition(":")[0] for each in differences(ours, other)] == [name]


def test_equal_engines_share_one_namespace_of_rows() -> None:
    (namespace,) = namespaces(Told().fields())
    assert namespace.is_opaque
    assert namespaces(Told().fields()) == (namespace,)
    assert of_text(as_text(Told().fields())) == Told().fields()


def test_another_hash_or_seed_is_another_namespace() -> None:
    fields = Told().fields()
    assert fields.hash_seed == DEFAULT_SEED
    seeded = with_hash(fields, "sha256_cbor", {"PYTHONHASHSEED": "7"})
    assert len({namespaces(each)[0].id for each in (fields, seeded)}) == 2
    with pytest.raises(BadValue, match="PYTHONHASHSEED"):
        check_fields(with_hash(fields, "xxhash", {}), ENGINES)


def test_a_folder_is_named_by_its_weights_and_its_configuration(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes(b"weights")
    digests = []
    for theta in (1e4, 1e6):
        (tmp_path / "config.json").write_text(json.dumps({"rope_theta": theta}))
        digests.append(Told(name=str(tmp_path)).fields(TierSettings()))
    assert digests[0].revision == digests[1].revision
    assert digests[0].revision.startswith("sha256:")
    assert digests[0].config_digest != digests[1].config_digest


def test_a_model_without_a_name_for_its_weights_is_refused() -> None:
    with pytest.raises(BadValue, match="revision"):
        Told().fields(TierSettings())


def test_rows_that_exceed_what_the_pool_stores_in_one_piece_are_refused() -> None:
    with pytest.raises(BadValue, match="blocks_per_chunk: got 8, want fewer"):
        Told(blocks_per_chunk=8).fields(row_bytes=limits.CHUNK_BYTES + 4096)


@pytest.mark.parametrize(
    ("given", "field"),
    [
        ({"mastres": "a:1"}, "secondary_tiers"),
        ({"locality": "NEAR"}, "secondary_tiers"),
        ({"timeout_s": 0}, "secondary_tiers.timeout_s"),
        ({"lookup_deadline_s": 2.0}, "secondary_tiers.lookup_deadline_s"),
        ({"save_bytes_max": -1}, "secondary_tiers.save_bytes_max"),
    ],
)
def test_a_wrong_setting_is_named(given: dict[str, object], field: str) -> None:
    with pytest.raises(BadValue) as caught:
        tier_settings(given)
    assert caught.value.field == field
