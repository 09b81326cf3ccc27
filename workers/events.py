"""What can happen to a pool worker, and what it then has to do: frozen values, no behaviour.

Events go into `WorkerState.handle`, actions come out; the shell carries actions out and feeds their
results back as events. Page columns inside messages stay packed as they came off the wire. Must
not know sockets, files or threads.
"""

from __future__ import annotations

from typing import Final

import msgspec

from kvstore.wire.messages.base import Message
from kvstore.wire.messages.puts import Ingest
from kvstore.wire.messages.stripes import HashParity

MOVER: Final = 0
"""The session of what the leader asks to be moved or copied; clients' are numbered from 1."""


class Stretch(msgspec.Struct, frozen=True, gc=False):
    """Pages [page, page + count) of a request whose extents are neighbours in one chunk."""

    page: int
    count: int
    chunk_start: int
    slot: int
    offset: int
    """Payload offset of the first extent, in bytes."""


class ExtentGroup(msgspec.Struct, frozen=True):
    """Extents of one size class in one segment, as neighbours where they are."""

    segment: str
    size_class: int
    stretches: tuple[Stretch, ...]

    @property
    def count(self) -> int:
        """How many extents these are."""
        return sum(stretch.count for stretch in self.stretches)


# --- events -----------------------------------------------------------------------------------


class LinkOpened(msgspec.Struct, frozen=True):
    """The control connection to a master stands."""


class LeaveWanted(msgspec.Struct, frozen=True):
    """The operator wants this worker to end, once no reader needs it."""


class LinkClosed(msgspec.Struct, frozen=True):
    """The control connection is gone; calls in flight are answered None besides."""


class MasterAnswered(msgspec.Struct, frozen=True):
    """The reply to a `CallMaster` or `SendRows`; None when none came in time."""

    call: int
    reply: Message | None


class CommandReceived(msgspec.Struct, frozen=True):
    """The master asks for Fence-, Free-, Retire- or CheckExtents, ReleaseChunks, or HashParity;
    `command` names the answer."""

    command: int
    message: Message


class IngestRequested(msgspec.Struct, frozen=True):
    """Somebody asks for a pull. `request` is fresh; `session` is a client's connection or MOVER."""

    request: int
    session: int
    message: Ingest


class PullEnded(msgspec.Struct, frozen=True):
    """A started pull is over: no byte moves any more, records are written, locks released.

    One Outcome byte a page of the request; those of pages outside the pull are ignored.
    """

    pull: int
    outcomes: bytes
    stored_max: int = 0
    """As in Ingested."""


class WorkEnded(msgspec.Struct, frozen=True):
    """`WriteFree`, `WriteRemoved` or `VerifyPayloads` is done: one Outcome byte an extent."""

    work: int
    outcomes: bytes


class Scrubbed(msgspec.Struct, frozen=True):
    """`ScrubExtents` is done: one Outcome byte an extent."""

    look: int
    outcomes: bytes


class SessionClosed(msgspec.Struct, frozen=True):
    """A client's connection is gone; what it asked for has nobody to answer to."""

    session: int


class MediumChanged(msgspec.Struct, frozen=True):
    """A segment's disk does less from now on: what ReportSegment says of it."""

    segment: str
    state: str
    reason: str


class Tick(msgspec.Struct, frozen=True):
    """Time has passed."""


Event = (
    LinkOpened
    | LinkClosed
    | LeaveWanted
    | MasterAnswered
    | CommandReceived
    | IngestRequested
    | PullEnded
    | WorkEnded
    | Scrubbed
    | SessionClosed
    | MediumChanged
    | Tick
)


# --- actions ----------------------------------------------------------------------------------


class CallMaster(msgspec.Struct, frozen=True):
    """Send this request to the leader and feed its reply back as `MasterAnswered`."""

    call: int
    message: Message


class Listed(msgspec.Struct, frozen=True, gc=False):
    """An extent as the state machine knows it; `state` is a RecordState."""

    slot: int
    state: int
    generation: int


class SendRows(msgspec.Struct, frozen=True):
    """Read a chunk's records off the segment, send them as InventoryRows, feed the reply back."""

    call: int
    segment: str
    chunk_start: int
    size_class: int
    listed: tuple[Listed, ...]
    """Every extent of the chunk that is not FREE, in slot order: exactly these get a row."""


class CloseLink(msgspec.Struct, frozen=True):
    """End the control connection: a leader of a lower epoch, or one that refused us."""

    reason: str


class EndProcess(msgspec.Struct, frozen=True):
    """No reader needs this worker any more: it may end."""


class AnswerCommand(msgspec.Struct, frozen=True):
    """Reply to a command of the master."""

    command: int
    message: Message


class StartPull(msgspec.Struct, frozen=True):
    """Lock, write RESERVED, copy, verify, write SEALED, unlock; then feed `PullEnded`.

    Only the pages in `stretches` are pulled; a stream's other pages are read past.
    """

    pull: int
    request: int
    session: int
    message: Ingest
    size_class: int
    stretches: tuple[Stretch, ...]
    source_classes: tuple[int, ...] = ()
    """Of a move: the size class of each page's source extent, 0 where the page is not pulled."""


class CancelPull(msgspec.Struct, frozen=True):
    """Make this pull end soon, whatever its source does; `PullEnded` still comes."""

    pull: int


class AnswerIngest(msgspec.Struct, frozen=True):
    """Reply Ingested with these outcomes."""

    request: int
    session: int
    outcomes: bytes
    stored_max: int = 0


class RefuseIngest(msgspec.Struct, frozen=True):
    """Reply Failure: the request itself is wrong, or no room to hold it."""

    request: int
    session: int
    code: str
    text: str


class WriteFree(msgspec.Struct, frozen=True):
    """Write these records FREE, then try the exclusive lock: OK, or BUSY where a reader holds."""

    work: int
    extents: ExtentGroup


class WriteRemoved(msgspec.Struct, frozen=True):
    """Write these records REMOVED."""

    work: int
    extents: ExtentGroup


class VerifyPayloads(msgspec.Struct, frozen=True):
    """Hash these sealed extents against their records: OK or CHECKSUM."""

    work: int
    extents: ExtentGroup


class ScrubExtents(msgspec.Struct, frozen=True):
    """Hash these extents as VerifyPayloads says, although anything may happen to them meanwhile;
    then feed `Scrubbed`."""

    look: int
    extents: ExtentGroup


class ComputeParity(msgspec.Struct, frozen=True):
    """Read the data, encode it, answer the command with the checksums of the parity."""

    command: int
    message: HashParity


class ReleaseMemory(msgspec.Struct, frozen=True):
    """Give the memory of these chunks of a device back, then answer the command Done."""

    command: int
    segment: str
    chunks: tuple[int, ...]


Action = (
    CallMaster
    | SendRows
    | CloseLink
    | EndProcess
    | AnswerCommand
    | StartPull
    | CancelPull
    | AnswerIngest
    | RefuseIngest
    | WriteFree
    | WriteRemoved
    | ReleaseMemory
    | ComputeParity
    | VerifyPayloads
    | ScrubExtents
)
