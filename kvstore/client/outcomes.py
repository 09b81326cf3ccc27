"""What became of each page of a call. A miss or a refusal is a result, never an exception."""

from __future__ import annotations

from enum import StrEnum
from typing import Final

import msgspec

from kvstore.wire.messages.common import Outcome


class RefusedReason(StrEnum):
    """Why a page was not stored."""

    IN_PROGRESS = "in_progress"
    """Another put of the same part is open."""
    OUT_OF_SPACE = "out_of_space"
    PARENT_MISSING = "parent_missing"
    """The page before it is not in the pool: put that first."""
    QUARANTINE_FULL = "quarantine_full"
    """Extents of failed puts wait for their worker: back off."""
    FENCED = "fenced"
    CHECKSUM = "checksum"
    """The source changed while it was being stored, or memory is bad."""
    STALE = "stale"
    SOURCE_LOST = "source_lost"
    """The worker could no longer read the source buffer."""
    TRANSPORT = "transport"
    """The worker could not be reached, or did not finish."""
    BUSY = "busy"
    """Readers held every extent that was planned."""
    TOO_FEW_HOSTS = "too_few_hosts"
    """Fewer hosts lend now than replicas are wanted, and the put is strict."""
    TOO_FEW_REPLICAS = "too_few_replicas"
    """Fewer replicas than wanted within the deadline, and the put is strict; those stay."""
    DEADLINE = "deadline"
    """The call's deadline passed before this page's turn came."""
    OTHER = "other"


class MissReason(StrEnum):
    """Why a page was not read."""

    ABSENT = "absent"
    """Not in the pool, or no readable replica."""
    LEASE_ENDED = "lease_ended"
    """The lease ran out before the bytes were verified."""
    NO_LEASE = "no_lease"
    """The leader could grant no lease just now, and views need one."""
    CHECKSUM = "checksum"
    """Every replica's bytes differ from the writer's checksum; reported."""
    STALE = "stale"
    """The extent holds something else by now."""
    BUSY = "busy"
    """The worker is about to reuse the extent (zero-copy views only), or found no room in memory
    for a page from its disk: other readers had it all."""
    UNREACHABLE = "unreachable"
    """No transport reaches a worker that holds it."""
    TRANSPORT = "transport"
    """A transfer failed or did not finish in time."""
    DEADLINE = "deadline"
    """The call's deadline passed before this page's turn came."""


class Stored(msgspec.Struct, frozen=True):
    """This put sealed its parts of the page. `visible`: all parts of the page are in.

    `replicas` can be read of the `replicas_wanted`; None where the put did not wait for them.
    """

    visible: bool = True
    replicas_wanted: int | None = None
    replicas: int | None = None


class AlreadyThere(msgspec.Struct, frozen=True):
    """The pool held these parts before, or another put stored them meanwhile.

    Replicas as in Stored.
    """

    replicas_wanted: int | None = None
    replicas: int | None = None


class Refused(msgspec.Struct, frozen=True):
    """Not stored. Asking again before `retry_after_s` is unlikely to help."""

    reason: RefusedReason
    retry_after_s: float = 0.0


class Hit(msgspec.Struct, frozen=True):
    """The page's verified bytes are in place."""


class Miss(msgspec.Struct, frozen=True):
    """The page is to be computed; its place in the destination holds nothing of the pool's."""

    reason: MissReason


PutOutcome = Stored | AlreadyThere | Refused
ReadOutcome = Hit | Miss

_REFUSED: Final[dict[int, RefusedReason]] = {
    Outcome.OK: RefusedReason.DEADLINE,  # nothing was ever said against it
    Outcome.IN_PROGRESS: RefusedReason.IN_PROGRESS,
    Outcome.OUT_OF_SPACE: RefusedReason.OUT_OF_SPACE,
    Outcome.PARENT_MISSING: RefusedReason.PARENT_MISSING,
    Outcome.TOO_MANY_QUARANTINED: RefusedReason.QUARANTINE_FULL,
    Outcome.BUSY: RefusedReason.BUSY,
    Outcome.FENCED: RefusedReason.FENCED,
    Outcome.PLAN_CLOSED: RefusedReason.FENCED,
    Outcome.CHECKSUM: RefusedReason.CHECKSUM,
    Outcome.STALE: RefusedReason.STALE,
    Outcome.MISSING: RefusedReason.STALE,
    Outcome.SOURCE_LOST: RefusedReason.SOURCE_LOST,
    Outcome.TRANSPORT: RefusedReason.TRANSPORT,
    Outcome.TOO_FEW_HOSTS: RefusedReason.TOO_FEW_HOSTS,
}
_MISSED: Final[dict[int, MissReason]] = {
    Outcome.MISSING: MissReason.ABSENT,
    Outcome.CHECKSUM: MissReason.CHECKSUM,
    Outcome.BUSY: MissReason.BUSY,
    Outcome.TRANSPORT: MissReason.TRANSPORT,
}


def refused_reason(code: int) -> RefusedReason:
    """The reason behind an Outcome byte; codes of a newer peer become OTHER."""
    return _REFUSED.get(code, RefusedReason.OTHER)


def miss_reason(code: int) -> MissReason:
    """The reason behind an Outcome byte; any unknown doubt is STALE."""
    return _MISSED.get(code, MissReason.STALE)
