"""What a gateway counts, for Prometheus."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import msgspec
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

if TYPE_CHECKING:
    from workers.gateway_relay import Stages

BUCKETS_S: Final = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)


class GatewayMetrics:
    """The figures of one gateway."""

    def __init__(self) -> None:
        """All zero."""
        self._registry = CollectorRegistry()
        self.requests: Final = Counter(
            "kvharbor_gateway_requests", "Requests by how they ended.", ["end"],
            registry=self._registry,
        )  # fmt: skip
        self.running: Final = Gauge(
            "kvharbor_gateway_running", "Requests under way.", registry=self._registry
        )
        self.tokens: Final = Counter(
            "kvharbor_gateway_tokens", "Tokens of prompts and of answers.", ["of"],
            registry=self._registry,
        )  # fmt: skip
        self._again: Final = Counter(
            "kvharbor_gateway_again", "Prefills and routes beyond a request's first.", ["stage"],
            registry=self._registry,
        )  # fmt: skip
        self._seconds: Final = Histogram(
            "kvharbor_gateway_stage_seconds", "Time of a request by stage.", ["stage"],
            registry=self._registry, buckets=BUCKETS_S,
        )  # fmt: skip
        self.first_token: Final = Histogram(
            "kvharbor_gateway_first_token_seconds", "From a request's arrival to its first token.",
            registry=self._registry, buckets=BUCKETS_S,
        )  # fmt: skip

    def passed(self, stages: Stages) -> None:
        """A request has ended."""
        for name, value in msgspec.structs.asdict(stages).items():
            if name.endswith("_s"):
                self._seconds.labels(name.removesuffix("_s")).observe(value)
        self._again.labels("prefill").inc(max(0, stages.prefills - 1))
        self._again.labels("route").inc(max(0, stages.routes - 1))

    def page(self) -> bytes:
        """In Prometheus's text format."""
        return generate_latest(self._registry)
