"""The `mooncake` transport to a worker with memory of a device: put, read one-sided, given back."""

from __future__ import annotations

from array import array
from typing import TYPE_CHECKING

import pytest

from kvstore.rpc.identity import Identity, Role
from kvstore.transfer import mooncake
from kvstore.transfer.buffer import Buffer
from kvstore.transfer.context import TransferContext
from kvstore.transfer.device import Move
from kvstore.transfer.memory import Memory
from kvstore.transfer.mooncake_process import EngineProcess
from kvstore.transfer.transport import IngestSpan, ReadSpan
from kvstore.wire.messages.common import Address, Outcome, SegmentRef
from kvstore.wire.messages.engine import EnginePull
from kvstore.wire.messages.hello import Done
from kvstore.wire.messages.membership import ExtentsConfirmed, FreeExtents, ReleaseChunks
from kvstore.wire.messages.puts import Sealed
from tests.contract.engine_rig import EngineRig, engine_pool
from tests.contract.scripted_leader import PATIENCE_S
from tests.contract.worker_rig import column
from tests.devices import DEVICES, served_device
from tests.unit.worker_scripts import CHUNK, EPOCH, PAGE, generation
from tests.unit.worker_segments import Pages

if TYPE_CHECKING:
    from collections.abc import Iterator

    from kvstore.transfer.device import Device
    from kvstore.transfer.mooncake import MooncakeTransport

OFFSETS = (3 * CHUNK, CHUNK - PAGE, CHUNK, CHUNK + PAGE, 2 * CHUNK - PAGE, 0, 2 * CHUNK)
STALE = Outcome.STALE


@pytest.fixture(params=DEVICES)
def device(request: pytest.FixtureRequest) -> Device:
    return served_device(request.param)


@pytest.fixture
def rig(device: Device) -> Iterator[EngineRig]:
    with engine_pool(device) as made:
        yield made


@pytest.fixture
def transport(rig: EngineRig) -> Iterator[MooncakeTransport]:
    address = Address("mooncake", rig.tcp, 0)
    context = TransferContext(Identity(Role.ENGINE), address, (address,))
    made = mooncake.open_transport(context, PATIENCE_S)
    yield made
    made.close()


def reference(rig: EngineRig) -> SegmentRef:
    hbm = rig.hbm
    return SegmentRef(hbm.id, hbm.incarnation, "hbm", hbm.geometry, "w", "here", ())


def put(
    rig: EngineRig,
    transport: MooncakeTransport,
    size: int = PAGE,
    offsets: tuple[int, ...] = OFFSETS,
) -> Pages:
    pages = Pages(offsets, size=size)
    buffer = Buffer(1, len(pages.source))
    buffer.view[:] = pages.source
    span = IngestSpan(
        EPOCH, reference(rig), generation(5), 1, 0, size, 64, bytes(32), b"".join(pages.keys),
        pages.offsets.tobytes(), tuple(pages.places()),
    )  # fmt: skip
    assert transport.ingest([span], buffer.memory, PATIENCE_S) == [bytes(len(offsets))]
    buffer.close()
    return pages


def read(rig: EngineRig, transport: MooncakeTransport, pages: Pages) -> tuple[bytes, list[bytes]]:
    """Outcomes, and what lies at the places then."""
    size, places = pages.size, tuple(reversed(pages.places()))
    span = ReadSpan(
        reference(rig), 0, size, b"".join(pages.keys), pages.offsets.tobytes(),
        column([generation(5)] * len(places)), pages.checksums.tobytes(), places,
    )  # fmt: skip
    into = Memory.of("into", bytearray(b"\xee" * len(pages.source)), writable=True)
    outcomes = transport.read(span, into, PATIENCE_S)
    return outcomes, [bytes(into.view[at : at + size]) for at in places]


@pytest.mark.parametrize("size", [100, PAGE])
def test_pages_are_put_on_the_device_and_read_from_it(
    rig: EngineRig, transport: MooncakeTransport, size: int
) -> None:
    pages = put(rig, transport, size)
    assert rig.leader.expect(Sealed).segment == rig.hbm.id
    assert read(rig, transport, pages) == (bytes(len(OFFSETS)), pages.payloads)


def test_no_transfer_spans_two_chunks_which_may_lie_side_by_side(
    rig: EngineRig, transport: MooncakeTransport, monkeypatch: pytest.MonkeyPatch
) -> None:
    pages = put(rig, transport)
    honest, asked = EngineProcess.pull, list[EnginePull]()

    def pull(self: EngineProcess, message: EnginePull, deadline_s: float) -> None:
        asked.append(message)
        honest(self, message, deadline_s)

    monkeypatch.setattr(EngineProcess, "pull", pull)
    assert read(rig, transport, pages)[0] == bytes(len(OFFSETS))
    bases = array("Q", rig.engine.find(rig.hbm.id).addresses)
    for message in asked:
        (base,) = (
            each for each in bases if each <= min(array("Q", message.addresses)) < each + CHUNK
        )
        assert max(array("Q", message.addresses)) < base + CHUNK
    assert sum(len(message.places) for message in asked) == 8 * len(OFFSETS)


def test_a_page_as_large_as_a_chunk_is_brought_in_pieces(
    rig: EngineRig, transport: MooncakeTransport, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("workers.engine_source.EnginePages.group_bytes", 3 * PAGE)
    pages = put(rig, transport, CHUNK - 5, (0, CHUNK))
    assert read(rig, transport, pages) == (bytes(2), pages.payloads)


def test_what_is_freed_or_damaged_is_told_apart_and_wiped(
    rig: EngineRig, transport: MooncakeTransport
) -> None:
    pages = put(rig, transport)
    damaged = Memory.of("x", bytearray(b"?"), writable=True)
    block = rig.hbm.chunks[1]
    rig.hbm.device.copy([Move(block.address + 7, damaged.address, 1)])
    free(rig, (CHUNK - PAGE,))
    want = [Outcome.OK, STALE, Outcome.CHECKSUM, *[Outcome.OK] * 4]
    outcomes, found = read(rig, transport, pages)
    assert list(outcomes) == want
    assert found == [
        bytes(PAGE) if outcome else payload
        for outcome, payload in zip(want, pages.payloads, strict=True)
    ]


def test_a_chunk_that_was_given_back_is_stale_and_others_are_read(
    rig: EngineRig, transport: MooncakeTransport
) -> None:
    pages = put(rig, transport)
    assert read(rig, transport, pages)[0] == bytes(len(OFFSETS))  # knows where each chunk is
    gone = (CHUNK, CHUNK + PAGE, 2 * CHUNK - PAGE)
    free(rig, gone)
    release = ReleaseChunks(EPOCH, rig.hbm.id, rig.hbm.incarnation, (1,))
    assert rig.leader.command(release) == Done()
    # Nor is it open in the engine's process, which would keep its memory from the device.
    there = array("Q", rig.engine.find(rig.hbm.id).addresses)
    assert [bool(address) for address in there] == [True, False, True, True]
    want = [STALE if offset in gone else Outcome.OK for offset in OFFSETS]
    for _ in range(2):
        outcomes, found = read(rig, transport, pages)
        assert list(outcomes) == want
        assert found[2:5] == [bytes(PAGE)] * 3
        assert found[5:] == pages.payloads[5:]


def free(rig: EngineRig, offsets: tuple[int, ...]) -> None:
    """Have the leader give these extents away."""
    generations = column([generation(5)] * len(offsets))
    hbm, packed = rig.hbm, column(list(offsets))
    order = FreeExtents(EPOCH, hbm.id, hbm.incarnation, PAGE, packed, generations)
    assert rig.leader.command(order) == ExtentsConfirmed(EPOCH, bytes(len(offsets)))
