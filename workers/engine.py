"""Requests that decode together: who joins and leaves between steps, and what room they take.

Owns the order of the work and the account of KV tokens. What a forward pass is, and where the KV
lies meanwhile, is a `Forward`'s: `batching.py` computes rows together, `one_by_one.py` any model.
Knows no pool and no socket, and is used by one thread.
"""

from __future__ import annotations

import enum
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, Generic, Protocol, TypeAlias, TypeVar

from kvstore.errors import BadValue, OutOfSpace
from workers.sampling import pick

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch
    from transformers import DynamicCache

CHUNK_TOKENS: Final = 256
"""Tokens of a prompt that one step computes: what running requests wait for a new one."""
ROWS_MAX: Final = 8
SEEDS: Final = 1 << 63

KV = TypeVar("KV")


@dataclass(frozen=True)
class EngineRequest:
    """Tokens to go on from, at most how far, and how each next token is chosen.

    `tokens` may have been generated elsewhere in part: with the same seed, the tokens that follow
    are the same wherever they are generated.
    """

    id: str
    tokens: tuple[int, ...]
    max_tokens: int
    """How many more."""
    temperature: float = 0.0
    """0: the most likely token, always."""
    top_p: float = 1.0
    seed: int = 0
    stop: frozenset[int] = frozenset()
    """Tokens after which nothing follows; the one that stopped it is generated, too."""
    expected_tokens: int | None = None
    """How many of `max_tokens` are likely to follow; None: all."""

    def __post_init__(self) -> None:
        """Refuse what no engine could run: BadValue."""
        if not self.tokens:
            raise BadValue("tokens", self.tokens, "one token at least")
        if self.max_tokens < 1:
            raise BadValue("max_tokens", self.max_tokens, "at least 1")
        if self.expected_tokens is not None and self.expected_tokens < 1:
            raise BadValue("expected_tokens", self.expected_tokens, "at least 1")
        if not (math.isfinite(self.temperature) and self.temperature >= 0):
            raise BadValue("temperature", self.temperature, "0 or a finite number above")
        if not 0 < self.top_p <= 1:
            raise BadValue("top_p", self.top_p, "above 0, at most 1")
        if not 0 <= self.seed < SEEDS:
            raise BadValue("seed", self.seed, f"0 to {SEEDS - 1}")

    @property
    def room(self) -> int:
        """KV tokens that are set aside for it."""
        expected = self.max_tokens if self.expected_tokens is None else self.expected_tokens
        return len(self.tokens) + min(expected, self.max_tokens)

    @property
    def most(self) -> int:
        """KV tokens that it may come to have."""
        return len(self.tokens) + self.max_tokens


class Finish(enum.StrEnum):
    """Why no token follows."""

    STOP = "stop"
    LENGTH = "length"


@dataclass(frozen=True)
class Taken:
    """What another engine needs to go on with a request, which has left this one or still runs."""

    tokens: tuple[int, ...]
    """Prompt and generated."""
    max_tokens: int
    """How many more were wanted."""
    cache: DynamicCache
    """KV of the leading tokens; of all but the last where nothing but decoding was left."""


@dataclass(frozen=True)
class Generated:
    """One token of one request."""

    request_id: str
    token: int
    position: int
    """Its index in the request's tokens."""
    finish: Finish | None = None
    taken: Taken | None = None
    """With `finish`: the request has left."""


class Forward(Protocol[KV]):
    """A model's forward passes, and the KV of rows between them."""

    def hold(self, cache: DynamicCache | None) -> KV:
        """A row that begins with this KV, which is the row's from now on. BadValue: not ours."""
        ...

    def held_tokens(self, kv: KV) -> int:
        """How many tokens' KV the row has."""
        ...

    def extend(self, kv: KV, tokens: Sequence[int]) -> torch.Tensor:
        """Compute these tokens after what the row has; logits after the last, [vocabulary]."""
        ...

    def decode(self, rows: Sequence[KV], tokens: Sequence[int]) -> torch.Tensor:
        """Compute one more token of each row; logits after each, [rows, vocabulary].

        The same bits as `extend` with this token on each row alone.
        """
        ...

    def cache(self, kv: KV) -> DynamicCache:
        """The row's KV as transformers has it: what it has now, however the row goes on (E5)."""
        ...


class _Row(Generic[KV]):
    """A request in the engine."""

    def __init__(self, request: EngineRequest, kv: KV) -> None:
        self.request: Final = request
        self.kv: Final = kv
        self.tokens: Final = list(request.tokens)

    @property
    def left(self) -> int:
        return self.request.most - len(self.tokens)

    @property
    def room(self) -> int:
        """It has outgrown what was expected where it is all that it has."""
        return max(self.request.room, len(self.tokens))

    def finish(self) -> Finish | None:
        if self.tokens[-1] in self.request.stop:
            return Finish.STOP
        return None if self.left else Finish.LENGTH


class Engine(Generic[KV]):
    """Continuous batching over one model: rows join and leave between any two steps.

    A step computes one chunk of the oldest prompt that is not complete, then one token of every
    row that is. Chunks end at multiples of `chunk_tokens`: two engines that begin a prompt from
    the same KV cut it alike, and so give the same bits.
    """

    def __init__(
        self,
        forward: Forward[KV],
        *,
        capacity_tokens: int,
        rows_max: int = ROWS_MAX,
        chunk_tokens: int = CHUNK_TOKENS,
    ) -> None:
        """Run nothing yet. `capacity_tokens` are KV tokens of all rows together."""
        for field, value in (
            ("capacity_tokens", capacity_tokens),
            ("rows_max", rows_max),
            ("chunk_tokens", chunk_tokens),
        ):
            if value < 1:
                raise BadValue(field, value, "at least 1")
        self.capacity_tokens: Final = capacity_tokens
        self.rows_max: Final = rows_max
        self._chunk_tokens: Final = chunk_tokens
        self._forward: Final = forward
        self._rows: Final[dict[str, _Row[KV]]] = {}

    @property
    def free_tokens(self) -> int:
        """KV tokens that no row has, or may yet want."""
        return self.capacity_tokens - sum(row.room for row in self._rows.values())

    @property
    def free_rows(self) -> int:
        """How many more requests may run."""
        return self.rows_max - len(self._rows)

    @property
    def waiting_tokens(self) -> int:
        """Of prompts, still to be computed before their next token is known."""
        wanting = map(self._wanting, self._rows.values())
        return sum(tokens for tokens in wanting if tokens > 1)

    @property
    def running(self) -> tuple[str, ...]:
        """Ids of the requests, oldest first."""
        return tuple(self._rows)

    def add(self, request: EngineRequest, cache: DynamicCache | None = None) -> None:
        """Let a request join the next step. `cache` has the KV of its first tokens, not of all.

        The cache is the engine's from now on. Raises OutOfSpace where it does not fit now,
        BadValue where it never would, its id is running, or the cache is not of its tokens.
        """
        if request.id in self._rows:
            raise BadValue("id", request.id, "one that is not running")
        if request.most > self.capacity_tokens:
            want = f"at most {self.capacity_tokens} tokens with what is to be generated"
            raise BadValue("tokens", request.most, want)
        if request.room > self.free_tokens or not self.free_rows:  # E2
            raise OutOfSpace(
                f"{request.id} wants {request.room} tokens and a row; "
                f"{self.free_tokens} tokens and {self.free_rows} rows are free"
            )
        kv = self._forward.hold(cache)
        if self._forward.held_tokens(kv) >= len(request.tokens):
            held = self._forward.held_tokens(kv)
            raise BadValue("cache", f"{held} tokens", f"fewer than {len(request.tokens)}")
        self._rows[request.id] = _Row(request, kv)

    def crowded_out(self) -> str | None:
        """The request that has to leave before the next step, as others have grown beyond what was
        expected: the youngest, for which least was done. One alone always has room (E2).
        """
        needed = sum(len(row.tokens) for row in self._rows.values())
        return next(reversed(self._rows)) if needed > self.capacity_tokens else None

    def step(self) -> list[Generated]:
        """One more token of every request whose prompt is complete; none where nothing runs.

        What the model raises comes through, and the engine is of no use any more.
        """
        generated = self._prefill()
        fresh = {one.request_id for one in generated}
        rows = [row for row in self._rows.values() if self._wanting(row) == 1]
        rows = [row for row in rows if row.request.id not in fresh]
        if rows:
            logits = self._forward.decode([r.kv for r in rows], [r.tokens[-1] for r in rows])
            generated += [self._generated(row, of) for row, of in zip(rows, logits, strict=True)]
        return generated

    def cancel(self, request_id: str) -> bool:
        """Drop a request and its KV. False: it does not run (any more)."""
        return self._rows.pop(request_id, None) is not None

    def export(self, request_id: str) -> Taken:
        """Take a request out, to go on elsewhere. Raises BadValue for one that does not run."""
        return self._take(self._running(request_id))

    def look(self, request_id: str) -> Taken:
        """As `export`, of a request that goes on. Nothing is copied."""
        return self._taken(self._running(request_id))

    def _running(self, request_id: str) -> _Row[KV]:
        if request_id not in self._rows:
            raise BadValue("request_id", request_id, f"one of {list(self._rows)}")
        return self._rows[request_id]

    def _prefill(self) -> list[Generated]:
        row = next((row for row in self._rows.values() if self._wanting(row) > 1), None)
        if row is None:
            return []
        held = self._forward.held_tokens(row.kv)
        end = chunk_end(held, len(row.tokens), self._chunk_tokens)
        logits = self._forward.extend(row.kv, row.tokens[held:end])
        return [self._generated(row, logits)] if end == len(row.tokens) else []

    def _wanting(self, row: _Row[KV]) -> int:
        """Tokens whose KV is to be computed before the next one is known."""
        return len(row.tokens) - self._forward.held_tokens(row.kv)

    def _generated(self, row: _Row[KV], logits: torch.Tensor) -> Generated:
        request, position = row.request, len(row.tokens)
        token = pick(
            logits,
            temperature=request.temperature,
            top_p=request.top_p,
            seed=request.seed,
            position=position,
        )
        row.tokens.append(token)
        finish = row.finish()
        taken = None if finish is None else self._take(row)
        return Generated(request.id, token, position, finish, taken)

    def _take(self, row: _Row[KV]) -> Taken:
        del self._rows[row.request.id]
        return self._taken(row)

    def _taken(self, row: _Row[KV]) -> Taken:
        return Taken(tuple(row.tokens), row.left, self._forward.cache(row.kv))


AnyEngine: TypeAlias = Engine[Any]
"""An engine, however its rows are kept."""


def chunk_end(start: int, end: int, chunk_tokens: int) -> int:
    """Where the chunk that begins at `start` ends: at a multiple of `chunk_tokens`, or `end`."""
    return min(end, (start // chunk_tokens + 1) * chunk_tokens)
