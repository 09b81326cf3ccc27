"""A client's lasting link to its masters: reconnects, follows the leader, survives fork.

Every message of the protocol is safe to repeat, so a call whose connection is lost is made again
within its deadline. Which master leads is found by asking them (kvstore.rpc.search). A leader that
keeps silent, or says that it cannot do what is asked, is left only for one of a higher epoch: its
silence may be work, and what this session has begun there would end with the connection. Where not
even its kernel confirms what is sent, the way there has gone, and another of its addresses will do.
"""

from __future__ import annotations

import os
import threading
import time
import weakref
from functools import partial
from random import Random
from typing import TYPE_CHECKING, Final, Protocol

from kvstore import limits
from kvstore.clock import SystemClock
from kvstore.errors import DeadlineExceeded, KVStoreError, StaleEpoch, Unavailable
from kvstore.ids import Epoch
from kvstore.rpc.connection import Connection
from kvstore.rpc.search import SILENT_PATIENCE_S, Search
from kvstore.wire.messages.reads import is_in_doubt

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from kvstore.clock import Clock
    from kvstore.rpc.identity import Identity
    from kvstore.wire.messages.base import Message

_ALL: Final[weakref.WeakSet[MasterLink]] = weakref.WeakSet()


class Calls(Protocol):
    """What a link needs of a connection; `Connection` is the real one."""

    @property
    def epoch(self) -> int:
        """Of the master at the other end."""
        ...

    @property
    def is_open(self) -> bool:
        """Whether calls can still be made."""
        ...

    @property
    def is_cut_off(self) -> bool:
        """Whether nobody confirms what is sent there."""
        ...

    def call(
        self, message: Message, timeout_s: float, on_silence: Callable[[], None] | None = None
    ) -> Message:
        """The reply, or the typed error; see Connection.call."""
        ...

    def close(self) -> None:
        """End it."""
        ...


class MasterLink:
    """Thread-safe. One connection at a time, to whichever of `addresses` answers and leads."""

    def __init__(
        self,
        addresses: Sequence[str],
        identity: Identity,
        clock: Clock | None = None,
        *,
        random: Random | None = None,
        pause: Callable[[float], None] = time.sleep,
        dial: Callable[[str, Identity, float], Calls] = Connection.open,
    ) -> None:
        """Check the addresses (BadValue); the first call connects.

        Clock, randomness, pausing and dialling can be replaced for tests.
        """
        self._identity = identity
        self._clock = SystemClock() if clock is None else clock
        self._addresses = tuple(addresses)
        self._search = Search(addresses, Random(os.urandom(8)) if random is None else random)
        self._pause = pause
        self._dial = dial
        self._highest_epoch = 0
        self._connection: Calls | None = None
        self._address = ""
        """Of the connection."""
        self._looked_s = float("-inf")
        """When it was last looked whether another leads."""
        self._was_silent = False
        """Whether the last call ended without an answer: the next one looks first."""
        self._mutex = threading.Lock()
        """Guards the search and which connection is used; never held across a wait."""
        self._dialling = threading.Lock()
        self._is_closed = False
        _ALL.add(self)

    @property
    def epoch(self) -> Epoch:
        """The highest epoch of a master that this link has met; 0 before the first."""
        return Epoch(self._highest_epoch)

    @property
    def identity(self) -> Identity:
        """Who this side is; a forked child has another session."""
        return self._identity

    def call(self, message: Message, timeout_s: float) -> Message:
        """The leading master's reply, within `timeout_s`, reconnecting as needed.

        Raises the error that the master's Failure names, and at the deadline DeadlineExceeded with
        every address that was tried and why it was not the one.
        """
        deadline_s = self._clock.now_s() + timeout_s
        while True:
            connection: Calls | None = None
            try:
                if self._was_silent:
                    self._look_elsewhere(deadline_s)
                connection = self._connection or self._connect(deadline_s)
                look = partial(self._look_elsewhere, deadline_s)
                on_silence = look if self._search.has_others else None
                reply = connection.call(message, deadline_s - self._clock.now_s(), on_silence)
            except (Unavailable, StaleEpoch) as error:
                self._failed(connection, error, deadline_s)
                continue
            if on_silence is not None and is_in_doubt(message, reply):
                on_silence()
                if self._connection is not connection:
                    continue  # to a leader who can grant a lease
            if self._search.tries:
                with self._mutex:
                    self._search.succeeded()
            return reply

    def close(self) -> None:
        """End the connection; later calls raise Unavailable. May be repeated."""
        self._is_closed = True
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.close()

    def _connect(self, deadline_s: float) -> Calls:
        """The current connection, made anew if there is none. One thread dials, others wait."""
        if not self._dialling.acquire(timeout=max(0.0, deadline_s - self._clock.now_s())):
            raise DeadlineExceeded("no master was reached within the deadline")
        try:
            self._check_open()
            if self._connection is not None:
                return self._connection
            with self._mutex:
                address = self._search.next()
                patience_s = self._search.patience_s(address, deadline_s - self._clock.now_s())
            try:
                found = self._open(address, patience_s, self._highest_epoch)
            except (Unavailable, StaleEpoch) as error:
                with self._mutex:
                    self._search.failed(address, error)
                raise
            self._adopt(address, found)
            self._check_open()
            return found
        finally:
            self._dialling.release()

    def _open(self, address: str, patience_s: float, epoch: int) -> Calls:
        """Dial there; StaleEpoch unless that master knows of this epoch or a higher one."""
        found = self._dial(address, self._identity, patience_s)
        if found.epoch >= epoch:
            return found
        found.close()
        raise StaleEpoch(f"{address} shows epoch {found.epoch}, but {epoch} is looked for")

    def _adopt(self, address: str, found: Calls) -> None:
        with self._mutex:
            self._search.greeted(address)
            self._highest_epoch = max(self._highest_epoch, found.epoch)
            self._address, self._connection = address, found

    def _look_elsewhere(self, deadline_s: float) -> None:
        """Leave the present master if another one shows a higher epoch, or, where the way there
        has gone, for whoever shows its own; seldom, and briefly.

        It takes its time from the call that is made: none beyond `deadline_s`.
        """
        now_s, present = self._clock.now_s(), self._connection
        too_soon = now_s < self._looked_s + limits.CALL_PATIENCE_S
        if present is None or too_soon or not self._dialling.acquire(blocking=False):
            return
        try:
            self._looked_s, self._was_silent = now_s, False
            with self._mutex:
                others = self._search.others(self._address)
            epoch = present.epoch if present.is_cut_off else present.epoch + 1
            if not any(self._leads_in(address, epoch, deadline_s) for address in others):
                return
        finally:
            self._dialling.release()
        present.close()  # who waits for it asks the other one
        self._check_open()

    def _leads_in(self, address: str, epoch: int, deadline_s: float) -> bool:
        """Whether this epoch, or a higher one, is known there; then that is the connection."""
        patience_s = min(SILENT_PATIENCE_S, deadline_s - self._clock.now_s())
        if patience_s <= 0:
            return False
        try:
            found = self._open(address, patience_s, epoch)
        except KVStoreError as error:
            with self._mutex:
                self._search.refused(address, error)
            return False
        self._adopt(address, found)
        return True

    def _failed(
        self, connection: Calls | None, error: Unavailable | StaleEpoch, deadline_s: float
    ) -> None:
        """See to it that another try has better chances; raise when there is no time for one."""
        self._check_open()
        if connection is not None and not isinstance(error, StaleEpoch) and connection.is_open:
            delay_s = self._refused(error, deadline_s)
        else:
            delay_s = self._drop(connection, error)
        if deadline_s - self._clock.now_s() <= delay_s:
            with self._mutex:
                why = self._search.why(error)
            raise DeadlineExceeded(why) from error
        if delay_s > 0:
            self._pause(delay_s)

    def _refused(self, error: Unavailable | StaleEpoch, deadline_s: float) -> float:
        """The master is there and could not, or kept silent; how long to wait before it is asked
        again."""
        if self._search.has_others:
            self._was_silent = isinstance(error, DeadlineExceeded)
            if deadline_s - self._clock.now_s() > limits.CALL_PATIENCE_S:
                self._look_elsewhere(deadline_s)
        with self._mutex:
            self._search.refused(self._address, error)
            return self._search.again_s(error.retry_after_s)

    def _drop(self, connection: Calls | None, error: Unavailable | StaleEpoch) -> float:
        """Forget a connection that broke or does not lead; how long to wait before the next."""
        with self._mutex:
            if connection is not None and self._connection is connection:
                self._connection = None
                self._search.failed(self._address, error)
            delay_s = 0.0 if self._connection else self._search.next_s(error.retry_after_s)
        if connection is not None:
            connection.close()
        return delay_s

    def _check_open(self) -> None:
        if self._is_closed:
            self.close()
            raise Unavailable("this store is closed")

    def _start_anew(self) -> None:
        """In a forked child: another session, and locks that no vanished thread can hold.

        The parent's connection is left alone; its descriptor was closed here without a word.
        """
        self._identity = self._identity.renewed()
        self._search = Search(self._addresses, Random(os.urandom(8)))
        self._connection = None
        self._mutex = threading.Lock()
        self._dialling = threading.Lock()


def _renew_inherited() -> None:
    for each in list(_ALL):
        each._start_anew()  # noqa: SLF001 — this module's own class, in its own fork hook


os.register_at_fork(after_in_child=_renew_inherited)
