"""Typed errors to Failure messages and back."""

from __future__ import annotations

import math
from typing import Final

from kvstore.errors import KVStoreError, NotLeader, error_from_wire
from kvstore.wire.messages.hello import Failure

TEXT_CHARACTERS_MAX: Final = 2000


def failure_of(error: KVStoreError) -> Failure:
    """What to answer a request that ended in `error`."""
    text = str(error)[:TEXT_CHARACTERS_MAX].encode(errors="replace").decode()
    where = error.where if isinstance(error, NotLeader) else ()
    return Failure(error.code, text, error.retry_after_s, where)


def error_of(failure: Failure) -> KVStoreError:
    """The error that the peer's `failure` reports."""
    error = error_from_wire(failure.code, failure.text)
    if math.isfinite(failure.retry_after_s) and failure.retry_after_s > 0:
        error.retry_after_s = failure.retry_after_s
    if isinstance(error, NotLeader):
        error.where = failure.where
    return error
