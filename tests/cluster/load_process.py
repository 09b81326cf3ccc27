"""A client at work in a process of its own, from start to end or kill."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from tests.cluster.servers import STOP_S, die_with_parent
from tests.cluster.up import clean_environment

if TYPE_CHECKING:
    from tests.cluster.load_client import Load


class LoadProcess:
    """One run of tests.cluster.load_client."""

    def __init__(self, load: Load) -> None:
        """Start it; returns once it has connected."""
        self.load = load
        self.history = Path(load.history)
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-m", "tests.cluster.load_client", msgspec.json.encode(load)],
            env=clean_environment(),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            preexec_fn=die_with_parent,
        )
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        assert line == "at work\n", self._process.communicate()[1]

    def end(self) -> None:
        """Let it end after its present call; fails unless it ends well."""
        self._process.terminate()
        _, said = self._process.communicate(timeout=STOP_S)
        assert self._process.returncode == 0, said

    @property
    def pid(self) -> int:
        """Of its process."""
        return self._process.pid

    @property
    def is_running(self) -> bool:
        """Whether it still works; it ends by itself only when something is wrong."""
        return self._process.poll() is None

    def kill(self) -> None:
        """kill -9, in the middle of whatever it does."""
        self._process.kill()
        self._process.communicate()

    def discard(self) -> None:
        """Kill it if it lives, at the end of a test."""
        if self.is_running:
            self.kill()
