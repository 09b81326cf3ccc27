"""Runs `kvharbor up` for the tests of this folder: on free ports, from a temporary folder."""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from kvstore.cli.places import places_of, wipe_segments

if TYPE_CHECKING:
    from typing import Self

START_S: Final = 60
STOP_S: Final = 30
FREE_PORTS: Final = (
    "--listen=127.0.0.1:0",
    "--worker-listen=127.0.0.1:0",
    "--admin=off",
    "--worker-admin=off",
)
"""Without HTTP pages: to load what serves them takes a third of a pool's start."""
ADMIN: Final = ("--admin=127.0.0.1:0", "--worker-admin=127.0.0.1:0")
"""With them, for tests that look at them or start a pool as its users do."""


def clean_environment() -> dict[str, str]:
    """This process's environment without the settings of the developer's own pool."""
    return {name: value for name, value in os.environ.items() if not name.startswith("KVHARBOR")}


def kvharbor(*arguments: str, timeout_s: float = START_S) -> subprocess.CompletedProcess[str]:
    """Run one command to its end."""
    return subprocess.run(
        [sys.executable, "-P", "-m", "kvstore.cli.main", *arguments],
        env=clean_environment(),
        capture_output=True,
        text=True,
        timeout=timeout_s,
        check=False,
    )


class Up:
    """A context manager around one `kvharbor up`; `ready` is its JSON line, decoded."""

    def __init__(
        self,
        data_dir: Path,
        *options: str,
        dram: str = "64MiB",
        wrapper: tuple[str, ...] = (),
        start_s: float = START_S,
    ) -> None:
        """Remember how to start it."""
        self.data_dir = data_dir
        self._start_s = start_s
        self._command = [
            *(*wrapper, sys.executable, "-P", "-m", "kvstore.cli.main", "--json", "up"),
            *(f"--data-dir={data_dir}", f"--dram={dram}", *FREE_PORTS, *options),
        ]
        self.ready: dict[str, Any] = {}

    def __enter__(self) -> Self:
        """Start it and wait until pages can be stored."""
        self.process = subprocess.Popen(
            self._command,
            env=clean_environment(),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        assert self.process.stdout is not None
        try:
            said, _, _ = select.select([self.process.stdout], [], [], self._start_s)
            line = self.process.stdout.readline() if said else ""
            if not line:
                self.process.kill()
                raise AssertionError(f"no ready line: {self.process.communicate()[1]}")
            self.ready = json.loads(line)
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        """Stop it if it still runs."""
        if self.process.poll() is None:
            self.process.terminate()
        try:
            self.process.communicate(timeout=STOP_S)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.communicate()

    @property
    def master(self) -> str:
        """Where the master listens."""
        return str(self.ready["master"]["listen"])

    def pid(self, part: str) -> int:
        """The process id of master or worker."""
        return int(self.ready[part]["pid"])

    def stop(self, part: str) -> None:
        """Stop master or worker; returns when none of its threads runs any more."""
        os.kill(self.pid(part), signal.SIGSTOP)
        ends_s = time.monotonic() + STOP_S
        threads = list(Path(f"/proc/{self.pid(part)}/task").glob("*/stat"))
        while any(each.read_text().rpartition(")")[2].split()[0] != "T" for each in threads):
            assert time.monotonic() < ends_s, f"the {part} does not stop"
            time.sleep(0.001)

    def end(self, signal_number: signal.Signals = signal.SIGTERM) -> tuple[int, str]:
        """Send a signal and wait; returns the exit code and standard error."""
        self.process.send_signal(signal_number)
        return self.wait()

    def wait(self) -> tuple[int, str]:
        """Wait for its end; returns the exit code and standard error."""
        _, said = self.process.communicate(timeout=STOP_S)
        return self.process.returncode, said


def remove_segments(data_dir: Path) -> None:
    """Give the memory of a test's pool back."""
    wipe_segments(places_of(data_dir))
