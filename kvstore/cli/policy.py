"""`kvharbor policy`: how a running pool chooses what to evict."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from kvstore.cli import output
from kvstore.cli.options import MASTER, AsJson, Cluster, Master, SecretFile, operator
from kvstore.errors import BadValue
from kvstore.wire.messages.operator import GetPolicy, PolicyInForce, SetPolicy

if TYPE_CHECKING:
    from collections.abc import Sequence

app = typer.Typer(help="See and change how victims of eviction are chosen.", no_args_is_help=True)


@app.command()
def show(
    context: typer.Context,
    master: Master = MASTER,
    cluster: Cluster = "",
    secret_file: SecretFile = None,
    as_json: AsJson = False,
) -> None:
    """Show the eviction policy in force, its parameters, and which others exist."""
    with operator(master, cluster, secret_file) as asking:
        found = asking.ask(GetPolicy(), PolicyInForce)
    _print(found, as_json=as_json or context.obj)


@app.command("set")
def set_policy(
    context: typer.Context,
    name: Annotated[str, typer.Argument(help="Of the policy.")],
    parameters: Annotated[
        list[str] | None, typer.Argument(metavar="[NAME=VALUE]...", help="Its parameters.")
    ] = None,
    master: Master = MASTER,
    cluster: Cluster = "",
    secret_file: SecretFile = None,
    as_json: AsJson = False,
) -> None:
    """Choose victims by this policy, at once and until the master ends.

    To keep it, write it into the configuration: eviction and eviction_parameters of [master].
    """
    asked = SetPolicy(name, _written(parameters or ()))
    with operator(master, cluster, secret_file) as asking:
        found = asking.ask(asked, PolicyInForce)
    _print(found, as_json=as_json or context.obj)


def _written(parameters: Sequence[str]) -> dict[str, str]:
    for each in parameters:
        if "=" not in each:
            raise BadValue("parameter", each, "name=value")
    return dict(each.split("=", 1) for each in parameters)


def _print(found: PolicyInForce, *, as_json: bool) -> None:
    if as_json:
        output.print_json(found)
    else:
        output.print_policy(found)
