"""Which blocks are told of: those that every rank has put, once, in the order of the last puts."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvstore.connectors import engine_events
from kvstore.connectors.engine_events import Announcements, PutBlock

if TYPE_CHECKING:
    import pytest

ONE, TWO, OTHER = PutBlock(0, b"1"), PutBlock(0, b"2"), PutBlock(1, b"1")


def planned(*blocks: PutBlock) -> Announcements[str]:
    """Blocks on their way, of two groups of which the second is put by one rank alone."""
    made: Announcements[str] = Announcements((2, 1))
    for block in blocks:
        made.plan(block, f"{block.group} {block.block_hash.decode()}")
    return made


def test_a_block_is_told_of_when_the_last_of_its_ranks_has_put_it() -> None:
    announcements = planned(ONE, TWO, OTHER)
    assert announcements.take() == []
    announcements.put([ONE, TWO, OTHER])
    assert announcements.take() == ["1 1"]
    announcements.put([TWO])
    announcements.put([ONE])
    assert announcements.take() == ["0 2", "0 1"]
    assert announcements.take() == []
    assert len(announcements) == 0


def test_what_nobody_planned_is_not_told_of() -> None:
    announcements = planned(OTHER)
    announcements.put([ONE, ONE, OTHER, OTHER])
    assert announcements.take() == ["1 1"]


def test_a_block_that_is_planned_anew_waits_for_all_ranks_again() -> None:
    announcements = planned(ONE)
    announcements.put([ONE])
    announcements.plan(ONE, "anew")
    announcements.put([ONE])
    assert announcements.take() == []
    announcements.put([ONE])
    assert announcements.take() == ["anew"]


def test_of_too_many_blocks_the_oldest_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_events, "PLANNED_MAX", 2)
    announcements = planned(OTHER, ONE, TWO)
    assert len(announcements) == 2
    announcements.put([OTHER, ONE, ONE])
    assert announcements.take() == ["0 1"]
