"""What became of requests that modelled workers have served, and the sums that are asked for."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from math import ceil, inf
from typing import TYPE_CHECKING

import msgspec

from kvstore.request_trace import TraceRequest

if TYPE_CHECKING:
    from collections.abc import Sequence


class Slo(msgspec.Struct, frozen=True):
    """What a request is to be served within."""

    ttft_s: float = 5.0
    """Until its first token, from its arrival."""
    tpot_s: float = 0.1
    """A token after the first one, on the average."""


class Throttle(msgspec.Struct, frozen=True):
    """A request was not admitted."""

    after_s: float
    """Since its arrival."""
    reason: str


class Served(msgspec.Struct):
    """What became of one request. Moments are those of the trace."""

    request: TraceRequest
    first_s: float = inf
    """When its first token was there; inf: never."""
    done_s: float = inf
    throttles: list[Throttle] = []
    failure: str = ""
    """What ended it before its last token: a code, or `throttled` where its patience was over."""
    reused_tokens: int = 0
    moved_bytes: int = 0
    """KV over links, for its prefix and its hand-overs."""
    install_s: float = 0.0
    """From claims to where all KV was there."""
    routes: int = 0
    alone: str = ""
    """Why one worker ran all of it; empty where it was handed over."""

    @property
    def ttft_s(self) -> float:
        """To the first token; inf without one."""
        return self.first_s - self.request.at_s

    @property
    def tpot_s(self) -> float:
        """A token after the first one: what hand-overs take is in it; inf where it has no end."""
        if self.done_s == inf:
            return inf
        return (self.done_s - self.first_s) / max(1, self.request.new_tokens - 1)


class RoleSwitch(msgspec.Struct, frozen=True):
    """A worker has joined in another role."""

    at_s: float
    worker: str
    role: str


class ServingReport(msgspec.Struct, frozen=True):
    """What a fleet has done with a trace."""

    served: list[Served]
    """One for each request, in the order of the trace."""
    switches: list[RoleSwitch]
    counters: Mapping[str, int]
    """Of the master."""

    @property
    def seconds(self) -> float:
        """From the first arrival to the last token."""
        ends = [each.done_s for each in self.served if each.done_s < inf]
        return max(ends, default=0.0) - self.served[0].request.at_s

    def good(self, slo: Slo) -> int:
        """Requests within both bounds."""
        return sum(r.ttft_s <= slo.ttft_s and r.tpot_s <= slo.tpot_s for r in self.served)

    def goodput_per_s(self, slo: Slo) -> float:
        """The same, a second."""
        return self.good(slo) / (self.seconds or 1.0)

    def throttled(self) -> Counter[str]:
        """How often requests were not admitted, by reason; who came again may count again."""
        return Counter(each.reason for served in self.served for each in served.throttles)

    def failed(self) -> Counter[str]:
        """Requests without a last token, by what ended them."""
        return Counter(served.failure for served in self.served if served.failure)


def percentile(values: Sequence[float], share: float) -> float:
    """The least value that so large a share of them does not exceed; 0 of none."""
    ordered = sorted(values)
    return ordered[max(0, ceil(share * len(ordered)) - 1)] if ordered else 0.0
