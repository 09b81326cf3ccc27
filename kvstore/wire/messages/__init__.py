"""Every message of the protocol, one file a conversation, and the one registry of them."""

from __future__ import annotations

from typing import Final

from kvstore.wire.messages import (
    engine,
    hello,
    membership,
    namespaces,
    operator,
    pins,
    puts,
    reads,
    relocation,
    replicas,
    stripes,
    tickets,
    transfers,
)
from kvstore.wire.messages.base import Message, tag_of

CONVERSATIONS: Final = (
    hello, namespaces, puts, reads, replicas, pins, operator, relocation, stripes, membership,
    transfers, engine, tickets,
)  # fmt: skip

RETIRED_TAGS: Final[frozenset[int]] = frozenset()
"""Tags of messages that are gone; never to be used again."""


def _registry() -> dict[int, type[Message]]:
    found: dict[int, type[Message]] = {}
    for module in CONVERSATIONS:
        for item in vars(module).values():
            if isinstance(item, type) and issubclass(item, Message) and item is not Message:
                tag = tag_of(item)
                assert found.setdefault(tag, item) is item, f"tag {tag} used twice"
                assert tag not in RETIRED_TAGS, f"tag {tag} is retired"
    return found


REGISTRY: Final[dict[int, type[Message]]] = _registry()
"""Message type by tag."""
