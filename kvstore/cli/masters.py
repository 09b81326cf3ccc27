"""`kvharbor masters`: what each configured master says of itself, whoever leads."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Final

import msgspec
import typer  # noqa: TC002 -- typer reads annotations when it runs

from kvstore.cli import output
from kvstore.cli.operator import Operator
from kvstore.cli.options import (
    MASTER,
    AsJson,
    Cluster,
    Master,
    SecretFile,
    cluster_section,
)
from kvstore.errors import KVStoreError

if TYPE_CHECKING:
    from kvstore.wire.messages.reads import Status

ASKED_AT_ONCE_MAX: Final = 16


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
    master: Master = MASTER,
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
        raise errors[0]
    if as_json or context.obj:
        output.print_json({"masters": rows})
    else:
        output.print_masters(rows)
