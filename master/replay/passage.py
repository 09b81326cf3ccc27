"""What a replay keeps of a request that is under way, and of an inference worker."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from master.replay.serving_report import Served

if TYPE_CHECKING:
    from master.replay.engines import Engine, Row


class Request(msgspec.Struct, eq=False):
    """One that is under way."""

    number: int
    served: Served
    pages: tuple[int, ...]
    keys: bytes
    ticket: int = 0
    prefix_pages: int = 0
    generated: int = 0
    computed_s: float = 0.0
    """That its prompt took from its turn on: layers are pulled meanwhile."""
    source: Worker | None = None
    """Who has its KV."""
    route: int = 0
    token: int = 0

    @property
    def tokens(self) -> int:
        """KV tokens that it has."""
        return self.served.request.tokens + self.generated

    @property
    def left(self) -> int:
        """Tokens that are still to come."""
        return max(1, self.served.request.new_tokens) - self.generated


class Worker:
    """One inference worker, and what it has of requests."""

    def __init__(self, name: str, role: str, number: int, engine: Engine) -> None:
        """Not yet joined."""
        self.name = name
        self.role = role
        self.number = number
        self.engine = engine
        self.life = 0
        """0: it has left, and not joined again."""
        self.is_draining = False
        self.rows: dict[Request, Row | None] = {}
        """Answers that run here; None: its KV is on its way."""
        self.sends_until_s = self.gets_until_s = 0.0
        """When its port has carried, in either direction, what it has to."""
