"""Pages staged in memory: loaded once, verified, lent, and never overwritten under a reader."""

from __future__ import annotations

import errno
import threading
from array import array
from typing import TYPE_CHECKING

import msgspec
import pytest

from kvstore.clock import SystemClock
from kvstore.codec import Codec
from kvstore.errors import BadValue
from kvstore.limits import CALL_TIMEOUT_MAX_S, STAGING_LEASE_S
from kvstore.wire.messages.common import Outcome
from kvstore.wire.messages.transfers import ReleaseStaged
from tests.fakes import ManualClock
from tests.unit.staging_rig import PAGES, SIZE, SLOTS, StagingRig, payload_of
from tests.unit.worker_scripts import GEOMETRY, key
from workers.events import ExtentGroup, Stretch
from workers.tiers.guarded_file import ServiceState

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from kvstore.wire.messages.transfers import Staged, StageExtents

OK, BUSY, STALE = Outcome.OK, Outcome.BUSY, Outcome.STALE
LATER_S = STAGING_LEASE_S + 0.1
ME, YOU = 1, 2


class SeenClock(ManualClock):
    """Tells that it was asked."""

    def __init__(self) -> None:
        super().__init__()
        self.asked = threading.Event()

    def now_s(self) -> float:
        self.asked.set()
        return super().now_s()


@pytest.fixture
def rig() -> Iterator[StagingRig]:
    made = StagingRig(SeenClock())
    yield made
    made.close()


def clock_of(rig: StagingRig) -> SeenClock:
    assert isinstance(rig.clock, SeenClock)
    return rig.clock


def beside(call: Callable[[], Staged], into: list[Staged]) -> threading.Thread:
    """Run a call in another thread."""
    thread = threading.Thread(target=lambda: into.append(call()))
    thread.start()
    return thread


@pytest.mark.parametrize("codec", [Codec.NONE, Codec.LZ4, Codec.ZSTD_PLANES])
def test_staged_pages_are_read_like_any_others(codec: Codec) -> None:
    rig = StagingRig(codec=codec)
    staged = rig.stage(3, 1, 2)
    assert (staged.segment, staged.incarnation) == (rig.memory.id, rig.memory.incarnation)
    assert staged.outcomes == bytes(3)
    assert rig.read(staged, 3, 1, 2) == bytes(3)
    rig.close()


def test_a_page_that_is_staged_is_found_again(rig: StagingRig) -> None:
    first = rig.stage(1, 2)
    rig.release(first)
    again = rig.stage(2, 3, 1, session=YOU)
    assert again.outcomes == bytes(3)
    assert rig.source.loaded == [key(1), key(2), key(3)]
    assert rig.read(again, 2, 3, 1) == bytes(3)
    assert msgspec.structs.astuple(rig.staging.counts) == (3, 2, 0, 0)


def test_a_page_that_is_asked_for_twice_at_once_is_loaded_once(rig: StagingRig) -> None:
    rig.source.open.clear()
    mine: list[Staged] = []
    yours: list[Staged] = []
    first = beside(lambda: rig.stage(1, 1, session=ME), mine)
    assert rig.source.entered.wait(20)
    clock_of(rig).asked.clear()
    second = beside(lambda: rig.stage(1, session=YOU), yours)
    assert clock_of(rig).asked.wait(20)
    rig.source.open.set()
    first.join()
    second.join()
    assert rig.source.loaded == [key(1)]
    assert (mine[0].outcomes, yours[0].outcomes) == (bytes(2), bytes(1))
    assert rig.read(yours[0], 1) == bytes(1)


def test_who_waits_for_a_load_that_fails_may_ask_again(rig: StagingRig) -> None:
    rig.source.open.clear()
    mine: list[Staged] = []
    yours: list[Staged] = []
    first = beside(lambda: rig.stage(1, session=ME), mine)
    assert rig.source.entered.wait(20)
    rig.disk.names[next(iter(rig.disk.names))].flip(8 * (GEOMETRY.payload_base + 5))
    clock_of(rig).asked.clear()
    second = beside(lambda: rig.stage(1, session=YOU), yours)
    assert clock_of(rig).asked.wait(20)
    rig.source.open.set()
    first.join()
    second.join()
    assert mine[0].outcomes == bytes([Outcome.CHECKSUM])
    assert yours[0].outcomes[0] in (BUSY, Outcome.CHECKSUM)
    assert rig.stage(1, session=YOU).outcomes == bytes([Outcome.CHECKSUM])


def test_what_finds_no_room_is_busy_and_comes_later(rig: StagingRig) -> None:
    numbers = range(1, SLOTS + 3)
    # Not waited for, since who asks has slots that others might wait for.
    staged = rig.stage(*numbers, timeout_s=CALL_TIMEOUT_MAX_S)
    assert staged.outcomes == bytes(SLOTS) + bytes([BUSY] * 2)
    assert rig.read(staged, *numbers)[:SLOTS] == bytes(SLOTS)
    assert rig.stage(SLOTS + 1, session=YOU).outcomes == bytes([BUSY])
    rig.release(staged)
    later = rig.stage(SLOTS + 1, SLOTS + 2)
    assert later.outcomes == bytes(2)
    assert rig.read(later, SLOTS + 1, SLOTS + 2) == bytes(2)
    # Whoever still believes in the old places finds out.
    assert rig.read(staged, *numbers)[:2] == bytes([STALE] * 2)
    assert rig.staging.counts.busy == 3


def test_a_slot_is_lent_for_its_time_from_the_last_answer_on(rig: StagingRig) -> None:
    rig.stage(1, 2, 3, 4)
    clock_of(rig).advance(STAGING_LEASE_S / 2)
    rig.stage(1, session=YOU)
    clock_of(rig).advance(STAGING_LEASE_S / 2)
    assert rig.stage(5, 6, 7, 8, session=3).outcomes == bytes([OK, OK, OK, BUSY])
    clock_of(rig).advance(STAGING_LEASE_S / 2)
    rig.staging.forget(3)
    assert rig.stage(9, 10, 11, 12, session=3).outcomes == bytes(4)


@pytest.mark.parametrize("how", ["release", "forget"])
def test_room_is_waited_for_until_somebody_gives_it(rig: StagingRig, how: str) -> None:
    staged = rig.stage(1, 2, 3, 4)
    clock_of(rig).asked.clear()
    yours: list[Staged] = []
    waiting = beside(lambda: rig.stage(5, session=YOU, timeout_s=60.0), yours)
    assert clock_of(rig).asked.wait(20)
    # It has the lock until it waits.
    if how == "release":
        rig.release(staged)
    else:
        rig.staging.forget(ME)
    waiting.join()
    assert yours[0].outcomes == bytes(1)


def test_a_worker_that_stops_lets_nobody_wait(rig: StagingRig) -> None:
    rig.stage(1, 2, 3, 4)
    clock_of(rig).asked.clear()
    yours: list[Staged] = []
    waiting = beside(lambda: rig.stage(5, session=YOU, timeout_s=CALL_TIMEOUT_MAX_S), yours)
    assert clock_of(rig).asked.wait(20)
    rig.staging.end_waits()
    waiting.join()
    assert yours[0].outcomes == bytes([BUSY])


def test_nobody_waits_longer_than_asked() -> None:
    rig = StagingRig(SystemClock())
    rig.stage(1, 2, 3, 4)
    assert rig.stage(5, session=YOU, timeout_s=0.01).outcomes == bytes([BUSY])
    rig.close()


def test_a_view_keeps_its_page_whatever_is_staged(rig: StagingRig) -> None:
    staged = rig.stage(1, 2, 3, 4)
    held = rig.mapped.hold(rig.span(staged, 1, 2, 3, 4))
    held.drop([2, 3])
    rig.release(staged)
    for round_ in range(3):
        other = rig.stage(5 + round_, 8 + round_, 11, session=YOU)
        assert other.outcomes == bytes([OK, OK, BUSY])
        assert rig.read(other, 5 + round_, 8 + round_, 11)[:2] == bytes(2)
        rig.release(other, session=YOU)
        clock_of(rig).advance(LATER_S)
        assert [bytes(view) for view in held.views if view] == [payload_of(1), payload_of(2)]
    # The pages in view are found all the while.
    loaded = len(rig.source.loaded)
    assert rig.stage(1, session=YOU).outcomes == bytes(1)
    assert len(rig.source.loaded) == loaded
    rig.staging.forget(YOU)
    assert held.end() == 0
    clock_of(rig).advance(LATER_S)
    assert rig.stage(5, 6, 7, 8, session=YOU).outcomes == bytes(4)


def test_a_flipped_byte_is_a_miss_and_its_slot_is_free(rig: StagingRig) -> None:
    rig.disk.names[next(iter(rig.disk.names))].flip(8 * (GEOMETRY.payload_base + SIZE + 5))
    staged = rig.stage(1, 2, 3)
    assert staged.outcomes == bytes([OK, Outcome.CHECKSUM, OK])
    assert rig.read(staged, 1, 2, 3) == bytes([OK, STALE, OK])
    assert rig.stage(4, 5).outcomes == bytes(2)


def test_a_staged_copy_that_a_reader_doubts_is_found_no_more(rig: StagingRig) -> None:
    first, other = rig.stage(1), rig.stage(2)
    at = array("Q", first.offsets)[0]
    rig.memory.payload[at] ^= 1
    assert rig.read(first, 1) == bytes((Outcome.CHECKSUM,))
    stretch = Stretch(0, 1, 0, 0, rig.offsets[1])
    rig.staging.doubt(ExtentGroup(rig.nvme.id, SIZE, (stretch,)))
    assert rig.read(rig.stage(1), 1) == bytes(1)
    assert rig.stage(2).offsets == other.offsets


def test_a_staged_copy_whose_record_is_damaged_is_loaded_anew(rig: StagingRig) -> None:
    """Found by simulation, seed 271: to readers it was busy for as long as they asked for it."""
    first = rig.stage(1)
    at = array("Q", first.offsets)[0]
    rig.memory.records.write_free(Stretch(0, 1, 0, at // SIZE, at), SIZE)
    assert rig.read(first, 1) == bytes((STALE,))
    assert rig.read(rig.stage(1), 1) == bytes((OK,))
    assert rig.source.loaded == [key(1)] * 2


@pytest.mark.parametrize(
    ("where", "again"),
    [
        ("with a damaged record", STALE),
        ("in another segment", OK),
        ("of a failed disk", Outcome.TRANSPORT),
    ],
)
def test_a_doubt_about_what_nobody_can_name_changes_nothing(
    rig: StagingRig, where: str, again: Outcome
) -> None:
    rig.stage(1)
    if where == "with a damaged record":
        rig.disk.names[next(iter(rig.disk.names))].flip(8 * GEOMETRY.record_offset(0, SIZE))
    elif where == "of a failed disk":
        rig.disk.read_error = errno.EIO
    name = "other" if where == "in another segment" else rig.nvme.id
    rig.staging.doubt(ExtentGroup(name, SIZE, (Stretch(0, 1, 0, 0, rig.offsets[1]),)))
    assert rig.stage(1).outcomes == bytes([again])
    assert rig.source.loaded == [key(1)], "it was found where it is"


def test_a_page_that_was_removed_since_is_not_found_again(rig: StagingRig) -> None:
    staged = rig.stage(1, 2)
    rig.nvme.write_removed([Stretch(0, 1, 0, 0, 0)], SIZE)
    assert rig.stage(1, 2, session=YOU).outcomes == bytes([STALE, OK])
    rig.release(staged)
    assert rig.stage(1, 3, session=YOU).outcomes == bytes([STALE, OK])


def test_a_disk_that_fails_serves_nothing_any_more(rig: StagingRig) -> None:
    rig.stage(1)
    rig.disk.read_error = errno.EIO
    assert rig.stage(2).outcomes == bytes([Outcome.TRANSPORT])
    assert rig.nvme.service is ServiceState.FAILED
    assert rig.stage(1, session=YOU).outcomes == bytes([Outcome.TRANSPORT])
    assert rig.staging.counts.failed == 2


def test_places_and_lives_that_are_not_there_are_stale(rig: StagingRig) -> None:
    message = rig.message(1, 2)
    other_life = msgspec.structs.replace(message, incarnation=message.incarnation + 1)
    assert rig.staging.stage(ME, other_life).outcomes == bytes([STALE] * 2)
    for offset in (SIZE + 4096, 3 * GEOMETRY.chunk_bytes, 1 << 60):
        places = msgspec.structs.replace(message, offsets=offset.to_bytes(8, "little") * 2)
        assert rig.staging.stage(ME, places).outcomes == bytes([STALE] * 2)
    other_key = msgspec.structs.replace(message, keys=key(7) + key(2))
    assert rig.staging.stage(ME, other_key).outcomes == bytes([STALE, OK])


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("segment", "w-dram0"),
        ("keys", b""),
        ("keys", b"k" * 31),
        ("offsets", bytes(8)),
        ("generations", bytes(24)),
        ("part_bytes", 0),
        ("part_bytes", GEOMETRY.chunk_bytes + 1),
        ("timeout_s", -1.0),
        ("timeout_s", float("nan")),
        ("timeout_s", CALL_TIMEOUT_MAX_S + 1),
    ],
)
def test_requests_that_cannot_be_are_refused(rig: StagingRig, field: str, value: object) -> None:
    message: StageExtents = msgspec.structs.replace(rig.message(1, 2), **{field: value})
    with pytest.raises(BadValue, match=field):
        rig.staging.stage(ME, message)


def test_releases_that_cannot_be_are_refused(rig: StagingRig) -> None:
    with pytest.raises(BadValue, match="generations"):
        rig.staging.release(ME, ReleaseStaged(bytes(8), bytes(16)))
    with pytest.raises(BadValue, match="generations"):
        rig.staging.release(ME, ReleaseStaged(bytes(7), bytes(7)))


@pytest.mark.parametrize("what", ["memory", "locks"])
def test_a_system_that_is_out_of_something_is_as_good_as_no_room(
    rig: StagingRig, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    def refuse(*_: object) -> bytes:
        raise OSError(errno.ENOSPC, "none left")

    with monkeypatch.context() as patch:
        if what == "memory":
            patch.setattr(rig.memory.records, "require", refuse)
        else:
            patch.setattr(rig.memory.locks, "try_lock", refuse)
        assert rig.stage(1, 2).outcomes == bytes([BUSY] * 2)
    clock_of(rig).advance(LATER_S)
    staged = rig.stage(*range(1, SLOTS + 1))
    assert staged.outcomes == bytes(SLOTS)
    assert rig.read(staged, *range(1, SLOTS + 1)) == bytes(SLOTS)


def test_many_readers_get_what_they_ask_for(rig: StagingRig) -> None:
    """Real threads, few slots: whoever reads what it was told of reads that page or nothing."""
    wrong: list[object] = []

    def reader(session: int) -> None:
        done = 0
        while done < PAGES:
            numbers = [(session * 5 + done + i) % PAGES + 1 for i in range(2)]
            staged = rig.stage(*numbers, session=session, timeout_s=CALL_TIMEOUT_MAX_S)
            outcomes = rig.read(staged, *numbers)
            wanted = [code for code in staged.outcomes if not code]
            if outcomes.count(OK) < len(wanted):
                wrong.append((session, numbers, staged.outcomes, outcomes))
            done += len(wanted)
            rig.release(staged, session=session)

    threads = [threading.Thread(target=reader, args=(session,)) for session in range(1, 5)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []
