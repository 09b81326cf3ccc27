"""A prompt that one engine computes and another goes on from, in vLLM's own terms.

A proxy sends `kv_transfer_params` with `do_remote_decode` to the first engine, has others back with
its answer, and sends those on to the second one as they are. All of it is a promise and none of it
is needed: what has not come when the deadline has passed is computed again. No KV travels here, and
the tokens behind the last full block are always computed again.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Final, NamedTuple

from kvstore.connectors.engine_lookups import NOTHING_PROMISED, Promised
from kvstore.errors import BadValue

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from kvstore.connectors.vllm.foreign import Request
    from kvstore.namespace import Namespace

_LOG: Final = logging.getLogger("kvharbor")

HERE: Final = "do_remote_decode"
"""This engine computes the prompt."""
THERE: Final = "do_remote_prefill"
"""Another one has."""
NAMESPACES: Final = "kvharbor_namespaces"
TOKENS: Final = "kvharbor_tokens"


class Handover(NamedTuple):
    """What an engine has said of a prompt that it has computed."""

    namespaces: tuple[bytes, ...]
    tokens: int
    """Of the prompt, in full blocks: these are on their way into the pool."""

    def params(self) -> dict[str, object]:
        """As `parsed` reads them."""
        names = [each.hex() for each in self.namespaces]
        return {THERE: True, HERE: False, NAMESPACES: names, TOKENS: self.tokens}


def parsed(params: Mapping[str, object]) -> Handover:
    """What `Handover.params` has made; BadValue names the field that it has not."""
    names, tokens = params.get(NAMESPACES), params.get(TOKENS)
    want = "the names that the other engine's answer had"
    if not isinstance(names, list) or not names:
        raise BadValue(NAMESPACES, names, want)
    try:
        namespaces = tuple([bytes.fromhex(each) for each in names])
    except (TypeError, ValueError) as error:
        raise BadValue(NAMESPACES, names, want) from error
    if type(tokens) is not int or tokens < 0:
        raise BadValue(TOKENS, tokens, "so many as the other engine's answer said, 0 or more")
    return Handover(namespaces, tokens)


def promised_to(request: Request, namespaces: Sequence[Namespace], until_s: float) -> Promised:
    """What another engine has promised this request.

    Never raises: who says nonsense is told so in the log, and served as anybody else is.
    """
    params = request.kv_transfer_params or {}
    if not params.get(THERE):
        return NOTHING_PROMISED
    try:
        handover = parsed(params)
    except BadValue as error:
        _LOG.warning("kvharbor: kv_transfer_params of %s: %s", request.request_id, error)
        return NOTHING_PROMISED
    if handover.namespaces != tuple([bytes(each.id) for each in namespaces]):
        _LOG.warning(
            "kvharbor: the engine that has computed the prompt of %s has other KV than this one: "
            "kvharbor doctor engine tells why", request.request_id,
        )  # fmt: skip
        return NOTHING_PROMISED
    return Promised(handover.tokens // namespaces[0].layout.page_tokens, until_s)


def told_on(request: Request, namespaces: Sequence[Namespace]) -> dict[str, object] | None:
    """What the engine that goes on is to be told, of a request whose end was asked for here."""
    if not (request.kv_transfer_params or {}).get(HERE):
        return None
    step = namespaces[0].layout.page_tokens
    # The last token was not computed: it is what the other engine begins with.
    tokens = (request.num_tokens - 1) // step * step
    return Handover(tuple([bytes(each.id) for each in namespaces]), tokens).params()
