"""Tests that a script has started in the background, where a shell ignores interrupts for them."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Final

HERE: Final = Path(__file__).resolve().parent
INTERRUPTED: Final = HERE.parent / "unit" / "test_workers_own_programs.py"
ENDS_S: Final = 120.0


def test_tests_that_interrupt_themselves_go_on_in_the_background() -> None:
    pytest_run = [sys.executable, "-P", "-m", "pytest", "-q", "-p", "no:cacheprovider"]
    done = subprocess.run(
        ["sh", "-c", 'trap "" INT HUP; exec "$@"', "sh", *pytest_run, str(INTERRUPTED)],
        capture_output=True,
        text=True,
        timeout=ENDS_S,
        check=False,
    )
    assert done.returncode == 0, done.stdout
