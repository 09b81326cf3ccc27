"""Replays a trace of requests: what would pools of these sizes and policies have served?

The replay is a program of its own, since it runs the master's code, which this package must not
know. It says one JSON object a pool, and on standard error what is wrong.
"""

from __future__ import annotations

import subprocess
import sys
from typing import TYPE_CHECKING, Final

import msgspec

if TYPE_CHECKING:
    from collections.abc import Sequence

MODULE: Final = "master.replay"

Replayed = dict[str, str | int | float | dict[str, int | float]]
"""Figures of one pool by name; ratios are 0 to 1."""


def replay(options: Sequence[str]) -> tuple[int, list[Replayed]]:
    """Run the replay with these options: (exit code, figures of each pool in the order given)."""
    run = subprocess.run(
        [sys.executable, "-P", "-m", MODULE, *options],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        check=False,
    )
    rows = [msgspec.json.decode(line, type=Replayed) for line in run.stdout.splitlines()]
    return run.returncode, rows
