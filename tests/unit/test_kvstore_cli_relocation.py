"""What `kvharbor drain` and its like refuse before they ask a master, and what their list shows."""

from __future__ import annotations

from math import inf

import pytest
from msgspec.structs import replace
from typer.testing import CliRunner

from kvstore.cli.main import app
from kvstore.cli.output import print_relocations
from kvstore.errors import BadValue
from kvstore.wire.messages.relocation import RelocationRow

MIB = 1 << 20
ROW = RelocationRow(
    "3-1", "drain", "w1", "", b"", 0, "", "running", True, 1, MIB, 8, 8 * MIB, 0, 0,
    2.0 * MIB, 4.0, "",
)  # fmt: skip


@pytest.mark.parametrize("seconds", ["-1", "nan"])
@pytest.mark.parametrize(
    "command", [["drain", "w1", "--yes"], ["copy", "--to", "w1"], ["rebalance"]]
)
def test_a_time_to_wait_that_is_none_is_refused(command: list[str], seconds: str) -> None:
    found = CliRunner().invoke(app, [*command, "--timeout-s", seconds])
    assert isinstance(found.exception, BadValue)
    assert str(found.exception).startswith("--timeout-s: got ")


@pytest.mark.parametrize(
    ("row", "shown"),
    [
        (ROW, ["1 MiB", "8 MiB", "2 MiB", "4"]),
        (replace(ROW, bytes_per_s=0.0, eta_s=inf), ["1 MiB", "8 MiB", "0 B", "-"]),
        (replace(ROW, left_bytes=0, eta_s=inf), ["1 MiB", "-", "2 MiB", "-"]),
        (replace(ROW, state="done", left_bytes=0), ["1 MiB", "0 B", "-", "-"]),
    ],
)
def test_what_is_not_known_or_has_ended_has_no_rate_nor_end(
    row: RelocationRow, shown: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    print_relocations([row])
    line = next(line for line in capsys.readouterr().out.splitlines() if "3-1" in line)
    cells = line.split(row.state)[1].split("  ")
    assert [cell.strip() for cell in cells if cell.strip()] == shown
