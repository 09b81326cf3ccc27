"""A store without a pool behind the calls of engines' connectors (EngineStore). Not a test."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvstore.client.locations import Found
from tests.fake_store import FakeStore

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from kvstore.client.locations import Locations, Match
    from kvstore.client.namespaces import OpenedNamespace
    from kvstore.client.outcomes import PutOutcome, ReadOutcome
    from kvstore.hints import Hints
    from kvstore.page import PageChain


class EngineFakeStore(FakeStore):
    """Keeps what is put; may be told to lose, refuse and fail."""

    def __init__(self) -> None:
        """Start empty and healthy."""
        super().__init__()
        self.closed = False

    def match_prefix(  # type: ignore[override]  # engines say other things than prefixes do
        self,
        opened: OpenedNamespace,
        chain: PageChain,
        *,
        parts: Sequence[int] = (),
        timeout_s: float | None = None,
    ) -> Match:
        """Find the longest prefix."""
        del parts, timeout_s
        return super().match_prefix(opened, chain)

    def lookup(
        self,
        opened: OpenedNamespace,
        chain: PageChain,
        *,
        parts: Sequence[int] = (),
        timeout_s: float | None = None,
    ) -> Found:
        """Find every page that is there."""
        del parts, timeout_s
        self._enter("lookup")
        readable = bytes(self._is_whole(opened, key) for key in chain)
        return Found(opened, chain, (), (), readable)

    def read(
        self,
        locations: Locations,
        into: object,
        offsets: Sequence[int],
        *,
        part: int = 0,
        timeout_s: float | None = None,
    ) -> list[ReadOutcome]:
        """Copy pages out."""
        del timeout_s
        return super().read(locations, into, offsets, part=part)

    def put_parts(  # type: ignore[override]  # as above
        self,
        opened: OpenedNamespace,
        chain: PageChain,
        source: object,
        offsets: Mapping[int, Sequence[int]],
        *,
        wait: bool = True,
        timeout_s: float | None = None,
        hints: Hints | None = None,
    ) -> list[PutOutcome]:
        """Store pages."""
        del wait, timeout_s
        return super().put_parts(opened, chain, source, offsets, hints=hints)

    def hint(
        self,
        opened: OpenedNamespace,
        chain: PageChain,
        hints: Hints,
        *,
        timeout_s: float | None = None,
    ) -> None:
        """Hear it."""
        del timeout_s
        super().hint(opened, chain, hints)

    def close(self) -> None:
        """Close every buffer, as a store does."""
        self.closed = True
        for buffer in self.buffers:
            buffer.close()
