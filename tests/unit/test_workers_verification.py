"""What a reader suspects is looked at: payload and record, one as damaged as the other."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from kvstore.record import RECORD_BYTES
from kvstore.wire.messages.common import Outcome
from tests.unit.worker_scripts import CHUNK, OK, PAGE
from tests.unit.worker_segments import Pages, memory_folder, opened
from workers import verification
from workers.events import ExtentGroup, Stretch
from workers.verification import verify, verify_all

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


def test_all_of_a_group_are_looked_at_until_the_worker_ends(segment: DramSegment) -> None:
    stretches = (Stretch(0, 2, 0, 0, 0), Stretch(2, 1, CHUNK, 0, CHUNK))
    group = ExtentGroup(segment.id, PAGE, stretches)
    bad = Outcome.CHECKSUM
    assert verify_all(segment, group) == bytes((OK, bad, bad))
    left = iter((False, False, True))
    assert verify_all(segment, group, lambda: next(left)) == bytes((OK, bad, Outcome.TRANSPORT))


def test_what_cannot_be_looked_at_is_nothing_found(
    segment: DramSegment, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(_: DramSegment, offset: int, size_class: int) -> Outcome:
        return verify(segment, offset, size_class) if not offset else Outcome(-1)

    monkeypatch.setattr(verification, "verify", fail)
    group = ExtentGroup(segment.id, PAGE, (Stretch(0, 3, 0, 0, 0),))
    assert verify_all(segment, group) == bytes((OK, Outcome.TRANSPORT, Outcome.TRANSPORT))
    assert "check of w-dram0 failed" in caplog.text
