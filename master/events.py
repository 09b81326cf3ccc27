"""What happens to the master (events) and what it wants done (actions). Values only.

The shell turns I/O into events and carries actions out; the core never sees a socket, a clock or
a file. Must not know how anything is carried.
"""

from __future__ import annotations

from typing import NewType

import msgspec

from kvstore.ids import Epoch
from kvstore.wire.messages.base import Message

SessionId = NewType("SessionId", int)
"""One open connection, numbered by the shell and never reused within a life of the master."""

CommandId = NewType("CommandId", int)
"""One request of the master to a worker."""

WriteId = NewType("WriteId", int)
"""One durable write, numbered by the core."""


class SessionOpened(msgspec.Struct, frozen=True, gc=False):
    """A peer passed the handshake. `token` is the session of its Hello; it survives reconnects."""

    session: SessionId
    role: str
    tenant: str
    name: str
    token: bytes
    host: str = ""
    """The machine that it runs on; empty: unknown."""


class SessionClosed(msgspec.Struct, frozen=True, gc=False):
    """The connection ended, whoever ended it."""

    session: SessionId


class Request(msgspec.Struct, frozen=True, gc=False):
    """A peer asks; exactly one Reply with the same request id answers it, now or later."""

    session: SessionId
    request_id: int
    message: Message


class CommandAnswered(msgspec.Struct, frozen=True, gc=False):
    """A worker answered a command, or (None) it never will: connection lost or timed out."""

    command: CommandId
    reply: Message | None


class Persisted(msgspec.Struct, frozen=True, gc=False):
    """A write is durable."""

    write: WriteId


class Tick(msgspec.Struct, frozen=True, gc=False):
    """Time has come to `wakeup_s`, or has simply passed."""


class Prolonged(msgspec.Struct, frozen=True, gc=False):
    """The lease that this master leads under is good until then, on the clock of `now` (I10)."""

    until_s: float


Event = SessionOpened | SessionClosed | Request | CommandAnswered | Persisted | Prolonged | Tick


class Reply(msgspec.Struct, frozen=True, gc=False):
    """Answer a request; a session that is gone by then is no error."""

    session: SessionId
    request_id: int
    message: Message


class Command(msgspec.Struct, frozen=True, gc=False):
    """Ask a worker; CommandAnswered follows, with None when the session is gone."""

    command: CommandId
    session: SessionId
    message: Message


class Persist(msgspec.Struct, frozen=True, gc=False):
    """Write durably, all or nothing, in the order of their numbers; Persisted follows.

    Those that are `behind` wait for all others, and keep their order among each other.
    """

    write: WriteId
    puts: tuple[tuple[str, bytes], ...]
    deletes: tuple[str, ...]
    behind: bool = False


class CloseSession(msgspec.Struct, frozen=True, gc=False):
    """End this connection; SessionClosed follows."""

    session: SessionId


class RaiseEpoch(msgspec.Struct, frozen=True, gc=False):
    """End this term, and lead in an epoch above that one, which somebody has seen (I10)."""

    above: Epoch


class Note(msgspec.Struct, frozen=True, gc=False):
    """Something that whoever operates the pool wants to find in the log."""

    text: str


Action = Reply | Command | Persist | CloseSession | RaiseEpoch | Note
