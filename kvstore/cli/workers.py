"""`kvharbor workers`: what is to be known of workers that are not here."""

from __future__ import annotations

from typing import Annotated

import typer

from kvstore.cli import output
from kvstore.cli.options import MASTER, AsJson, Cluster, Master, SecretFile, confirm, operator
from kvstore.wire.messages.hello import Done
from kvstore.wire.messages.operator import ForgetWorker

app = typer.Typer(help="Give up workers that will not come back.", no_args_is_help=True)


@app.callback()
def before() -> None:
    """Keep `forget` a command of its own."""


@app.command()
def forget(
    context: typer.Context,
    worker: Annotated[str, typer.Argument(help="Its name; `kvharbor status` lists those lost.")],
    yes: Annotated[bool, typer.Option("--yes", help="Do not ask.")] = False,
    master: Master = MASTER,
    cluster: Cluster = "",
    secret_file: SecretFile = None,
    as_json: AsJson = False,
) -> None:
    """Do not wait for a worker that is lost or has left: it counts as lost no more.

    What only it had is gone for good: should it come back after all, it comes back empty.
    """
    if not yes:
        confirm(f"Forget worker {worker}? What only it has is given up.")
    with operator(master, cluster, secret_file) as asking:
        asking.change(ForgetWorker(worker), Done)
    if as_json or context.obj:
        output.print_json({"forgotten": worker})
    else:
        typer.echo(f"forgotten {worker}")
