"""Which codec a namespace's parts are stored by: measured on a few of its first, kept for long.

Pure: whoever encodes says what it took. Thread-safe by its owner's lock.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import msgspec

from kvstore import limits
from kvstore.codec import Codec

if TYPE_CHECKING:
    from collections.abc import Iterable

SAMPLE_PARTS: Final = 4
"""Tried with every codec before one is chosen."""
KEPT_PARTS: Final = 16_384
"""Stored by the chosen one before it is measured anew: a sample is about ten times as dear."""
SAVING_MIN: Final = 0.10
"""A smaller saving is not worth a decoder in the way of every read."""


class Trial(msgspec.Struct, frozen=True):
    """One codec on one part: its stored bytes, and the seconds to encode and decode it."""

    codec: Codec
    payload_bytes: int
    stored_bytes: int
    seconds: float


class _Sums:
    """What a codec has done in the sample."""

    __slots__ = ("payload_bytes", "seconds", "stored_bytes")

    def __init__(self) -> None:
        self.payload_bytes = self.stored_bytes = 0
        self.seconds = 0.0


class _Namespace:
    """Where one namespace is: in its sample, or with a choice."""

    __slots__ = ("chosen", "left", "sums")

    def __init__(self) -> None:
        self.chosen: Codec | None = None
        self.left = SAMPLE_PARTS
        """Parts until the sample, or the choice, ends."""
        self.sums: dict[Codec, _Sums] = {}


class CodecChoice:
    """The choices of NAMESPACES_MAX namespaces at most: those that were measured last."""

    def __init__(self) -> None:
        """Nothing measured yet."""
        self._namespaces: dict[int, _Namespace] = {}

    def choose(self, namespace: int) -> Codec | None:
        """The codec for the next part of this namespace (its ordinal).

        None: try all on it, and say with `learn` what each did.
        """
        known = self._namespaces.get(namespace)
        if known is None or known.chosen is None:
            return None
        known.left -= 1
        if known.left < 0:
            del self._namespaces[namespace]
            return None
        return known.chosen

    def learn(self, namespace: int, trials: Iterable[Trial]) -> None:
        """Take the trials of one part in; those that come after the choice change nothing."""
        known = self._namespaces.setdefault(namespace, _Namespace())
        if len(self._namespaces) > limits.NAMESPACES_MAX:
            del self._namespaces[next(iter(self._namespaces))]
        if known.chosen is not None:
            return
        for trial in trials:
            sums = known.sums.setdefault(trial.codec, _Sums())
            sums.payload_bytes += trial.payload_bytes
            sums.stored_bytes += trial.stored_bytes
            sums.seconds += trial.seconds
        known.left -= 1
        if known.left <= 0:
            known.chosen, known.left = _best(known.sums), KEPT_PARTS
            known.sums = {}


def _best(sums: dict[Codec, _Sums]) -> Codec:
    """The codec that saves most bytes a second; NONE when none saves enough."""
    best, best_rate = Codec.NONE, 0.0
    for codec, each in sorted(sums.items()):
        saved = each.payload_bytes - each.stored_bytes
        rate = saved / max(each.seconds, 1e-9)
        if saved >= SAVING_MIN * each.payload_bytes and rate > best_rate:
            best, best_rate = codec, rate
    return best
