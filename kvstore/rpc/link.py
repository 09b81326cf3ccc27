"""A client's lasting link to its masters: reconnects, follows the leader, survives fork.

Every message of the protocol is safe to repeat, so a call whose connection is lost is made again
within its deadline. Which master leads is found by asking them in turn.
"""

from __future__ import annotations

import os
import threading
import time
import weakref
from random import Random
from typing import TYPE_CHECKING, Final, Protocol

from kvstore.clock import SystemClock
from kvstore.errors import BadValue, DeadlineExceeded, StaleEpoch, Unavailable
from kvstore.ids import Epoch
from kvstore.rpc.address import parse_address
from kvstore.rpc.backoff import Backoff
from kvstore.rpc.connection import Connection

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

    def call(self, message: Message, timeout_s: float) -> Message:
        """The reply, or the typed error."""
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
        if not addresses:
            raise BadValue("masters", addresses, "at least one address")
        for address in addresses:
            parse_address(address)
        self._addresses = tuple(addresses)
        self._identity = identity
        self._clock = SystemClock() if clock is None else clock
        self._backoff = Backoff(Random(os.urandom(8)) if random is None else random)
        self._pause = pause
        self._dial = dial
        self._next = 0
        self._highest_epoch = 0
        self._connection: Calls | None = None
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
        the last reason. An unreachable master is tried again until then.
        """
        deadline_s = self._clock.now_s() + timeout_s
        while True:
            connection: Calls | None = None
            try:
                connection = self._connection or self._connect(deadline_s)
                reply = connection.call(message, deadline_s - self._clock.now_s())
            except DeadlineExceeded as error:
                # The call's own deadline, or a master that does not greet: try another then.
                self._wait(error, deadline_s)
            except Unavailable as error:
                if connection is not None and not connection.is_open:
                    self._drop(connection)
                self._wait(error, deadline_s)
            except StaleEpoch as error:
                if connection is not None:
                    self._drop(connection)
                self._wait(error, deadline_s)
            else:
                self._backoff.succeeded()
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
            address = self._addresses[self._next % len(self._addresses)]
            self._next += 1
            found = self._dial(address, self._identity, deadline_s - self._clock.now_s())
            if found.epoch < self._highest_epoch:
                found.close()
                raise Unavailable(
                    f"{address} leads epoch {found.epoch}, but {self._highest_epoch} is known"
                )
            self._highest_epoch = found.epoch
            # Stay with this one until it fails.
            self._next -= 1
            self._connection = found
            self._check_open()
            return found
        finally:
            self._dialling.release()

    def _drop(self, connection: Calls) -> None:
        """Forget a connection that broke or does not lead; the next dial asks the next master."""
        with self._dialling:
            if self._connection is connection:
                self._connection = None
                self._next += 1
        connection.close()

    def _check_open(self) -> None:
        if self._is_closed:
            self.close()
            raise Unavailable("this store is closed")

    def _wait(self, reason: Unavailable | StaleEpoch, deadline_s: float) -> None:
        """Pause before the next try; raise at the deadline, or when the link is closed."""
        self._check_open()
        delay_s = self._backoff.failed(reason.retry_after_s)
        left_s = deadline_s - self._clock.now_s()
        if left_s <= delay_s:
            raise DeadlineExceeded(f"{reason} ({self._backoff.failures} tries)") from reason
        self._pause(delay_s)

    def _start_anew(self) -> None:
        """In a forked child: another session, and locks that no vanished thread can hold.

        The parent's connection is left alone; its descriptor was closed here without a word.
        """
        self._identity = self._identity.renewed()
        self._backoff = Backoff(Random(os.urandom(8)))
        self._connection = None
        self._dialling = threading.Lock()


def _renew_inherited() -> None:
    for each in list(_ALL):
        each._start_anew()  # noqa: SLF001 — this module's own class, in its own fork hook


os.register_at_fork(after_in_child=_renew_inherited)
