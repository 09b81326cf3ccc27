"""The plan of waiting for replicas: after a put, until the pages have as many as they are to have.

Pure, as all plans. Must not know how replicas are made.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import msgspec

from kvstore import limits
from kvstore.client.outcomes import AlreadyThere, Refused, RefusedReason, Stored
from kvstore.client.steps import Pause, Steps, ask
from kvstore.client.writes import PATIENCE, PAUSE_MAX_S, PAUSE_MIN_S
from kvstore.errors import DeadlineExceeded, MalformedMessage, OutOfSpace, Unavailable
from kvstore.ids import KEY_BYTES
from kvstore.wire.messages.replicas import AwaitReplicas, ReplicasCounted

if TYPE_CHECKING:
    from kvstore.client.outcomes import PutOutcome
    from kvstore.client.writes import PutRequest
    from kvstore.clock import Clock

RETRY_AFTER_S: Final = 1.0
"""A page that got too few replicas within a put's deadline will not have them at once."""
_UNKNOWN: Final = None, None


def replica_steps(
    request: PutRequest, outcomes: list[PutOutcome], clock: Clock
) -> Steps[list[PutOutcome]]:
    """The outcomes of a put, with how many replicas its pages got by its deadline.

    Those that were refused, or are not visible because other parts are missing, are not waited for.
    Where the put is strict a page that got fewer than it is to have counts as refused, also where
    nobody could tell; what it got stays.
    """
    waited = [page for page, outcome in enumerate(outcomes) if _is_visible(outcome)]
    counted = list(outcomes)
    for at in range(0, len(waited), limits.BATCH_PAGES_MAX):
        pages = waited[at : at + limits.BATCH_PAGES_MAX]
        keys = b"".join([request.chain.key(page) for page in pages])
        counts = yield from _count(request, keys, clock)
        for number, page in enumerate(pages):
            wanted, got = _UNKNOWN
            if counts is not None:  # a new leader may know of the pages, and not what was asked
                wanted, got = max(counts.wanted[number], request.replicas), counts.got[number]
            counted[page] = _outcome(outcomes[page], wanted, got, is_strict=request.strict)
    return counted


def _is_visible(outcome: PutOutcome) -> bool:
    return isinstance(outcome, AlreadyThere) or (isinstance(outcome, Stored) and outcome.visible)


def _count(request: PutRequest, keys: bytes, clock: Clock) -> Steps[ReplicasCounted | None]:
    """What the master answers within the deadline, if it does.

    Asked again where it knows of no replica at all: a new one has yet to hear from its workers.
    """
    counts, pause_s = None, PAUSE_MIN_S
    while (left_s := request.deadline_s - clock.now_s()) > 0:
        question = AwaitReplicas(request.opened.namespace.id, keys, left_s * PATIENCE)
        try:
            counts = yield from ask(question, ReplicasCounted, left_s)
        except (DeadlineExceeded, Unavailable, OutOfSpace):
            break  # the pages are stored: that is not to be lost in an error
        if not len(counts.wanted) == len(counts.got) == len(keys) // KEY_BYTES:
            raise MalformedMessage(f"ReplicasCounted: {len(counts.got)} pages of {len(keys)} bytes")
        if all(counts.got):
            break
        yield Pause(min(pause_s, left_s))
        pause_s = min(2 * pause_s, PAUSE_MAX_S)
    return counts


def _outcome(
    outcome: PutOutcome, wanted: int | None, got: int | None, *, is_strict: bool
) -> PutOutcome:
    if is_strict and (wanted is None or not got or got < wanted):
        return Refused(RefusedReason.TOO_FEW_REPLICAS, RETRY_AFTER_S)
    if isinstance(outcome, Stored | AlreadyThere):
        return msgspec.structs.replace(outcome, replicas_wanted=wanted, replicas=got)
    return outcome
