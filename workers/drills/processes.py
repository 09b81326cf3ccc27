"""The processes of a drill: each with a folder for its data and its log, to be killed and started.

Owns their start and their end: none outlives the drill, however that ends. They are started by the
main thread, as the kernel ties a child to the thread that made it.
"""

from __future__ import annotations

import os
import signal
import subprocess
import time
from typing import TYPE_CHECKING, Final

from kvstore.announcement import read_announcement
from kvstore.cli.standalone import PartDied
from kvstore.errors import Unavailable
from workers.own_programs import QUIET

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from kvstore.announcement import Announcement

START_S: Final = 240.0
END_S: Final = 60.0
POLL_S: Final = 0.02
LOG_LINES_SHOWN: Final = 20


class Process:
    """One program; not started yet."""

    def __init__(self, name: str, announced: str, folder: Path, command: Sequence[str]) -> None:
        """`announced` is what its announcement in `folder` is called; empty: it has none."""
        self.name = name
        self._announced = announced
        self._folder = folder
        self._command = tuple(command)
        self._process: subprocess.Popen[bytes] | None = None
        folder.mkdir()

    def start(self) -> None:
        """Start it, or start it again on what it left."""
        with (self._folder / "log").open("ab") as log:
            self._process = subprocess.Popen(
                self._command, env=_environment(), stdin=subprocess.DEVNULL, stdout=log,
                stderr=log, process_group=0,
            )  # fmt: skip

    def announcement(self) -> Announcement | None:
        """What it says of itself; None before it listens. PartDied where it has ended."""
        running = self._running()
        returncode = running.poll()
        if returncode is not None:
            lines = (self._folder / "log").read_text(errors="replace").splitlines()
            raise PartDied(self.name, returncode, "\n".join(lines[-LOG_LINES_SHOWN:]))
        found = read_announcement(self._folder, self._announced)
        return found if found is not None and found.pid == running.pid else None

    def await_listening(self) -> None:
        """Until it says that it listens. Raises as `until` and `announcement`."""
        until(f"{self.name} listens", self.announcement, START_S)

    @property
    def listen(self) -> str:
        """Where it listens; waits for that."""
        self.await_listening()
        found = self.announcement()
        assert found is not None
        return found.listen

    @property
    def is_running(self) -> bool:
        """Whether it has a process."""
        return self._process is not None and self._process.poll() is None

    def kill(self) -> None:
        """kill -9; returns when it is gone."""
        self._running().kill()
        self._running().wait(END_S)

    def end(self) -> None:
        """Ask it to end, and wait for that. Unavailable where it does not."""
        self._running().send_signal(signal.SIGTERM)
        try:
            self._running().wait(END_S)
        except subprocess.TimeoutExpired:
            raise Unavailable(f"{self.name} did not end within {END_S:g} s") from None

    def discard(self) -> None:
        """Kill it if it runs."""
        if self.is_running:
            self.kill()

    def _running(self) -> subprocess.Popen[bytes]:
        assert self._process is not None, f"{self.name} was not started"
        return self._process


def others(program: str, *options: str) -> list[str]:
    """The command that runs somebody else's program until this process ends."""
    return ["setpriv", "--pdeathsig", "KILL", program, *options]


def until(what: str, is_so: Callable[[], object], limit_s: float) -> None:
    """Wait until it is so. Unavailable, naming `what`, where it is not within the limit."""
    ends_s = time.monotonic() + limit_s
    while not is_so():
        if time.monotonic() > ends_s:
            raise Unavailable(f"not within {limit_s:g} s: {what}")
        time.sleep(POLL_S)


def _environment() -> dict[str, str]:
    """This process's, without the settings of the operator's own pool."""
    own = {name: value for name, value in os.environ.items() if not name.startswith("KVHARBOR")}
    return {**QUIET, **own}
