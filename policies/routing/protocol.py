"""What routing policies decide: who computes a prompt, who goes on from there, and if both do.

Only workers that can take the request are offered. Speeds are what a worker has measured lately,
0 where it has not yet. What a master has given a worker since its last beat is counted in its offer
already, so that requests that come at once do not all go to the same one.
"""

from __future__ import annotations

from enum import StrEnum
from typing import TYPE_CHECKING, Protocol

import msgspec

if TYPE_CHECKING:
    from collections.abc import Sequence

    from policies.parameters import Parameters


class Place(msgspec.Struct, frozen=True, gc=False):
    """Where something is; empty: not known, and then of a rack or zone of its own."""

    host: str = ""
    rack: str = ""
    zone: str = ""


class Wish(msgspec.Struct, frozen=True, gc=False):
    """A request that wants a worker. Times are those of the pool."""

    tokens: int
    """Of the prompt, and whatever has been generated already: at least one."""
    new_tokens: int
    """Expected output that is still to come."""
    bytes_total: int
    """KV of all those tokens."""
    ready_s: float
    """When its prefill had finished; before that: when it was opened."""
    deadline_s: float
    """When its first token should be out."""
    place: Place = Place()
    """Where most of its pages lie; empty: nowhere yet."""
    prefix_tokens: int = 0
    """Of `tokens`, those whose KV the pool has, anywhere."""
    needs_adapter: bool = False


class PrefillOffer(msgspec.Struct, frozen=True, gc=False):
    """A worker that would compute the prompt."""

    worker: str
    host: str
    rack: str
    zone: str
    prefix_tokens: int
    """Of the wish's prefix, those whose KV lie on that host."""
    queued_tokens: int
    tokens_per_s: float
    has_adapter: bool = True
    """Loaded; without meaning where none is needed."""
    link_bytes_per_s: float = 0.0


class DecodeOffer(msgspec.Struct, frozen=True, gc=False):
    """A worker that would go on from the KV: it has the tokens free, and a place in its batch."""

    worker: str
    host: str
    rack: str
    zone: str
    free_tokens: int
    capacity_tokens: int
    running: int
    """Requests in its batch, and those that are on their way to it."""
    batch_max: int
    step_s: float
    prefix_tokens: int = 0
    """Of the wish's tokens, those whose KV lie on that host."""
    same_prefix: int = 0
    """Of `running`, those whose prompt begins with the same pages."""
    link_bytes: int = 0
    """On their way to it."""
    link_bytes_per_s: float = 0.0
    source_link_bytes: int = 0
    """On their way from where it would pull, to anybody."""


class Case(msgspec.Struct, frozen=True, gc=False):
    """A request for which there is a worker of role `both`."""

    fresh_tokens: int
    """Of its prompt, those to be computed: the pool does not have their KV."""
    failed_hand_overs: int = 0
    """Workers that were to compute this request's prompt and have not handed it over, or were to
    decode it and have not."""
    others: int = 1
    """Workers that could take it over from there, besides that one."""


class Alone(StrEnum):
    """Why a worker runs the whole request."""

    ALWAYS = "always"
    BREAK_EVEN = "break_even"
    FAILED = "failed_hand_overs"
    NO_OTHERS = "no_others"


class PrefillPolicy(Protocol):
    """Chooses who computes a prompt. Pure: the same wish and offers give the same worker."""

    parameters: Parameters
    """May be replaced by others of the same type at any time."""

    def choose(self, wish: Wish, offers: Sequence[PrefillOffer]) -> int | None:
        """Index of an offer; None: there is none, or none with the adapter that is needed."""
        ...


class DecodePolicy(Protocol):
    """Chooses who goes on, and who is served first. Pure, as PrefillPolicy."""

    parameters: Parameters
    """May be replaced by others of the same type at any time."""

    def order(self, wishes: Sequence[Wish], now_s: float) -> list[int]:
        """Indices of all wishes, the one to be routed first in front. Nobody waits for ever: each
        policy says when those that come later no longer overtake."""
        ...

    def choose(self, wish: Wish, offers: Sequence[DecodeOffer], now_s: float) -> int | None:
        """Index of an offer; None: there is none."""
        ...


class ColocationPolicy(Protocol):
    """Says whether a worker of role `both` runs a whole request. Pure."""

    parameters: Parameters
    """May be replaced by others of the same type at any time."""

    def alone(self, case: Case) -> Alone | None:
        """Why it should; None: hand over to decode."""
        ...
