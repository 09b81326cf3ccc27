"""The part of README's measured table that is about engines and programs of other pools."""

from __future__ import annotations

from benchmarks.results.files import Row, load, origin, parameters, tables


def engines_lines() -> list[str]:
    """What a vLLM engine's answers take with and without a pool."""
    found = load("engines")
    how = parameters(found)
    lines = [
        "A vLLM engine on one core, without a pool, with ours and with LMCache's server: ms to the",
        "first token, and for each of the others. What comes again is asked of an engine that does",
        f"not have it itself; medians of {how['rounds']} rounds.",
        origin(found),
        "",
    ]
    for title, rows in tables(found).items():
        lines += _by_engine(title.partition(":")[0], rows)
    return lines[:-1]


def _by_engine(model: str, rows: list[Row]) -> list[str]:
    """A row for each load."""
    engines = list(dict.fromkeys(str(row["engine"]) for row in rows))
    cells = {
        (row["load"], row["engine"]): f"{float(row['first token ms']):.0f}, "
        f"{float(row['token ms']):.0f}"
        for row in rows
    }
    loads = dict.fromkeys(str(row["load"]) for row in rows)
    return [
        f"| {model} | {' | '.join(engines)} |",
        f"|---|{'---|' * len(engines)}",
        *(
            f"| {load} | {' | '.join(cells.get((load, each), '-') for each in engines)} |"
            for load in loads
        ),
        "",
    ]


def drop_in_lines() -> list[str]:
    """What a program of Mooncake Store's takes on either."""
    found = load("drop_in")
    lines = [
        "A program written for Mooncake Store, on the pool and on Mooncake Store: µs of a call,",
        f"medians of {parameters(found)['rounds']} rounds in turns.",
        origin(found),
        "",
        "| a call | kvharbor | Mooncake Store | kvharbor takes |",
        "|---|---|---|---|",
    ]
    for title, rows in tables(found).items():
        for mine, theirs in zip(rows[::2], rows[1::2], strict=True):
            what = (
                f"{mine['op']} {mine['a call']} × {mine['object']}"
                if title == "Objects"
                else f"existence of {mine['names']}"
            )
            one, other = float(mine["median us"]), float(theirs["median us"])
            lines.append(f"| {what} | {one:.0f} | {other:.0f} | {one / other:.2f} × |")
    return lines
