"""Checksums of parity that is about to be made, from data that was read and verified for it.

Nothing is stored, and no worker seals by a checksum of its own making: each that stores parity
reads the data and encodes it once more, and seals only what equals the checksum that the master
was told here. Must not know where parity goes.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from kvstore.ids import KEY_BYTES
from kvstore.page import payload_checksum
from kvstore.wire.messages.stripes import ParityHashed
from workers.pull_requests import parity_asked

if TYPE_CHECKING:
    from kvstore.wire.messages.stripes import HashParity
    from workers.peer_source import PeerReads

PART: Final = 0
"""Of parity, whatever parts its data are."""


def hashed(reads: PeerReads, message: HashParity) -> ParityHashed:
    """Read the data, encode it, hash what comes out; of what could not be read, why that was."""
    from kvstore.erasure import encode  # the library is loaded by who has parity to make

    page = parity_asked(message)
    gathered = reads.gather(page, message.part_bytes, message.segments)
    outcomes = bytes([gathered.outcome(0, number) for number in range(page.k)])
    if any(outcomes):
        return ParityHashed(outcomes, b"")
    have = gathered.have(0)
    parity = [memoryview(bytearray(message.part_bytes)) for _ in range(page.m)]
    encode(page.k, page.m, [have[number] for number in range(page.k)], parity)
    found = b""
    for number, view in enumerate(parity):
        key = message.keys[number * KEY_BYTES : (number + 1) * KEY_BYTES]
        found += payload_checksum(view, key, PART).to_bytes(8, "little")
    return ParityHashed(outcomes, found)
