"""The six decisions: each answered, with figures, and turned round by the figure it hangs on."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from kvstore.planner import models
from kvstore.planner.arithmetic import kv_lines, lines, number, quantity, text
from kvstore.planner.decisions import Decision, decisions
from kvstore.planner.kv_bytes import kv_format
from kvstore.planner.sizing import Hardware, Kv, plan
from kvstore.planner.traffic import Lengths, Traffic
from tests.unit.plans import HARDWARE, SEVEN_B, TRAFFIC

BOUND, MACHINES, TRANSPORT, SCHEDULING, FAILURES, WATCH = range(6)
SLOW = replace(HARDWARE, link_bytes_per_s=1e9)
SEVENTY_B = Kv(models.model("llama-3.1-70b").groups, kv_format("bfloat16"), 70e9)


def decided(
    traffic: Traffic = TRAFFIC, hardware: Hardware = HARDWARE, kv: Kv = SEVEN_B
) -> list[Decision]:
    return decisions(kv, traffic, hardware, plan(kv, traffic, hardware))


def test_six_questions_are_answered_each_with_figures() -> None:
    found = decided()
    assert len({each.question for each in found}) == 6
    for each in found:
        assert each.answer
        assert any(letter.isdigit() for reason in each.because for letter in reason)


def test_bound_is_who_takes_longer_for_a_request() -> None:
    assert decided()[BOUND].answer == "decode"
    assert decided(replace(TRAFFIC, output=Lengths(20.0, 20.0)))[BOUND].answer == "prefill"


@pytest.mark.parametrize(("output", "said"), [(3999.0, "prefill"), (4001.0, "decode")])
def test_the_rule_of_thumb_by_lengths_is_said_beside(output: float, said: str) -> None:
    found = decided(replace(TRAFFIC, output=Lengths(output, output)))[BOUND]
    assert found.because[2].endswith(f": {said}")


@pytest.mark.parametrize(("rate", "said"), [(1, "chunked"), (20, "between"), (200, "fully")])
def test_the_number_of_requests_a_day_says_how_far_to_go(rate: float, said: str) -> None:
    found = decided(replace(TRAFFIC, requests_per_s=rate, peak_per_s=rate))[BOUND]
    assert said in found.because[3]


def test_other_machines_are_for_links_that_carry_a_long_prompt_in_time() -> None:
    assert decided()[MACHINES].answer.startswith("others")
    assert decided(hardware=SLOW)[MACHINES].answer.startswith("the same")


def test_where_prefill_alone_is_too_late_the_link_is_not_to_blame() -> None:
    late = decided(hardware=replace(HARDWARE, ttft_s=0.05))[MACHINES]
    assert late.answer.startswith("others")
    assert "faster prefill workers" in late.because[0]
    both = decided(hardware=replace(SLOW, ttft_s=0.05))[MACHINES]
    assert both.answer.startswith("the same")


def test_the_size_of_the_model_is_a_rule_of_thumb() -> None:
    assert decided()[MACHINES].because[-1] == "rule of thumb for 7 G parameters: the same"
    large = decided(kv=SEVENTY_B)[MACHINES]
    assert large.because[-1] == "rule of thumb for 70 G parameters: others"
    unknown = decided(kv=replace(SEVEN_B, parameters=0.0))[MACHINES]
    assert not any("rule of thumb" in reason for reason in unknown.because)


def test_beyond_100_megabytes_a_request_takes_rdma() -> None:
    assert decided()[TRANSPORT].answer == "mooncake over RDMA"
    short = decided(replace(TRAFFIC, input=Lengths(190.0, 190.0)))[TRANSPORT]
    assert short.answer.startswith("tcp")
    assert decided(hardware=SLOW)[TRANSPORT].answer.startswith("shm")


def test_shortest_first_is_for_long_tails() -> None:
    assert decided()[SCHEDULING].answer.startswith("in turn")
    tail = decided(replace(TRAFFIC, input=Lengths(512.0, 4096.0)))[SCHEDULING]
    assert tail.answer.startswith("shortest first")


def test_what_is_handed_over_and_throttled_is_said_in_tokens() -> None:
    found = decided()[SCHEDULING]
    assert found.answer.endswith("hand over from 3 tokens to compute on")
    assert "0.8: at 131 072 tokens" in found.because[1]
    never = decided(hardware=replace(HARDWARE, link_bytes_per_s=1e8))[SCHEDULING]
    assert never.answer.endswith("hand over never")


def test_a_second_replica_is_for_prompts_that_cannot_be_computed_twice_in_time() -> None:
    assert decided()[FAILURES].answer.endswith("1 replica")
    tight = replace(HARDWARE, ttft_s=0.2)
    assert decided(hardware=tight)[FAILURES].answer.endswith("2 replicas")
    # Each prefill worker's link would be as good as full.
    busy = replace(TRAFFIC, peak_per_s=7.9)
    full = replace(tight, link_bytes_per_s=4.2e9)
    assert decided(busy, full)[FAILURES].answer.endswith("1 replica")


def test_reuse_above_30_percent_keeps_pages() -> None:
    assert "a short TTL" in decided()[FAILURES].because[2]
    assert "5 to 60 minutes" in decided(replace(TRAFFIC, reused=0.31))[FAILURES].because[2]


def test_alarms_are_above_what_is_expected() -> None:
    assert "above 0.06721 s (0.0336 s expected)" in decided()[WATCH].because[1]
    fast = replace(HARDWARE, link_bytes_per_s=1e11)
    assert "above 0.05 s" in decided(hardware=fast)[WATCH].because[1]
    assert "above 0.75 s" in decided()[WATCH].because[2]


def test_every_line_shows_its_sum_and_the_value_of_the_plan() -> None:
    hardware = replace(HARDWARE, workers=22)
    made = plan(SEVEN_B, TRAFFIC, hardware)
    found = {line.name: line for line in lines(SEVEN_B, TRAFFIC, hardware, made)}
    assert text(found["KV of a token"]) == (
        "KV of a token: 2 × 32 layers × 32 heads × 128 × 2 B = 524 288 B"
    )
    assert found["KV of a prompt"].value == made.request_bytes
    assert found["decode pulls"].value == made.pull_bytes_per_s
    assert found["first token, p99, handed over at the end"].value == (
        made.prefill_p99_s + made.transfer_p99_s
    )
    assert found["first token, p99, if handed over layer by layer"].value == made.prefill_p99_s
    assert text(found["decode workers of 22"]) == "decode workers of 22: 22 − 5 = 17 workers"
    without = lines(SEVEN_B, TRAFFIC, HARDWARE, plan(SEVEN_B, TRAFFIC, HARDWARE))
    assert {line.name for line in found.values()} - {line.name for line in without} == {
        "prefill workers of 22",
        "decode workers of 22",
    }


def test_windows_are_in_the_sum_of_a_prompt() -> None:
    gemma = Kv(models.model("gemma-2-9b").groups, kv_format("bfloat16"))
    found = text(kv_lines(gemma, 8192)[1])
    assert "8 192 tokens × 172 032 B + 4 096 tokens × 172 032 B" in found
    assert found.endswith("= 2 113 929 216 B (2.11 GB)")


def test_what_there_is_none_of_is_said() -> None:
    late = replace(HARDWARE, ttft_s=0.1)
    found = lines(SEVEN_B, TRAFFIC, late, plan(SEVEN_B, TRAFFIC, late))
    (line,) = [each for each in found if each.name == "link that a p99 prompt needs"]
    assert text(line).endswith("= none")


@pytest.mark.parametrize(
    ("value", "unit", "shown"),
    [
        (0, "B", "0 B"),
        (524_288, "B", "524 288 B"),
        (1.5e6, "B", "1 500 000 B (1.5 MB)"),
        (3.4e12, "B/s", "3 400 000 000 000 B/s (3.4 TB/s)"),
        (1, "workers", "1 worker"),
        (0.033604, "s", "0.0336 s"),
    ],
)
def test_figures_are_written_like_this(value: float, unit: str, shown: str) -> None:
    assert quantity(value, unit) == shown
    assert number(1234.5) == "1 234"
