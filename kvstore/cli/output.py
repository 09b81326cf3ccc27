"""What commands print: tables for people, one JSON line for programs. Owns `rich`."""

from __future__ import annotations

import sys
from math import inf, isfinite
from typing import TYPE_CHECKING, Final

import msgspec
from msgspec.structs import astuple
from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from kvstore.standing import IN_DOUBT, Standing
from kvstore.wire.messages.relocation import RelocationState
from kvstore.wire.named import named

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from kvstore.cli.masters import MasterRow
    from kvstore.cli.serving import Served
    from kvstore.cli.standalone import Ready
    from kvstore.cli.trace import Replayed
    from kvstore.wire.messages.operator import PoliciesInForce
    from kvstore.wire.messages.pins import PinRow
    from kvstore.wire.messages.reads import SegmentStatus, Status, TierStatus, WorkerStatus
    from kvstore.wire.messages.relocation import RelocationRow
    from kvstore.wire.messages.replicas import ReplicaReport
    from kvstore.wire.messages.tickets import TicketList

PLAIN_WIDTH: Final = 200
"""Columns of output that is not for a terminal."""
EXACT: Final = 1e12
"""Whole figures below it are shown to the last digit."""
BEHIND_SHOWN_S: Final = 1.0
"""Metadata that should have been stored so long ago is worth a line."""
WAITED_FOR: Final = {
    "due": "their time",
    "rate": "copy_bytes_per_s",
    "worker": "a worker",
    "copying": "copies under way",
    "surplus": "what is too much to go",
}
"""What chains wait for before repair goes on, where one word does not say it."""
REPLAYED: Final = {
    "capacity_pages": "capacity, pages",
    "hit_ratio": "hit ratio",
    "pages_stored": "stored",
    "pages_refused": "refused",
    "evictions": "evicted",
    "expirations": "expired",
    "ghost_hits": "ghost hits",
    "effective_ttl_s_by_tier": "effective TTL, s",
    "unreachable_share": "unreachable",
}
"""Headings of a replay's figures."""
REPLAYED_DRIVE: Final = {
    "admission": "admission",
    "nvme_pages": "drive, pages",
    "hit_ratio_by_tier": "hits by tier",
    "pages_written_by_tier": "written",
    "nvme_pages_per_s": "to the drive a second",
    "promotions": "brought up",
}
"""Of those with a drive."""


def print_json(value: object) -> None:
    """One line on standard output, at once: the reader may wait for it."""
    sys.stdout.write(msgspec.json.encode(named(value)).decode() + "\n")
    sys.stdout.flush()


def print_error(text: str) -> None:
    """A line on standard error, in the form of every program of ours."""
    sys.stderr.write(f"kvharbor: {text}\n")
    sys.stderr.flush()


def size_text(size_bytes: int) -> str:
    """Bytes for people: 1.5 GiB."""
    size = float(size_bytes)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if size < 1024:
            return f"{size:.4g} {unit}"
        size /= 1024
    return f"{size:.4g} TiB"


def ready_value(
    ready: Ready, places: tuple[str, str], pid: int, served: Served | None
) -> dict[str, object]:
    """The ready line's fields; `places` are the data folder and the segment folder."""
    status = ready.status
    serving = {} if served is None else {"serving": served}
    return {
        "event": "ready",
        "pid": pid,
        "cluster": status.cluster,
        "epoch": status.epoch,
        "master": ready.master,
        "worker": ready.worker,
        "segments": status.segments,
        "pages": status.pages,
        "discarded_bytes": ready.discarded_bytes,
        "warnings": ready.warnings,
        "data_dir": places[0],
        "segment_dir": places[1],
        **serving,
    }


def print_ready(ready: Ready, places: tuple[str, str], served: Served | None) -> None:
    """Where the pool listens, and what it lends."""
    status, master, worker = ready.status, ready.master, ready.worker
    lines = [
        f"kvharbor is ready: cluster {status.cluster}, epoch {status.epoch}, "
        f"{status.pages} pages found"
    ]
    if ready.discarded_bytes:
        lines.append(
            f"  removed   {size_text(ready.discarded_bytes)} of segments whose metadata is gone"
        )
    lines.append(f"  master    {master.listen}{_admin(master.admin)}")
    if master.unix:
        lines.append(f"            unix:{master.unix}")
    lines.append(f"  worker    {worker.listen}{_admin(worker.admin)}")
    if worker.unix:
        lines.append(f"            unix:{worker.unix}")
    lines += [
        f"  {segment.tier:<9} {size_text(segment.capacity_bytes)} ({segment.segment})"
        for segment in status.segments
    ]
    if served is not None:
        lines += [f"  {each.role:<9} {each.listen}" for each in served.workers]
        lines.append(f"  gateway   http://{served.gateway.listen}/v1, model {served.model}")
    lines += [f"  warning   {text}" for text in ready.warnings]
    lines += [f"  data      {places[0]}", f"  segments  {places[1]}", "Ctrl-C stops it."]
    print("\n".join(lines), flush=True)


def print_status(status: Status) -> None:
    """The pool as tables."""
    console = _console()
    who = f"cluster {status.cluster}, epoch {status.epoch}, {_leading(status)}"
    if status.standing not in {Standing.LEADING, IN_DOUBT}:  # it has no pool to show
        console.print(Text(who))
        return
    console.print(
        Text(
            f"{who}, "
            f"up {status.uptime_s:.0f} s: "
            f"{status.pages} pages in {status.runs} runs of {status.namespaces} namespaces, "
            f"{status.sessions} sessions, {status.open_plans} open plans"
        )
    )
    stored = status.stored
    if stored.behind_s > BEHIND_SHOWN_S:
        late = f"{stored.dirty} chunks wait, the first for {stored.behind_s:.0f} s"
        console.print(Text(f"metadata is not stored in time: {late}"))
    if status.stripes.stripes:
        parity, waiting = size_text(status.stripes.parity_bytes), status.stripes.waiting
        text = f"{status.stripes.stripes} stripes of cold pages, with {parity} of parity"
        console.print(Text(f"{text}; {waiting} are being made whole" if waiting else text))
    if status.stripes.lacks:
        console.print(Text(f"no stripes are made: {status.stripes.lacks}"))
    if status.pins.pins:
        soft, hard = map(size_text, (status.pins.soft_bytes, status.pins.hard_bytes))
        console.print(Text(f"{status.pins.pins} pins: {soft} held softly, {hard} hard"))
    for table in (
        _workers(status.workers),
        _tiers(status.tiers),
        _segments(status.segments),
        _counters(status),
    ):
        if table.row_count:
            console.print(table)
    for each in status.segments:
        if each.reason:
            console.print(Text(f"segment {each.segment} is {each.medium}: {each.reason}"))


def print_masters(masters: Iterable[MasterRow]) -> None:
    """Who leads, and who stands by."""
    table = _table("", "address", "master", "standing", ">epoch", "leader")
    for each in masters:
        standing = each.standing or f"no answer: {each.error}"
        names = each.address, each.master, standing, str(each.epoch or "")
        table.add_row(*map(Text, names), Text(", ".join(each.leader)))
    _console().print(table)


def print_pins(pins: Iterable[PinRow]) -> None:
    """Whose pages stay until when."""
    table = _table(
        "", "owner", "kind", ">pages", ">bytes", ">left, s", "tenant", "model", "namespace"
    )
    for each in pins:
        left = f"{each.left_s:.0f}" if isfinite(each.left_s) else "for ever"
        figures = str(each.pages), size_text(each.size_bytes), left
        names = each.tenant, each.model, each.namespace.hex()
        cells = each.owner, "hard" if each.hard else "soft", *figures, *names
        table.add_row(*map(Text, cells))
    _console().print(table)


def print_replicas(report: ReplicaReport) -> None:
    """By namespace, then what repair is at."""
    figures = ">pages", ">have 1", ">2", ">more", ">lack", ">no host", ">thinned", ">gone"
    table = _table("", ">wanted", *figures, "tenant", "model", "namespace")
    for each in report.namespaces:
        one, two, *more = (*each.by_got, 0, 0)
        counts = (
            each.pages, one, two, sum(more), each.lacking, each.without_host, each.thinned,
            each.unreadable,
        )  # fmt: skip
        wanted = str(each.replicas) if each.replicas else f"{report.replicas} (usual)"
        names = each.tenant, each.model, each.namespace.hex()
        table.add_row(*map(Text, (wanted, *map(str, counts), *names)))
    console = _console()
    console.print(table)
    if report.others:
        console.print(f"{report.others} namespaces that lack less are left out")
    queued = ", ".join(f"{count} with {got}" for got, count in enumerate(report.queued, 1) if count)
    waits = sorted(report.waiting.items())
    waiting = ", ".join(f"{count} for {WAITED_FOR.get(why, why)}" for why, count in waits)
    rate, backlog = size_text(int(report.bytes_per_s)), size_text(report.backlog_bytes)
    eta = f", {report.eta_s:.0f} s to go" if 0 < report.eta_s < inf else ""
    console.print(f"hosts that lend: {report.hosts}")
    console.print(f"for heat ({report.heat}): {report.for_heat} replicas of {report.hot_runs} runs")
    console.print(f"chains to be copied: {queued or 'none'}; waiting: {waiting or 'none'}")
    console.print(f"backlog: {backlog}, copied lately: {rate}/s{eta}")


def print_relocations(rows: Iterable[RelocationRow]) -> None:
    """Which pages change places, and how far that is."""
    figures = ">done", ">left", ">a second", ">to go, s"
    table = _table("", "id", "kind", "from", "to", "pages", "state", *figures, "waits for")
    for each in rows:
        done, left = size_text(each.done_bytes), size_text(each.left_bytes)
        rate = eta = "-"
        if each.state == RelocationState.RUNNING:
            rate = size_text(int(each.bytes_per_s))
            if isfinite(each.eta_s):
                eta = f"{each.eta_s:.0f}"
            elif not each.left_bytes:
                left = "-"
        stuck = f" ({size_text(each.stuck_bytes)})" if each.stuck_bytes else ""
        pages = each.namespace.hex()[:16] or "all"
        if each.keys:
            pages = f"{each.keys} of {pages}"
        names = each.id, each.kind, each.source or "-", each.target or "-", pages, each.state
        table.add_row(*map(Text, (*names, done, left, rate, eta, f"{each.reason}{stuck}")))
    _console().print(table)


def print_tickets(found: TicketList) -> None:
    """Requests on their way, and who carries them out."""
    headings = ">prompt", ">output", ">credit", ">staged", ">routes", ">age, s", ">left, s"
    names = "request", "state", "prefill", "decode", *headings, "tenant", "model"
    tickets = _table("", ">ticket", *names)
    for each in found.rows:
        *who, prompt, output, credit, staged, routes, age, left = astuple(each)
        number, request, tenant, model, state, prefill, decode = map(str, who)
        told = str(prompt), str(output), str(credit), size_text(staged), str(routes)
        cells = number, request, state, prefill or "-", decode or "-", *told
        tickets.add_row(*map(Text, (*cells, f"{age:.1f}", f"{left:.1f}", tenant, model)))
    places = "worker", "tenant", "model", "revision", "role", "state", "host"
    tokens = ">queued", ">used", ">capacity", ">running", ">at most"
    workers = _table("inference workers, in tokens", *places, *tokens)
    for worker in found.workers:
        workers.add_row(*(Text(str(value)) for value in astuple(worker)))
    console, listed = _console(), len(found.rows)
    console.print(tickets)
    shown = f", of which {listed} are shown" if listed < found.tickets else ""
    budget = f"{size_text(found.staging_bytes)} of {size_text(found.staging_budget_bytes)}"
    console.print(f"{found.tickets} tickets{shown}; staged: {budget}")
    console.print(workers)


def print_policies(found: PoliciesInForce) -> None:
    """The policy of each kind, and its parameters."""
    table = _table("", "kind", "policy", "by", "parameter", ">value", "there are also")
    for each in found.policies:
        by = "operator" if each.is_set else "configuration"
        others = ", ".join(name for name in each.known if name != each.name) or "-"
        names = Text(each.kind), Text(each.name), Text(by)
        (first, value), *more = each.parameters.items() or [("-", None)]
        cell = Text("-") if value is None else _figure(value)
        table.add_row(*names, Text(first), cell, Text(others))
        for name, value in more:
            table.add_row("", "", "", Text(name), _figure(value))
    _console().print(table)


def print_replayed(pools: Iterable[Replayed]) -> None:
    """What each pool did with a trace."""
    pools, console = list(pools), _console()
    console.print(_replayed(pools, REPLAYED))
    with_drive = [pool for pool in pools if pool["nvme_pages"]]
    if with_drive:
        console.print(_replayed(with_drive, {"capacity_pages": "memory, pages"} | REPLAYED_DRIVE))


def _replayed(pools: Iterable[Replayed], headings: Mapping[str, str]) -> Table:
    table = _table("", "policy", *(f">{heading}" for heading in headings.values()))
    for pool in pools:
        table.add_row(Text(str(pool["policy"])), *(_figure(pool[name]) for name in headings))
    return table


def _figure(value: object) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{name} {_figure(each)}" for name, each in value.items()) or "-"
    if isinstance(value, float):
        return f"{value:.0f}" if value.is_integer() and abs(value) < EXACT else f"{value:.4g}"
    return "-" if value is None else str(value)


def _leading(status: Status) -> str:
    """Who leads, as the master that answered sees it."""
    if status.standing == Standing.LEADING:
        return f"{status.master or 'this master'} leads"
    if status.standing == IN_DOUBT:
        return f"{status.master} leads but its lease is in doubt: lookups only"
    where = ", ".join(status.leader)
    known = f"the leader is at {where}" if where else "no leader is known"
    return f"{status.master} is {status.standing}, {known}"


def _console() -> Console:
    return Console(width=None if sys.stdout.isatty() else PLAIN_WIDTH, highlight=False)


def _admin(address: str | None) -> str:
    return f"  http://{address}/status" if address else ""


def _table(title: str, *columns: str) -> Table:
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, padding=(0, 1))
    for column in columns:
        # What counts is aligned right; names and addresses are not cut.
        name = column.lstrip(">")
        table.add_column(name, justify="right" if name != column else "left", overflow="fold")
    return table


def _workers(workers: Iterable[WorkerStatus]) -> Table:
    headings = "worker", "state", ">heard, s ago", "host", "rack", "zone", "addresses"
    table = _table("workers", *headings)
    for each in workers:
        where = (each.host, each.rack or "-", each.zone or "-")
        cells = (each.worker, each.state, f"{each.heard_ago_s:.1f}", *where)
        # A peer's text is never markup.
        table.add_row(*map(Text, cells), Text("\n".join(each.addresses)))
    return table


def _tiers(tiers: Iterable[TierStatus]) -> Table:
    headings = (
        ">segments", ">capacity", ">used", ">parts", ">hits", ">evicted", ">brought",
        ">bytes brought", ">ratio",
    )  # fmt: skip
    table = _table("tiers", "tier", *headings)
    for each in tiers:
        # How much longer pages are than the extents that hold them.
        ratio = each.moved_bytes / each.stored_bytes if each.stored_bytes else None
        figures = (
            each.segments, size_text(each.capacity_bytes), size_text(each.used_bytes),
            each.extents, each.hits, each.copies_evicted, each.moved_pages,
            size_text(each.moved_bytes), _figure(ratio),
        )  # fmt: skip
        table.add_row(Text(each.tier), *map(str, figures))
    return table


def _segments(segments: Iterable[SegmentStatus]) -> Table:
    states = (">capacity", ">sealed", ">reserved", ">retired", ">quarantined", ">free")
    table = _table("segments", "segment", "worker", "tier", "medium", *states)
    for each in segments:
        sizes = (
            each.capacity_bytes, each.sealed_bytes, each.reserved_bytes, each.retired_bytes,
            each.quarantined_bytes, each.free_bytes,
        )  # fmt: skip
        names = (each.segment, each.worker, each.tier, each.medium)
        table.add_row(*map(Text, names), *map(size_text, sizes))
    return table


def _counters(status: Status) -> Table:
    table = _table("counters", "counter", ">value")
    for name, value in sorted(status.counters.items()):
        table.add_row(Text(name), str(value))
    return table
