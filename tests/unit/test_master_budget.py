"""Budgets of bytes a second: what is spent is earned, before or after."""

from __future__ import annotations

import pytest

from master.budget import BURST_S, Budget


def test_a_budget_of_bytes_a_second_is_kept() -> None:
    budget = Budget()
    assert budget.free_at_s(100.0, 1000.0) == 100.0
    assert budget.left_bytes == 1000.0 * BURST_S
    budget.spend(1250)
    at_s = budget.free_at_s(100.0, 1000.0)
    assert at_s == pytest.approx(101.0, abs=0.002)
    assert budget.free_at_s(100.5, 1000.0) == pytest.approx(at_s)
    assert budget.free_at_s(at_s, 1000.0) == at_s
