"""NVMe segments after kills, losses of power and damage at every place: never a wrong part."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvstore.errors import ConfigError
from kvstore.record import RECORD_BYTES
from kvstore.segment import HEADER_BYTES
from tests.fake_disk import FakeDisk, Killed
from tests.unit.nvme_parts import (
    OK,
    PATH,
    opened,
    outcomes,
    part,
    parts_at,
    require_never_wrong,
    stretch,
)
from tests.unit.worker_scripts import CHUNK, GEOMETRY, PAGE

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from workers.tiers.nvme import NvmeSegment
    from workers.tiers.part_io import PartToWrite

OFFSETS = (0, PAGE, CHUNK)
AREAS = [(GEOMETRY.record_offset(offset, PAGE), RECORD_BYTES) for offset in OFFSETS] + [
    (GEOMETRY.payload_base + offset, PAGE) for offset in OFFSETS
]
"""Where each part's record and bytes lie, and for how long."""


def image_of(data: bytes) -> FakeDisk:
    """A disk that holds nothing but these bytes as the segment file."""
    disk = FakeDisk()
    file = disk.create(PATH.parent)
    file.allocate(0, max(1, len(data)))
    file.inode.write(0, data)
    file.inode.sync()
    del file.inode.data[len(data) :]
    file.publish(PATH)
    file.close()
    return disk


def found_in(data: bytes) -> tuple[set[int], set[int]]:
    """What a start makes of such a file: offsets adopted, and those of them that are read."""
    segment, found = opened(image_of(data))
    try:
        return {r.offset for r in found.adopted}, require_never_wrong(segment, found)
    finally:
        segment.close()


@pytest.fixture(scope="module")
def image() -> bytes:
    """A segment file with three parts, at OFFSETS."""
    disk = FakeDisk()
    segment, _ = opened(disk)
    segment.write(parts_at(*OFFSETS))
    segment.close()
    return bytes(disk.names[PATH].data)


def places_of_interest() -> Iterator[int]:
    """Every byte of the header's fields and of the records, and some of the payload."""
    yield from range(0, 240, 3)
    yield from range(HEADER_BYTES - 9, HEADER_BYTES)
    for offset in OFFSETS:
        record = GEOMETRY.record_offset(offset, PAGE)
        yield from range(record, record + RECORD_BYTES)
        payload = GEOMETRY.payload_base + offset
        yield from range(payload, payload + PAGE, 307)


def test_an_undamaged_file_is_found_whole(image: bytes) -> None:
    assert found_in(image) == (set(OFFSETS), set(OFFSETS))


def test_a_file_cut_at_any_byte_is_empty_or_refused(image: bytes) -> None:
    lengths = [*range(0, HEADER_BYTES, 61), *list(places_of_interest())[::11], len(image) - 1]
    for length in lengths:
        if length < 8:
            with pytest.raises(ConfigError, match="is not a segment"):
                found_in(image[:length])
        else:
            assert found_in(image[:length]) == (set(), set()), length


@pytest.mark.slow
def test_a_file_whose_end_was_lost_gives_no_wrong_part(image: bytes) -> None:
    for length in places_of_interest():
        zeroed = image[:length] + bytes(len(image) - length)
        if length < 8:
            with pytest.raises(ConfigError, match="is not a segment"):
                found_in(zeroed)
            continue
        _, right = found_in(zeroed)
        # What lies before the cut, record and bytes, is there; nothing else is.
        assert right == {
            offset for offset in OFFSETS if GEOMETRY.payload_base + offset + PAGE <= length
        }, length


@pytest.mark.slow
def test_a_flipped_bit_costs_one_part_or_the_header_all(image: bytes) -> None:
    for place in list(places_of_interest())[::2]:
        flipped = bytearray(image)
        flipped[place] ^= 1 << place % 8
        if place < 8:
            with pytest.raises(ConfigError, match="is not a segment"):
                found_in(bytes(flipped))
            continue
        _, right = found_in(bytes(flipped))
        assert len(right) == (0 if place < HEADER_BYTES else len(OFFSETS) - 1), place


Damage = tuple[int, int, bytes]
"""In which of the three parts (their records, then their bytes), how far in, and what is there."""


@pytest.mark.slow
@settings(max_examples=100)
@given(
    damages=st.lists(
        st.tuples(st.integers(0, 5), st.integers(0, PAGE - 1), st.binary(min_size=1, max_size=300)),
        max_size=3,
    ),
    header=st.none() | st.tuples(st.integers(8, HEADER_BYTES - 1), st.integers(1, 255)),
    lost_from=st.none() | st.tuples(st.integers(0, 5), st.integers(0, PAGE - 1)),
)
def test_whatever_is_written_over_or_lost_gives_no_wrong_part(
    image: bytes,
    damages: list[Damage],
    header: tuple[int, int] | None,
    lost_from: tuple[int, int] | None,
) -> None:
    """Any byte of header, records and payload; what was not touched is there, if the header is."""
    data = bytearray(image)
    for area, at, written in damages:
        start, length = AREAS[area]
        begin = start + at % length
        data[begin : begin + len(written)] = written
    if lost_from is not None:
        area, at = lost_from
        start, length = AREAS[area]
        end = start + at % length
        data[end:] = bytes(len(data) - end)
    whole = {
        offset
        for offset, areas in zip(OFFSETS, zip(AREAS[:3], AREAS[3:], strict=True), strict=True)
        if all(data[s : s + n] == image[s : s + n] for s, n in areas)
    }
    if header is not None:
        place, turned = header
        data[place] ^= turned
        whole = set()
    _, right = found_in(bytes(data))
    assert right == whole


def test_a_disk_of_noise_gives_nothing(image: bytes) -> None:
    noise = random.Random(4).randbytes(len(image) - HEADER_BYTES)
    assert found_in(image[:HEADER_BYTES] + noise) == (set(), set())


def test_records_moved_to_other_places_give_nothing(image: bytes) -> None:
    moved = bytearray(image)
    a, b = (GEOMETRY.record_offset(offset, PAGE) for offset in (0, CHUNK))
    moved[a : a + RECORD_BYTES], moved[b : b + RECORD_BYTES] = (
        image[b : b + RECORD_BYTES],
        image[a : a + RECORD_BYTES],
    )
    assert found_in(bytes(moved)) == ({PAGE}, {PAGE})


# --- kills ------------------------------------------------------------------------------------

STORY: list[Callable[[NvmeSegment], object]] = [
    lambda segment: segment.write([part(1, 0)]),
    lambda segment: segment.write([part(2, PAGE), part(3, 2 * PAGE)]),
    lambda segment: segment.write_free([stretch(0)], PAGE),
    lambda segment: segment.write_removed([stretch(PAGE)], PAGE),
    lambda segment: segment.write([part(4, 0, counter=6)]),
]
"""After each step: which offsets are there."""
STATES = [{0}, {0, PAGE, 2 * PAGE}, {PAGE, 2 * PAGE}, {2 * PAGE}, {0, 2 * PAGE}]


def test_a_kill_at_any_change_leaves_the_state_before_or_after_a_step() -> None:
    kills = 0
    while True:
        disk = FakeDisk()
        segment, _ = opened(disk)
        disk.kill_after, step = kills, 0
        try:
            for step, act in enumerate(STORY):  # noqa: B007 - where the kill came is looked at
                act(segment)
        except Killed:
            pass
        else:
            disk.end_process()
            segment.close()
            break
        disk.end_process()
        segment.close()
        again, found = opened(disk)
        right = require_never_wrong(again, found)
        again.close()
        before = STATES[step - 1] if step else set()
        assert right == {r.offset for r in found.adopted}, (kills, step)
        assert right in (before, STATES[step]), (kills, step)
        kills += 1
    assert kills == 14  # one for the table, three a write, two a free or removal


def test_a_kill_at_any_change_of_a_start_loses_nothing() -> None:
    kills = 0
    while True:
        disk = FakeDisk()
        segment, _ = opened(disk)
        segment.write(parts_at(*OFFSETS))
        segment.close()
        disk.kill_after = kills
        try:
            opened(disk)[0].close()
        except Killed:
            disk.end_process()
            again, found = opened(disk)
            assert require_never_wrong(again, found) == set(OFFSETS), kills
            assert again.incarnation > segment.incarnation
            again.close()
            kills += 1
        else:
            break
    assert kills == 2 + 2 + 1  # header and its sync, two runs of records, their sync


def test_a_kill_while_the_file_is_made_leaves_none() -> None:
    for kills in range(5):
        disk = FakeDisk()
        disk.kill_after = kills
        with pytest.raises(Killed):
            opened(disk)
        disk.end_process()
        opened(disk)[0].close()


@pytest.mark.slow
def test_any_prefix_of_the_bytes_written_is_the_state_of_a_prefix_of_the_records() -> None:
    disk = FakeDisk()
    segment, _ = opened(disk)
    start = bytes(disk.names[PATH].data)
    disk.trace.clear()
    ends, states = [0], [set[int]()]
    for act, state in zip(STORY, STATES, strict=True):
        act(segment)
        ends.append(len(disk.trace))
        states.append(state)
    trace = list(disk.trace)
    segment.close()
    data = bytearray(start)
    for number, (at, piece) in enumerate(trace):
        step = max(i for i, end in enumerate(ends) if end <= number)
        for length in range(0, len(piece), 1 if len(piece) == RECORD_BYTES else 211):
            cut = data.copy()
            cut[at : at + length] = piece[:length]
            adopted, right = found_in(bytes(cut))
            # A record that is being written over may be neither the old nor the new one.
            assert states[step] & states[step + 1] <= adopted, (number, length)
            assert right <= states[step] | states[step + 1], (number, length)
            assert right == adopted, (number, length)
        data[at : at + len(piece)] = piece
    assert found_in(bytes(data)) == (STATES[-1], STATES[-1])


# --- losses of power --------------------------------------------------------------------------


class PoweredStory:
    """Random work on a segment whose power fails, beside what may and must be there after it."""

    def __init__(self, seed: int) -> None:
        """Everything follows from the seed."""
        self.draw = random.Random(seed)
        self.disk = FakeDisk()
        self.segment, _ = opened(self.disk)
        self.sealed: dict[int, PartToWrite] = {}
        self.durable: set[int] = set()
        """Offsets of sealed parts that a sync has followed."""
        self.gone: set[int] = set()
        """Generations whose removal or free was confirmed."""
        self.number = 10
        self.lives = [self.segment.incarnation]

    def work(self) -> None:
        """One step."""
        offset = self.draw.randrange(6) * PAGE
        held = self.sealed.get(offset)
        if held is None:
            self.number += 1
            made = part(self.number % 7 + 1, offset, counter=self.number)
            assert outcomes(self.segment.write([made])) == [OK]
            self.sealed[offset] = made
            return
        if self.draw.random() < 0.5:
            assert self.segment.write_free([stretch(offset)], PAGE) is OK
        else:
            assert self.segment.write_removed([stretch(offset)], PAGE) is OK
            assert self.segment.write_free([stretch(offset)], PAGE) is OK
        del self.sealed[offset]
        self.gone.add(held.record.generation)
        self.durable = set(self.sealed)

    def lose_power(self) -> None:
        """And start again."""
        self.segment.close()
        self.disk.lose_power(self.draw, kept=self.draw.random())
        self.segment, found = opened(self.disk)
        assert self.segment.incarnation not in self.lives
        self.lives.append(self.segment.incarnation)
        right = require_never_wrong(self.segment, found)
        assert self.durable <= right
        adopted = {record.offset: record for record in found.adopted}
        assert not {record.generation for record in adopted.values()} & self.gone
        assert set(adopted) <= set(self.sealed)
        self.sealed = {offset: self.sealed[offset] for offset in right}
        for offset in set(adopted) - right:  # a reader has told: it is freed
            assert self.segment.write_free([stretch(offset)], PAGE) is OK
        self.durable = set(self.sealed)


@pytest.mark.parametrize("seed", range(40))
def test_a_loss_of_power_gives_no_wrong_part_and_nothing_that_was_removed(seed: int) -> None:
    story = PoweredStory(seed)
    for _ in range(6):
        for _ in range(story.draw.randrange(8)):
            story.work()
        story.lose_power()
    story.segment.close()


def test_a_life_that_has_begun_survives_a_loss_of_power() -> None:
    disk = FakeDisk()
    opened(disk)[0].close()
    second, _ = opened(disk)
    second.close()
    disk.lose_power(random.Random(1), kept=0.0)
    third, _ = opened(disk)
    assert third.incarnation == second.incarnation + 1
    third.close()
