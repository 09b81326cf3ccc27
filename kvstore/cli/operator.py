"""An operator's connection to the masters: what the commands ask, as typed answers."""

from __future__ import annotations

from random import Random
from typing import TYPE_CHECKING, Final, TypeVar

from kvstore.errors import DeadlineExceeded, MalformedMessage, NotLeader, Unavailable
from kvstore.rpc.connection import Connection
from kvstore.rpc.identity import Identity, Role
from kvstore.rpc.search import Search
from kvstore.standing import Standing
from kvstore.wire.messages.base import Message
from kvstore.wire.messages.reads import GetStatus, Status

if TYPE_CHECKING:
    from typing import Self

M = TypeVar("M", bound=Message)

CALL_TIMEOUT_S: Final = 5.0


class Operator:
    """Context manager of one connection. Raises what the greeting and the calls raise."""

    def __init__(self, masters: str, secret: bytes | None, cluster: str = "") -> None:
        """Connect to whichever of `masters` answers: "host:port", several with commas between.

        `cluster` is the only one wanted, empty for any.
        """
        addresses = masters.split(",")
        self._has_choice = len(addresses) > 1
        self._search = Search(addresses, Random(0))
        self._identity = Identity(Role.OPERATOR, name="kvharbor", secret=secret, cluster=cluster)
        self._master, self._connection = self._connect()

    def __enter__(self) -> Self:
        """The operator, connected."""
        return self

    def __exit__(self, *_: object) -> None:
        """Close the connection."""
        self._connection.close()

    def status(self) -> Status:
        """The pool at this moment, as the leader sees it; or the only master that was named.

        Where nobody leads, it is what a standby says.
        """
        said = self.ask(GetStatus(), Status)
        try:
            while said.standing == Standing.STANDBY and self._has_choice:
                self._go_on(NotLeader(said.leader))
                said = self.ask(GetStatus(), Status)
        except (Unavailable, NotLeader):
            pass
        return said

    def ask(self, question: Message, want: type[M]) -> M:
        """The leader's answer, of the one kind that this question has."""
        while True:
            try:
                answer = self._connection.call(question, CALL_TIMEOUT_S)
            except NotLeader as error:
                self._go_on(error)
                continue
            if isinstance(answer, want):
                return answer
            asked, came = type(question).__name__, type(answer).__name__
            raise MalformedMessage(f"{self._master} answered {asked} by {came}")

    def change(self, wish: Message, want: type[M]) -> M:
        """The answer to a wish that is in force at once, and is answered when it is durable.

        DeadlineExceeded says so where only the second is missing.
        """
        try:
            return self.ask(wish, want)
        except DeadlineExceeded as error:
            # Requests of one connection are handled in order: the wish was, if this one is.
            if self.ask(GetStatus(), Status).standing != Standing.LEADING:
                raise
            raise DeadlineExceeded(
                f"{self._master}: this is in force, but not durable yet: the metadata store has "
                f"not taken it within {CALL_TIMEOUT_S:g} s. It is stored once the store takes "
                "writes again; a master that starts before will not know of it"
            ) from error

    def _go_on(self, error: NotLeader) -> None:
        """To whom this master names, or to the next; NotLeader when everybody was asked."""
        self._connection.close()
        self._search.failed(self._master, error)
        if self._search.next_s(0.0) > 0:
            raise error
        self._master, self._connection = self._connect()

    def _connect(self) -> tuple[str, Connection]:
        """Whoever answers first. Where several were named, the error tells of each."""
        while True:
            address = self._search.next()
            patience_s = self._search.patience_s(address, CALL_TIMEOUT_S)
            try:
                return address, Connection.open(address, self._identity, patience_s)
            except Unavailable as error:
                self._search.failed(address, error)
                if self._search.next_s(0.0) > 0:
                    if not self._has_choice:
                        raise
                    raise Unavailable(self._search.why(error)) from error
