"""The leak check of conftest: a test that leaves a thread or a child behind fails."""

from __future__ import annotations

import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

from tests.tidy.sources import ROOT

if TYPE_CHECKING:
    from pathlib import Path

THREAD = """
import threading

def test_made_up():
    threading.Thread(target=threading.Event().wait, daemon=True).start()
"""

CHILD = """
import subprocess, sys

KEPT = []

def test_made_up():
    KEPT.append(subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE))
"""

CLEAN = """
import threading

def test_made_up():
    thread = threading.Thread(target=int)
    thread.start()
    thread.join()
"""


def run_in_unit_folder(text: str, folder: Path) -> subprocess.CompletedProcess[str]:
    """Run a made-up test file beside a copy of our conftest."""
    (folder / "unit").mkdir()
    (folder / "conftest.py").write_text((ROOT / "tests" / "conftest.py").read_text())
    (folder / "unit" / "test_made_up.py").write_text(text)
    command = [sys.executable, "-P", "-m", "pytest", "--rootdir", str(folder), "-q", str(folder)]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)


@pytest.mark.parametrize(
    ("text", "leak"), [(THREAD, "left running: <Thread("), (CHILD, "left running: child process ")]
)
def test_a_leak_fails_the_test(text: str, leak: str, tmp_path: Path) -> None:
    done = run_in_unit_folder(text, tmp_path)
    assert done.returncode == 1
    assert leak in done.stdout


def test_a_test_that_tidies_up_passes(tmp_path: Path) -> None:
    done = run_in_unit_folder(CLEAN, tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
