"""Segment files as the nemesis reads and damages them."""

from __future__ import annotations

from random import Random
from typing import TYPE_CHECKING

import pytest

from tests.cluster import segment_files
from tests.unit.worker_scripts import CHUNK, PAGE
from tests.unit.worker_segments import Pages, memory_folder, opened

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

PAGES = 40


@pytest.fixture
def path() -> Iterator[Path]:
    """A segment file whose owner lives, with pages in four chunks."""
    with memory_folder() as folder:
        segment, _ = opened(folder / "segment")
        offsets = [at * PAGE for at in range(PAGES - 1)]
        assert not any(Pages((*offsets, 3 * CHUNK)).put(segment))
        yield folder / "segment"
        segment.close()


def test_every_sealed_page_is_found_and_whole(path: Path) -> None:
    found = list(segment_files.sealed(path))
    assert len(found) == PAGES
    assert {record.offset for _, record in found} >= {0, 3 * CHUNK}
    assert segment_files.damaged(path) == 0


def test_what_was_spoilt_is_damaged_and_nothing_else(path: Path) -> None:
    spoilt = segment_files.spoil(path, Random(1))
    assert 0 < spoilt < PAGES
    assert segment_files.damaged(path) == spoilt
