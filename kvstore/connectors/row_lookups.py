"""What is known of single rows that an engine's own cache tier asks for, answered from memory.

Pure: times are told, and questions are collected for whoever asks the pool beside the engine's
scheduler. As engine_lookups, whose states these are, for tiers that are asked row by row and not
told which rows follow each other. A row is forgotten with the last request that asked for it.
"""

from __future__ import annotations

from math import inf
from typing import TYPE_CHECKING, NamedTuple

from kvstore.connectors.engine_lookups import DEADLINE_S, MEMO_S, NEXT, Knowledge, News

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence


class RowQuestion(NamedTuple):
    """Rows that the pool has to be asked for, all at once."""

    number: int
    """Which question of this process it is: answers to older ones are late."""
    keys: tuple[bytes, ...]


class RowAnswer(NamedTuple):
    """What became of a question."""

    question: RowQuestion
    there: Sequence[bool] | None
    """For each of its rows; None where the pool is in trouble."""
    lease_id: int
    """What is there is leased under this number."""


class _Row:
    __slots__ = ("asked_s", "is_there", "knowledge", "known_s", "number", "requests")

    def __init__(self) -> None:
        self.knowledge = Knowledge.ASKED
        self.number = 0
        self.asked_s = 0.0
        self.known_s = 0.0
        self.is_there = False
        self.requests: set[str] = set()

    def hear(self, news: News) -> None:
        self.knowledge = NEXT[self.knowledge, news]


class RowLookups:
    """Knowledge of all rows of one scheduler. Not thread-safe: the scheduler's thread only."""

    def __init__(self, deadline_s: float = DEADLINE_S) -> None:
        """A request is held back for `deadline_s` at most."""
        self._deadline_s = deadline_s
        self._rows: dict[bytes, _Row] = {}
        self._keys_of: dict[str, set[bytes]] = {}
        self._to_ask: list[bytes] = []
        self._asked = 0

    def __len__(self) -> int:
        return len(self._rows)

    def __contains__(self, key: bytes) -> bool:
        return key in self._rows

    def is_there(self, request: str, key: bytes, now_s: float, *, hold: bool) -> bool | None:
        """Whether the pool has the row; None: ask again. Without `hold` nobody waits for that."""
        row = self._rows.get(key)
        if row is None:
            row = self._rows[key] = _Row()
            self._ask(key, row, now_s)
        row.requests.add(request)
        self._keys_of.setdefault(request, set()).add(key)
        if row.knowledge is Knowledge.KNOWN and row.is_there and now_s - row.known_s > MEMO_S:
            row.hear(News.AGED)
            self._ask(key, row, now_s)
        if row.knowledge is Knowledge.ASKED:
            if hold and now_s - row.asked_s < self._deadline_s:
                return None
            row.hear(News.NO_ANSWER)
        return hold and row.knowledge is Knowledge.KNOWN and row.is_there

    def question(self) -> RowQuestion | None:
        """What was asked for since the last call, if anybody still wants to know."""
        keys = tuple([key for key in self._to_ask if key in self._rows])
        self._to_ask.clear()
        if not keys:
            return None
        self._asked += 1
        for key in keys:
            self._rows[key].number = self._asked
        return RowQuestion(self._asked, keys)

    def hear(self, answer: RowAnswer, now_s: float) -> list[bytes]:
        """An answer has come, for rows that may have been forgotten, or asked for again.

        Those of them that somebody may be promised from now on.
        """
        question, there, _ = answer
        promised: list[bytes] = []
        for i, key in enumerate(question.keys):
            row = self._rows.get(key)
            if row is None or row.number != question.number:
                continue
            if there is None:
                row.hear(News.NO_ANSWER)
                continue
            row.is_there, row.known_s = there[i], now_s
            row.hear(News.ANSWERED)
            if row.is_there and row.knowledge is Knowledge.KNOWN:
                promised.append(key)
        return promised

    def leases_ended(self, keys: Iterable[bytes]) -> None:
        """What was leased of these rows is so no more: they are asked for anew if wanted again."""
        for key in keys:
            if key in self._rows:
                self._rows[key].known_s = -inf

    def load_failed(self, keys: Iterable[bytes]) -> None:
        """These rows did not come: whoever asks for them now never asks for them again."""
        for key in keys:
            if key in self._rows:
                self._rows[key].hear(News.LOAD_FAILED)

    def end(self, request: str) -> list[bytes]:
        """The request has gone: rows that nobody wants to know of any more."""
        forgotten: list[bytes] = []
        for key in self._keys_of.pop(request, ()):
            row = self._rows[key]
            row.requests.discard(request)
            if not row.requests:
                del self._rows[key]
                forgotten.append(key)
        return forgotten

    def _ask(self, key: bytes, row: _Row, now_s: float) -> None:
        row.number, row.asked_s = 0, now_s
        self._to_ask.append(key)
