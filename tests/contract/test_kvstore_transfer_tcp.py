"""What a read over a stream makes of a worker that dies, lies or changes its mind."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import pytest

from kvstore.wire.framing import FrameKind
from kvstore.wire.messages.common import Outcome
from kvstore.wire.messages.hello import Done, Failure
from kvstore.wire.messages.puts import Ingested
from kvstore.wire.messages.transfers import (
    ReadEnded,
    ReadExtents,
    ReadStarted,
)
from tests.contract.fake_worker import FakeWorker
from tests.fakes import payload

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

    from kvstore.rpc.frame_socket import FrameSocket
    from kvstore.wire.framing import Frame
    from kvstore.wire.messages.base import Message

from tests.contract.transport_ways import CHAIN, PAGES, SIZE, TIMEOUT_S, Way, reply


@pytest.fixture
def worker(tmp_path: Path) -> Iterator[FakeWorker]:
    with FakeWorker(tmp_path) as made:
        yield made


def read_answers() -> Sequence[Message]:
    """What no worker says to ReadExtents."""
    return (
        Failure("bad_value", "no"),
        Done(),
        ReadStarted(b""),
        ReadStarted(bytes(PAGES + 1)),
        ReadEnded(bytes(PAGES)),
        Ingested(bytes(PAGES)),
    )


@pytest.mark.parametrize("message", read_answers(), ids=repr)
def test_refusals_and_nonsense_about_a_read_over_a_stream(
    worker: FakeWorker, message: Message
) -> None:
    way = Way("tcp", worker)
    span = way.stored()
    worker.say = reply(message, ReadExtents)
    assert way.read(span) == bytes([Outcome.TRANSPORT] * PAGES)
    way.transport.close()


def test_a_stream_cut_in_mid_payload_leaves_nothing_behind(worker: FakeWorker) -> None:
    way = Way("tcp", worker)
    span = way.stored()

    def say(link: FrameSocket, frame: Frame) -> bool:
        if isinstance(frame.message, ReadExtents):
            part = [payload(CHAIN.key(0), 0, SIZE), b"half a page"]
            link.send(FrameKind.REPLY, frame.request_id, ReadStarted(bytes(PAGES)), raw=part)
            link.shutdown()
            return True
        return False

    worker.say = say
    assert way.read(span) == bytes([Outcome.TRANSPORT] * PAGES)
    way.transport.close()


def test_a_page_that_changed_while_it_was_sent_is_stale(worker: FakeWorker) -> None:
    way = Way("tcp", worker)
    span = way.stored()

    def say(link: FrameSocket, frame: Frame) -> bool:
        if isinstance(frame.message, ReadExtents):
            raw = [payload(key, 0, SIZE) for key in CHAIN]
            link.send(FrameKind.REPLY, frame.request_id, ReadStarted(bytes(PAGES)), raw=raw)
            ended = bytes(PAGES - 1) + bytes([Outcome.STALE])
            link.send(FrameKind.REPLY, frame.request_id, ReadEnded(ended))
            return True
        return False

    worker.say = say
    assert way.read(span) == bytes(PAGES - 1) + bytes([Outcome.STALE])
    way.transport.close()


@pytest.mark.parametrize("sent", [0, 1, SIZE, PAGES * SIZE])
def test_a_worker_that_falls_silent_costs_no_more_than_the_stall(
    worker: FakeWorker, monkeypatch: pytest.MonkeyPatch, sent: int
) -> None:
    monkeypatch.setattr("kvstore.limits.READ_STALL_MAX_S", 0.05)
    way = Way("tcp", worker)
    span = way.stored()

    def say(link: FrameSocket, frame: Frame) -> bool:
        if isinstance(frame.message, ReadExtents) and sent:
            raw = b"".join(payload(key, 0, SIZE) for key in CHAIN)[:sent]
            link.send(FrameKind.REPLY, frame.request_id, ReadStarted(bytes(PAGES)), raw=[raw])
        return True

    worker.say = say
    began_s = time.monotonic()
    assert way.read(span) == bytes([Outcome.TRANSPORT] * PAGES)
    assert time.monotonic() - began_s < TIMEOUT_S / 2
    way.transport.close()
