"""Following a relocation until it has ended: a bar on a terminal, else a line now and then.

It goes on in the pool whoever follows it, and under whichever master; so a connection that breaks
is made anew for a while.
"""

from __future__ import annotations

import sys
import time
from math import inf, isfinite
from typing import TYPE_CHECKING, Final

from msgspec.structs import replace
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn

from kvstore.cli.output import size_text
from kvstore.errors import DeadlineExceeded, StaleEpoch, Unavailable
from kvstore.wire.messages.relocation import (
    GetRelocations,
    RelocationRow,
    Relocations,
    RelocationState,
)

if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Self

    from kvstore.cli.operator import Operator

POLL_S: Final = 0.5
PATIENCE_S: Final = 60.0
"""So long may nobody lead before it is given up to follow."""
SHARES_TOLD: Final = 10
"""Lines of a whole relocation, where nothing else changes."""
ENDED: Final = frozenset(RelocationState) - {RelocationState.PLANNED, RelocationState.RUNNING}


class Silent:
    """Shows nothing: the result alone is wanted."""

    def show(self, row: RelocationRow, total_bytes: int) -> None:
        """Do nothing."""

    def __enter__(self) -> Self:
        """Nothing to open."""
        return self

    def __exit__(self, *_: object) -> None:
        """Nothing to close."""


class Lines(Silent):
    """A line whenever a tenth more is done, or it waits for something else."""

    def __init__(self) -> None:
        """Nothing was told yet."""
        self._told: tuple[object, ...] = ()

    def show(self, row: RelocationRow, total_bytes: int) -> None:
        """Print a line, if there is something to tell."""
        share = _share(row, total_bytes)
        told = row.state, row.reason, int(share * SHARES_TOLD)
        if told != self._told:
            self._told = told
            sys.stdout.write(line_of(row, share) + "\n")
            sys.stdout.flush()


class Bar(Silent):
    """A bar that is drawn over and over."""

    def __init__(self) -> None:
        """Not shown before it is entered."""
        sizes = DownloadColumn(binary_units=True)  # as all others that are shown
        columns = TextColumn("{task.description}", markup=False), BarColumn(), sizes
        text = TextColumn("{task.fields[pace]}", markup=False)
        self._progress = Progress(*columns, text, console=Console(highlight=False))
        self._task = self._progress.add_task("", pace="")

    def __enter__(self) -> Self:
        """Begin to draw."""
        self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        """Leave it as it is."""
        self._progress.stop()

    def show(self, row: RelocationRow, total_bytes: int) -> None:
        """Draw how far it is."""
        self._progress.update(
            self._task,
            description=name_of(row),
            total=max(1, total_bytes),
            completed=total_bytes - row.left_bytes if total_bytes else 1,
            pace=pace_of(row),
        )


def shown(*, as_json: bool) -> Silent:
    """How to show progress here."""
    if as_json:
        return Silent()
    return Bar() if sys.stdout.isatty() else Lines()


def follow(
    connect: Callable[[], Operator],
    row: RelocationRow,
    show: Silent,
    timeout_s: float = inf,
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> RelocationRow:
    """How it has ended. DeadlineExceeded if it has not by then; Unavailable if nobody answers."""
    deadline_s = clock() + timeout_s
    heard_s, total_bytes = clock(), row.done_bytes + row.left_bytes
    with show:
        show.show(row, total_bytes)
        while row.state not in ENDED:
            if clock() >= deadline_s:
                text = f"{name_of(row)} goes on after {timeout_s:g} s: {pace_of(row)}"
                raise DeadlineExceeded(text)
            sleep(min(POLL_S, max(0.0, deadline_s - clock())))
            try:
                row = _known(_ask(connect, row), row)
                heard_s = clock()
            except (Unavailable, StaleEpoch):
                if clock() >= heard_s + PATIENCE_S:
                    raise
            total_bytes = max(total_bytes, row.done_bytes + row.left_bytes)
            show.show(row, total_bytes)
    return row


def _ask(connect: Callable[[], Operator], row: RelocationRow) -> RelocationRow:
    with connect() as asking:
        rows = asking.ask(GetRelocations(row.id), Relocations).rows
    if rows:
        return rows[0]
    # Only what has ended is forgotten, and only by another master.
    reason = "it ended under another master"
    return replace(row, state=RelocationState.DONE.value, left_bytes=0, left_pages=0, reason=reason)


def _known(row: RelocationRow, before: RelocationRow) -> RelocationRow:
    """With what was left before, where nobody knows: the worker that has it is away."""
    if row.state in ENDED or row.left_bytes or isfinite(row.eta_s):
        return row
    return replace(row, left_bytes=before.left_bytes, left_pages=before.left_pages)


def name_of(row: RelocationRow) -> str:
    """What it is, in a few words: drain 3-1 of w2."""
    source = f" of {row.source}" if row.source else ""
    target = f" to {row.target}" if row.target else ""
    return f"{row.kind} {row.id}{source}{target}"


def pace_of(row: RelocationRow) -> str:
    """How fast it is, and what it waits for."""
    if row.state in ENDED:
        return f"{row.state}{_reason(row)}"
    left = f"{size_text(row.left_bytes)} left"
    if not row.bytes_per_s:
        return left + _reason(row)
    eta = f", {row.eta_s:.0f} s to go" if isfinite(row.eta_s) else ""
    return f"{left}, {size_text(int(row.bytes_per_s))}/s{eta}{_reason(row)}"


def line_of(row: RelocationRow, share: float) -> str:
    """All of it, for a log."""
    return f"{name_of(row)}: {share:.0%}, {size_text(row.done_bytes)} done, {pace_of(row)}"


def _reason(row: RelocationRow) -> str:
    stuck = f" for {size_text(row.stuck_bytes)}" if row.stuck_bytes else ""
    return f" ({row.reason}{stuck})" if row.reason else ""


def _share(row: RelocationRow, total_bytes: int) -> float:
    if row.state in {RelocationState.DONE, RelocationState.UNDONE} or not total_bytes:
        return 1.0
    return (total_bytes - row.left_bytes) / total_bytes
