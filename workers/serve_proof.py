"""How a gateway proves the cluster secret to inference workers, by a header of each question.

Pure but for fresh random bytes. A proof is HMAC-SHA256 over the worker's salt, a number used once,
path and body: good for one question to one worker. The worker tells its salt to whoever asks
without a good proof; it takes a new one when it has seen as many numbers as it remembers, so that
nothing is ever taken twice.
"""

from __future__ import annotations

import hmac
import os
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Callable

PROOF_HEADER: Final = "X-Kvharbor-Proof"
SALT_HEADER: Final = "X-Kvharbor-Salt"
FRESH_BYTES: Final = 16
SEEN_MAX: Final = 65_536
_TAG: Final = b"kvh1.serve"


def _mac(secret: bytes, salt: str, number: str, path: str, body: bytes) -> str:
    said = [salt.encode(), number.encode(), path.encode(), body]
    framed = b"".join(len(each).to_bytes(8, "little") + each for each in said)
    return hmac.new(secret, _TAG + framed, "sha256").hexdigest()


def _fresh() -> str:
    return os.urandom(FRESH_BYTES).hex()


def prove(secret: bytes, salt: str, path: str, body: bytes) -> str:
    """The header's value for this question to the worker with that salt."""
    number = _fresh()
    return f"{number}:{_mac(secret, salt, number, path, body)}"


class Doorkeeper:
    """What a worker checks proofs by. Without a secret, whoever reaches it is let in: then it
    listens on its own host only."""

    def __init__(
        self, secret: bytes | None, seen_max: int = SEEN_MAX, fresh: Callable[[], str] = _fresh
    ) -> None:
        """Remember no question yet."""
        self._secret = secret
        self._seen_max = seen_max
        self._fresh = fresh
        self._seen: set[str] = set()
        self.salt = fresh()

    def admits(self, header: str, path: str, body: bytes) -> bool:
        """Whether this question comes from one who has the secret, for the first time."""
        if self._secret is None:
            return True
        number, _, proof = header.partition(":")
        want = _mac(self._secret, self.salt, number, path, body)
        if not hmac.compare_digest(want.encode(), proof.encode()) or number in self._seen:
            return False
        self._seen.add(number)
        if len(self._seen) >= self._seen_max:
            self._seen.clear()
            self.salt = self._fresh()
        return True
