"""Options of `kvharbor plan`, and what they come to: a KV cache, traffic and hardware.

Reads the files that it is given; nothing else of the planner does.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final

import msgspec
import typer

from kvstore.config_values import parse_size
from kvstore.errors import BadValue, ConfigError
from kvstore.namespace import Attention, CacheGroup
from kvstore.planner import checks, kv_bytes, model_config, models, traffic
from kvstore.planner.sizing import Hardware, Kv
from kvstore.request_trace import read_trace

if TYPE_CHECKING:
    from kvstore.planner.traffic import Traffic

DTYPE: Final = "bfloat16"
"""Where neither option nor configuration says otherwise."""
GBIT_BYTES: Final = 1e9 / 8

Whole = int | None
Number = float | None

Model = Annotated[str | None, typer.Option(help=f"One of {', '.join(models.MODELS)}.")]
ConfigFile = Annotated[Path | None, typer.Option(help="config.json of a Hugging Face model.")]
Layers = Annotated[Whole, typer.Option(help="Of a model without name and config.json.")]
KvHeads = Annotated[Whole, typer.Option(help="Heads with keys and values in each layer.")]
HeadDim = Annotated[Whole, typer.Option(help="Elements of a key, and of a value.")]
LatentDim = Annotated[Whole, typer.Option(help="MLA instead: latent and rotated key in all.")]
Window = Annotated[Whole, typer.Option(help="Tokens that layers of sliding attention keep.")]
WindowLayers = Annotated[Whole, typer.Option(help="How many these are.", show_default="all")]
Dtype = Annotated[
    str | None, typer.Option(help="Of the KV cache.", show_default="the model's, else bfloat16")
]
ScaleBytes = Annotated[
    Whole, typer.Option(help="Beside each key and value.", show_default="int8: 2, int4: 4, else 0")
]
TraceFile = Annotated[Path | None, typer.Option(help="Recorded traffic: one request a line.")]
PageTokens = Annotated[int, typer.Option(help="Tokens that one of its hash_ids stands for.")]
Prompt = Annotated[Number, typer.Option("--input", help="Mean tokens of a prompt.")]
PromptP99 = Annotated[Number, typer.Option("--input-p99", show_default="the mean")]
Answer = Annotated[Number, typer.Option("--output", help="Mean tokens of an answer.")]
AnswerP99 = Annotated[Number, typer.Option("--output-p99", show_default="the mean")]
Rate = Annotated[Number, typer.Option(help="Requests a second.")]
PeakRate = Annotated[Number, typer.Option(help="In the busiest minute.", show_default="the rate")]
Reuse = Annotated[
    Number,
    typer.Option(
        help="Share of prompts' tokens in the pool, below 1.",
        show_default="0; of a trace: as in a pool that forgets nothing",
    ),
]
PrefillRate = Annotated[Number, typer.Option(help="Of a prefill worker.")]
DecodeRate = Annotated[Number, typer.Option(help="Of a decode worker with a full batch.")]
DecodeBatch = Annotated[Whole, typer.Option(help="Requests that a decode worker runs at once.")]
StepMs = Annotated[Number, typer.Option(help="Of a step with that batch, instead of its rate.")]
KvMemory = Annotated[str | None, typer.Option(help="Of a decode worker for KV: 40GiB.")]
LinkGbit = Annotated[Number, typer.Option(help="Gbit/s of a worker's link, each way.")]
RttUs = Annotated[float, typer.Option(help="Round trip between workers, in microseconds.")]
HandOverMs = Annotated[float, typer.Option(help="Of a hand-over besides; assumed, so measure it.")]
TtftMs = Annotated[float, typer.Option(help="Target of the first token at p99.")]
TpotMs = Annotated[float, typer.Option(help="Target of each further one.")]
Workers = Annotated[Whole, typer.Option(help="That there are, to be split.")]


class Shape(msgspec.Struct, frozen=True):
    """Dimensions of a model."""

    layers: int | None
    kv_heads: int | None
    head_dim: int | None
    latent_dim: int | None
    window: int | None
    window_layers: int | None

    def groups(self) -> tuple[CacheGroup, ...]:
        """Its layers by the shape of their KV. BadValue names the option that is missing."""
        layers = checks.count("layers", self.layers)
        if self.latent_dim is not None:
            self._refuse(("kv_heads", "head_dim", "window", "window_layers"), "latent_dim")
            dim = checks.count("latent_dim", self.latent_dim)
            return (CacheGroup(Attention.LATENT, layers, 1, dim, 0),)
        heads, dim = (
            checks.count("kv_heads", self.kv_heads),
            checks.count("head_dim", self.head_dim),
        )
        if self.window is None:
            self._refuse(("window_layers",), "no window")
            return (CacheGroup(Attention.FULL, layers, heads, dim, dim),)
        window = checks.count("window", self.window)
        sliding = layers if self.window_layers is None else self.window_layers
        if checks.count("window_layers", sliding) > layers:
            raise BadValue("window_layers", sliding, f"at most {layers}, the number of layers")
        bounded = CacheGroup(Attention.SLIDING, sliding, heads, dim, dim, window)
        full = CacheGroup(Attention.FULL, layers - sliding, heads, dim, dim)
        return (full, bounded) if sliding < layers else (bounded,)

    def _refuse(self, fields: tuple[str, ...], beside: str) -> None:
        for field in fields:
            if getattr(self, field) is not None:
                raise BadValue(field, getattr(self, field), f"nothing, beside {beside}")


NO_SHAPE: Final = Shape(None, None, None, None, None, None)


class Described(msgspec.Struct, frozen=True):
    """Traffic in options."""

    rate: float | None
    peak_rate: float | None
    input: float | None
    input_p99: float | None
    output: float | None
    output_p99: float | None
    reuse: float | None


class Speeds(msgspec.Struct, frozen=True):
    """Hardware in options that have no defaults."""

    prefill_tokens_per_s: float | None
    decode_batch: int | None
    decode_tokens_per_s: float | None
    decode_step_ms: float | None
    kv_memory: str | None
    link_gbit: float | None


def kv_of(
    model: str | None, config: Path | None, shape: Shape, dtype: str | None, scale_bytes: int | None
) -> Kv:
    """The KV cache of the model that exactly one of name, file and dimensions describes."""
    ways = [model is not None, config is not None, shape != NO_SHAPE]
    if sum(ways) != 1:
        raise BadValue("model", model, "one of --model, --config, or --layers and its dimensions")
    parameters = 0.0
    if config is not None:
        fields = read_config(config)
        try:
            groups = model_config.groups_of(fields)
        except BadValue as error:
            raise ConfigError(f"{config}: {error}") from error
        dtype = dtype or model_config.dtype_of(fields)
    elif model is not None:
        known = models.model(model)
        groups, parameters = known.groups, known.parameters
    else:
        groups = shape.groups()
    return Kv(groups, kv_bytes.kv_format(dtype or DTYPE, scale_bytes), parameters)


def read_config(file: Path) -> dict[str, object]:
    """The object that a JSON file holds; ConfigError names the file and what is wrong with it."""
    try:
        return msgspec.json.decode(file.read_bytes(), type=dict[str, object])
    except OSError as error:
        raise ConfigError(f"{file}: {error.strerror}") from error
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{file}: {error}, want a JSON object") from error


def traffic_of(file: Path | None, page_tokens: int, described: Described) -> Traffic:
    """Recorded traffic, or described; BadValue names what is missing or said twice.

    Reuse may be said of recorded traffic, too: a pool of some size serves less than it repeats.
    """
    if file is not None:
        for field, value in msgspec.structs.asdict(described).items():
            if value is not None and field != "reuse":
                raise BadValue(field, value, "nothing, beside --trace")
        recorded = traffic.of_trace(read_trace(file, page_tokens))
        if described.reuse is None:
            return recorded
        return msgspec.structs.replace(recorded, reused=checks.share("reuse", described.reuse))
    prompts = traffic.lengths("input", _given("input", described.input), described.input_p99)
    answers = traffic.lengths("output", _given("output", described.output), described.output_p99)
    rate = _given("rate", described.rate)
    return traffic.given(rate, described.peak_rate, prompts, answers, described.reuse or 0.0)


def hardware_of(
    speeds: Speeds,
    times: tuple[float, float, float, float],
    workers: int | None,
) -> Hardware:
    """Hardware from options; `times`: rtt_us, hand_over_ms, ttft_ms, tpot_ms."""
    rtt_us, hand_over_ms, ttft_ms, tpot_ms = times
    prefill = _given("prefill_tokens_per_s", speeds.prefill_tokens_per_s)
    batch = checks.count("decode_batch", speeds.decode_batch)
    return Hardware(
        prefill_tokens_per_s=prefill,
        decode_batch=batch,
        step_s=_step_s(speeds, batch),
        kv_bytes=_size("kv_memory", speeds.kv_memory),
        link_bytes_per_s=_given("link_gbit", speeds.link_gbit) * GBIT_BYTES,
        rtt_s=checks.not_negative("rtt_us", rtt_us) / 1e6,
        hand_over_s=checks.not_negative("hand_over_ms", hand_over_ms) / 1e3,
        ttft_s=checks.positive("ttft_ms", ttft_ms) / 1e3,
        tpot_s=checks.positive("tpot_ms", tpot_ms) / 1e3,
        workers=workers,
    )


def _step_s(speeds: Speeds, batch: int) -> float:
    rate, step_ms = speeds.decode_tokens_per_s, speeds.decode_step_ms
    if (rate is None) == (step_ms is None):
        raise BadValue("decode_step_ms", step_ms, "either it or decode_tokens_per_s")
    if rate is not None:
        return batch / checks.positive("decode_tokens_per_s", rate)
    return _given("decode_step_ms", step_ms) / 1e3


def _given(field: str, value: float | None) -> float:
    if value is None:
        raise BadValue(field, value, "it, as a number above 0")
    return checks.positive(field, value)


def _size(field: str, text: str | None) -> int:
    try:
        return parse_size(text)
    except ValueError as error:
        raise BadValue(field, text, str(error)) from error
