"""Client to master: make a namespace known before its first put or lookup. Safe to repeat."""

from __future__ import annotations

from kvstore.namespace import Content, Layout
from kvstore.wire.messages.base import Message


class OpenNamespace(Message, frozen=True, tag=16):
    """Answered by NamespaceOpened once the namespace's value is stored durably."""

    content: Content
    layout: Layout


class NamespaceOpened(Message, frozen=True, tag=17):
    """`ordinal` is the namespace's short number in this cluster's records, never reused."""

    namespace: bytes
    ordinal: int
