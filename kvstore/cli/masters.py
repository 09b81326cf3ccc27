"""`kvharbor masters`: what each configured master says of itself, whoever leads."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Annotated, Final

import msgspec
import typer

from kvstore.cli import output
from kvstore.cli.operator import Operator
from kvstore.cli.options import (
    MASTER,
    AsJson,
    Cluster,
    SecretFile,
    cluster_section,
)
from kvstore.errors import KVStoreError, Unavailable

if TYPE_CHECKING:
    from kvstore.wire.messages.reads import Status

ASKED_AT_ONCE_MAX: Final = 16
Masters = Annotated[
    str,
    typer.Option(
        help="Whom to ask: host:port or unix:/path, several with commas between.",
        envvar="KVHARBOR_MASTER",
    ),
]


class MasterRow(msgspec.Struct, frozen=True):
    """One address and who answered there; `error` says why nobody did."""

    address: str
    master: str = ""
    standing: str = ""
    epoch: int = 0
    leader: tuple[str, ...] = ()
    error: str = ""


def masters(
    context: typer.Context,
    master: Masters = MASTER,
    cluster: Cluster = "",
    secret_file: SecretFile = None,
    as_json: AsJson = False,
) -> None:
    """Show of each master what it is, and in which epoch; fails when none of them answers."""
    secret = cluster_section(None, secret_file).secret()
    addresses = list(dict.fromkeys(master.split(",")))
    rows: list[MasterRow] = []
    errors: list[KVStoreError] = []

    def ask(address: str) -> Status | KVStoreError:
        try:
            with Operator(address, secret, cluster) as asking:
                return asking.status()
        except KVStoreError as error:
            return error

    with ThreadPoolExecutor(min(len(addresses), ASKED_AT_ONCE_MAX)) as pool:
        for address, said in zip(addresses, pool.map(ask, addresses), strict=True):
            if isinstance(said, KVStoreError):
                errors.append(said)
                rows.append(MasterRow(address, error=str(said)))
            else:
                names = said.master, said.standing, said.epoch, said.leader
                rows.append(MasterRow(address, *names))
    if len(errors) == len(rows):
        refusals = [error for error in errors if not isinstance(error, Unavailable)]
        raise refusals[0] if refusals else Unavailable("; ".join(map(str, errors)))
    if as_json or context.obj:
        output.print_json({"masters": rows})
    else:
        output.print_masters(rows)
