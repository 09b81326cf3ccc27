"""The text of an answer as its tokens come: what may be shown, and where it stops.

Pure. Characters that a token has only begun, and what may yet become a stop text, are held back:
what was shown is never taken back.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Sequence

    from workers.chat_formats import ChatFormat

UNFINISHED: Final = "\ufffd"
"""What decoders show of the beginning of a character."""


class AnswerText:
    """One answer."""

    def __init__(self, chat: ChatFormat, stops: Sequence[str]) -> None:
        """Nothing has come yet."""
        self._chat = chat
        self._stops = tuple(stops)
        self._tokens: list[int] = []
        self._shown = 0
        """Characters."""
        self.is_stopped = False
        """A stop text came; the text ends before it, and nothing follows."""

    def add(self, token: int) -> str:
        """What can be shown now that this token has come."""
        self._tokens.append(token)
        return self._show(self._chat.text(self._tokens), is_end=False)

    def end(self) -> str:
        """What was held back, now that no token follows."""
        return self._show(self._chat.text(self._tokens), is_end=True)

    def _show(self, whole: str, *, is_end: bool) -> str:
        if self.is_stopped:
            return ""
        stops = [at for stop in self._stops if (at := whole.find(stop)) >= 0]
        if stops:
            self.is_stopped = True
            whole = whole[: min(stops)]
        elif not is_end:
            whole = whole.rstrip(UNFINISHED)
            whole = whole[: len(whole) - self._held_back(whole)]
        fresh = whole[self._shown :]
        self._shown += len(fresh)
        return fresh

    def _held_back(self, whole: str) -> int:
        """Characters at the end that a stop text begins with."""
        longest = max((len(stop) - 1 for stop in self._stops), default=0)
        for size in range(min(longest, len(whole)), 0, -1):
            if any(stop.startswith(whole[-size:]) for stop in self._stops):
                return size
        return 0
