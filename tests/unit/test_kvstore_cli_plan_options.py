"""What the options of `kvharbor plan` come to, and which of them is named when it cannot be."""

from __future__ import annotations

import json
from math import inf, nan
from typing import TYPE_CHECKING

import pytest
from msgspec.structs import replace

from kvstore.cli.plan_options import (
    NO_SHAPE,
    Described,
    Shape,
    Speeds,
    hardware_of,
    kv_of,
    read_config,
    traffic_of,
)
from kvstore.errors import BadValue, ConfigError
from kvstore.namespace import Attention, CacheGroup
from kvstore.planner.traffic import Lengths

if TYPE_CHECKING:
    from pathlib import Path

SHAPE = Shape(32, 32, 128, None, None, None)
SPEEDS = Speeds(8000.0, 16, None, 30.0, "40GiB", 100.0)
TIMES = (50.0, 5.0, 500.0, 50.0)
DESCRIBED = Described(4.0, None, 800.0, None, 200.0, None, None)
LLAMA = {
    "model_type": "llama", "num_hidden_layers": 32, "num_attention_heads": 32,
    "hidden_size": 4096, "torch_dtype": "float32",
}  # fmt: skip


@pytest.fixture
def config(tmp_path: Path) -> Path:
    file = tmp_path / "config.json"
    file.write_text(json.dumps(LLAMA))
    return file


def test_name_file_and_dimensions_describe_the_same_model(config: Path) -> None:
    groups = {
        kv_of("llama-2-7b", None, NO_SHAPE, None, None).groups,
        kv_of(None, config, NO_SHAPE, None, None).groups,
        kv_of(None, None, SHAPE, None, None).groups,
    }
    assert groups == {(CacheGroup(Attention.FULL, 32, 32, 128, 128),)}


def test_an_option_outranks_the_format_of_the_file(config: Path) -> None:
    assert kv_of(None, config, NO_SHAPE, None, None).form.dtype == "float32"
    assert kv_of(None, config, NO_SHAPE, "int8", 0).form.dtype == "int8"
    assert kv_of(None, None, SHAPE, None, None).form.dtype == "bfloat16"


def test_dimensions_may_be_of_mla_or_of_windows() -> None:
    latent = replace(NO_SHAPE, layers=61, latent_dim=576)
    assert latent.groups() == (CacheGroup(Attention.LATENT, 61, 1, 576, 0),)
    bounded = CacheGroup(Attention.SLIDING, 32, 32, 128, 128, 4096)
    assert replace(SHAPE, window=4096).groups() == (bounded,)
    full = CacheGroup(Attention.FULL, 20, 32, 128, 128)
    twelve = replace(SHAPE, window=4096, window_layers=12)
    assert twelve.groups() == (full, replace(bounded, layers=12))


@pytest.mark.parametrize(
    ("shape", "field"),
    [
        (replace(SHAPE, layers=None), "layers"),
        (replace(SHAPE, layers=0), "layers"),
        (replace(SHAPE, kv_heads=None), "kv_heads"),
        (replace(SHAPE, head_dim=-1), "head_dim"),
        (replace(SHAPE, window=0), "window"),
        (replace(SHAPE, window_layers=2), "window_layers"),
        (replace(SHAPE, window=8, window_layers=33), "window_layers"),
        (replace(SHAPE, window=8, window_layers=0), "window_layers"),
        (replace(SHAPE, latent_dim=576), "kv_heads"),
        (replace(NO_SHAPE, layers=61, latent_dim=0), "latent_dim"),
        (NO_SHAPE, "model"),
    ],
)
def test_a_dimension_that_cannot_be_is_named(shape: Shape, field: str) -> None:
    with pytest.raises(BadValue, match=rf"^{field}: got .*, want "):
        kv_of(None, None, shape, None, None)


def test_two_models_are_one_too_many() -> None:
    with pytest.raises(BadValue, match=r"^model: got 'llama-2-7b', want one of --model"):
        kv_of("llama-2-7b", None, SHAPE, None, None)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("{}", "num_hidden_layers: got None, want a whole number"),
        ("[]", "want a JSON object"),
        ('{"hidden_size": NaN}', "want a JSON object"),
        ("\xff", "want a JSON object"),
        (json.dumps(LLAMA | {"model_type": "new"}), "num_key_value_heads: got None, want it"),
    ],
)
def test_a_wrong_file_is_named_with_what_it_lacks(config: Path, text: str, said: str) -> None:
    config.write_text(text, encoding="latin-1")
    with pytest.raises(ConfigError, match=rf"^{config}: .*{said}"):
        kv_of(None, config, NO_SHAPE, None, None)


def test_a_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"absent\.json: No such file"):
        read_config(tmp_path / "absent.json")


def test_traffic_is_described_or_recorded(tmp_path: Path) -> None:
    described = traffic_of(None, 512, replace(DESCRIBED, input_p99=4096.0, reuse=0.3))
    assert (described.input, described.output) == (Lengths(800, 4096), Lengths(200, 200))
    assert (described.requests_per_s, described.reused) == (4.0, 0.3)
    file = tmp_path / "trace.jsonl"
    rows = [
        {"timestamp": at, "input_length": 20, "output_length": 2, "hash_ids": [0, 1]}
        for at in (0, 1000)
    ]
    file.write_text("\n".join(map(json.dumps, rows)))
    nothing = Described(None, None, None, None, None, None, None)
    recorded = traffic_of(file, 10, nothing)
    assert (recorded.requests_per_s, recorded.reused) == (2.0, 0.5)
    assert traffic_of(file, 10, replace(nothing, reuse=0.0)) == replace(recorded, reused=0.0)
    with pytest.raises(BadValue, match=r"^reuse: got 1\.0, want a number from 0"):
        traffic_of(file, 10, replace(nothing, reuse=1.0))
    with pytest.raises(BadValue, match=r"^rate: got 4\.0, want nothing, beside --trace"):
        traffic_of(file, 10, replace(nothing, rate=4.0))


@pytest.mark.parametrize("field", ["rate", "input", "output"])
@pytest.mark.parametrize("value", [None, 0.0, -1.0, nan, inf])
def test_traffic_that_is_missing_or_wrong_is_named(field: str, value: float | None) -> None:
    with pytest.raises(BadValue, match=rf"^{field}: got"):
        traffic_of(None, 512, replace(DESCRIBED, **{field: value}))


def test_hardware_is_in_seconds_and_bytes() -> None:
    found = hardware_of(SPEEDS, TIMES, 22)
    assert found.step_s == 0.03
    assert found.decode_tokens_per_s == pytest.approx(16 / 0.03)
    assert (found.kv_bytes, found.link_bytes_per_s) == (40 << 30, 12.5e9)
    assert (found.rtt_s, found.hand_over_s, found.ttft_s, found.tpot_s) == (
        50e-6, 0.005, 0.5, 0.05
    )  # fmt: skip
    by_rate = replace(SPEEDS, decode_step_ms=None, decode_tokens_per_s=800.0)
    assert hardware_of(by_rate, TIMES, None).step_s == 0.02


@pytest.mark.parametrize(
    ("field", "value"),
    [
        *((name, value) for value in (None, 0.0, -1.0, nan, inf)
          for name in ("prefill_tokens_per_s", "link_gbit")),
        ("decode_batch", None), ("decode_batch", 0),
        ("decode_step_ms", None), ("decode_step_ms", 0.0), ("decode_step_ms", nan),
        ("kv_memory", None), ("kv_memory", "much"), ("kv_memory", "0"),
    ],
)  # fmt: skip
def test_hardware_that_is_missing_or_wrong_is_named(field: str, value: object) -> None:
    with pytest.raises(BadValue, match=rf"^{field}: got"):
        hardware_of(replace(SPEEDS, **{field: value}), TIMES, None)


@pytest.mark.parametrize(
    ("at", "field"), [*enumerate(["rtt_us", "hand_over_ms", "ttft_ms", "tpot_ms"])]
)
@pytest.mark.parametrize("value", [-1.0, nan, inf])
def test_times_that_cannot_be_are_named(at: int, field: str, value: float) -> None:
    rtt_us, hand_over_ms, ttft_ms, tpot_ms = (
        value if place == at else time for place, time in enumerate(TIMES)
    )
    with pytest.raises(BadValue, match=rf"^{field}: got"):
        hardware_of(SPEEDS, (rtt_us, hand_over_ms, ttft_ms, tpot_ms), None)


def test_step_and_rate_of_decode_are_one_too_many() -> None:
    with pytest.raises(BadValue, match=r"^decode_step_ms: got 30\.0, want either"):
        hardware_of(replace(SPEEDS, decode_tokens_per_s=800.0), TIMES, None)
