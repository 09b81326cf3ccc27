"""`kvharbor pin`, `unpin` and `pins`: which pages stay in a running pool."""

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
    hex_ids,
    operator,
)
from kvstore.errors import BadValue
from kvstore.wire.messages.pins import (
    ListPins,
    PagesPinned,
    PagesUnpinned,
    PinList,
    PinPages,
    UnpinPages,
)

Namespace = Annotated[
    str, typer.Argument(help="Id of the pages' namespace, as `pins` shows it: 64 hex digits.")
]
Keys = Annotated[list[str] | None, typer.Argument(metavar="[KEY]...", help="64 hex digits each.")]
Owner = Annotated[str, typer.Option(help="Name by which the pin is taken back.")]


def pin(  # noqa: PLR0913 -- each is an option of the command line
    context: typer.Context,
    namespace: Namespace,
    owner: Owner,
    ttl_s: Annotated[float, typer.Option(help="Seconds until the pin ends, or inf.")],
    keys: Keys = None,
    hard: Annotated[
        bool, typer.Option("--hard", help="Never evict or expire them; counts against a quota.")
    ] = False,
    master: Master = MASTER,
    cluster: Cluster = "",
    secret_file: SecretFile = None,
    as_json: AsJson = False,
) -> None:
    """Keep pages in the pool; a pin that is not hard makes them go last."""
    packed = hex_ids("key", keys or ())
    if not packed:
        raise BadValue("key", "", "at least one")
    asked = PinPages(hex_id("namespace", namespace), packed, owner, hard, ttl_s)
    with operator(master, cluster, secret_file) as asking:
        pinned = sum(asking.change(asked, PagesPinned).pinned)
    _print({"pinned": pinned}, as_json=as_json or context.obj)


def unpin(
    context: typer.Context,
    namespace: Namespace,
    owner: Owner,
    keys: Keys = None,
    master: Master = MASTER,
    cluster: Cluster = "",
    secret_file: SecretFile = None,
    as_json: AsJson = False,
) -> None:
    """Take an owner's pins back: of these pages, or without keys of all in the namespace."""
    asked = UnpinPages(hex_id("namespace", namespace), hex_ids("key", keys or ()), owner)
    with operator(master, cluster, secret_file) as asking:
        pages = asking.change(asked, PagesUnpinned).pages
    _print({"unpinned": pages}, as_json=as_json or context.obj)


def pins(
    context: typer.Context,
    master: Master = MASTER,
    cluster: Cluster = "",
    secret_file: SecretFile = None,
    as_json: AsJson = False,
) -> None:
    """List pins: whose, of how many pages, until when."""
    with operator(master, cluster, secret_file) as asking:
        found = asking.ask(ListPins(), PinList)
    if as_json or context.obj:
        rows = [{**asdict(each), "namespace": each.namespace.hex()} for each in found.pins]
        output.print_json({"pins": rows})
    else:
        output.print_pins(found.pins)


def _print(counted: dict[str, int], *, as_json: bool) -> None:
    if as_json:
        output.print_json(counted)
    else:
        print("".join(f"{what} {pages} pages" for what, pages in counted.items()))
