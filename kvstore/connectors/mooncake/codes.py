"""Return codes of Mooncake Store 0.3.13, and which of them our outcomes and errors become.

Pure. The numbers are that store's interface: programs compare them.
"""

from __future__ import annotations

from enum import IntEnum
from typing import TYPE_CHECKING, Final

from kvstore.client.outcomes import Hit, MissReason, Refused, RefusedReason
from kvstore.errors import CallerError, OutOfSpace, Unavailable

if TYPE_CHECKING:
    from kvstore.client.outcomes import PutOutcome, ReadOutcome
    from kvstore.errors import KVStoreError


class Code(IntEnum):
    """Those that we return."""

    OK = 0
    INTERNAL_ERROR = -1
    NO_AVAILABLE_HANDLE = -200
    """No room."""
    INVALID_PARAMS = -600
    REPLICA_IS_NOT_READY = -703
    OBJECT_NOT_FOUND = -704
    OBJECT_ALREADY_EXISTS = -705
    LEASE_EXPIRED = -707
    TRANSFER_FAIL = -800
    RPC_FAIL = -900
    UNAVAILABLE_IN_CURRENT_MODE = -1011
    """What this store does not offer."""
    TASK_NOT_FOUND = -1400


_REFUSED: Final[dict[RefusedReason, Code]] = {
    RefusedReason.IN_PROGRESS: Code.REPLICA_IS_NOT_READY,
    RefusedReason.OUT_OF_SPACE: Code.NO_AVAILABLE_HANDLE,
    RefusedReason.QUARANTINE_FULL: Code.NO_AVAILABLE_HANDLE,
    RefusedReason.FENCED: Code.TRANSFER_FAIL,
    RefusedReason.CHECKSUM: Code.TRANSFER_FAIL,
    RefusedReason.STALE: Code.TRANSFER_FAIL,
    RefusedReason.SOURCE_LOST: Code.TRANSFER_FAIL,
    RefusedReason.TRANSPORT: Code.TRANSFER_FAIL,
    RefusedReason.BUSY: Code.NO_AVAILABLE_HANDLE,
    RefusedReason.DEADLINE: Code.RPC_FAIL,
}
_MISSED: Final[dict[MissReason, Code]] = {
    MissReason.LEASE_ENDED: Code.LEASE_EXPIRED,
    MissReason.UNREACHABLE: Code.TRANSFER_FAIL,
    MissReason.TRANSPORT: Code.TRANSFER_FAIL,
    MissReason.BUSY: Code.TRANSFER_FAIL,
    MissReason.DEADLINE: Code.RPC_FAIL,
}


def code_of_put(outcome: PutOutcome) -> Code:
    """What a put returns: 0 also for what was there before."""
    if isinstance(outcome, Refused):
        return _REFUSED.get(outcome.reason, Code.INTERNAL_ERROR)
    return Code.OK


def code_of_read(outcome: ReadOutcome) -> Code:
    """What a read returns; bytes that are not the object's count as no object."""
    if isinstance(outcome, Hit):
        return Code.OK
    return _MISSED.get(outcome.reason, Code.OBJECT_NOT_FOUND)


def code_of_error(error: KVStoreError) -> Code:
    """What a call returns that could not be carried out."""
    if isinstance(error, OutOfSpace):
        return Code.NO_AVAILABLE_HANDLE
    if isinstance(error, Unavailable):
        return Code.RPC_FAIL
    if isinstance(error, CallerError):
        return Code.INVALID_PARAMS
    return Code.INTERNAL_ERROR
