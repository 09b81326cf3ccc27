"""An operator's connection to a master: what the commands ask, as typed answers."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, TypeVar

from kvstore.errors import MalformedMessage
from kvstore.rpc.connection import Connection
from kvstore.rpc.identity import Identity, Role
from kvstore.wire.messages.base import Message
from kvstore.wire.messages.reads import GetStatus, Status

if TYPE_CHECKING:
    from typing import Self

M = TypeVar("M", bound=Message)

CALL_TIMEOUT_S: Final = 5.0


class Operator:
    """Context manager of one connection. Raises what the greeting and the calls raise."""

    def __init__(self, master: str, secret: bytes | None, cluster: str = "") -> None:
        """Connect to `master`, "host:port"; `cluster` is the only one wanted, empty for any."""
        self._master = master
        identity = Identity(Role.OPERATOR, name="kvharbor", secret=secret, cluster=cluster)
        self._connection = Connection.open(master, identity, CALL_TIMEOUT_S)

    def __enter__(self) -> Self:
        """The operator, connected."""
        return self

    def __exit__(self, *_: object) -> None:
        """Close the connection."""
        self._connection.close()

    def status(self) -> Status:
        """The pool at this moment."""
        return self.ask(GetStatus(), Status)

    def ask(self, question: Message, want: type[M]) -> M:
        """The master's answer, of the one kind that this question has."""
        answer = self._connection.call(question, CALL_TIMEOUT_S)
        if not isinstance(answer, want):
            asked, came = type(question).__name__, type(answer).__name__
            raise MalformedMessage(f"{self._master} answered {asked} by {came}")
        return answer
