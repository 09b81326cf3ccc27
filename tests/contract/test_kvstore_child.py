"""A part of the pool never outlives the process that started it, even after kill -9."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from pathlib import Path

# Becomes the part: says who it is, how it was called, which signals are blocked; then waits.
PART = """
import os, signal, sys
print(os.getpid(), sys.argv[1:], signal.pthread_sigmask(signal.SIG_BLOCK, ()), flush=True)
signal.pause()
"""

# Starts a part with signals blocked, as `kvharbor up` does, and waits for it.
PARENT = """
import os, signal, subprocess, sys
signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM, signal.SIGINT, signal.SIGCHLD})
subprocess.run([sys.executable, "-P", "-m", "kvstore.child", sys.argv[1] or str(os.getpid()),
                "part_of_a_pool", "--a", "b c"])
print("the part ended", flush=True)
"""

WAIT_S = 20


@pytest.fixture
def environment(tmp_path: Path) -> dict[str, str]:
    (tmp_path / "part_of_a_pool.py").write_text(PART)
    return os.environ | {"PYTHONPATH": str(tmp_path)}


def start(environment: dict[str, str], claimed_parent: str = "") -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-P", "-c", PARENT, claimed_parent],
        env=environment,
        stdout=subprocess.PIPE,
        text=True,
    )


def test_the_part_ends_with_its_parent(environment: dict[str, str]) -> None:
    with start(environment) as parent:
        assert parent.stdout is not None
        pid, _, rest = parent.stdout.readline().partition(" ")
        assert rest == "['--a', 'b c'] set()\n"
        part = os.pidfd_open(int(pid))
        try:
            parent.send_signal(signal.SIGKILL)
            parent.wait(WAIT_S)
            ended, _, _ = select.select([part], [], [], WAIT_S)
            assert ended, "the part outlived its parent"
        finally:
            os.close(part)


def test_a_part_whose_parent_has_gone_does_not_start(environment: dict[str, str]) -> None:
    with start(environment, claimed_parent="1") as parent:
        assert parent.stdout is not None
        assert parent.stdout.read() == "the part ended\n"
