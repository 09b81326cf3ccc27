"""The six decisions about separating prefill from decode, each answered from the plan's figures."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import msgspec

from kvstore.planner.arithmetic import number, quantity
from kvstore.planner.sizing import OCCUPANCY_MAX

if TYPE_CHECKING:
    from kvstore.planner.sizing import Hardware, Kv, Plan
    from kvstore.planner.traffic import Traffic

INPUT_TO_OUTPUT: Final = 1 / 5
"""Rule of thumb: prompts above this share of answers make prefill what is short."""
ONE_MACHINE_PARAMETERS: Final = 13e9
APART_PARAMETERS: Final = 70e9
"""Rule of thumb: models up to the one go with both kinds on a machine, above the other apart."""
RDMA_BYTES: Final = 100e6
"""KV of a request beyond which only RDMA or NVLink keeps what separation gains."""
LONG_TAIL: Final = 5
"""p99 to mean, from which short requests suffer from long ones before them."""
REUSE_KEPT: Final = 0.3
"""Share of reuse from which it pays to keep pages well after their request."""
DAILY_TOGETHER: Final = 1e6
DAILY_APART: Final = 1e7
"""Requests a day: below the one chunked prefill in one worker is enough, above the other not."""
DAY_S: Final = 86400
TRANSFER_ALARM_S: Final = 0.05
TTFT_ALARM: Final = 1.5
"""Times the target at p99, from which fewer requests should be admitted."""


class Decision(msgspec.Struct, frozen=True):
    """A question, its answer, and what speaks for it."""

    question: str
    answer: str
    because: tuple[str, ...]


def decisions(kv: Kv, traffic: Traffic, hardware: Hardware, plan: Plan) -> list[Decision]:
    """All six, in the order in which they are taken."""
    apart = fits_links(hardware, plan)
    return [
        _bound(traffic, plan),
        _machines(kv, hardware, plan, apart=apart),
        _transport(hardware, plan, apart=apart),
        _scheduling(traffic, hardware, plan),
        _failures(traffic, hardware, plan),
        _watch(hardware, plan),
    ]


def fits_links(hardware: Hardware, plan: Plan) -> bool:
    """Whether a long prompt's KV gets over the network while its first token is still in time.

    Where prefill alone takes too long for that: whether the KV moves faster than it is made.
    """
    needed = plan.link_needed_bytes_per_s
    if needed is None:
        return plan.transfer_p99_s <= plan.prefill_p99_s
    return needed <= OCCUPANCY_MAX * hardware.link_bytes_per_s


def _bound(traffic: Traffic, plan: Plan) -> Decision:
    prefill = plan.prefill_load_s > plan.decode_load_s
    ratio = traffic.input.mean / traffic.output.mean
    thumb = "prefill" if ratio > INPUT_TO_OUTPUT else "decode"
    daily = traffic.requests_per_s * DAY_S
    if daily < DAILY_TOGETHER:
        scale = "few enough to begin with chunked prefill in one worker"
    elif daily > DAILY_APART:
        scale = "enough to separate fully"
    else:
        scale = "between: separate where the targets ask for it"
    return Decision("Bound by prefill or by decode?", "prefill" if prefill else "decode", (
        f"a request takes {number(plan.prefill_load_s)} s of a prefill worker and "
        f"{number(plan.decode_load_s)} s of a decode worker",
        f"{plan.prefill_workers} prefill and {plan.decode_workers} decode workers at the peak",
        f"rule of thumb by input : output = {number(ratio)}: {thumb}",
        f"{number(daily)} requests a day: {scale}",
    ))  # fmt: skip


def _machines(kv: Kv, hardware: Hardware, plan: Plan, *, apart: bool) -> Decision:
    link = quantity(hardware.link_bytes_per_s, "B/s")
    because = []
    if plan.link_needed_bytes_per_s is None:
        because.append(
            f"prefill of a p99 prompt takes {number(plan.prefill_p99_s)} s, the target "
            f"is {number(hardware.ttft_s)} s: faster prefill workers come first"
        )
    else:
        needed = quantity(plan.link_needed_bytes_per_s, "B/s")
        because.append(f"a p99 prompt needs {needed} of a link of {link}")
    each = plan.pull_bytes_per_s / plan.decode_workers
    because.append(f"each decode worker pulls {quantity(each, 'B/s')}")
    if 0 < kv.parameters <= ONE_MACHINE_PARAMETERS:
        because.append(f"rule of thumb for {number(kv.parameters / 1e9)} G parameters: the same")
    elif kv.parameters >= APART_PARAMETERS:
        because.append(f"rule of thumb for {number(kv.parameters / 1e9)} G parameters: others")
    answer = "others, to be scaled by themselves" if apart else "the same, or a faster link"
    return Decision("Same machine or others?", answer, tuple(because))


def _transport(hardware: Hardware, plan: Plan, *, apart: bool) -> Decision:
    size = f"a p99 prompt has {quantity(plan.request_bytes_p99, 'B')} of KV"
    took = f"over the link in {number(plan.transfer_p99_s)} s at p99"
    if not apart:
        answer = "shm; between devices of the machine mooncake over NVLink"
    elif plan.request_bytes_p99 > RDMA_BYTES:
        answer = "mooncake over RDMA"
    else:
        answer = "tcp is enough, mooncake over RDMA if there is some"
    batch = f"a decode batch of {hardware.decode_batch}: {number(plan.batch_transfer_s)} s"
    threshold = f"beyond {quantity(RDMA_BYTES, 'B')} a request only RDMA or NVLink will do"
    return Decision("Which transport?", answer, (size, took, batch, threshold))


def _scheduling(traffic: Traffic, hardware: Hardware, plan: Plan) -> Decision:
    tail = traffic.input.p99 / traffic.input.mean
    order = "shortest first" if tail >= LONG_TAIL else "in turn"
    places = plan.decode_workers * hardware.decode_batch
    handed = "never"
    if plan.break_even_tokens is not None:
        handed = f"from {number(plan.break_even_tokens)} tokens to compute on"
    answer = f"{order}, decode credit first, hand over {handed}"
    return Decision("How are requests scheduled?", answer, (
        f"p99 of prompts is {number(tail)} times the mean; shortest first from {LONG_TAIL} on",
        f"throttle when decode is fuller than {OCCUPANCY_MAX}: at "
        f"{number(OCCUPANCY_MAX * plan.capacity_tokens)} tokens of prompts and expected answers, "
        f"or {number(OCCUPANCY_MAX * places)} requests; the peak runs {number(plan.running)}",
        f"throttle when staging holds {quantity(plan.staging_bytes[1], 'B')}",
        f"a prompt of more than {number(plan.stall_tokens)} tokens beside decode breaks its target "
        f"of {number(hardware.tpot_s)} s a token",
    ))  # fmt: skip


def _failures(traffic: Traffic, hardware: Hardware, plan: Plan) -> Decision:
    both = 2 * plan.put_bytes_per_s / plan.prefill_workers
    room = both <= OCCUPANCY_MAX * hardware.link_bytes_per_s
    late = plan.transfer_p99_s + 2 * plan.prefill_p99_s > hardware.ttft_s
    replicas = 2 if room and late else 1
    kept = (
        "keep pages for 5 to 60 minutes" if traffic.reused > REUSE_KEPT else "a short TTL will do"
    )
    answer = f"verify, pull again, else prefill again; {replicas} replica" + "s" * (replicas > 1)
    return Decision("What when a transfer fails?", answer, (
        f"to pull a p99 prompt again costs {number(plan.transfer_p99_s)} s, to compute it again "
        f"{number(plan.prefill_p99_s)} s of {number(hardware.ttft_s)} s",
        f"two replicas are {quantity(both, 'B/s')} of each prefill worker's link, "
        f"which has {'room' if room else 'no room'} for them",
        f"{number(100 * traffic.reused)} % of prompts' tokens are reused: {kept}",
        "after two failed hand-overs one worker runs the whole request",
    ))  # fmt: skip


def _watch(hardware: Hardware, plan: Plan) -> Decision:
    alarm_s = max(TRANSFER_ALARM_S, 2 * plan.transfer_p99_s)
    return Decision("What to watch?", "both kinds of workers, and the transfers between them", (
        "prefill busier than 0.8 for 5 minutes, decode than 0.85 for 10: add workers",
        f"p99 of transfers above {number(alarm_s)} s ({number(plan.transfer_p99_s)} s expected), "
        "or more than 0.1 % failed: look at links",
        f"p99 to first token above {number(TTFT_ALARM * hardware.ttft_s)} s: admit fewer",
        f"time per token above {number(hardware.tpot_s)} s ({number(hardware.step_s)} s a step)",
    ))  # fmt: skip
