"""The blocking connection on which data threads report seals to the leader.

Besides the control link, because handing a report to the event loop and back would cost two thread
switches a put. It goes where the control link goes, and lives no longer than that does. A report
that it cannot bring is answered None; `workers.pulls` then keeps it for the next leader.
"""

from __future__ import annotations

import logging
import threading
from typing import TYPE_CHECKING, Final

import msgspec

from kvstore import limits
from kvstore.errors import KVStoreError, Unavailable
from kvstore.rpc.connection import Connection

if TYPE_CHECKING:
    from kvstore.rpc.identity import Identity
    from kvstore.wire.messages.base import Message

LOG: Final = logging.getLogger(__name__)
REPORT_TIMEOUT_S: Final = limits.PUT_TIMEOUT_BASE_S


class Sent(msgspec.Struct, frozen=True):
    """A report on its way."""

    connection: Connection
    request_id: int


class ReportLine:
    """Thread-safe; any number of reports may be on their way."""

    def __init__(self, identity: Identity) -> None:
        """Nowhere to report to yet. The identity is that of a worker, by its name."""
        self._identity = identity
        self._mutex = threading.Lock()
        self._dialling = threading.Lock()
        """Apart from the mutex: `use`, which heartbeats wait for, never waits for a dial."""
        self._address: str | None = None
        self._connection: Connection | None = None

    def use(self, address: str | None) -> None:
        """Report to the leader at `address` from now on; None while there is none."""
        with self._mutex:
            self._address = address
            connection, self._connection = self._connection, None
        if connection is not None:
            connection.close()

    def start(self, message: Message) -> Sent | None:
        """Send a report; None when it cannot be sent."""
        try:
            connection = self._open()
            return Sent(connection, connection.start(message, REPORT_TIMEOUT_S))
        except KVStoreError as error:
            LOG.warning("report not sent: %s", error)
            return None

    def finish(self, sent: Sent) -> Message | None:
        """The leader's answer; None when there was none, or a refusal."""
        try:
            return sent.connection.finish(sent.request_id, REPORT_TIMEOUT_S)
        except KVStoreError as error:
            LOG.warning("report not answered: %s", error)
            return None

    def _open(self) -> Connection:
        connection = self._connection
        if connection is not None and connection.is_open:
            return connection
        with self._dialling:
            with self._mutex:
                address, connection = self._address, self._connection
            if connection is not None and connection.is_open:
                return connection
            if address is None:
                raise Unavailable("no leader is known")
            made = Connection.open(address, self._identity, REPORT_TIMEOUT_S)
            with self._mutex:
                if self._address == address:
                    self._connection = made
                    return made
            made.close()
            raise Unavailable(f"{address} does not lead any more")
