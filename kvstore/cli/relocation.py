"""`kvharbor drain`, `undrain`, `copy`, `move`, `rebalance`, `relocations`: pages change places."""

from __future__ import annotations

from contextlib import contextmanager
from math import inf
from typing import TYPE_CHECKING, Annotated, Final

import typer
from msgspec.structs import asdict, replace

from kvstore.cli import output, progress
from kvstore.cli.options import (
    MASTER,
    AsJson,
    Cluster,
    Master,
    SecretFile,
    confirm,
    hex_id,
    hex_ids,
    operator,
)
from kvstore.errors import BadValue, CallerError, error_from_wire
from kvstore.exit_codes import ExitCode
from kvstore.wire.messages.relocation import (
    CancelRelocation,
    GetRelocations,
    RelocationKind,
    RelocationRow,
    Relocations,
    RelocationState,
    StartRelocation,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator
    from pathlib import Path

    from kvstore.cli.operator import Operator

Worker = Annotated[str, typer.Argument(help="Its name; `kvharbor status` lists them.")]
Namespace = Annotated[
    str, typer.Argument(help="Id of the pages' namespace: 64 hex digits.", show_default="all")
]
Keys = Annotated[
    list[str] | None,
    typer.Argument(metavar="[KEY]...", help="64 hex digits each.", show_default="all"),
]
To = Annotated[str, typer.Option("--to", help="Worker that they go to.")]
From = Annotated[str, typer.Option("--from", help="Only pages of this worker.")]
Tier = Annotated[
    str, typer.Option(help="hbm, dram or nvme.", show_default="where each lies, if there is room")
]
Wait = Annotated[bool, typer.Option(help="Show progress until it is done.")]
TimeoutS = Annotated[float, typer.Option(help="Seconds to wait; it goes on after them.")]
Yes = Annotated[bool, typer.Option("--yes", help="Do not ask.")]
WORDS: Final = {
    RelocationKind.DRAIN: {"source": "WORKER"},
    RelocationKind.COPY: {
        "source": "--from", "target": "--to", "namespace": "NAMESPACE", "keys": "KEY",
        "tier": "--tier",
    },
}  # fmt: skip
"""What is written here for a field of StartRelocation; a move is written as a copy is."""
ENDED_DRAINS: Final = (RelocationState.CANCELLED, RelocationState.UNDONE)
"""One that is done goes on: its worker is kept empty."""
ENDS_BY: Final = "kvharbor relocations --cancel {}"
EXAMPLES: Final = {
    "drain": "Example: kvharbor drain worker-2 --yes --timeout-s 600 && stop worker-2",
    "copy": "Example: kvharbor copy --from worker-1 --to worker-3 --tier dram",
    "move": "Example: kvharbor move 6f0c…e1 --from worker-1 --to worker-3 --yes",
    "rebalance": "Example: kvharbor rebalance --dry-run",
}


def drain(  # noqa: PLR0913 -- each is an option of the command line
    context: typer.Context,
    worker: Worker,
    wait: Wait = True,
    timeout_s: TimeoutS = inf,
    cancel: Annotated[bool, typer.Option("--cancel", help="As `kvharbor undrain`.")] = False,
    yes: Yes = False,
    master: Master = MASTER,
    cluster: Cluster = "",
    secret_file: SecretFile = None,
    as_json: AsJson = False,
) -> None:
    """Empty a worker, so that it can be stopped without a page lost; it is read meanwhile.

    Its pages are copied to other workers, unless they lie there already, and nothing new comes to
    it: not when it starts anew either, nor under another master, until `kvharbor undrain`.
    """
    connect = _connecting(master, cluster, secret_file)
    as_json = as_json or context.obj
    if cancel:
        _undrain(connect, worker, as_json=as_json)
        return
    wish = StartRelocation(RelocationKind.DRAIN, source=worker)
    asked = f"Drain worker {worker}? {{}} go elsewhere, and nothing comes to it any more."
    ends_by = f"kvharbor drain {worker} --cancel"
    _carry_out(connect, wish, "" if yes else asked, ends_by, wait, timeout_s, as_json=as_json)


def undrain(
    context: typer.Context,
    worker: Worker,
    master: Master = MASTER,
    cluster: Cluster = "",
    secret_file: SecretFile = None,
    as_json: AsJson = False,
) -> None:
    """Fill a worker again that was drained, or is being drained."""
    connect = _connecting(master, cluster, secret_file)
    _undrain(connect, worker, as_json=as_json or context.obj)


def copy(  # noqa: PLR0913 -- each is an option of the command line
    context: typer.Context,
    to: To,
    namespace: Namespace = "",
    keys: Keys = None,
    source: From = "",
    tier: Tier = "",
    wait: Wait = True,
    timeout_s: TimeoutS = inf,
    master: Master = MASTER,
    cluster: Cluster = "",
    secret_file: SecretFile = None,
    as_json: AsJson = False,
) -> None:
    """Have one more replica of pages on a worker, which is kept as if a put had asked for it."""
    wish = _wish(RelocationKind.COPY, to, source, tier, namespace, keys or ())
    connect = _connecting(master, cluster, secret_file)
    as_json = as_json or context.obj
    _carry_out(connect, wish, "", ENDS_BY, wait, timeout_s, as_json=as_json)


def move(  # noqa: PLR0913 -- each is an option of the command line
    context: typer.Context,
    to: To,
    namespace: Namespace = "",
    keys: Keys = None,
    source: From = "",
    tier: Tier = "",
    wait: Wait = True,
    timeout_s: TimeoutS = inf,
    yes: Yes = False,
    master: Master = MASTER,
    cluster: Cluster = "",
    secret_file: SecretFile = None,
    as_json: AsJson = False,
) -> None:
    """Bring pages to a worker; then they leave the one named by --from.

    Without it they leave every other, but for as many replicas as they are to have.
    """
    wish = _wish(RelocationKind.MOVE, to, source, tier, namespace, keys or ())
    asked = "" if yes else f"Move {{}} to worker {to}?"
    connect = _connecting(master, cluster, secret_file)
    as_json = as_json or context.obj
    _carry_out(connect, wish, asked, ENDS_BY, wait, timeout_s, as_json=as_json)


def rebalance(
    context: typer.Context,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Begin nothing, and show what it would be.")
    ] = False,
    wait: Wait = True,
    timeout_s: TimeoutS = inf,
    master: Master = MASTER,
    cluster: Cluster = "",
    secret_file: SecretFile = None,
    as_json: AsJson = False,
) -> None:
    """Bring cold pages from the fullest segments to the emptiest until they are filled alike."""
    wish = StartRelocation(RelocationKind.REBALANCE, dry_run=dry_run)
    connect = _connecting(master, cluster, secret_file)
    as_json = as_json or context.obj
    _carry_out(connect, wish, "", ENDS_BY, wait, timeout_s, as_json=as_json)


def relocations(
    context: typer.Context,
    cancel: Annotated[
        str, typer.Option(help="End the one of this id; what was copied stays.")
    ] = "",
    master: Master = MASTER,
    cluster: Cluster = "",
    secret_file: SecretFile = None,
    as_json: AsJson = False,
) -> None:
    """List drains, copies, moves and rebalances: how far they are, and what they wait for."""
    connect = _connecting(master, cluster, secret_file)
    with connect() as asking:
        if cancel:
            rows = asking.change(CancelRelocation(cancel), Relocations).rows
        else:
            rows = asking.ask(GetRelocations(), Relocations).rows
    if as_json or context.obj:
        output.print_json({"relocations": [_named(row) for row in rows]})
    else:
        output.print_relocations(rows)


def _connecting(master: str, cluster: str, secret_file: Path | None) -> Callable[[], Operator]:
    return lambda: operator(master, cluster, secret_file)


def _wish(
    kind: RelocationKind, to: str, source: str, tier: str, namespace: str, keys: Iterable[str]
) -> StartRelocation:
    wanted = hex_id("namespace", namespace) if namespace else b""
    return StartRelocation(kind, source, to, wanted, hex_ids("key", keys), tier)


def _carry_out(
    connect: Callable[[], Operator],
    wish: StartRelocation,
    question: str,
    ends_by: str,
    wait: bool,
    timeout_s: float,
    *,
    as_json: bool,
) -> None:
    """Begin it, ask before that where there is a question, and follow it."""
    if not timeout_s >= 0:  # nor is it no number
        raise BadValue("--timeout-s", timeout_s, "0 or more seconds")
    with connect() as asking, _in_words_of(wish.kind):
        if question:
            _confirm(asking, wish, question)
        (row,) = asking.change(wish, Relocations).rows
    if wait and row.state == RelocationState.RUNNING:
        try:
            row = progress.follow(connect, row, progress.shown(as_json=as_json), timeout_s)
        except KeyboardInterrupt:
            ends = ends_by.format(row.id)
            output.print_error(f"{progress.name_of(row)} goes on in the pool; `{ends}` ends it")
            raise typer.Exit(ExitCode.FAILED) from None
    elif not as_json:
        state = "" if row.state in progress.ENDED else f"{row.state}, "
        typer.echo(f"{progress.name_of(row)}: {state}{progress.pace_of(row)}")
    if as_json:
        output.print_json(_named(row))
    if row.state == RelocationState.CANCELLED:
        raise typer.Exit(ExitCode.FAILED)


@contextmanager
def _in_words_of(kind: str) -> Iterator[None]:
    """Name what a master refuses as it was written on the command line."""
    words = WORDS.get(RelocationKind.COPY if kind == RelocationKind.MOVE else RelocationKind(kind))
    try:
        yield
    except CallerError as error:
        field, colon, rest = str(error).partition(": ")
        if not words or field not in words:
            raise
        raise error_from_wire(error.code, f"{words[field]}{colon}{rest}") from error


def _confirm(asking: Operator, wish: StartRelocation, question: str) -> None:
    (planned,) = asking.ask(replace(wish, dry_run=True), Relocations).rows
    if planned.state == RelocationState.PLANNED:  # else it is under way
        size = output.size_text(planned.left_bytes)
        confirm(question.format(f"Up to {size} of pages"))


def _undrain(connect: Callable[[], Operator], worker: str, *, as_json: bool) -> None:
    with connect() as asking:
        rows = asking.ask(GetRelocations(), Relocations).rows
        open_ones = [
            row
            for row in rows
            if row.kind == RelocationKind.DRAIN and row.state not in ENDED_DRAINS
        ]
        drains = [row.id for row in open_ones if row.source == worker]
        if not drains:
            names = ", ".join(row.source for row in open_ones) or "none"
            raise BadValue("worker", worker, f"one that is drained: {names}")
        (row,) = asking.change(CancelRelocation(drains[0]), Relocations).rows
    if as_json:
        output.print_json(_named(row))
    else:
        typer.echo(f"worker {worker} is filled again")


def _named(row: RelocationRow) -> dict[str, object]:
    return {**asdict(row), "namespace": row.namespace.hex()}
