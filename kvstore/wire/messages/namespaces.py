"""Client to master: make a namespace known before its first put or lookup. Safe to repeat."""

from __future__ import annotations

from kvstore.namespace import Content, Layout
from kvstore.wire.messages.base import Message


class OpenNamespace(Message, frozen=True, tag=16):
    """Answered by NamespaceOpened once the namespace's value is stored durably.

    `ttl_s`: TTL of pages that are put from now on without one of their own; infinity for ever.
    None leaves it as it is, at first the master's own. `replicas`: how many of each of its pages
    are wanted where no put asks for more; 0 leaves it as it is, at first the master's own.
    """

    content: Content
    layout: Layout
    ttl_s: float | None = None
    replicas: int = 0


class NamespaceOpened(Message, frozen=True, tag=17):
    """`ordinal` is the namespace's short number in this cluster's records, never reused."""

    namespace: bytes
    ordinal: int
