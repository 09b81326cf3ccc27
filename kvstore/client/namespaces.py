"""A namespace as a store holds it once the master knows it."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

import msgspec

from kvstore.ids import ROOT_PARENT, PageKey
from kvstore.namespace import Namespace
from kvstore.page import PageChain, name_key
from kvstore.require import require

if TYPE_CHECKING:
    from collections.abc import Sequence


class OpenedNamespace(msgspec.Struct, frozen=True):
    """A namespace and its short number in the records of this cluster."""

    namespace: Namespace
    ordinal: int

    def chain(
        self, tokens: Sequence[int], extra: bytes = b"", parent: PageKey = ROOT_PARENT
    ) -> PageChain:
        """Keys of the full pages of `tokens`; `extra` is e.g. the digest of a picture."""
        page_tokens = self.namespace.layout.page_tokens
        return PageChain.of_tokens(self.namespace.id, tokens, page_tokens, parent, extra)

    def names(self, names: Iterable[bytes]) -> PageChain:
        """Keys of named objects of an opaque namespace. They are in no order and have no parent."""
        require("names", names, Iterable, "a list of bytes")
        return PageChain(b"".join(name_key(self.namespace.id, name) for name in names))
