"""Steps carried out where no transport leads anywhere."""

from __future__ import annotations

from kvstore.client.performer import Viewer
from kvstore.page import PageChain
from kvstore.rpc.identity import Identity, Role
from kvstore.transfer.choice import Choice
from kvstore.wire.messages.common import Outcome
from tests.fakes import ManualClock, payload
from tests.unit.segment_files import SegmentFile

SIZE = 4096


def test_pages_that_were_never_held_can_be_let_go() -> None:
    file = SegmentFile(chunks=1)
    span = file.span(PageChain(payload(b"keys", 0, 64)), [0, SIZE], SIZE, (0, 1))
    file.close()
    viewer = Viewer(Choice(["tcp"], lambda: Identity(Role.ENGINE), ManualClock()))
    assert viewer.read([span], 1.0) == [bytes([Outcome.TRANSPORT] * 2)]
    viewer.wipe(span.places, SIZE)
    viewer.end_or_warn()
