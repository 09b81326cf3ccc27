"""How a command that starts programs of ours ends."""

from __future__ import annotations

import os
import signal
from typing import TYPE_CHECKING

import pytest

from kvstore.errors import KVStoreError, OutOfSpace
from kvstore.exit_codes import ExitCode, ProgramDied
from workers.own_programs import conclude

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.fixture(autouse=True)
def _handler() -> Iterator[None]:
    before = signal.getsignal(signal.SIGTERM)
    yield
    signal.signal(signal.SIGTERM, before)


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (OutOfSpace("full"), ExitCode.NO_SPACE),
        (ProgramDied("a program ended with 5", 5), ExitCode.IN_USE),
        (ProgramDied("a program was killed", -9), ExitCode.CHILD_DIED),
    ],
)
def test_an_error_is_told_and_decides_how_it_ends(
    capsys: pytest.CaptureFixture[str], error: KVStoreError, code: ExitCode
) -> None:
    def run() -> int:
        raise error

    with pytest.raises(SystemExit) as ended:
        conclude("kvharbor try", run)
    assert ended.value.code == code
    assert capsys.readouterr().err == f"kvharbor try: {error}\n"


@pytest.mark.parametrize("sent", [signal.SIGTERM, signal.SIGINT])
def test_signals_end_it_once_it_has_cleared_up(sent: signal.Signals) -> None:
    cleared: list[bool] = []

    def run() -> int:
        try:
            os.kill(os.getpid(), sent)
            return 0
        finally:
            cleared.append(True)

    with pytest.raises(SystemExit) as ended:
        conclude("kvharbor try", run)
    assert (ended.value.code, cleared) == (128 + sent, [True])


def test_it_ends_with_what_was_found() -> None:
    with pytest.raises(SystemExit) as ended:
        conclude("kvharbor try", lambda: ExitCode.FAILED)
    assert ended.value.code == ExitCode.FAILED
