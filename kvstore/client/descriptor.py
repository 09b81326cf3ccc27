"""What a decode worker checks of the ticket that it has claimed, before it pulls anything. Pure.

The gateway sends the prompt and what it has streamed so far; the master says what lies where. Each
field must be what follows from those and from the worker's own namespace: a mistake anywhere would
be a wrong answer that looks like a right one.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvstore.block_hashes import OWN_HASHING, chain_of
from kvstore.errors import BadValue
from kvstore.ids import KEY_BYTES
from kvstore.namespace import tails

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvstore.block_hashes import Hashing
    from kvstore.namespace import Namespace
    from kvstore.page import PageChain
    from kvstore.wire.messages.tickets import TicketClaimed


def check_descriptor(
    claimed: TicketClaimed,
    namespace: Namespace,
    prompt: Sequence[int],
    streamed: Sequence[int] = (),
    extra: bytes = b"",
    *,
    is_ahead: bool = False,
    hashing: Hashing = OWN_HASHING,
) -> int:
    """BadValue names the field that contradicts the rest. Returns how many tokens' KV the tail has.

    `streamed` are generated tokens that the gateway has, of whoever; the ticket may know of fewer,
    and of more, but of no others. Its pages may be fewer than there are full ones, where the pool
    had no room: the rest is computed again. A claim ahead knows of no token, and of no tail.
    `hashing` is where the fleet's pages have their names from.
    """
    if claimed.token <= 0:
        raise BadValue("token", claimed.token, "a claim's, above 0")
    if claimed.namespace != namespace.id:
        raise BadValue("namespace", claimed.namespace.hex(), namespace.id.hex())
    page_tokens = namespace.layout.page_tokens
    if claimed.page_tokens != page_tokens:
        raise BadValue("page_tokens", claimed.page_tokens, str(page_tokens))
    if claimed.prompt_tokens != len(prompt):
        raise BadValue("prompt_tokens", claimed.prompt_tokens, str(len(prompt)))
    known = min(len(claimed.tokens), len(streamed))
    if is_ahead:
        if claimed.tokens or claimed.tail.key:
            raise BadValue("tokens, tail", (claimed.tokens, claimed.tail.key.hex()), "none yet")
    elif not claimed.tokens or claimed.tokens[:known] != tuple(streamed[:known]):
        want = f"one token at least, and {list(streamed[:known])} first"
        raise BadValue("tokens", claimed.tokens, want)
    # The last token was not computed yet: nothing follows it.
    computed = [*prompt, *claimed.tokens[:-1]]
    pages = _check_keys(claimed.keys, chain_of(namespace, computed, hashing, extra))
    return _check_tail(claimed, namespace, len(computed) - pages * page_tokens)


def _check_keys(keys: bytes, chain: PageChain) -> int:
    if len(keys) % KEY_BYTES or not chain.packed.startswith(keys):
        raise BadValue("keys", keys.hex(), f"leading pages of {chain.packed.hex()}")
    return len(keys) // KEY_BYTES


def _check_tail(claimed: TicketClaimed, namespace: Namespace, behind: int) -> int:
    """The tail has the tokens behind the last page, all of them and nothing else."""
    tail = claimed.tail
    if not tail.key:
        if tail.size_bytes:
            raise BadValue("tail.size_bytes", tail.size_bytes, "0, as there is no tail")
        return 0
    if len(tail.key) != KEY_BYTES:
        raise BadValue("tail.key", tail.key.hex(), f"one of {KEY_BYTES} bytes, or none")
    own = tails(namespace.content.tenant).id
    if tail.namespace != own:
        raise BadValue("tail.namespace", tail.namespace.hex(), own.hex())
    page_tokens = namespace.layout.page_tokens
    if not 0 < behind < page_tokens:
        want = f"none: {behind} tokens lie behind the last page, and a tail has 1 to "
        raise BadValue("tail.key", tail.key.hex(), f"{want}{page_tokens - 1}")
    size = behind * namespace.page_bytes // page_tokens
    if tail.size_bytes != size:
        raise BadValue("tail.size_bytes", tail.size_bytes, f"{size} for {behind} tokens")
    return behind
