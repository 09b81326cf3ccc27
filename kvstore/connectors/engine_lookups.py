"""What an engine's scheduler knows of the pool for each request, answered from memory.

Pure: times are told, and questions are handed to whoever asks the pool beside the scheduler. An
answer is "not yet" while a question is out, and nothing after a deadline: the scheduler never
waits. Asking changes nothing but the age of what is known.
"""

from __future__ import annotations

from enum import StrEnum
from math import inf
from typing import TYPE_CHECKING, Final, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

DEADLINE_S: Final = 0.02
"""A request is held back so long for the pool's answer."""
MEMO_S: Final = 5.0
"""An answer is asked for anew when it is older: its leases would end before a load does."""

SOON_S: Final = 0.005
"""What was promised to a request and is not there yet is asked for again after so long."""

QUIET_S: Final = 1.0
"""After a failed load nobody is promised anything for so long: what was leased a moment ago did
not come, so the way to it is in trouble, of which only the ranks know."""


class Knowledge(StrEnum):
    """What is known of one request's blocks."""

    ASKED = "asked"
    KNOWN = "known"
    GIVEN_UP = "given_up"
    """No answer in time, or the pool is in trouble: computed without it."""
    FAILED = "failed"
    """A load failed: this request never asks again, or it would for ever."""


class News(StrEnum):
    """What changes it."""

    ANSWERED = "answered"
    NO_ANSWER = "no_answer"
    AGED = "aged"
    LOAD_FAILED = "load_failed"


NEXT: Final[dict[tuple[Knowledge, News], Knowledge]] = {
    (Knowledge.ASKED, News.ANSWERED): Knowledge.KNOWN,
    (Knowledge.ASKED, News.NO_ANSWER): Knowledge.GIVEN_UP,
    (Knowledge.ASKED, News.LOAD_FAILED): Knowledge.FAILED,
    (Knowledge.KNOWN, News.AGED): Knowledge.ASKED,
    (Knowledge.KNOWN, News.LOAD_FAILED): Knowledge.FAILED,
    # Late, but of use once the request is preempted; until then its saves know what is there.
    (Knowledge.GIVEN_UP, News.ANSWERED): Knowledge.KNOWN,
    (Knowledge.GIVEN_UP, News.NO_ANSWER): Knowledge.GIVEN_UP,
    (Knowledge.GIVEN_UP, News.LOAD_FAILED): Knowledge.FAILED,
    (Knowledge.FAILED, News.ANSWERED): Knowledge.FAILED,  # V2: there is no way out
    (Knowledge.FAILED, News.NO_ANSWER): Knowledge.FAILED,
    (Knowledge.FAILED, News.LOAD_FAILED): Knowledge.FAILED,
}


class Promised(NamedTuple):
    """What somebody else has said to be on its way into the pool."""

    blocks: int
    until_s: float
    """The request waits so long for it, and then goes by what there is."""


NOTHING_PROMISED: Final = Promised(0, 0.0)


class Held(NamedTuple):
    """What the pool holds of a request's blocks."""

    leading: int
    """Leading blocks that every group with chains has, and every rank."""
    windows: tuple[bytes, ...] = ()
    """For each group with a window, a byte for each of these blocks: 1 where it is there."""


class Question(NamedTuple):
    """Blocks of a request that somebody has to ask the pool for."""

    request: str
    number: int
    """Which question of this process it is: answers to older ones are late."""
    hashes: tuple[bytes, ...]


class Answer(NamedTuple):
    """What became of a question; None where the pool is in trouble."""

    request: str
    number: int
    held: Held | None


class _Known:
    """One request's knowledge."""

    __slots__ = ("asked_s", "held", "knowledge", "known_s", "number", "promised", "unleased")

    def __init__(self, promised: Promised) -> None:
        self.promised = promised
        self.knowledge = Knowledge.ASKED
        self.number = 0
        self.unleased = 0
        """The question whose leases were given back, be it answered or not."""
        self.asked_s = 0.0
        self.known_s = 0.0
        self.held: Held | None = None

    def hear(self, news: News) -> None:
        self.knowledge = NEXT[self.knowledge, news]


class Lookups:
    """Knowledge of all requests of one scheduler. Not thread-safe: the scheduler's thread only."""

    def __init__(
        self,
        window_blocks: Sequence[int],
        block_tokens: int,
        ask: Callable[[Question], None],
        deadline_s: float = DEADLINE_S,
        load_tokens_min: int = 0,
    ) -> None:
        """`window_blocks` has, for each group with a window, how many last blocks it needs.

        Fewer than `load_tokens_min` are not worth a load, and nobody is held back for them.
        """
        self._deadline_s = deadline_s
        self._blocks_min = -(-load_tokens_min // block_tokens)
        self._window_blocks = tuple(window_blocks)
        self._block_tokens = block_tokens
        self._ask = ask
        self._known: dict[str, _Known] = {}
        self._asked = 0
        self._quiet_until_s = 0.0

    def __len__(self) -> int:
        return len(self._known)

    def begin(
        self,
        request: str,
        hashes: Sequence[bytes],
        now_s: float,
        *,
        hold: bool,
        promised: Promised = NOTHING_PROMISED,
    ) -> None:
        """A request has come: ask for it; without `hold` nobody waits for the answer."""
        known = self._known[request] = _Known(promised)
        self._question(request, known, hashes, now_s)
        if not hold:
            known.hear(News.NO_ANSWER)

    def hear(self, answer: Answer, now_s: float) -> None:
        """An answer has come, for a request that may have gone, or have asked again."""
        known = self._known.get(answer.request)
        if known is None or known.number != answer.number:
            return
        if answer.held is None:
            known.hear(News.NO_ANSWER)
            return
        known.held = answer.held
        known.known_s = -inf if answer.number == known.unleased else now_s
        known.hear(News.ANSWERED)

    def blocks(
        self, request: str, hashes: Sequence[bytes], first: int, tokens: int, now_s: float
    ) -> int | None:
        """Blocks that can be loaded beyond the `first` that the engine has; None: ask again.

        `tokens` are the request's, the last of which has to be computed.
        """
        known = self._known.get(request)
        if known is None:
            return 0
        limit = (tokens - 1) // self._block_tokens
        least = self._least(known)
        if limit - first < least:
            return 0
        found, is_early = 0, now_s < known.promised.until_s
        if known.knowledge is Knowledge.KNOWN and known.held is not None:
            found = restorable(known.held, self._window_blocks, first, limit) - first
            is_early = is_early and first + found < min(known.promised.blocks, limit)
            if now_s - known.known_s > (SOON_S if is_early else MEMO_S):
                known.hear(News.AGED)
                self._question(request, known, hashes, now_s)
            elif is_early:
                return None
        if known.knowledge is Knowledge.ASKED:
            if is_early or now_s - known.asked_s < self._deadline_s:
                return None
            known.hear(News.NO_ANSWER)
        is_quiet = now_s < self._quiet_until_s
        is_given = known.knowledge is Knowledge.KNOWN and not is_quiet and found >= least
        return found if is_given else 0

    def short(self, request: str, first: int, tokens: int) -> int:
        """Blocks beyond the `first` that the pool has, and which are too few to be loaded."""
        known, held = self._known.get(request), self.held(request)
        if known is None or held is None:
            return 0
        limit = (tokens - 1) // self._block_tokens
        found = restorable(held, self._window_blocks, first, limit) - first
        return found if found < self._least(known) else 0

    def held(self, request: str) -> Held | None:
        """What the pool was last found to hold, if that is known and no load contradicted it."""
        known = self._known.get(request)
        if known is None or known.knowledge is Knowledge.FAILED:
            return None
        return known.held

    def leases_ended(self, request: str) -> None:
        """What was leased for it is so no more: it is asked for anew before it is promised."""
        known = self._known.get(request)
        if known is not None:
            known.known_s, known.unleased = -inf, known.number

    def load_failed(self, request: str, now_s: float) -> None:
        """What was promised did not come: never ask for this request again."""
        self._quiet_until_s = now_s + QUIET_S
        known = self._known.get(request)
        if known is not None:
            known.hear(News.LOAD_FAILED)

    def end(self, request: str) -> None:
        """The request has gone."""
        self._known.pop(request, None)

    def _least(self, known: _Known) -> int:
        """Blocks that are worth a load; any, of a prompt that another engine has computed."""
        return 0 if known.promised.blocks else self._blocks_min

    def _question(self, request: str, known: _Known, hashes: Sequence[bytes], now_s: float) -> None:
        self._asked += 1
        known.number, known.asked_s = self._asked, now_s
        self._ask(Question(request, self._asked, tuple(hashes)))


def restorable(held: Held, window_blocks: Sequence[int], first: int, limit: int) -> int:
    """The longest prefix, in blocks, that all groups can be brought to; `first` where none is.

    Of a group with a window only its last blocks must be there; those before `first` the engine
    has. A hole in a window makes the prefix end before the hole, or past its reach.
    """
    blocks = min(held.leading, limit)  # V1
    while blocks > first:
        hole = max(
            (
                flags.rfind(0, max(first, blocks - reach), blocks)
                for flags, reach in zip(held.windows, window_blocks, strict=True)
            ),
            default=-1,
        )
        if hole < 0:
            return blocks
        blocks = hole
    return first
