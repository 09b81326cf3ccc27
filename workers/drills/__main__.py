"""Drills: break a deployment on purpose, and look at what its clients saw.

    kvharbor drill NAME...    (or python -m workers.drills)

Owns the command's options and its order. Exits with 0 only if every answer was right and complete,
and nothing was left over.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Final

import msgspec

from kvstore.errors import BadValue, Unavailable
from kvstore.exit_codes import ExitCode
from workers.drills.deployment import Deployment, Shape
from workers.drills.load import Load
from workers.drills.processes import until
from workers.drills.report import report
from workers.drills.scenarios import DRILLS, SETTLED
from workers.own_programs import conclude

if TYPE_CHECKING:
    from collections.abc import Sequence

    from workers.drills.report import Report

IDLE_S: Final = 60.0
"""For tickets to end once nobody asks any more."""


def shape_of(options: argparse.Namespace) -> Shape:
    """What the drills that were named take together. BadValue naming an option."""
    drills = [DRILLS[name] for name in options.drill]
    for field in ("prefills", "decodes", "clients"):
        least = max(each.decodes for each in drills) if field == "decodes" else 1
        if getattr(options, field) < least:
            raise BadValue(f"--{field}", getattr(options, field), f"at least {least}")
    return Shape(
        options.prefills, options.decodes,
        max(each.masters for each in drills), max(each.hosts for each in drills),
    )  # fmt: skip


def play(site: Deployment, name: str, seed: int, clients: int) -> Report:
    """Hold one drill on a deployment that is made whole first. Raises where that, or it, sticks."""
    # Only now: it costs seconds, and the options may have been wrong.
    from workers.drills.truth import alone

    site.restore()
    with Load(site.target, seed, clients) as load:
        load.settle(SETTLED)
        outcome = DRILLS[name].play(site, load)
    return report(name, load.all(), outcome, leftovers(site), alone)


def leftovers(site: Deployment) -> list[str]:
    """What is held although nobody asks for anything; it has IDLE_S to go."""
    try:
        until("everything is given back", lambda: not site.leftovers(), IDLE_S)
    except Unavailable:
        return site.leftovers()
    return []


def run(options: argparse.Namespace) -> ExitCode:
    """Hold all that were named, on one deployment."""
    shape, reports = shape_of(options), []
    # A short path: Unix sockets lie below it.
    with (
        tempfile.TemporaryDirectory(prefix="kvharbor-drill-") as folder,
        Deployment(Path(folder), shape) as site,
    ):
        for name in options.drill:
            _tell(options, f"{name}: {DRILLS[name].summary}")
            reports.append(play(site, name, options.seed, options.clients))
            for line in reports[-1].lines():
                _tell(options, f"  {line}")
    if options.json:
        _say(json.dumps({"drills": [_row(each) for each in reports]}))
    return ExitCode.OK if all(each.is_good for each in reports) else ExitCode.FAILED


def _row(found: Report) -> dict[str, object]:
    return {**msgspec.to_builtins(found), "is_good": found.is_good}


def _tell(options: argparse.Namespace, text: str) -> None:
    """A line for people."""
    if not options.json:
        _say(text)


def _say(text: str) -> None:
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


def _options(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        "kvharbor drill",
        description="Break a deployment that is started for this, and check what clients get.",
        epilog="Several drills are held one after the other, on one deployment.",
    )
    parser.add_argument("drill", nargs="*", metavar="NAME", help=", ".join(DRILLS))
    parser.add_argument("--list", action="store_true", help="show what each drill breaks")
    parser.add_argument("--prefills", type=int, default=1, metavar="N", help="prefill workers")
    parser.add_argument("--decodes", type=int, default=2, metavar="N", help="decode workers")
    parser.add_argument("--clients", type=int, default=4, metavar="N", help="who ask at once")
    parser.add_argument("--seed", type=int, default=1, metavar="N", help="of what they ask")
    parser.add_argument("--json", action="store_true", help="one line of JSON at the end")
    options = parser.parse_args(arguments)
    if not options.list:
        if not options.drill:
            parser.error(f"name a drill: one of {', '.join(DRILLS)}")
        for name in options.drill:
            if name not in DRILLS:
                parser.error(f"got {name!r}, want one of {', '.join(DRILLS)}")
    return options


def main() -> None:
    """Run the command; ends the process."""
    options = _options(sys.argv[1:])
    if options.list:
        for name, drill in DRILLS.items():
            _say(f"{name:17} {drill.summary}")
        return
    conclude("kvharbor drill", lambda: run(options))


if __name__ == "__main__":
    main()
