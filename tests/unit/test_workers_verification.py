"""What a reader suspects is looked at: payload and record, one as damaged as the other."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from kvstore.record import RECORD_BYTES
from kvstore.wire.messages.common import Outcome
from tests.unit.worker_scripts import PAGE
from tests.unit.worker_segments import Pages, memory_folder, opened
from workers.verification import verify

if TYPE_CHECKING:
    from collections.abc import Iterator

    from workers.tiers.dram import DramSegment


@pytest.fixture
def segment() -> Iterator[DramSegment]:
    """A segment with a page at offset 0."""
    with memory_folder() as folder:
        made, _ = opened(folder / "segment")
        assert Pages((0,)).put(made) == bytes(1)
        yield made
        made.close()


def test_a_whole_page_is_good(segment: DramSegment) -> None:
    assert verify(segment, 0, PAGE) is Outcome.OK


@pytest.mark.parametrize("at", [0, 1, PAGE - 1])
def test_a_flipped_bit_of_the_payload_shows(segment: DramSegment, at: int) -> None:
    segment.payload[at] ^= 1
    assert verify(segment, 0, PAGE) is Outcome.CHECKSUM


@pytest.mark.parametrize("at", range(0, RECORD_BYTES, 7))
def test_a_flipped_bit_of_the_record_shows(segment: DramSegment, at: int) -> None:
    segment.records.read(0, PAGE)[at] ^= 0x10
    assert verify(segment, 0, PAGE) is Outcome.CHECKSUM


def test_a_record_that_is_gone_is_damage_too(segment: DramSegment) -> None:
    segment.records.read(0, PAGE)[:] = bytes(RECORD_BYTES)
    assert verify(segment, 0, PAGE) is Outcome.CHECKSUM
