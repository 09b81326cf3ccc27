"""What the log says of objects that the pool did not store: programs are told a code alone.

Each reason is told of at once, and then once a while, with how many objects it was since.
"""

from __future__ import annotations

import logging
import threading
from typing import TYPE_CHECKING, Final

from kvstore import limits
from kvstore.client.outcomes import RefusedReason

if TYPE_CHECKING:
    from kvstore.clock import Clock

_LOG: Final = logging.getLogger("kvharbor")
EVERY_S: Final = 60.0
NAME_SHOWN: Final = 80
ORDINARY: Final = frozenset({RefusedReason.IN_PROGRESS})
"""Nobody has to look into these."""
WHY: Final = {
    RefusedReason.OUT_OF_SPACE: "objects of one size, and the names of all, lie in chunks of their "
    f"own of up to {limits.CHUNK_BYTES >> 20} MiB: lend more memory, or see kvharbor status",
}


class Refusals:
    """Those of one store. Thread-safe."""

    def __init__(self, clock: Clock) -> None:
        """Nothing was refused yet."""
        self._clock = clock
        self._mutex = threading.Lock()
        self._told_s: dict[RefusedReason, float] = {}
        self._untold: dict[RefusedReason, int] = {}

    def add(self, name: bytes, size_bytes: int, reason: RefusedReason) -> None:
        """An object was not stored."""
        if reason in ORDINARY:
            return
        now_s = self._clock.now_s()
        with self._mutex:
            self._untold[reason] = self._untold.get(reason, 0) + 1
            told_s = self._told_s.get(reason)
            if told_s is not None and now_s - told_s < EVERY_S:
                return
            self._told_s[reason], count = now_s, self._untold.pop(reason)
        shown = name.decode(errors="backslashreplace")[:NAME_SHOWN]
        why = WHY.get(reason, "")
        _LOG.warning(
            "mooncake: objects not stored: %d (%s), the last %r of %d bytes%s",
            count, reason.value, shown, size_bytes, why and f"; {why}",
        )  # fmt: skip
