"""Benchmarks that replay requests of a trace: which trace, and what is said of one that is none."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Final

from benchmarks.harness import arguments
from kvstore.errors import KVStoreError
from kvstore.exit_codes import exit_code_of

if TYPE_CHECKING:
    import argparse
    from collections.abc import Callable

TRACE_VARIABLE: Final = "KVHARBOR_TRACE"


def run(
    name: str,
    question: str,
    extra: Callable[[argparse.ArgumentParser], None],
    measure: Callable[[argparse.Namespace], int],
) -> int:
    """Measure as the command line says: --trace, and what `extra` adds; the exit status."""

    def options(parser: argparse.ArgumentParser) -> None:
        known = os.environ.get(TRACE_VARIABLE)
        parser.add_argument(
            "--trace", type=Path, metavar="FILE", default=known and Path(known),
            help=f"requests, one JSON object a line; ${TRACE_VARIABLE} unless given",
        )  # fmt: skip
        extra(parser)

    found = arguments(question, options)
    try:
        return measure(found)
    except KVStoreError as error:
        print(f"{name}: {error}", file=sys.stderr)
        return int(exit_code_of(error))
