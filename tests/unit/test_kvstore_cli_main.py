"""What the command line says of itself is true of the code."""

from __future__ import annotations

import re

from kvstore.cli.main import EXIT_CODES
from kvstore.exit_codes import ExitCode


def test_the_help_names_every_exit_code() -> None:
    assert [int(each) for each in re.findall(r"\d+", EXIT_CODES)] == [*map(int, ExitCode)]
