"""The master's commands: on extents fence, free, remove and check; and giving memory back.

A part of the worker's state machine, called by `workers.state` alone. A command is answered once
every extent's outcome is known: a pull in the way is ended first, other work is waited for.
Generation rule of fence and free: a record of the named or a lower generation becomes FREE even
if it was sealed meanwhile, a higher one is left alone (I6). Must not know bytes, locks or sockets.
"""

from __future__ import annotations

from array import array
from typing import Final

import msgspec

from kvstore import limits
from kvstore.errors import BadValue
from kvstore.record import RecordState
from kvstore.segment import size_class_of
from kvstore.wire.messages.common import Outcome
from kvstore.wire.messages.hello import Failure
from kvstore.wire.messages.membership import (
    CheckExtents,
    ExtentsConfirmed,
    FenceExtents,
    FreeExtents,
    ReleaseChunks,
    RetireExtents,
)
from workers.events import (
    Action,
    AnswerCommand,
    CancelPull,
    ExtentGroup,
    ReleaseMemory,
    VerifyPayloads,
    WriteFree,
    WriteRemoved,
)
from workers.extent_table import ChunkTable, SegmentTable
from workers.holdings import Holdings, Work, WorkKind

ExtentCommand = FenceExtents | FreeExtents | RetireExtents | CheckExtents

WAITING: Final = 255
"""Outcome of an extent that somebody is at work on: asked again when that work ends."""
CHOSEN: Final = 254
"""Outcome of an extent that this command's own work has."""

_WORK_OF: Final = {
    FenceExtents: WorkKind.FREE,
    FreeExtents: WorkKind.FREE,
    RetireExtents: WorkKind.REMOVE,
    CheckExtents: WorkKind.CHECK,
}

_BECOMES: Final = {WorkKind.FREE: RecordState.FREE, WorkKind.REMOVE: RecordState.REMOVED}

_ACTION_OF: Final[dict[WorkKind, type[WriteFree | WriteRemoved | VerifyPayloads]]] = {
    WorkKind.FREE: WriteFree,
    WorkKind.REMOVE: WriteRemoved,
    WorkKind.CHECK: VerifyPayloads,
}


class Command(msgspec.Struct, gc=False):
    """A command that is being carried out."""

    id: int
    kind: WorkKind
    epoch: int
    table: SegmentTable
    size_class: int
    offsets: array[int]
    generations: array[int]
    outcomes: bytearray
    pages_of: dict[int, list[int]] = {}
    """Pages of the command by the work that has their extents."""


class Commands:
    """Commands of the current link that are not answered yet, oldest first."""

    def __init__(self, holdings: Holdings) -> None:
        """Nothing is asked."""
        self._holdings = holdings
        self.open: dict[int, Command] = {}

    def receive(self, number: int, message: ExtentCommand, epoch: int) -> list[Action]:
        """Carry a command out as far as nobody is in the way. `epoch` is the highest seen."""
        count = len(message.offsets) // 8
        refusal = None
        if message.epoch < epoch:  # I10
            refusal = Outcome.FENCED
        table = self._holdings.find(message.segment, message.incarnation)
        if refusal is None and table is None:
            refusal = Outcome.STALE  # I11
        if refusal is not None or table is None:
            outcomes = bytes((refusal or Outcome.STALE,)) * count
            return [AnswerCommand(number, ExtentsConfirmed(epoch, outcomes))]
        try:
            command = _opened(number, message, table)
        except BadValue as error:
            return [AnswerCommand(number, Failure(error.code, str(error)))]
        self.open[number] = command
        return self._advance(command)

    def release(self, number: int, message: ReleaseChunks, epoch: int) -> list[Action]:
        """Give memory back in which nothing lies; another leader's or life's is left alone."""
        table = self._holdings.find(message.segment, message.incarnation)
        try:
            if message.epoch < epoch:  # I10
                raise BadValue("epoch", message.epoch, f"at least {epoch}")
            if table is None:  # I11
                raise BadValue("segment", message.segment, "one of this worker, in its life")
            table.release(message.chunks)
        except BadValue as error:
            return [AnswerCommand(number, Failure(error.code, str(error)))]
        return [ReleaseMemory(number, message.segment, message.chunks)]

    def forget(self) -> None:
        """The link is gone: nobody waits for answers. Works in progress end by themselves."""
        self.open.clear()

    def resume(self) -> list[Action]:
        """Look again at extents that were busy, after a work has ended."""
        if not self.open:
            return []
        return [action for command in list(self.open.values()) for action in self._advance(command)]

    def ended(self, work: Work, outcomes: bytes) -> list[Action]:
        """A free, removal or check is done; what could not be written stays what it was."""
        done = 0
        for stretch in work.extents.stretches:
            chunk = work.table.chunks[stretch.chunk_start]
            chunk.vacate(stretch)
            written = outcomes[done : done + stretch.count]
            done += stretch.count
            if work.kind in _BECOMES:
                chunk.restate(stretch, written, _BECOMES[work.kind])
            else:
                chunk.note_verified(stretch, written)
        if work.kind is WorkKind.FREE:
            self._holdings.note_locks(work.extents, (each == Outcome.BUSY for each in outcomes))
        command = self.open.get(work.owner)
        if command is None:
            return []
        for page, outcome in zip(command.pages_of.pop(work.id), outcomes, strict=True):
            command.outcomes[page] = outcome
        return self._answer(command)

    def _advance(self, command: Command) -> list[Action]:
        actions: list[Action] = []
        chosen: list[int] = []
        page = command.outcomes.find(WAITING)
        while page >= 0:
            outcome = self._decide(command, page, actions)
            command.outcomes[page] = outcome
            if outcome == CHOSEN:
                chosen.append(page)
            page = command.outcomes.find(WAITING, page + 1)
        if chosen:
            actions.append(self._start(command, chosen))
        return actions + self._answer(command)

    def _start(self, command: Command, pages: list[int]) -> Action:
        """Hand these extents of the command to the shell."""
        chosen = array("Q", (command.offsets[page] for page in pages))
        stretches = command.table.stretches(command.size_class, chosen)
        extents = ExtentGroup(command.table.segment, command.size_class, stretches)
        work = self._holdings.begin(command.kind, command.id, extents)
        command.pages_of[work.id] = pages
        return _ACTION_OF[command.kind](work.id, extents)

    def _answer(self, command: Command) -> list[Action]:
        if max(command.outcomes, default=Outcome.OK) >= CHOSEN:
            return []
        del self.open[command.id]
        confirmed = ExtentsConfirmed(command.epoch, bytes(command.outcomes))
        return [AnswerCommand(command.id, confirmed)]

    def _decide(self, command: Command, page: int, actions: list[Action]) -> int:
        """The outcome of one extent, or CHOSEN for the command's own work, or WAITING."""
        offset, generation = command.offsets[page], command.generations[page]
        chunk = command.table.cut(offset, command.size_class)
        if chunk is None:  # extents of another class lie there
            return Outcome.STALE
        slot = (offset - chunk.start) // chunk.size_class
        work = self._holdings.at(chunk, slot)
        if work is not None:
            # A sealed extent of a pull is the one that it copies: it stays as it is till then.
            is_target = work.kind is WorkKind.PULL and chunk.states[slot] != RecordState.SEALED
            return self._decide_pulled(work, command, page, actions) if is_target else WAITING
        if command.kind is WorkKind.FREE:
            return _decide_free(chunk, slot, generation)
        if command.kind is WorkKind.REMOVE:
            return _decide_removal(chunk, slot, generation)
        sealed = chunk.states[slot] == RecordState.SEALED
        return CHOSEN if sealed and chunk.generations[slot] == generation else Outcome.STALE

    def _decide_pulled(self, work: Work, command: Command, page: int, actions: list[Action]) -> int:
        """End an older pull and wait for it; leave a newer one alone."""
        if work.generation > command.generations[page]:
            return Outcome.OK
        if command.kind is not WorkKind.FREE:
            return Outcome.STALE  # not sealed, so neither to be removed nor to be checked
        if not work.is_cancelled:
            work.is_cancelled = True
            actions.append(CancelPull(work.id))
        return WAITING


def _opened(number: int, message: ExtentCommand, table: SegmentTable) -> Command:
    """The command in `message`; BadValue where its columns do not fit each other or the segment."""
    count, rest = divmod(len(message.offsets), 8)
    if rest or count > limits.BATCH_PAGES_MAX:
        raise BadValue(
            "offsets", len(message.offsets), f"up to {limits.BATCH_PAGES_MAX} of 8 bytes"
        )
    if len(message.generations) != len(message.offsets):
        raise BadValue("generations", len(message.generations), f"{len(message.offsets)} bytes")
    if size_class_of(message.size_class) != message.size_class:
        raise BadValue("size_class", message.size_class, f"a multiple of {size_class_of(1)}")
    offsets, generations = array("Q", message.offsets), array("Q", message.generations)
    table.stretches(message.size_class, offsets)
    return Command(
        number, _WORK_OF[type(message)], message.epoch, table, message.size_class, offsets,
        generations, bytearray((WAITING,)) * count,
    )  # fmt: skip


def _decide_free(chunk: ChunkTable, slot: int, generation: int) -> int:
    """Free an idle extent of that or a lower generation, and refuse those from now on."""
    if chunk.generations[slot] > generation:
        return Outcome.OK
    chunk.generations[slot] = generation
    chunk.outcomes[slot] = Outcome.FENCED
    return CHOSEN


def _decide_removal(chunk: ChunkTable, slot: int, generation: int) -> int:
    """Remove a sealed extent of that or a lower generation; what is free stays free."""
    if chunk.generations[slot] > generation or chunk.states[slot] == RecordState.REMOVED:
        return Outcome.OK
    if chunk.states[slot] == RecordState.FREE:
        chunk.generations[slot] = generation  # a removed generation never returns
        chunk.outcomes[slot] = Outcome.FENCED
        return Outcome.OK
    return CHOSEN
