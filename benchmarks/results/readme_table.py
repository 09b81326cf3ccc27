"""Writes the measured table of README.md: `python -m benchmarks.results.readme_table`.

A test compares the README with what this gives, so the figures there are those of the results.
"""

from __future__ import annotations

from typing import Final

from benchmarks.harness import ROOT
from benchmarks.results.files import Document, Row, load, origin, parameters, tables
from benchmarks.results.readme_engines import drop_in_lines, engines_lines

README: Final = ROOT / "README.md"
START: Final = "<!-- measured: made by `python -m benchmarks.results.readme_table` -->"
STOP: Final = "<!-- /measured -->"

BATCH_SIZES: Final = ("64KiB", "256KiB", "1MiB", "4MiB")
WAYS: Final = {
    "shm": "kvharbor, shared memory",
    "shm, zero-copy": "kvharbor, zero-copy views",
    "tcp": "kvharbor, TCP",
    "mooncake": "kvharbor, transfer engine over TCP",
    "mooncake store": "Mooncake Store",
    "memcpy": "memcpy, one thread",
}

OVERLOAD: Final = " asked for more than the trace does"
PUSHED: Final = " asked for more than it can do"


def batch_table(document: Document) -> list[str]:
    """GB/s of 32 MiB batches, a row for each way of moving them."""
    (rows,) = [
        rows for title, rows in tables(document).items() if title.startswith("Batches of 32")
    ]
    speed = {(row["op"], row["who"], row["page"]): float(row["GB/s"]) for row in rows}
    lines = [
        f"| GB/s, batches of 32 MiB | {' | '.join(BATCH_SIZES)} |",
        f"|---|{'---|' * len(BATCH_SIZES)}",
    ]
    for op in ("put", "get"):
        for who, name in WAYS.items():
            if (op, who, "1MiB") in speed and not (op == "get" and who == "memcpy"):
                cells = [f"{speed[op, who, size]:.1f}" for size in BATCH_SIZES]
                label = name if who == "memcpy" else f"{op}: {name}"
                lines.append(f"| {label} | {' | '.join(cells)} |")
    return lines


def single_table(document: Document) -> list[str]:
    """Microseconds of one page a call."""
    rows = tables(document)["Single pages"]
    took = {(row["op"], row["who"], row["page"]): float(row["median us"]) for row in rows}
    columns = [("put", "64KiB"), ("put", "1MiB"), ("get", "64KiB"), ("get", "1MiB")]
    lines = [
        f"| µs, one page a call | {' | '.join(f'{op} {size}' for op, size in columns)} |",
        f"|---|{'---|' * len(columns)}",
    ]
    for who in ("shm", "tcp", "mooncake store"):
        cells = [f"{took[op, who, size]:.0f}" for op, size in columns]
        lines.append(f"| {WAYS[who]} | {' | '.join(cells)} |")
    return lines


def failover_table(document: Document) -> list[str]:
    """Seconds without an answer, when processes are killed."""
    rows = [
        (f"leader killed: {row['what']}", row)
        for title, found in tables(document).items()
        if title.startswith("kill -9 of the leader")
        for row in found
    ]
    rows += [(str(row["what"]), row) for row in tables(document)["Other losses"]]
    rows += [
        (f"{row['who']}, one master, killed and started again: {row['what']}", row)
        for title, found in tables(document).items()
        if title.startswith("A single master")
        for row in found
    ]
    lines = ["| seconds without it | times | p50 | max |", "|---|---|---|---|"]
    for what, row in rows:
        p50_s, max_s = (f"{float(row[name]):.2g}" for name in ("p50 s", "max s"))
        lines.append(f"| {what} | {row['times']} | {p50_s} | {max_s} |")
    return lines


def cluster_table(document: Document) -> list[str]:
    """What fleets of modelled workers do with a trace."""
    lines = [
        "| workers | prompts' tokens reused | first token (s): p50, p99 | token (ms): p50, p99 "
        "| answers in time |",
        "|---|---|---|---|---|",
    ]
    for row in tables(document)["cluster, modelled"]:
        cells = [
            str(row["fleet"]), f"{float(row['reused %']):.0f} %",
            f"{float(row['first p50 s']):.2f}, {float(row['first p99 s']):.1f}",
            f"{float(row['token p50 ms']):.0f}, {float(row['token p99 ms']):.0f}",
            f"{float(row['met both %']):.0f} %",
        ]  # fmt: skip
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def overload_table(document: Document) -> list[str]:
    """What fleets of modelled workers do with the same trace, so many times as fast."""
    lines = [
        "| workers | asked for | told to come again | first token (s): p50, p99 "
        "| in time, a second |",
        "|---|---|---|---|---|",
    ]
    for title, rows in tables(document).items():
        fleet, found, _ = title.removeprefix("cluster, modelled: ").partition(OVERLOAD)
        for row in rows if found else []:
            cells = [
                fleet, str(row["asked for"]).replace("x", "×"),
                f"{float(row['throttled %']):.0f} %",
                f"{float(row['first p50 s']):.1f}, {float(row['first p99 s']):.1f}",
                f"{float(row['goodput/s']):.1f}",
            ]  # fmt: skip
            lines.append(f"| {' | '.join(cells)} |")
    return lines


def pushed_table(document: Document, model: str) -> list[str]:
    """What fleets of real processes do with as much as they can do, and with more."""
    lines = [
        "| workers | asked for | told to come again | first token (ms): p50, p99 "
        "| in time, a second |",
        "|---|---|---|---|---|",
    ]
    for title, rows in tables(document).items():
        fleet, found, _ = title.removeprefix(f"{model}: ").partition(PUSHED)
        for row in rows if found else []:
            cells = [
                fleet, str(row["asked for"]).replace("x", "×"),
                f"{float(row['refused %']):.0f} %",
                f"{float(row['first p50 ms']):.0f}, {float(row['first p99 ms']):.0f}",
                f"{float(row['goodput/s']):.2f}",
            ]  # fmt: skip
            lines.append(f"| {' | '.join(cells)} |")
    return lines


def serving_table(document: Document, model: str) -> list[str]:
    """What fleets of real processes do, on few cores, at one rate."""
    lines = [
        "| workers | prompts with | first token (ms): p50, p99 | handed over in (ms) "
        "| token (ms): p50, p99 | one pause in a hundred (ms) |",
        "|---|---|---|---|---|---|",
    ]
    for row, stages in zip(
        at_one_rate(document, model), tables(document)[f"{model}: stages, medians"], strict=True
    ):
        moved_ms = float(stages["route ms"]) + float(stages["install ms"])
        first, token = (
            f"{float(row[f'{what} p50 ms']):.0f}, {float(row[f'{what} p99 ms']):.0f}"
            for what in ("first", "token")
        )
        cells = [
            str(row["fleet"]), str(row["prompts with"]), first,
            f"{moved_ms:.0f}" if stages["prefill ms"] else "-", token,
            f"{float(row['pause p99 ms']):.0f}",
        ]  # fmt: skip
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def at_one_rate(document: Document, model: str) -> list[Row]:
    """Rows of the fleets that were compared."""
    (rows,) = [
        rows for title, rows in tables(document).items()
        if title.startswith(f"{model}: ") and title.endswith("requests/s")
    ]  # fmt: skip
    return rows


def early_lines() -> list[str]:
    """How soon decode begins with KV that is handed over at the end, or before."""
    found = load("layerwise")
    ((title, rows),) = tables(found).items()
    lines = [
        "KV handed over at a prompt's end, or as it is computed, by a link that takes as long to",
        f"move it as computing takes: SmolLM2, {title}, medians of {parameters(found)['rounds']};",
        "seconds since admission, and how many times the longer of both. The answer's first token",
        "is prefill's, its second decode's first.",
        origin(found),
        "",
        "| handed over | KV is at decode | decode's first token |",
        "|---|---|---|",
    ]
    for row in rows:
        installed, token = (
            f"{float(row[f's until {what}']):.2f} ({float(row[f'{what}, of the longer']):.2f} ×)"
            for what in ("installed", "decode's token")
        )
        lines.append(f"| {row['handed over']} | {installed} | {token} |")
    return lines


def shedding_lines() -> list[str]:
    """What moving a running request costs."""
    found = load("shedding")
    by_title = tables(found)
    ways = [str(row["request is"]) for row in next(iter(by_title.values()))]
    lines = [
        "A request that leaves one worker for another: ms from its last token in the one to its",
        f"next in the other (SmolLM2, medians of {parameters(found)['rounds']}).",
        origin(found),
        "",
        f"| of its KV | {' | '.join(ways)} |",
        f"|---|{'---|' * len(ways)}",
    ]
    for title, rows in by_title.items():
        cells = [f"{float(row['ms to its next token']):.0f}" for row in rows]
        lines.append(f"| {title} | {' | '.join(cells)} |")
    return lines


def hedge_lines() -> list[str]:
    """What hedged reads save."""
    found = load("hedge")
    how = parameters(found)
    stop_ms = 1e3 * float(how["stop_s"])
    lines = [
        f"Reads of 256 KiB over TCP from two workers that stand still for {stop_ms:.0f} ms at",
        f"random moments; with and without hedging, {how['turns']} seconds each, in turns.",
        origin(found),
        "",
        "| ms of a read | plain: p50, p99 | hedged: p50, p99 | hedges |",
        "|---|---|---|---|",
    ]
    by_title = tables(found)
    for title, rows in by_title.items():
        weather, is_read, _ = title.partition(": ms of a read")
        if not is_read:
            continue
        cells = [f"{float(row['p50']):.1f}, {float(row['p99']):.1f}" for row in rows]
        (hedges,) = by_title[f"{weather}: hedges"]
        share = 100 * float(hedges["hedges"]) / float(hedges["hedgeable_reads"])
        lines.append(f"| {weather} | {' | '.join(cells)} | {share:.1f} % |")
    return lines


def serving_lines() -> list[str]:
    """Prefill and decode apart and together."""
    modelled, tiny, small = load("pd_cluster"), load("pd"), load("pd_smollm")
    how = parameters(modelled)
    return [
        "Prefill and decode in different workers, in virtual time, through the master's own code:",
        f"{how['cluster_requests']} requests of `{how['trace']}` (`KVHARBOR_TRACE`),",
        f"{how['cluster_workers']} workers with a model of 8 billion weights and 80 GB,",
        "links of 100 Gbit/s. In time: 5 s to the first token, and 50 ms for each of the others;",
        "who is refused is not. Layer by layer, what is pulled meanwhile is made up, too.",
        origin(modelled),
        "",
        *cluster_table(modelled),
        "",
        "Who is told to come again does so here for 30 s, which count:",
        "",
        *overload_table(modelled),
        "",
        "Real processes, which share two cores whatever their number; KV moves by shared memory.",
        "Prompts are handed over at their end, or by chunks or groups of layers as they are",
        "computed; where a line does not say, as `route_ahead` is by default, or (`both`) not at",
        "all. With the tiny model, whose answers cost what passing them on costs:",
        origin(tiny),
        "",
        *serving_table(tiny, "tiny"),
        "",
        f"With SmolLM2-135M, {at_one_rate(small, 'smollm')[0]['requests']} requests a line: p99 is "
        "the slowest:",
        origin(small),
        "",
        *serving_table(small, "smollm"),
        "",
        "In time: 6 s to the first token, and 0.5 s for each of the others.",
        "",
        *pushed_table(small, "smollm"),
    ]


def block() -> str:
    """What stands between the markers."""
    store, failover = load("store_vs_mooncake"), load("failover")
    lines = [
        START,
        "Medians; both systems in the same interleaved rounds, in separate processes,",
        "with fresh keys and every byte verified.",
        origin(store),
        "",
        *batch_table(store),
        "",
        *single_table(store),
        "",
        "When processes die (10 240 pages, etcd of three members, a lease of two seconds):",
        origin(failover),
        "",
        *failover_table(failover),
        "",
        *hedge_lines(),
        "",
        *serving_lines(),
        "",
        *early_lines(),
        "",
        *shedding_lines(),
        "",
        *engines_lines(),
        "",
        *drop_in_lines(),
        STOP,
    ]
    return "\n".join(lines)


def updated(text: str) -> str:
    """The README's text with the block of the present results."""
    before, rest = text.split(START)
    _, after = rest.split(STOP)
    return before + block() + after


def main() -> None:
    """Rewrite README.md."""
    README.write_text(updated(README.read_text(encoding="utf-8")), encoding="utf-8")


if __name__ == "__main__":
    main()
