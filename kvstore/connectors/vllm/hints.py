"""What a request's client knows of its chain's future, as vLLM carries it: in `kv_transfer_params`.

    {"kv_transfer_params": {"kvharbor_hints": {"session_closed": true}}}

The names and values are those of `kvstore.Hints`. Pages that the request saves are put with them;
when it ends, its whole chain is told, since only then the session ends or the tool begins.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Final

from kvstore.errors import BadValue
from kvstore.hints import Hints

if TYPE_CHECKING:
    from kvstore.connectors.vllm.foreign import Request

_LOG: Final = logging.getLogger("kvharbor")

HINTS: Final = "kvharbor_hints"


def hints_of(request: Request) -> Hints | None:
    """The hints that came with a request, if any did.

    Never raises: who says nonsense is told so in the log, and served as anybody else is.
    """
    written = (request.kv_transfer_params or {}).get(HINTS)
    if written is None:
        return None
    try:
        return Hints.of(written)
    except BadValue as error:
        _LOG.warning("kvharbor: %s of %s: %s", HINTS, request.request_id, error)
        return None
