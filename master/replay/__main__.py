"""The program behind `kvharbor trace replay`: one JSON line on standard output a pool."""

from __future__ import annotations

import argparse
import json
import signal
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Final

import msgspec

from kvstore import limits
from kvstore.request_trace import TRACE_PAGE_TOKENS, read_trace
from kvstore.startup import run_server
from master.replay.figures import replay
from master.replay.pool import Setting, VirtualPool
from master.tunables import GIVEN, HINTS, Tunables

if TYPE_CHECKING:
    from collections.abc import Sequence

PROGRAM: Final = "kvharbor trace replay"


def main() -> None:
    """Replay a trace; ends the process."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # Ctrl-C leaves nothing to tidy up or to say
    run_server(PROGRAM, _run)


def _run(arguments: Sequence[str]) -> None:
    given = _parser().parse_args(arguments)
    settings = [
        Setting(
            capacity,
            policy,
            given.lease_ttl_s,
            given.page_ttl_s,
            watermark_demote=given.watermark_demote,
            nvme_pages=given.nvme_capacity,
            admission=admission,
            hints=given.hints,
            move_s=given.move_s,
        )
        for policy in given.policy or [Tunables().eviction]
        for admission in given.nvme_admission or [Tunables().nvme_admission]
        for capacity in given.capacity
    ]
    # Before the trace is read: a wrong setting is said at once.
    pools = [VirtualPool(setting, given.page_tokens) for setting in settings]
    trace = read_trace(given.file, given.page_tokens)
    for pool in pools:
        figures = replay(trace, pool)
        sys.stdout.write(json.dumps(msgspec.to_builtins(figures)) + "\n")
        sys.stdout.flush()


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(PROGRAM, description="Replays a trace of requests.")
    parser.add_argument("file", type=Path, metavar="FILE", help="one JSON object a line")
    parser.add_argument("--policy", action="append", metavar="NAME", help="of eviction")
    parser.add_argument("--capacity", action="append", required=True, type=int, metavar="PAGES")
    parser.add_argument("--nvme-capacity", type=int, default=0, metavar="PAGES")
    parser.add_argument("--nvme-admission", action="append", metavar="NAME")
    parser.add_argument(
        "--watermark-demote", type=float, default=limits.WATERMARK_DEMOTE, metavar="SHARE"
    )
    parser.add_argument("--move-s", type=float, default=0.0, metavar="SECONDS")
    parser.add_argument("--hints", choices=HINTS, default=GIVEN, help="whom to believe")
    parser.add_argument("--page-tokens", type=int, default=TRACE_PAGE_TOKENS, metavar="TOKENS")
    parser.add_argument("--lease-ttl-s", type=float, default=0.0, metavar="SECONDS")
    parser.add_argument("--page-ttl-s", type=float, default=limits.PAGE_TTL_S, metavar="SECONDS")
    return parser


if __name__ == "__main__":
    main()
