"""Masters and workers as processes that a test kills, stops, continues and starts again.

Each has a data folder and a fixed address of its own; what it logged in all its lives is in one
file there. A server dies with the test.
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Final, TypeVar

from kvstore.announcement import read_announcement
from tests.cluster.up import clean_environment
from tests.processes import stop

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    Sections = Mapping[str, Mapping[str, object]]

T = TypeVar("T")
START_S: Final = 30.0
STOP_S: Final = 30.0
POLL_S: Final = 0.005
_PR_SET_PDEATHSIG: Final = 1
_libc: Final = ctypes.CDLL(None)


def die_with_parent() -> None:
    """Have the kernel kill this process when the thread that started it is gone."""
    _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def until(what: str, is_so: Callable[[], object], timeout_s: float = START_S) -> float:
    """Wait until it is so; the seconds that took. Fails the test when it takes too long."""
    began_s = time.monotonic()
    obtained(what, is_so, timeout_s)
    return time.monotonic() - began_s


def obtained(what: str, ask: Callable[[], T], timeout_s: float = START_S) -> T:
    """Wait until there is something, and return it. Fails the test when it takes too long."""
    ends_s = time.monotonic() + timeout_s
    while not (found := ask()):
        assert time.monotonic() < ends_s, f"not within {timeout_s} s: {what}"
        time.sleep(POLL_S)
    return found


def write_config(path: Path, sections: Sections) -> None:
    """Write a TOML file; values are written as JSON, which TOML reads alike for these types."""
    lines: list[str] = []
    for section, values in sections.items():
        lines.append(f"[{section}]")
        lines += [f"{name} = {json.dumps(value)}" for name, value in values.items()]
    path.write_text("\n".join(lines) + "\n")


class Server:
    """One master or worker; not started yet."""

    def __init__(self, role: str, folder: Path, sections: Sections) -> None:
        """`sections` are its configuration, written into `folder`, where its data lie too."""
        self.role = role
        self.address = str(sections[role]["listen"])
        self.folder = folder
        self._log = folder / "log"
        folder.mkdir(parents=True)
        config = folder / "config.toml"
        write_config(config, sections)
        program = Path(sys.executable).parent / f"kvharbor-{role}"
        self._command = [str(program), f"--config={config}"]
        self.launched_s = 0.0
        """When its present life began."""
        self._process: subprocess.Popen[bytes] | None = None
        self._is_stopped = False

    def start(self) -> None:
        """Start it; returns once it says that it listens."""
        self.launch()
        self.await_ready()

    def launch(self) -> None:
        """Start it."""
        assert not self.is_running, self
        self.launched_s = time.monotonic()
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(
                self._command,
                env=clean_environment(),
                stdout=log,
                stderr=log,
                stdin=subprocess.DEVNULL,
                preexec_fn=die_with_parent,
            )

    def await_ready(self) -> None:
        """Wait until it says that it listens."""
        until(f"{self} is ready", self._has_announced)

    def _has_announced(self) -> bool:
        assert self.is_running, f"{self} ended: {self.log()}"
        found = read_announcement(self.folder, self.role)
        return found is not None and found.pid == self.pid

    @property
    def pid(self) -> int:
        """Of its present life."""
        assert self._process is not None
        return self._process.pid

    @property
    def is_running(self) -> bool:
        """Whether it has a process, stopped or not."""
        return self._process is not None and self._process.poll() is None

    @property
    def is_stopped(self) -> bool:
        """Whether `stop` holds."""
        return self._is_stopped

    def kill(self) -> None:
        """kill -9; returns when it is gone."""
        assert self._process is not None
        self._process.kill()
        self._process.wait(STOP_S)
        self._is_stopped = False

    def stop(self) -> None:
        """SIGSTOP; returns when none of its threads runs any more."""
        self._is_stopped = True
        stop(self.pid)

    def go_on(self) -> None:
        """SIGCONT."""
        self._is_stopped = False
        os.kill(self.pid, signal.SIGCONT)

    def terminate(self) -> None:
        """SIGTERM; returns at once."""
        assert self._process is not None
        self._process.terminate()

    def end(self) -> int:
        """SIGTERM; waits for its end and returns its exit code."""
        self.terminate()
        return self.wait()

    def wait(self) -> int:
        """Wait for its end; its exit code."""
        assert self._process is not None
        return self._process.wait(STOP_S)

    def discard(self) -> None:
        """Kill it if it lives, at the end of a test."""
        if self.is_running:
            self.kill()

    def log(self) -> str:
        """What it has logged in all its lives."""
        return self._log.read_text(errors="replace")

    def __str__(self) -> str:
        return f"{self.role} {self.folder.name}"
