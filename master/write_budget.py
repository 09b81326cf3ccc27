"""What of the drives' budget of writes is used up, kept for the next master.

Owns the key `write-budget`. A bucket that is full at every start is none where masters often begin.
Nothing is made up for while nobody leads: that errs on the side of the drive.
"""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING, Final

from kvstore.errors import CorruptPage

if TYPE_CHECKING:
    from master.core import Core

KEY: Final = "write-budget"
_BYTES: Final = struct.Struct("<Q")
SPENT_BYTES_MAX: Final = 1 << 60
"""No drive is owed more, and what is spent on top of it can still be noted."""


def spend(core: Core, size_bytes: int) -> None:
    """So much is on its way to a drive, whether admission was asked or not."""
    core.admission.wrote(size_bytes)
    noted_bytes = core.admission.to_note()
    if noted_bytes is not None:
        core.persist(((KEY, _BYTES.pack(noted_bytes)),))


def restore(core: Core, value: bytes) -> None:
    """Take in the durable value; CorruptPage when it is not ours: the bucket is full then."""
    try:
        (spent_bytes,) = _BYTES.unpack(value)
    except struct.error as error:
        raise CorruptPage(f"metadata value {KEY}: {error}") from error
    if spent_bytes > SPENT_BYTES_MAX:
        raise CorruptPage(f"metadata value {KEY}: {spent_bytes} bytes cannot be spent")
    core.admission.begin_with(spent_bytes)
