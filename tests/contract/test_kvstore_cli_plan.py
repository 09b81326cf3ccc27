"""`kvharbor plan` as a user runs it: text, one JSON line, and what ends it. No pool runs."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import sys

import pytest

from tests.tidy.sources import ROOT

SEVEN_B = ("--model", "llama-2-7b", "--dtype", "float16")
TRAFFIC = ("--input", "800", "--output", "200", "--rate", "4")
HARDWARE = (
    "--prefill-tokens-per-s", "8000", "--decode-batch", "16", "--decode-step-ms", "30",
    "--kv-memory", "40GiB", "--link-gbit", "100",
)  # fmt: skip


def run(*given: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-P", "-m", "kvstore.cli.main", *given]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def test_the_bytes_alone_need_the_model_only() -> None:
    done = run("plan", *SEVEN_B, "--input", "2048")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.splitlines() == [
        "KV of a token: 2 × 32 layers × 32 heads × 128 × 2 B = 524 288 B",
        "KV of a prompt: 2 048 tokens × 524 288 B = 1 073 741 824 B (1.07 GB)",
    ]


def test_the_text_has_the_arithmetic_and_then_six_decisions() -> None:
    done = run("plan", *SEVEN_B, *TRAFFIC, *HARDWARE, "--workers", "22")
    assert (done.returncode, done.stderr) == (0, "")
    above, *decided = done.stdout.split("\n\n")
    assert all(" = " in line for line in above.splitlines())
    assert [each[:2] for each in decided] == [f"{number}." for number in range(1, 7)]


def test_one_json_line_has_figures_arithmetic_and_decisions() -> None:
    before, after = ("--json", "plan"), ("plan", "--json")
    answers = [run(*way, *SEVEN_B, *TRAFFIC, *HARDWARE, "--workers", "22")
               for way in (before, after)]  # fmt: skip
    assert answers[0].stdout == answers[1].stdout
    (line,) = answers[0].stdout.splitlines()
    found = json.loads(line)
    assert found["plan"]["token_bytes"] == 524_288
    assert found["plan"]["split"] == [5, 17]
    assert found["traffic"]["requests_per_s"] == 4
    assert found["hardware"]["kv_bytes"] == 40 << 30
    assert found["arithmetic"][0] == {
        "name": "KV of a token", "sum": "2 × 32 layers × 32 heads × 128 × 2 B",
        "value": 524_288, "unit": "B",
    }  # fmt: skip
    assert len(found["decisions"]) == 6
    bytes_alone = json.loads(run("plan", "--json", *SEVEN_B).stdout)
    assert (bytes_alone["token_bytes"], bytes_alone["decisions"]) == (524_288, [])


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ((), "model: got None, want one of --model, --config, or --layers and its dimensions"),
        ((*SEVEN_B, "--rate", "4"), "input: got None, want it, as a number above 0"),
        ((*SEVEN_B, *TRAFFIC), "prefill_tokens_per_s: got None, want it, as a number above 0"),
        (
            (*SEVEN_B, *HARDWARE, *TRAFFIC, "--rate", "nan"),
            "rate: got nan, want a number from 1e-09 to 1099511627776",
        ),
        (
            (*SEVEN_B, *HARDWARE, *TRAFFIC, "--workers", "1"),
            "workers: got 1, want 2 or more, one each for prefill and decode",
        ),
    ],
)
def test_what_is_missing_or_wrong_ends_it_with_one_line(given: tuple[str, ...], said: str) -> None:
    done = run("plan", *given)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == f"kvharbor: {said}\n"


def test_the_readme_shows_what_it_prints() -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    (shown,) = re.findall(r"^```\n\$ kvharbor (plan .*?)^```", text, re.MULTILINE | re.DOTALL)
    command, *lines = shown.replace("\\\n", " ").splitlines()
    done = run(*shlex.split(command))
    assert done.returncode == 0
    printed = done.stdout.splitlines()
    assert len(lines) > 5
    assert [line for line in printed if line in lines] == lines
