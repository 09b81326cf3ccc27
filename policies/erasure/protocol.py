"""What an erasure policy decides: by which code pages are kept, and which are cold enough."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

import msgspec

if TYPE_CHECKING:
    from policies.parameters import Parameters


class Code(msgspec.Struct, frozen=True, gc=False):
    """m parts of parity stand for k parts of pages: any k of all of them give the others."""

    k: int
    m: int


class Resting(msgspec.Struct, frozen=True, gc=False):
    """How a page on a drive stands that might be striped."""

    idle_s: float
    """Since it was used last, or put."""
    left_s: float
    """Until it expires, if nobody uses it; infinity: never."""


class ErasurePolicy(Protocol):
    """Says what is striped from now on; what is striped stays so. Pure."""

    parameters: Parameters
    """May be replaced by others of the same type at any time."""

    @property
    def code(self) -> Code | None:
        """Of stripes that are made from now on; None: none are made."""
        ...

    def takes(self, page: Resting) -> bool:
        """Whether a page is cold, and worth the parity."""
        ...
