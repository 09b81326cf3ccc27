"""`kvharbor tickets`: requests on their way from prefill to decode, and who carries them out."""

from __future__ import annotations

from typing import Annotated

import typer

from kvstore.cli import output
from kvstore.cli.options import (
    MASTER,
    AsJson,
    Cluster,
    Master,
    SecretFile,
    operator,
    refuse_early_options,
)
from kvstore.wire.messages.hello import Done
from kvstore.wire.messages.tickets import CancelTicket, ListTickets, TicketList

app = typer.Typer(
    help="See requests that prefill and decode workers carry out, and end them.",
    invoke_without_command=True,
)


@app.callback()
def before(
    context: typer.Context,
    master: Master = MASTER,
    cluster: Cluster = "",
    secret_file: SecretFile = None,
    as_json: AsJson = False,
) -> None:
    """List tickets, oldest first, and the inference workers of every fleet.

    For example: kvharbor tickets; kvharbor tickets cancel 4294967297
    """
    context.obj = as_json or context.obj
    if context.invoked_subcommand is None:
        show(context, master, cluster, secret_file)
    else:
        refuse_early_options(context)


@app.command()
def show(
    context: typer.Context,
    master: Master = MASTER,
    cluster: Cluster = "",
    secret_file: SecretFile = None,
    as_json: AsJson = False,
) -> None:
    """The same as `kvharbor tickets`."""
    with operator(master, cluster, secret_file) as asking:
        found = asking.ask(ListTickets(), TicketList)
    if as_json or context.obj:
        output.print_json(found)
    else:
        output.print_tickets(found)


@app.command()
def cancel(
    context: typer.Context,
    ticket: Annotated[int, typer.Argument(help="As `kvharbor tickets` shows it.", min=1)],
    master: Master = MASTER,
    cluster: Cluster = "",
    secret_file: SecretFile = None,
    as_json: AsJson = False,
) -> None:
    """End a request: whatever it holds is given back; no error where it has ended already."""
    with operator(master, cluster, secret_file) as asking:
        asking.ask(CancelTicket(ticket), Done)
    if as_json or context.obj:
        output.print_json({"cancelled": ticket})
    else:
        typer.echo(f"ticket {ticket} is cancelled")
