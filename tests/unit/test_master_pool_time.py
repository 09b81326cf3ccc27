"""Pool time goes on from term to term; lives keep their length across them."""

from __future__ import annotations

import struct
from math import inf, nan

import pytest

from kvstore.errors import CorruptPage
from master.pool_time import Life, PoolTime


def test_a_new_master_goes_on_where_the_last_one_stored() -> None:
    first = PoolTime()
    first.start(5000.0)
    assert first.stored(Life(60.0, 5001.0, 5061.0)) == Life(60.0, 1.0, 61.0)
    second = PoolTime()
    second.restore(first.value(5010.0))
    second.start(70.0)  # another host's clock
    assert second.restored_s == 10.0
    assert second.own(Life(60.0, 1.0, 61.0)) == Life(60.0, 61.0, 121.0)
    assert second.stored(Life(9.0, 70.0, 79.0)) == Life(9.0, 10.0, 19.0)


def test_what_lives_for_ever_does_so() -> None:
    clock = PoolTime()
    clock.start(9.0)
    assert clock.own(clock.stored(Life(inf, 8.0, inf))) == Life(inf, 8.0, inf)


@pytest.mark.parametrize(
    "value",
    [b"", bytes(7), bytes(9), *(struct.pack("<d", each) for each in (nan, inf, -1.0, 1e11))],
)
def test_a_strange_value_is_refused(value: bytes) -> None:
    clock = PoolTime()
    with pytest.raises(CorruptPage, match="clock"):
        clock.restore(value)
    assert clock.is_lost
