"""`kvharbor tier`: how much of which memory a running pool has."""

from __future__ import annotations

from typing import Annotated

import typer

from kvstore.cli import output
from kvstore.cli.options import MASTER, AsJson, Cluster, Master, SecretFile, operator
from kvstore.config_values import parse_size
from kvstore.errors import BadValue
from kvstore.wire.messages.operator import SegmentShrinks, ShrinkSegment

app = typer.Typer(help="Change how much memory the pool has.", no_args_is_help=True)


@app.callback()
def before() -> None:
    """Keep `shrink` a command of its own."""


@app.command()
def shrink(
    context: typer.Context,
    segment: Annotated[str, typer.Argument(help="One on a device; `kvharbor status` lists them.")],
    size: Annotated[str, typer.Argument(help="What is to stay, e.g. 8GiB; 0B for nothing.")],
    master: Master = MASTER,
    cluster: Cluster = "",
    secret_file: SecretFile = None,
    as_json: AsJson = False,
) -> None:
    """Give memory of a device back, in whole chunks, until its worker starts anew.

    Pages there are copied down to memory where there is room, else dropped; what is leased goes
    when the lease ends, what another process has open when that closes it.
    """
    asked = ShrinkSegment(segment, _size(size))
    with operator(master, cluster, secret_file) as asking:
        found = asking.ask(asked, SegmentShrinks)
    if as_json or context.obj:
        output.print_json(found)
    else:
        kept, left = output.size_text(found.kept_bytes), output.size_text(found.left_bytes)
        typer.echo(f"{found.segment}: {kept} stay, {left} are being given back")


def _size(text: str) -> int:
    if text in {"0", "0B"}:
        return 0
    try:
        return parse_size(text)
    except ValueError as error:
        raise BadValue("size", text, str(error)) from error
