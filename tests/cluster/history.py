"""What clients asked of a pool and were told, and whether a right pool may have told them so.

Every client writes one line before a call and one after it, with the time of the machine's
monotonic clock, which all processes of a host share; a client that is killed leaves calls without
an end. A page is named by its key, its bytes by a digest of their own (not the pool's checksum).

What must hold, whatever was killed, stopped or cut meanwhile:
- a read of a page returns the bytes of a put of that page that had begun before the read ended, or
  a miss;
- not those of a put that had ended before a removal of that page began which had ended before the
  read began.
A miss is never wrong; `expected` names the pages that must be there once all is well again.
"""

from __future__ import annotations

import math
import os
from bisect import bisect_right
from collections import defaultdict
from dataclasses import dataclass, field
from enum import StrEnum
from hashlib import blake2b
from itertools import pairwise
from typing import TYPE_CHECKING, Final

import msgspec

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence
    from pathlib import Path

    from kvstore.clock import Clock

DIGEST_BYTES: Final = 8
WRONG_KEPT: Final = 20
"""Findings that are told in words; all are counted."""


class Op(StrEnum):
    """Calls that are written down."""

    PUT = "put"
    READ = "read"
    REMOVE = "remove"


class Began(msgspec.Struct, frozen=True, tag=True):
    """A call is about to be made. Of a put: `digests`, one a key."""

    number: int
    op: Op
    at_s: float
    keys: tuple[str, ...]
    digests: tuple[str, ...] = ()


class Ended(msgspec.Struct, frozen=True, tag=True):
    """It has returned. `results`, one a key: of a put what became of it, of a read the digest or
    nothing for a miss, of a removal whether the page was there. `error`: the code of what it
    raised instead."""

    number: int
    at_s: float
    results: tuple[str, ...] = ()
    error: str = ""


STORED: Final = "stored"
THERE: Final = "there"
REFUSED: Final = "refused"
WAS_THERE: Final = "was there"
WAS_NOT: Final = "was not"
MISSED: Final = ""
IS_IN: Final = (STORED, THERE)


def digest(payload: bytes | memoryview) -> str:
    """What a page's bytes are called in a history."""
    return blake2b(payload, digest_size=DIGEST_BYTES).hexdigest()


class Recorder:
    """Writes one client's history; each line is in the file when the call returns."""

    def __init__(self, path: Path, clock: Clock) -> None:
        """Begin the file anew."""
        self._clock = clock
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
        self._encode = msgspec.json.Encoder().encode
        self._calls = 0

    def close(self) -> None:
        """Nothing more comes."""
        os.close(self._file)

    def began(self, op: Op, keys: Sequence[str], digests: Sequence[str] = ()) -> int:
        """Note a call that follows; its number."""
        self._calls += 1
        self._write(Began(self._calls, op, self._clock.now_s(), tuple(keys), tuple(digests)))
        return self._calls

    def ended(self, number: int, results: Sequence[str]) -> None:
        """Note what a call returned."""
        self._write(Ended(number, self._clock.now_s(), tuple(results)))

    def failed(self, number: int, code: str) -> None:
        """Note that it raised an error of this code."""
        self._write(Ended(number, self._clock.now_s(), error=code))

    def _write(self, line: Began | Ended) -> None:
        data = self._encode(line) + b"\n"
        assert os.write(self._file, data) == len(data)


@dataclass(frozen=True)
class Call:
    """One call: `ended_s` is infinite, and `results` empty, where nobody knows its end."""

    op: Op
    began_s: float
    ended_s: float
    keys: tuple[str, ...]
    digests: tuple[str, ...]
    results: tuple[str, ...]
    error: str


def read_history(path: Path) -> list[Call]:
    """One client's calls; a last line that was not written whole is left out."""
    lines = path.read_bytes().split(b"\n")[:-1]
    decoder = msgspec.json.Decoder(Began | Ended)
    return list(calls_of(decoder.decode(line) for line in lines))


def calls_of(lines: Iterable[Began | Ended]) -> Iterator[Call]:
    """Pair beginnings with their ends."""
    running: dict[int, Began] = {}
    for line in lines:
        if isinstance(line, Began):
            running[line.number] = line
        else:
            yield _call(running.pop(line.number), line)
    for began in running.values():
        yield _call(began, Ended(began.number, math.inf))


def _call(began: Began, ended: Ended) -> Call:
    known = len(ended.results) == len(began.keys)
    assert known or not ended.results, ended
    return Call(
        began.op, began.at_s, ended.at_s, began.keys, began.digests, ended.results, ended.error
    )


@dataclass
class _Page:
    """What happened to one page."""

    puts: dict[str, list[tuple[float, float]]] = field(default_factory=lambda: defaultdict(list))
    """By digest: when each put began, and until when it may have taken effect."""
    removals: list[tuple[float, float]] = field(default_factory=list)
    """Those that have an end: when they ended and began, in the order of their ends."""
    last_in_s: float = -math.inf
    """When the last put that found or left it in the pool began."""
    last_removal_s: float = -math.inf
    """Until when the last removal, finished or not, may have taken effect."""

    def is_allowed(self, found: str, began_s: float, ended_s: float) -> bool:
        """Whether a read of that time may return these bytes."""
        done = bisect_right(self.removals, (began_s, math.inf))
        gone_s = max((began for _, began in self.removals[:done]), default=-math.inf)
        return any(
            put_began_s <= ended_s and put_ended_s > gone_s
            for put_began_s, put_ended_s in self.puts.get(found, ())
        )


@dataclass
class Findings:
    """What a history says of the pool."""

    puts: int = 0
    """Pages that were stored or found stored by their writers."""
    refused: int = 0
    """Pages whose put was refused or raised an error."""
    reads: int = 0
    """Pages that were read; each is verified here."""
    misses: int = 0
    removals: int = 0
    errors: dict[str, int] = field(default_factory=lambda: defaultdict(int))
    """Calls that raised an error, by its code."""
    wrong: int = 0
    """Pages read with bytes that nobody may have read."""
    stories: list[str] = field(default_factory=list)
    """The first of those."""
    longest_s: float = 0.0
    """Of all calls."""
    read_gap_s: float = 0.0
    """Longest time in which no call returned a page."""
    put_gap_s: float = 0.0
    """Longest time in which no page was stored."""


class History:
    """All clients' calls together."""

    def __init__(self, calls: Iterable[Call]) -> None:
        """Sort them by page."""
        self._calls = sorted(calls, key=lambda call: call.began_s)
        self._pages: dict[str, _Page] = defaultdict(_Page)
        for call in self._calls:
            if call.op is Op.PUT:
                self._note_put(call)
            elif call.op is Op.REMOVE:
                self._note_removal(call)
        for page in self._pages.values():
            page.removals.sort()

    def _note_put(self, call: Call) -> None:
        for i, key in enumerate(call.keys):
            result = call.results[i] if call.results else REFUSED
            page = self._pages[key]
            # A put that was refused or broken off may go on at the worker for a while.
            until_s = call.ended_s if result in IS_IN else math.inf
            page.puts[call.digests[i]].append((call.began_s, until_s))
            if result in IS_IN:
                page.last_in_s = max(page.last_in_s, call.began_s)

    def _note_removal(self, call: Call) -> None:
        until_s = math.inf if call.error else call.ended_s
        for key in call.keys:
            page = self._pages[key]
            if until_s < math.inf:
                page.removals.append((until_s, call.began_s))
            page.last_removal_s = max(page.last_removal_s, until_s)

    def expected(self) -> list[str]:
        """Pages that are in the pool now, unless it lost or evicted them."""
        return [key for key, page in self._pages.items() if page.last_in_s > page.last_removal_s]

    def check(self) -> Findings:
        """Hold every read against every put and removal."""
        found = Findings()
        for call in self._calls:
            if call.error:
                found.errors[call.error] += 1
            if call.ended_s < math.inf:
                found.longest_s = max(found.longest_s, call.ended_s - call.began_s)
            if call.op is Op.READ:
                self._check_read(call, found)
            elif call.op is Op.PUT:
                stored = sum(result in IS_IN for result in call.results)
                found.puts += stored
                found.refused += len(call.keys) - stored
            else:
                found.removals += len(call.results)
        found.read_gap_s = self._gap_s(Op.READ)
        found.put_gap_s = self._gap_s(Op.PUT)
        return found

    def _check_read(self, call: Call, found: Findings) -> None:
        for key, result in zip(call.keys, call.results, strict=False):
            if result == MISSED:
                found.misses += 1
                continue
            found.reads += 1
            page = self._pages.get(key)
            if page is None or not page.is_allowed(result, call.began_s, call.ended_s):
                found.wrong += 1
                if len(found.stories) < WRONG_KEPT:
                    found.stories.append(self._story(key, result, call))

    def _story(self, key: str, result: str, call: Call) -> str:
        page = self._pages.get(key, _Page())
        ended = page.removals[: bisect_right(page.removals, (call.began_s, math.inf))]
        removed = f"removed from {ended[-1][1]:.3f} to {ended[-1][0]:.3f}" if ended else "kept"
        puts = ", ".join(f"{a:.3f} to {b:.3f}" for a, b in page.puts.get(result, ())) or "never"
        return (
            f"page {key}: read from {call.began_s:.3f} to {call.ended_s:.3f} with bytes {result}, "
            f"which were put {puts}; last {removed}; bytes put of that page: {len(page.puts)}"
        )

    def _gap_s(self, op: Op) -> float:
        """Longest time between ends of calls of this kind that came to something."""
        ends_s = sorted(
            call.ended_s
            for call in self._calls
            if call.op is op and any(r not in (MISSED, REFUSED) for r in call.results)
        )
        return max((b - a for a, b in pairwise(ends_s)), default=0.0)
