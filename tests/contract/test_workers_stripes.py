"""Stripes over real workers: parity hashed by one, made by another, and a lost page rebuilt."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, NamedTuple

import msgspec
import pytest

from kvstore.erasure import encode
from kvstore.errors import BadValue
from kvstore.ids import KEY_BYTES
from kvstore.page import payload_checksum
from kvstore.wire.messages.common import Address, Outcome, SegmentRef
from kvstore.wire.messages.puts import Ingest, Ingested, StripeSource
from kvstore.wire.messages.stripes import HashParity, ParityHashed, Shard, StripedPage
from tests.contract.worker_rig import Rig, column, pool, read
from tests.unit.worker_scripts import EPOCH, PAGE, generation
from tests.unit.worker_segments import Pages

if TYPE_CHECKING:
    from collections.abc import Iterator

    from kvstore.wire.messages.base import Message

K, M = 2, 2
PARITY_KEYS = b"p" * KEY_BYTES + b"q" * KEY_BYTES
TO = 3 * PAGE
"""Where rebuilt pages and parity go."""


class Pool(NamedTuple):
    """Two workers with a page of data each, and two more."""

    data: tuple[Rig, Rig]
    spare: tuple[Rig, Rig]
    pages: tuple[Pages, Pages]

    def parity(self) -> list[bytes]:
        """What is to be made."""
        into = [bytearray(PAGE) for _ in range(M)]
        data = [memoryview(each.source) for each in self.pages]
        encode(K, M, data, [memoryview(view) for view in into])
        return [bytes(each) for each in into]


@contextlib.contextmanager
def four() -> Iterator[Pool]:
    """Workers with a leader each."""
    with contextlib.ExitStack() as undo:
        a, b, c, d = (undo.enter_context(pool(worker=name)) for name in "abcd")
        pages = Pages((0,), first_key=1), Pages((PAGE,), first_key=2)
        for rig, each in zip((a, b), pages, strict=True):
            with rig.client() as client:
                assert client.ingest(each) == Ingested(b"\0")
        yield Pool((a, b), (c, d), pages)


def ref(rig: Rig) -> SegmentRef:
    segment = rig.segment
    return SegmentRef(
        segment.id, segment.incarnation, segment.tier, segment.geometry, rig.worker, rig.worker,
        (Address("tcp", rig.tcp, 0),),
    )  # fmt: skip


def data_shards(at: Pool) -> tuple[Shard, ...]:
    return tuple(
        Shard(number, number, 0, each.keys[0], each.offsets[0], generation(5), each.checksums[0])
        for number, each in enumerate(at.pages)
    )


def refs(*rigs: Rig) -> tuple[SegmentRef, ...]:
    return tuple(ref(rig) for rig in rigs)


def hash_parity(at: Pool, by: Rig, **changed: object) -> Message:
    question = HashParity(EPOCH, PAGE, M, PARITY_KEYS, refs(*at.data), data_shards(at))
    return by.leader.command(msgspec.structs.replace(question, **changed))


def parity_ingest(at: Pool, target: Rig, number: int, checksum: int) -> Ingest:
    """The leader's request to make a shard of parity."""
    source = StripeSource(refs(*at.data), (StripedPage(K, M, K + number, data_shards(at)),))
    key = PARITY_KEYS[number * KEY_BYTES : (number + 1) * KEY_BYTES]
    message = Pages((TO,)).ingest(target.segment, 6)
    return msgspec.structs.replace(message, keys=key, checksums=column([checksum]), source=source)


def test_parity_is_hashed_by_one_worker_and_made_by_another() -> None:
    with four() as at:
        first, second = at.spare
        told = hash_parity(at, first)
        assert isinstance(told, ParityHashed), told
        wanted = [
            payload_checksum(each, PARITY_KEYS[n * KEY_BYTES : (n + 1) * KEY_BYTES], 0)
            for n, each in enumerate(at.parity())
        ]
        assert told == ParityHashed(bytes(K), column(wanted))
        made = second.leader.command(parity_ingest(at, second, 1, wanted[1]))
        assert made == Ingested(b"\0")
        assert bytes(second.segment.payload[TO : TO + PAGE]) == at.parity()[1]


def test_parity_unlike_what_was_hashed_is_not_sealed() -> None:
    with four() as at:
        target = at.spare[0]
        made = target.leader.command(parity_ingest(at, target, 0, 12345))
        assert made == Ingested(bytes([Outcome.CHECKSUM]))
        assert Pages((TO,)).records(target.segment) == [None]


def test_a_lost_page_is_rebuilt_from_data_and_parity() -> None:
    with four() as at:
        parity_at, target = at.spare
        told = hash_parity(at, target)
        assert isinstance(told, ParityHashed)
        checksum = int.from_bytes(told.checksums[:8], "little")
        made = parity_at.leader.command(parity_ingest(at, parity_at, 0, checksum))
        assert made == Ingested(b"\0")
        shards = (
            msgspec.structs.replace(data_shards(at)[1], segment=0),
            Shard(K, 1, 0, PARITY_KEYS[:KEY_BYTES], TO, generation(6), checksum),
        )
        source = StripeSource(refs(at.data[1], parity_at), (StripedPage(K, M, 0, shards),))
        lost = at.pages[0]
        there = Pages((TO,), first_key=1)
        message = msgspec.structs.replace(there.ingest(target.segment, 7), source=source)
        assert target.leader.command(message) == Ingested(b"\0")
        with target.client() as client:
            assert read(client, there, 7) == (b"\0", lost.source, b"\0")
        assert target.service.counts.copies == {"ok": 1}


def test_too_few_shards_rebuild_nothing_and_say_so() -> None:
    with four() as at:
        target = at.spare[0]
        source = StripeSource(refs(at.data[1]), (
            StripedPage(K, M, 0, (msgspec.structs.replace(data_shards(at)[1], segment=0),)),
        ))  # fmt: skip
        message = Pages((TO,), first_key=1).ingest(target.segment, 7)
        made = target.leader.command(msgspec.structs.replace(message, source=source))
        assert made == Ingested(bytes([Outcome.TRANSPORT]))


def test_data_that_is_damaged_is_told_by_shard() -> None:
    with four() as at:
        at.data[1].segment.payload[PAGE + 9] ^= 1
        told = hash_parity(at, at.spare[0])
        assert told == ParityHashed(bytes([Outcome.OK, Outcome.CHECKSUM]), b"")


REFUSED: dict[str, dict[str, object]] = {
    "epoch: got 2": {"epoch": EPOCH - 1},
    "keys: got 40": {"keys": PARITY_KEYS[:40]},
    "at most 32": {"m": 31},
    "part_bytes: got 0": {"part_bytes": 0},
    "stripe.k: got 0": {"shards": ()},
    "shard.segment: got 0": {"segments": ()},
}


@pytest.mark.parametrize("why", REFUSED)
def test_a_question_that_makes_no_sense_is_refused(why: str) -> None:
    with four() as at, pytest.raises(BadValue, match=why):
        hash_parity(at, at.spare[0], **REFUSED[why])


def test_a_worker_may_decode_from_a_shard_of_its_own() -> None:
    with four() as at:
        target = at.data[0]
        told = hash_parity(at, at.spare[0])
        assert isinstance(told, ParityHashed)
        checksum = int.from_bytes(told.checksums[:8], "little")
        assert target.leader.command(parity_ingest(at, target, 0, checksum)) == Ingested(b"\0")


def test_a_client_cannot_have_pages_decoded() -> None:
    with four() as at, at.spare[0].client() as client:
        message = parity_ingest(at, at.spare[0], 0, 1)
        with pytest.raises(BadValue, match=r"source: got .extents., want"):
            client.call(message)
