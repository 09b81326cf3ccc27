"""Carries looks at sealed extents out, in a thread of each segment, so that nothing waits for them.

Owns these threads; a disk that hangs holds up no other segment's. What is looked at, and what
becomes of a bad extent, is `workers.rounds`' to decide.
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

from workers.events import Scrubbed
from workers.guarded_threads import GuardedThreads
from workers.verification import verify_all

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from workers.events import ScrubExtents
    from workers.tiers.tier import Segment


class Scrubber:
    """One look a segment at a time."""

    def __init__(
        self,
        segments: Mapping[str, Segment],
        tell: Callable[[Scrubbed], None],
        broken: Callable[[BaseException], None],
    ) -> None:
        """`tell` hears of each look's end, `broken` of a bug, both in the segment's thread."""
        self._segments = segments
        self._tell = tell
        self._closing = threading.Event()
        self._threads = {name: GuardedThreads(1, f"scrubber-{name}", broken) for name in segments}

    @property
    def is_closing(self) -> bool:
        """Whether nothing more is read."""
        return self._closing.is_set()

    def begin(self, look: ScrubExtents) -> None:
        """Verify these extents soon. For any thread; waits for nothing."""
        self._threads[look.extents.segment].begin(self._run, look)

    def close(self) -> None:
        """Wait for what runs, to the end of its extent; what has not begun never does."""
        self._closing.set()
        for thread in self._threads.values():
            thread.close(cancel=True)

    def _run(self, look: ScrubExtents) -> None:
        segment = self._segments[look.extents.segment]
        outcomes = verify_all(segment, look.extents, lambda: self.is_closing)
        self._tell(Scrubbed(look.look, outcomes))
