"""The documented limits are the limits."""

from __future__ import annotations

import ast
import re
from pathlib import Path

from kvstore import limits

ROOT = Path(__file__).parents[2]
ROW = re.compile(r"^\| `([A-Z_]+)` \| (.+?) \|", re.MULTILINE)
UNITS = {"KIB", "MIB"}


def test_the_table_in_the_architecture_equals_the_code() -> None:
    text = (ROOT / "ARCHITECTURE.md").read_text(encoding="utf-8")
    documented = {name: ast.literal_eval(value) for name, value in ROW.findall(text)}
    defined = {
        name: value for name, value in vars(limits).items() if name.isupper() and name not in UNITS
    }
    assert documented == defined


def test_a_put_may_take_longer_the_more_it_carries() -> None:
    assert limits.put_timeout_s(0) == limits.PUT_TIMEOUT_BASE_S
    assert limits.put_timeout_s(100_000_000) == limits.PUT_TIMEOUT_BASE_S + 1
