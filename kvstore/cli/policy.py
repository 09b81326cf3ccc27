"""`kvharbor policy`: the policies by which a running pool decides."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from kvstore.cli import output
from kvstore.cli.options import MASTER, AsJson, Cluster, Master, SecretFile, operator
from kvstore.errors import BadValue
from kvstore.wire.messages.operator import GetPolicies, PoliciesInForce, ResetPolicy, SetPolicy

if TYPE_CHECKING:
    from collections.abc import Sequence

app = typer.Typer(
    help="See and change how the pool evicts, admits to drives, places, replicates, stripes and "
    "routes.",
    no_args_is_help=True,
)

Kind = Annotated[
    str,
    typer.Argument(
        help="eviction, admission (to drives), placement, replication, erasure, prefill_routing, "
        "decode_routing, colocation or roles (of inference workers)."
    ),
]


@app.command()
def show(
    context: typer.Context,
    master: Master = MASTER,
    cluster: Cluster = "",
    secret_file: SecretFile = None,
    as_json: AsJson = False,
) -> None:
    """Show the policies in force, their parameters, and which others exist."""
    with operator(master, cluster, secret_file) as asking:
        found = asking.ask(GetPolicies(), PoliciesInForce)
    _print(found, as_json=as_json or context.obj)


@app.command("set")
def set_policy(
    context: typer.Context,
    kind: Kind,
    name: Annotated[str, typer.Argument(help="Of the policy.")],
    parameters: Annotated[
        list[str] | None, typer.Argument(metavar="[NAME=VALUE]...", help="Its parameters.")
    ] = None,
    master: Master = MASTER,
    cluster: Cluster = "",
    secret_file: SecretFile = None,
    as_json: AsJson = False,
) -> None:
    """Decide by this policy, at once.

    It is kept with the pool's metadata and outranks the configuration, also after a restart and
    for another master, until `kvharbor policy reset`.
    """
    asked = SetPolicy(kind, name, _written(parameters or ()))
    with operator(master, cluster, secret_file) as asking:
        found = asking.change(asked, PoliciesInForce)
    _print(found, as_json=as_json or context.obj)


@app.command()
def reset(
    context: typer.Context,
    kind: Kind,
    master: Master = MASTER,
    cluster: Cluster = "",
    secret_file: SecretFile = None,
    as_json: AsJson = False,
) -> None:
    """Decide by the policy that is configured again, at once."""
    with operator(master, cluster, secret_file) as asking:
        found = asking.change(ResetPolicy(kind), PoliciesInForce)
    _print(found, as_json=as_json or context.obj)


def _written(parameters: Sequence[str]) -> dict[str, str]:
    for each in parameters:
        if "=" not in each:
            raise BadValue("parameter", each, "name=value")
    return dict(each.split("=", 1) for each in parameters)


def _print(found: PoliciesInForce, *, as_json: bool) -> None:
    if as_json:
        output.print_json(found)
    else:
        output.print_policies(found)
