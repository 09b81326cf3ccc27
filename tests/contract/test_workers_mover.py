"""Moves by a real worker: the leader asks over the control link, threads of their own copy."""

from __future__ import annotations

from array import array

import pytest

from kvstore.errors import BadValue
from kvstore.wire.messages.common import Outcome
from kvstore.wire.messages.membership import FreeExtents
from kvstore.wire.messages.puts import ExtentSource, Ingested, Sealed
from tests.contract.worker_rig import Rig, column, order, pool, read
from tests.unit.worker_scripts import CHUNK, PAGE, generation
from tests.unit.worker_segments import Pages

FROM = (0, PAGE, 2 * PAGE, CHUNK)
TO = (3 * CHUNK, 3 * CHUNK + 2 * PAGE, 3 * CHUNK + PAGE, 2 * CHUNK)


def extents(rig: Rig, counter: int = 5) -> ExtentSource:
    """The pages that `put` has stored."""
    generations = column([generation(counter)] * len(FROM))
    return ExtentSource(rig.segment.id, rig.segment.incarnation, column(list(FROM)), generations)


def put(rig: Rig) -> Pages:
    """Store pages; the same pages where they shall be moved to."""
    pages = Pages(FROM)
    with rig.client() as client:
        assert client.ingest(pages) == Ingested(bytes(4))
    pages.offsets = array("Q", TO)
    return pages


def test_a_move_copies_and_reports_before_it_is_answered() -> None:
    with pool() as rig:
        pages = put(rig)
        rig.leader.expect(Sealed)
        answer = rig.leader.command(pages.ingest(rig.segment, 6, extents(rig)))
        assert answer == Ingested(bytes(4))
        assert rig.leader.expect(Sealed).offsets == column(list(TO))
        assert pages.stored(rig.segment) == pages.payloads
        with rig.client() as client:
            assert read(client, pages, 6) == (bytes(4), pages.source, bytes(4))
        free = rig.leader.command(order(FreeExtents, rig, FROM))
        assert not any(free.outcomes)  # type: ignore[attr-defined]  # it is ExtentsConfirmed


def test_damage_at_the_source_goes_no_further() -> None:
    with pool() as rig:
        pages = put(rig)
        rig.segment.payload[PAGE + 5] ^= 1
        answer = rig.leader.command(pages.ingest(rig.segment, 6, extents(rig)))
        assert answer == Ingested(bytes((0, Outcome.CHECKSUM, 0, 0)))


def test_a_client_cannot_name_extents() -> None:
    with pool() as rig:
        pages = put(rig)
        with rig.client() as client, pytest.raises(BadValue, match="source"):
            client.call(pages.ingest(rig.segment, 6, extents(rig)))
