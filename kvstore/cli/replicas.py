"""`kvharbor replicas`: how many replicas pages have, are to have, and what is done about it."""

from __future__ import annotations

from typing import Annotated

import typer
from msgspec.structs import asdict

from kvstore.cli import output
from kvstore.cli.options import (
    MASTER,
    AsJson,
    Cluster,
    Master,
    SecretFile,
    hex_id,
    operator,
    refuse_early_options,
)
from kvstore.require import require_replicas
from kvstore.wire.messages.hello import Done
from kvstore.wire.messages.replicas import GetReplicas, RepairNow, ReplicaReport, SetReplicas

app = typer.Typer(help="See and change how many replicas pages have.", invoke_without_command=True)

Namespace = Annotated[
    str, typer.Argument(help="Id of a namespace, as `replicas` shows it: 64 hex digits.")
]


@app.callback()
def before(
    context: typer.Context,
    master: Master = MASTER,
    cluster: Cluster = "",
    secret_file: SecretFile = None,
    as_json: AsJson = False,
) -> None:
    """Show by namespace how many replicas pages have and lack, and what repair is at.

    For example: kvharbor replicas; kvharbor replicas set 3f…c0 3
    """
    context.obj = as_json or context.obj
    if context.invoked_subcommand is None:
        show(context, master, cluster, secret_file)
        return
    refuse_early_options(context)


@app.command()
def show(
    context: typer.Context,
    master: Master = MASTER,
    cluster: Cluster = "",
    secret_file: SecretFile = None,
    as_json: AsJson = False,
) -> None:
    """The same as `kvharbor replicas`: count all pages by their replicas."""
    with operator(master, cluster, secret_file) as asking:
        found = asking.ask(GetReplicas(), ReplicaReport)
    if as_json or context.obj:
        rows = [{**asdict(each), "namespace": each.namespace.hex()} for each in found.namespaces]
        output.print_json({**asdict(found), "namespaces": rows})
    else:
        output.print_replicas(found)


@app.command("set")
def set_replicas(
    context: typer.Context,
    namespace: Namespace,
    replicas: Annotated[int, typer.Argument(help="Of each page; 0: as many as usual.")],
    master: Master = MASTER,
    cluster: Cluster = "",
    secret_file: SecretFile = None,
    as_json: AsJson = False,
) -> None:
    """Want so many replicas of a namespace's pages, at once and for pages to come.

    Pages whose put asked for a number of its own keep that. Replicas are made and dropped in the
    background.
    """
    require_replicas("replicas", replicas)
    asked = SetReplicas(hex_id("namespace", namespace), replicas)
    with operator(master, cluster, secret_file) as asking:
        asking.change(asked, Done)
    _print({"namespace": namespace.lower(), "replicas": replicas}, as_json=as_json or context.obj)


@app.command()
def repair(
    context: typer.Context,
    namespace: Annotated[
        str, typer.Argument(help="Id of a namespace; without one: of all of them.")
    ] = "",
    master: Master = MASTER,
    cluster: Cluster = "",
    secret_file: SecretFile = None,
    as_json: AsJson = False,
) -> None:
    """Look through all pages now, and let none wait for its time.

    What was lost is copied without waiting for its worker to come back, what is too much goes.
    """
    asked = RepairNow(hex_id("namespace", namespace) if namespace else b"")
    with operator(master, cluster, secret_file) as asking:
        asking.change(asked, Done)
    _print({"repairing": namespace.lower() or "all"}, as_json=as_json or context.obj)


def _print(said: dict[str, object], *, as_json: bool) -> None:
    if as_json:
        output.print_json(said)
    else:
        typer.echo(", ".join(f"{name} {value}" for name, value in said.items()))
