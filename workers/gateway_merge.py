"""One answer put together from the workers that take turns at it.

Pure. A token counts once, whoever sends it, and only from the highest claim that was seen: the
master fences, and this is where a fenced worker that does not know it yet is not heard any more.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from kvstore.errors import Fenced, MalformedMessage

if TYPE_CHECKING:
    from workers.serve_messages import Line


class Answer:
    """The tokens of one answer so far."""

    def __init__(self, tokens_max: int, end_token: int) -> None:
        """None has come yet."""
        self._tokens_max = tokens_max
        self._end_token = end_token
        self.tokens: Final[list[int]] = []
        self.claim = 0
        """The highest that was heard of."""

    @property
    def finish(self) -> str:
        """stop or length where it is complete; empty: more is to come."""
        if self.tokens and self.tokens[-1] == self._end_token:
            return "stop"
        return "length" if len(self.tokens) >= self._tokens_max else ""

    def begin(self, token: int) -> bool:
        """The first token, by prefill; whether it is new. Computed again elsewhere, it is not."""
        if self.tokens:
            return False
        self.tokens.append(token)
        return True

    def fence(self) -> None:
        """No claim counts from now on: one worker goes on by itself."""
        self.claim = 0

    def hear(self, line: Line) -> bool:
        """Whether the line brings a token that is new.

        Fenced for a line of a lower claim, MalformedMessage for one that leaves a token out.
        """
        if line.claim < self.claim:
            raise Fenced(f"claim {line.claim}, and {self.claim} was heard of")
        self.claim = line.claim
        if line.index < len(self.tokens):
            return False
        if line.index > len(self.tokens):
            raise MalformedMessage(f"token {line.index} came after {len(self.tokens)} tokens")
        self.tokens.append(line.token)
        return True
