"""The pool as an engine's connector may use it: reached lazily, and never an exception.

Owns the store, the circuit breaker in front of it, and what is said of both. Trouble is a miss:
whoever calls says what to go on with instead. A pool that is absent when the engine starts, or
that goes away, is looked for again by itself.
"""

from __future__ import annotations

import logging
import threading
from functools import partial
from math import inf
from typing import TYPE_CHECKING, Final, NamedTuple, Protocol, TypeVar

from kvstore.connectors.breaker import Breaker
from kvstore.errors import BufferClosed, KVStoreError, Unavailable, UnknownNamespace

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from contextlib import AbstractContextManager

    from kvstore.client.locations import Found, Locations, Match
    from kvstore.client.namespaces import OpenedNamespace
    from kvstore.client.outcomes import Miss, PutOutcome, ReadOutcome
    from kvstore.clock import Clock
    from kvstore.hints import Hints
    from kvstore.namespace import Content, Layout, Namespace
    from kvstore.page import PageChain
    from kvstore.transfer.buffer import Buffer

_LOG: Final = logging.getLogger("kvharbor")
T = TypeVar("T")


class EngineStore(Protocol):
    """What engines' connectors need of a store; `KVStore` is one."""

    def open(self, content: Content, layout: Layout) -> OpenedNamespace:
        """Make a namespace known."""
        ...

    def buffer(self, size_bytes: int) -> Buffer:
        """Memory that the pool's workers can reach."""
        ...

    def match_prefix(
        self,
        opened: OpenedNamespace,
        chain: PageChain,
        *,
        parts: Sequence[int] = (),
        timeout_s: float | None = None,
        lease_id: int = 0,
    ) -> Match:
        """Find and lease the longest run of leading pages."""
        ...

    def lookup(
        self,
        opened: OpenedNamespace,
        chain: PageChain,
        *,
        parts: Sequence[int] = (),
        timeout_s: float | None = None,
        lease_id: int = 0,
    ) -> Found:
        """Find and lease every page that is there."""
        ...

    def give_back_lease(
        self,
        opened: OpenedNamespace,
        chain: PageChain,
        lease_id: int,
        *,
        timeout_s: float | None = None,
    ) -> None:
        """End what was leased of these pages under this number."""
        ...

    def read(
        self,
        locations: Locations,
        into: object,
        offsets: Sequence[int],
        *,
        part: int = 0,
        timeout_s: float | None = None,
    ) -> list[ReadOutcome]:
        """Copy located pages out, verified."""
        ...

    def views(
        self, locations: Locations, *, part: int = 0, timeout_s: float | None = None
    ) -> AbstractContextManager[list[memoryview | Miss]]:
        """Located pages where they lie, verified; misses where this process cannot map them."""
        ...

    def put_parts(
        self,
        opened: OpenedNamespace,
        chain: PageChain,
        source: object,
        offsets: Mapping[int, Sequence[int]],
        *,
        wait: bool = True,
        timeout_s: float | None = None,
        hints: Hints | None = None,
    ) -> list[PutOutcome]:
        """Store these parts of every page."""
        ...

    def hint(
        self,
        opened: OpenedNamespace,
        chain: PageChain,
        hints: Hints,
        *,
        timeout_s: float | None = None,
    ) -> None:
        """Tell what is known of these pages' future."""
        ...

    def put_objects(
        self,
        opened: OpenedNamespace,
        names: PageChain,
        source: object,
        offsets: Sequence[int],
        size_bytes: int,
        *,
        wait: bool = True,
        timeout_s: float | None = None,
    ) -> list[PutOutcome]:
        """Store rows of an opaque namespace."""
        ...

    def list_objects(self, opened: OpenedNamespace) -> list[PageChain]:
        """Keys of all rows of an opaque namespace."""
        ...

    def remove(self, opened: OpenedNamespace, chain: PageChain) -> list[bool]:
        """Take rows out; tells for each whether it was there."""
        ...

    def close(self) -> None:
        """Give everything back."""
        ...


class Reached(NamedTuple):
    """A pool that was reached, with every namespace of the engine open there."""

    store: EngineStore
    opened: tuple[OpenedNamespace, ...]


class EnginePool:
    """One process's way to the pool. Thread-safe; calls may take as long as they are told to."""

    def __init__(
        self,
        connect: Callable[[], EngineStore],
        namespaces: Sequence[Namespace] | Callable[[], Sequence[Namespace]],
        clock: Clock,
    ) -> None:
        """Ask nothing yet; `connect` is called by the first call, and again after a loss.

        So are `namespaces`, of an engine that tells all about itself only when it serves.
        """
        self._connect = connect
        self._namespaces = namespaces
        self._clock = clock
        self._breaker = Breaker()
        self._mutex = threading.Lock()
        self._reaching = threading.Lock()
        self._reached: Reached | None = None
        self._is_closed = False
        self.troubles = 0
        """Calls that ended in trouble: each was a miss for somebody."""

    @property
    def is_worth_asking(self) -> bool:
        """Whether a call would go through now; a look at it begins no try."""
        with self._mutex:
            return self._breaker.is_closed()

    @property
    def store(self) -> EngineStore | None:
        """The store, if the pool was reached; asks nobody."""
        return None if self._reached is None else self._reached.store

    @property
    def times_opened(self) -> int:
        """How often the circuit has opened."""
        return self._breaker.opened

    def call(self, what: str, work: Callable[[Reached], T], otherwise: T, late_s: float = inf) -> T:
        """The result of `work`, or `otherwise` where the pool is not to be asked, or in trouble.

        `what` names the call for whoever reads the log. A result that took longer than `late_s`
        is of no use any more; some of them in a row are trouble, too, whatever calls without such
        a bound come between. Never raises.
        """
        begun_s = self._clock.now_s()
        with self._mutex:
            if self._is_closed or not self._breaker.lets_through(self._clock.now_s()):
                return otherwise
        try:
            result = work(self._reach())
        except KVStoreError as error:
            self._failed(what, error)
            return otherwise
        except Exception as error:  # V5: a fault of ours must not end the engine
            _LOG.exception("kvharbor: %s", what)
            self._failed(what, error)
            return otherwise
        self._succeeded(self._clock.now_s() - begun_s, late_s)
        return result

    def tell(self, what: str, work: Callable[[Reached], None]) -> None:
        """Have the pool told what it may do without, unless it is not worth asking.

        A refusal is no trouble, because nobody was to have anything of it. Silence is, as in any
        other call: the next lookup would meet it, too.
        """
        if self.is_worth_asking:
            self.call(what, partial(_tell, what, work), None)

    def close(self) -> None:
        """End the connection; later calls are misses. Safe to repeat."""
        with self._mutex:
            self._is_closed = True
        self._let_go()

    def _reach(self) -> Reached:
        """The pool with the namespaces open; one thread connects, others wait for it."""
        with self._reaching:
            if self._is_closed:  # between the call's begin and here: nobody would close a store
                raise Unavailable("the engine has left the pool")
            if self._reached is None:
                named = self._namespaces() if callable(self._namespaces) else self._namespaces
                store = self._connect()
                try:
                    opened = tuple(store.open(n.content, n.layout) for n in named)
                except BaseException:
                    store.close()
                    raise
                self._reached = Reached(store, opened)
                _LOG.info("kvharbor: the pool is reached")
            return self._reached

    def _succeeded(self, took_s: float, late_s: float) -> None:
        now_s = self._clock.now_s()
        with self._mutex:
            was_closed = self._breaker.is_closed()
            if late_s == inf or (took_s > late_s and not was_closed):
                self._breaker.succeeded(now_s)
            elif took_s > late_s:
                self._breaker.late(now_s)
            else:
                self._breaker.in_time(now_s)
        if not was_closed:
            _LOG.warning("kvharbor: the pool answers again")

    def _failed(self, what: str, error: Exception) -> None:
        with self._mutex:
            was_closed = self._breaker.is_closed()
            self._breaker.failed(self._clock.now_s())
            self.troubles += 1
        if was_closed:
            _LOG.warning(
                "kvharbor: %s: %s; serving goes on without the pool until it is well again",
                what, error,
            )  # fmt: skip
        if isinstance(error, UnknownNamespace | BufferClosed):
            # A pool that lost its memory has come in its place: begin anew with it.
            self._let_go()

    def _let_go(self) -> None:
        with self._reaching:
            reached, self._reached = self._reached, None
        if reached is None:
            return
        try:
            reached.store.close()
        except Exception:  # V5: whoever is in the middle of a use keeps a buffer from closing
            _LOG.exception("kvharbor: a store is left as it is")


def _tell(what: str, work: Callable[[Reached], None], pool: Reached) -> None:
    try:
        work(pool)
    except (Unavailable, UnknownNamespace, BufferClosed):  # of the pool, not of what it is told
        raise
    except KVStoreError as error:
        _LOG.info("kvharbor: %s: %s", what, error)
