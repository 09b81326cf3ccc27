"""PROTOCOL.md says what the code says."""

from __future__ import annotations

from kvstore.wire.document import protocol
from tests.tidy.sources import ROOT


def test_the_protocol_document_is_fresh() -> None:
    written = (ROOT / "PROTOCOL.md").read_text(encoding="utf-8")
    assert written == protocol(), "stale; run: make protocol"
