"""`kvharbor doctor`: why engines do not share pages."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from kvstore.cli import output
from kvstore.cli.options import AsJson  # noqa: TC001 -- typer reads annotations when it runs
from kvstore.connectors.engine_namespace import (
    EngineFields,
    described,
    differences,
    namespaces,
    of_text,
)
from kvstore.errors import BadValue
from kvstore.exit_codes import ExitCode

app = typer.Typer(help="Find out why engines do not share pages.", no_args_is_help=True)

Description = Annotated[
    Path, typer.Argument(help="What an engine's connector wrote to its `description_file`.")
]


@app.callback()
def before() -> None:
    """Keep `engine` a command of its own."""


@app.command()
def engine(
    context: typer.Context,
    description: Description,
    other: Annotated[Path | None, typer.Argument(help="Another engine's, to compare with.")] = None,
    as_json: AsJson = False,
) -> None:
    """Show what an engine's KV is called; with two, what keeps them from sharing, if anything."""
    fields = _read(description)
    if other is None:
        found = described(fields)
        found |= {f"namespaces[{i}]": each.id.hex() for i, each in enumerate(namespaces(fields))}
        _show(found, [f"{name}: {value}" for name, value in found.items()], context, as_json)
        return
    differing = differences(fields, _read(other))
    lines = differing or ["they share: nothing differs"]
    _show({"differences": differing}, lines, context, as_json)
    if differing:
        raise typer.Exit(ExitCode.FAILED)


def _show(value: object, lines: list[str], context: typer.Context, as_json: bool) -> None:
    if as_json or context.obj:
        output.print_json(value)
    else:
        typer.echo("\n".join(lines))


def _read(path: Path) -> EngineFields:
    try:
        return of_text(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise BadValue("description", str(path), f"a file that can be read: {error}") from error
