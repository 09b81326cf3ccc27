"""Sizes that follow from KV, traffic and hardware. Seconds, bytes, tokens, requests.

The rules: moving a request costs a round trip plus its bytes by the bandwidth; work is requests
times seconds of a worker; who is busier than OCCUPANCY_MAX makes requests wait.
"""

from __future__ import annotations

from math import ceil, floor
from typing import TYPE_CHECKING, Final

import msgspec

from kvstore import limits
from kvstore.errors import BadValue
from kvstore.namespace import CacheGroup
from kvstore.planner import checks
from kvstore.planner.kv_bytes import KvFormat, request_bytes, token_bytes

if TYPE_CHECKING:
    from kvstore.planner.traffic import Traffic

OCCUPANCY_MAX: Final = limits.DECODE_OCCUPANCY_MAX
"""Of workers and links as well: beyond it queues grow."""
STAGING_S: Final = (5.0, limits.STAGING_S)
"""KV waits for a decode worker so long, as a rule and when decode is late."""


class Kv(msgspec.Struct, frozen=True):
    """The KV cache of a model."""

    groups: tuple[CacheGroup, ...]
    form: KvFormat
    parameters: float = 0.0
    """Of the model; 0: unknown."""

    def bytes_of(self, tokens: float) -> int:
        """Of a request with so many tokens."""
        return request_bytes(self.groups, self.form, tokens)


class Hardware(msgspec.Struct, frozen=True):
    """One prefill worker, one decode worker, what is between them, and what users expect."""

    prefill_tokens_per_s: float
    decode_batch: int
    """Requests that a decode worker runs at once."""
    step_s: float
    """Of a decode step with that batch: each of them gets a token."""
    kv_bytes: int
    """Memory of a decode worker for KV."""
    link_bytes_per_s: float
    """Of a worker, each way."""
    rtt_s: float
    hand_over_s: float
    """What a hand-over costs besides round trip and bytes."""
    ttft_s: float
    tpot_s: float
    workers: int | None = None
    """That there are in all, to be split."""

    @property
    def decode_tokens_per_s(self) -> float:
        """Of a decode worker with a full batch."""
        return self.decode_batch / self.step_s


class Plan(msgspec.Struct, frozen=True):
    """Everything that a plan says in numbers. Workers are those needed at the peak."""

    token_bytes: int
    request_bytes: int
    """Of a prompt of mean length."""
    request_bytes_p99: int
    fresh_tokens: float
    """To be computed of a prompt of mean length."""
    prefill_p99_s: float
    """Of a long prompt of which the pool has nothing."""
    transfer_s: float
    transfer_p99_s: float
    batch_transfer_s: float
    """Of the KV of a whole decode batch over one link."""
    link_needed_bytes_per_s: float | None
    """So that a long prompt's first token is in time; None: prefill alone takes too long."""
    put_bytes_per_s: float
    """From prefill workers into the pool."""
    prefix_bytes_per_s: float
    """From the pool to prefill workers."""
    pull_bytes_per_s: float
    """From the pool to decode workers."""
    staging_bytes: tuple[float, float]
    """What waits for decode, by STAGING_S."""
    prefill_load_s: float
    """Of a prefill worker, for one request."""
    decode_load_s: float
    """Of a decode worker, for one request."""
    running: float
    """Requests in decode at once."""
    capacity_requests: int
    """Of mean length, in the memory of one decode worker."""
    capacity_tokens: int
    """In the memory of all decode workers."""
    prefill_workers_by_time: int
    prefill_workers_by_link: int
    prefill_workers: int
    decode_workers_by_time: int
    decode_workers_by_memory: int
    decode_workers_by_link: int
    decode_workers: int
    split: tuple[int, int] | None
    """Of the workers that there are: prefill, decode."""
    break_even_tokens: int | None
    """Prompts with fewer tokens to compute are better not handed over; None: all are."""
    stall_tokens: int
    """A prompt of more, computed whole between decode steps, breaks the TPOT target."""


def transfer_s(size_bytes: float, hardware: Hardware) -> float:
    """Time to move so much KV: round trip plus bytes by bandwidth."""
    return hardware.rtt_s + size_bytes / hardware.link_bytes_per_s


def needed_bytes_per_s(size_bytes: float, within_s: float) -> float | None:
    """Bandwidth that moves so much in so long; None: no time is left."""
    return size_bytes / within_s if within_s > 0 else None


def split(workers: int, prefill_load: float, decode_load: float) -> tuple[int, int]:
    """Of so many workers (prefill, decode), nearest to these loads; at least one each."""
    if checks.count("workers", workers) < 2:
        raise BadValue("workers", workers, "2 or more, one each for prefill and decode")
    share = prefill_load / (prefill_load + decode_load)
    prefill = min(max(floor(workers * share + 0.5), 1), workers - 1)
    return prefill, workers - prefill


def workers_for(load: float) -> int:
    """Workers that carry a load, in workers that are always busy, at OCCUPANCY_MAX."""
    return max(1, ceil(load / OCCUPANCY_MAX))


def break_even_tokens(kv: Kv, hardware: Hardware) -> int | None:
    """From how many tokens on a prompt is worth handing over.

    Computed beside a decode batch, n tokens hold up everybody in it for n / prefill rate. Handed
    over, one request waits a round trip, the hand-over's own cost and its bytes. Both grow with n,
    as long as no window bounds the bytes; equal where

        n x (batch / prefill rate - token bytes / bandwidth) = round trip + hand-over

    None: a token costs more to move than it holds up, so no prompt is worth it.
    """
    held_up_s = hardware.decode_batch / hardware.prefill_tokens_per_s
    gained_s = held_up_s - token_bytes(kv.groups, kv.form) / hardware.link_bytes_per_s
    if gained_s <= 0:
        return None
    return ceil((hardware.rtt_s + hardware.hand_over_s) / gained_s)


def plan(kv: Kv, traffic: Traffic, hardware: Hardware) -> Plan:
    """Size everything. BadValue if a decode worker could not hold one long request."""
    prompt, answer = traffic.input, traffic.output
    longest = kv.bytes_of(prompt.p99 + answer.p99)
    if hardware.kv_bytes < longest:
        raise BadValue("kv_memory", hardware.kv_bytes, f"{longest} bytes, a p99 request, or more")
    size, size_p99 = kv.bytes_of(prompt.mean), kv.bytes_of(prompt.p99)
    fresh, peak = prompt.mean * (1 - traffic.reused), traffic.peak_per_s
    prefill_p99_s = prompt.p99 / hardware.prefill_tokens_per_s
    left_s = hardware.ttft_s - prefill_p99_s - hardware.rtt_s
    put = peak * size * (1 - traffic.reused)
    prefill_load = fresh / hardware.prefill_tokens_per_s
    decode_load = answer.mean / hardware.decode_tokens_per_s
    running = peak * answer.mean * hardware.step_s
    whole = prompt.mean + answer.mean
    whole_bytes = kv.bytes_of(whole)
    by_time = workers_for(peak * decode_load)
    by_memory = workers_for(running * whole_bytes / hardware.kv_bytes)
    by_link = workers_for(peak * size / hardware.link_bytes_per_s)
    decode = max(by_time, by_memory, by_link)
    prefix = peak * size * traffic.reused
    prefill_by_time = workers_for(peak * prefill_load)
    prefill_by_link = workers_for(max(put, prefix) / hardware.link_bytes_per_s)
    return Plan(
        token_bytes=token_bytes(kv.groups, kv.form),
        request_bytes=size,
        request_bytes_p99=size_p99,
        fresh_tokens=fresh,
        prefill_p99_s=prefill_p99_s,
        transfer_s=transfer_s(size, hardware),
        transfer_p99_s=transfer_s(size_p99, hardware),
        batch_transfer_s=transfer_s(hardware.decode_batch * size, hardware),
        link_needed_bytes_per_s=needed_bytes_per_s(size_p99, left_s),
        put_bytes_per_s=put,
        prefix_bytes_per_s=prefix,
        pull_bytes_per_s=peak * size,
        staging_bytes=(put * STAGING_S[0], put * STAGING_S[1]),
        prefill_load_s=prefill_load,
        decode_load_s=decode_load,
        running=running,
        capacity_requests=floor(hardware.kv_bytes / whole_bytes),
        capacity_tokens=floor(decode * hardware.kv_bytes * whole / whole_bytes),
        prefill_workers_by_time=prefill_by_time,
        prefill_workers_by_link=prefill_by_link,
        prefill_workers=max(prefill_by_time, prefill_by_link),
        decode_workers_by_time=by_time,
        decode_workers_by_memory=by_memory,
        decode_workers_by_link=by_link,
        decode_workers=decode,
        split=None
        if hardware.workers is None
        else split(hardware.workers, prefill_load, decode_load),
        break_even_tokens=break_even_tokens(kv, hardware),
        stall_tokens=floor(
            max(0.0, hardware.tpot_s - hardware.step_s) * hardware.prefill_tokens_per_s
        ),
    )
