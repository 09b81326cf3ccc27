"""A plan line by line, each with the sum that it comes from."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import msgspec

from kvstore.planner import kv_bytes
from kvstore.planner.sizing import OCCUPANCY_MAX, STAGING_S

if TYPE_CHECKING:
    from kvstore.planner.sizing import Hardware, Kv, Plan
    from kvstore.planner.traffic import Traffic

UNITS: Final = ((1e12, "T"), (1e9, "G"), (1e6, "M"))
"""From which value on a short form is shown beside the whole number. Decimal, as links are."""

ONE: Final = {"requests": "request", "tokens": "token", "workers": "worker"}


class Line(msgspec.Struct, frozen=True):
    """One result."""

    name: str
    sum: str
    value: float | None
    """None: there is none."""
    unit: str


def number(value: float) -> str:
    """For people: 524 288; 0.0327; 1.07e-06."""
    if value >= 1000 or float(value).is_integer():
        return f"{value:,.0f}".replace(",", " ")
    return f"{value:.4g}"


def quantity(value: float, unit: str) -> str:
    """A number with its unit, long ones with a short form: 1 073 741 824 B (1.07 GB)."""
    text = f"{number(value)} {ONE.get(unit, unit) if value == 1 else unit}"
    if unit in ("B", "B/s"):
        for least, prefix in UNITS:
            if value >= least:
                return f"{text} ({value / least:.3g} {prefix}{unit})"
    return text


def text(line: Line) -> str:
    """One line for people."""
    result = "none" if line.value is None else quantity(line.value, line.unit)
    return f"{line.name}: {line.sum} = {result}"


def kv_lines(kv: Kv, prompts: float | None) -> list[Line]:
    """What a token needs, and a prompt of so many tokens where one is given."""
    of_token = kv_bytes.token_bytes(kv.groups, kv.form)
    lines = [Line("KV of a token", kv_bytes.arithmetic(kv.groups, kv.form), of_token, "B")]
    if prompts is not None:
        lines.append(_prompt("KV of a prompt", kv, prompts))
    return lines


def lines(kv: Kv, traffic: Traffic, hardware: Hardware, plan: Plan) -> list[Line]:
    """All of a plan, in the order in which one thing follows from another."""
    return [
        *kv_lines(kv, traffic.input.mean),
        _prompt("KV of a p99 prompt", kv, traffic.input.p99),
        *_hand_over(traffic, hardware, plan),
        *_links(traffic, plan),
        *_workers(traffic, hardware, plan),
    ]


def _prompt(name: str, kv: Kv, tokens: float) -> Line:
    terms = [
        f"{number(min(tokens, group.window_tokens or tokens))} tokens × "
        f"{number(kv_bytes.token_bytes([group], kv.form))} B"
        for group in kv.groups
    ]
    return Line(name, " + ".join(terms), kv.bytes_of(tokens), "B")


def _hand_over(traffic: Traffic, hardware: Hardware, plan: Plan) -> list[Line]:
    rtt, link = f"{number(hardware.rtt_s)} s", quantity(hardware.link_bytes_per_s, "B/s")
    rate = number(hardware.prefill_tokens_per_s)
    both = f"{number(plan.prefill_p99_s)} s, {number(plan.transfer_p99_s)} s"
    ttft = f"{number(hardware.ttft_s)} s to first token"
    return [
        Line("tokens to compute of a prompt", f"{number(traffic.input.mean)} × "
             f"(1 − {number(traffic.reused)} reused)", plan.fresh_tokens, "tokens"),
        Line("prefill", f"{number(plan.fresh_tokens)} / {rate} tokens/s", plan.prefill_load_s, "s"),
        Line("prefill, p99 without reuse", f"{number(traffic.input.p99)} / {rate} tokens/s",
             plan.prefill_p99_s, "s"),
        Line("transfer", f"{rtt} + {number(plan.request_bytes)} B / {link}", plan.transfer_s, "s"),
        Line("transfer, p99", f"{rtt} + {number(plan.request_bytes_p99)} B / {link}",
             plan.transfer_p99_s, "s"),
        Line("transfer of a decode batch", f"{rtt} + {hardware.decode_batch} × "
             f"{number(plan.request_bytes)} B / {link}", plan.batch_transfer_s, "s"),
        Line("first token, p99, handed over at the end", both.replace(", ", " + "),
             plan.prefill_p99_s + plan.transfer_p99_s, "s"),
        Line("first token, p99, if handed over layer by layer", f"max({both})",
             max(plan.prefill_p99_s, plan.transfer_p99_s), "s"),
        Line("link that a p99 prompt needs", f"{number(plan.request_bytes_p99)} B / "
             f"({ttft} − {number(plan.prefill_p99_s)} s − {rtt})",
             plan.link_needed_bytes_per_s, "B/s"),
    ]  # fmt: skip


def _links(traffic: Traffic, plan: Plan) -> list[Line]:
    pulled = f"{number(traffic.peak_per_s)} requests/s × {number(plan.request_bytes)} B"
    short, long = STAGING_S
    return [
        Line("decode pulls", pulled, plan.pull_bytes_per_s, "B/s"),
        Line("prefill puts", f"{pulled} × (1 − {number(traffic.reused)})",
             plan.put_bytes_per_s, "B/s"),
        Line("prefill pulls of prefixes", f"{pulled} × {number(traffic.reused)}",
             plan.prefix_bytes_per_s, "B/s"),
        Line("staging, as a rule", f"{short:g} s × {number(plan.put_bytes_per_s)} B/s",
             plan.staging_bytes[0], "B"),
        Line("staging, when decode is late", f"{long:g} s × {number(plan.put_bytes_per_s)} B/s",
             plan.staging_bytes[1], "B"),
    ]  # fmt: skip


def _workers(traffic: Traffic, hardware: Hardware, plan: Plan) -> list[Line]:
    peak, busy = f"{number(traffic.peak_per_s)} requests/s", f"/ {OCCUPANCY_MAX}, rounded up"
    step = f"{number(hardware.step_s)} s"
    answer = f"{number(traffic.output.mean)} tokens"
    batch_s = hardware.decode_batch / hardware.prefill_tokens_per_s
    moved_s = plan.token_bytes / hardware.link_bytes_per_s
    waits = f"({number(hardware.rtt_s)} s + {number(hardware.hand_over_s)} s)"
    found = [
        Line("decode tokens a second of a worker", f"{hardware.decode_batch} / {step}",
             hardware.decode_tokens_per_s, "tokens/s"),
        Line("decode of a request", f"{answer} / {number(hardware.decode_tokens_per_s)} tokens/s",
             plan.decode_load_s, "s of a worker"),
        Line("requests in decode", f"{peak} × {answer} × {step}", plan.running, "requests"),
        Line("requests that the memory of a decode worker holds",
             f"{number(hardware.kv_bytes)} B / KV of prompt and answer, rounded down",
             plan.capacity_requests, "requests"),
        Line("prefill workers", f"max({plan.prefill_workers_by_time} by time: {peak} × "
             f"{number(plan.prefill_load_s)} s {busy}; {plan.prefill_workers_by_link} by link)",
             plan.prefill_workers, "workers"),
        Line("decode workers", f"max({plan.decode_workers_by_time} by time: {peak} × "
             f"{number(plan.decode_load_s)} s {busy}; {plan.decode_workers_by_memory} by memory; "
             f"{plan.decode_workers_by_link} by link)", plan.decode_workers, "workers"),
        Line("tokens that the decode workers hold", f"{plan.decode_workers} × "
             f"{number(hardware.kv_bytes)} B / KV of a token", plan.capacity_tokens, "tokens"),
        Line("prompts that are worth a hand-over, from", f"{waits} / ({number(batch_s)} s that a "
             f"token holds up a batch − {number(moved_s)} s to move it), rounded up",
             plan.break_even_tokens, "tokens"),
        Line("prompts that hold up a decode batch beyond its target, above",
             f"({number(hardware.tpot_s)} s − {step}) × "
             f"{number(hardware.prefill_tokens_per_s)} tokens/s", plan.stall_tokens, "tokens"),
    ]  # fmt: skip
    if plan.split is not None:
        loads = f"{number(plan.prefill_load_s)} s : {number(plan.decode_load_s)} s of a worker"
        share = plan.prefill_load_s / (plan.prefill_load_s + plan.decode_load_s)
        found.append(
            Line(
                f"prefill workers of {hardware.workers}",
                f"{loads} for each request; {hardware.workers} × {share:.3f}, rounded",
                plan.split[0],
                "workers",
            )
        )
        found.append(
            Line(
                f"decode workers of {hardware.workers}",
                f"{hardware.workers} − {plan.split[0]}",
                plan.split[1],
                "workers",
            )
        )
    return found
