"""The standalone pool: a master and a worker as children of this process, wired by a data folder.

Owns their start, the wait until pages can be stored, and their end: a signal stops both cleanly,
worker first; the end of one ends the whole. Must not know how either works inside: it sees their
announcements, their exit codes, and the master's status.
"""

from __future__ import annotations

import os
import signal
import subprocess
import time
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Final, TypeVar

import msgspec

from kvstore.announcement import Announcement, announcement_path, read_announcement
from kvstore.child import tied
from kvstore.cli.operator import Operator
from kvstore.cli.options import key_alone
from kvstore.cli.places import forget_strange_segments
from kvstore.cli.serving import GATEWAY, GATEWAY_MODULE, WORKER_MODULE, Served, Serving
from kvstore.config_values import DiskSpace
from kvstore.errors import BadValue, Unavailable
from kvstore.exit_codes import ProgramDied
from kvstore.rpc.address import UNIX_PATH_BYTES_MAX
from kvstore.wire.messages.reads import Status

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from typing import Self

    from kvstore.cli.places import Places

Found = TypeVar("Found")

WORKER_NAME: Final = "standalone"
START_TIMEOUT_S: Final = 600.0
"""Reserving and touching the memory of a large pool takes minutes."""
STOP_TIMEOUT_S: Final = 10.0
POLL_S: Final = 0.02
LOG_LINES_SHOWN: Final = 20
STOP_SIGNALS: Final = frozenset({signal.SIGINT, signal.SIGTERM, signal.SIGHUP})


class Stopped(Exception):  # an end that was asked for, not an error
    """A signal asked for the end."""


class PartDied(ProgramDied):
    """A part of the pool ended by itself; the text is what it last said."""

    code = "part_died"

    def __init__(self, part: str, returncode: int, last_words: str) -> None:
        """Name the part, how it ended, and the end of its log."""
        how = f"signal {-returncode}" if returncode < 0 else f"exit code {returncode}"
        super().__init__(f"the {part} ended by itself ({how}):\n{last_words}", returncode)


class _Given(msgspec.Struct, frozen=True):
    """The one key of section [master] that is read here."""

    metadata: str = "sqlite"

    def __post_init__(self) -> None:
        if self.metadata == "etcd":
            want = "sqlite: with etcd start kvharbor-master and kvharbor-worker instead of `up`"
            raise BadValue("metadata", self.metadata, want)


def require_alone(config: Path | None) -> None:
    """ConfigError where the pool's master is to share its metadata.

    It might stand by for ever, and what `--fresh` and `wipe` remove is in the data folder.
    """
    key_alone(config, "master", "metadata").section(_Given, "master")


class Wiring(msgspec.Struct, frozen=True):
    """Options of both parts as they stood on the command line, None where not given."""

    config: Path | None = None
    secret_file: Path | None = None
    dram: str | None = None
    listen: str | None = None
    admin: str | None = None
    worker_listen: str | None = None
    worker_admin: str | None = None
    hbm: str | None = None
    disks: tuple[DiskSpace, ...] = ()
    """Folders of this pool alone."""

    def shared(self) -> list[str]:
        """Options that both parts take."""
        return [*_option("config", self.config), *_option("secret-file", self.secret_file)]

    def master(self, places: Places) -> list[str]:
        """Options of the master."""
        return [
            *_option("data-dir", places.data_dir),
            *_option("unix", _socket(places, "master.sock")),
            *_option("listen", self.listen),
            *_option("admin", self.admin),
            *self.shared(),
        ]

    def worker(self, places: Places, master: str) -> list[str]:
        """Options of the worker, whose master listens at `master`."""
        return [
            *_option("master", master),
            *_option("data-dir", places.data_dir),
            *_option("segment-dir", places.segment_dir),
            *_option("worker-id", WORKER_NAME),
            *_option("unix", _socket(places, "worker.sock")),
            *_option("dram", self.dram),
            *_option("hbm", self.hbm),
            *_option("nvme", ",".join(f"{disk.path}:{disk.size}" for disk in self.disks) or None),
            *_option("listen", self.worker_listen),
            *_option("admin", self.worker_admin),
            *self.shared(),
        ]


class Ready(msgspec.Struct, frozen=True):
    """A pool that takes pages."""

    master: Announcement
    worker: Announcement
    status: Status
    discarded_bytes: int
    """Of segments whose metadata was gone."""
    warnings: list[str]
    """What both parts warned of while they started."""


class Part:
    """One child process and its log."""

    def __init__(
        self, name: str, module: str, options: Sequence[str], places: Places, lock: int
    ) -> None:
        """Start it; its standard error goes to the log.

        It inherits the lock: after a kill of `up` the next one waits until its parts are gone.
        """
        self.name = name
        self._log = places.log(name)
        announcement_path(places.data_dir, name).unlink(missing_ok=True)
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(
                tied(module, *options),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                # Not in the terminal's foreground group: Ctrl-C reaches this process alone,
                # which then ends the parts in the right order.
                process_group=0,
                pass_fds=(lock,),
            )

    def warnings(self) -> list[str]:
        """What it has warned of, by its log."""
        lines = self._log.read_text(errors="replace").splitlines()
        marked = (line.partition(" WARNING ")[2] for line in lines)
        return [text.partition(": ")[2] for text in marked if text]

    @property
    def pid(self) -> int:
        """The process id."""
        return self._process.pid

    def require_alive(self) -> None:
        """PartDied, with the end of the log, when it has ended."""
        returncode = self._process.poll()
        if returncode is not None:
            lines = self._log.read_text(errors="replace").splitlines()
            raise PartDied(self.name, returncode, "\n".join(lines[-LOG_LINES_SHOWN:]))

    def stop(self) -> None:
        """Ask it to end, wait, and kill it when it does not.

        SIGINT, because a worker answers SIGTERM by waiting for its readers, and with the pool
        their leases end too.
        """
        self._process.send_signal(signal.SIGINT)
        try:
            self._process.wait(STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


class StandalonePool:
    """Context manager of one running pool. Signals are blocked inside and taken by `wait`."""

    def __init__(self, places: Places, wiring: Wiring, secret: bytes | None, lock: int) -> None:
        """Remember what to start; `places` are prepared, and locked by the descriptor `lock`."""
        self._places = places
        self._wiring = wiring
        self._secret = secret
        self._lock = lock
        self._parts: list[Part] = []
        self._mask: set[int] = set()
        # What nohup, or a shell for its background jobs, has this process ignore stays ignored;
        # a blocked signal would come all the same.
        self._stop_signals = {
            each for each in STOP_SIGNALS if signal.getsignal(each) is not signal.SIG_IGN
        }
        self._watched = self._stop_signals | {signal.SIGCHLD}

    def __enter__(self) -> Self:
        """Take the signals over, so that none is lost between two steps."""
        self._mask = set(signal.pthread_sigmask(signal.SIG_BLOCK, self._watched))
        return self

    def __exit__(self, *_: object) -> None:
        """Stop what runs, the latest first: the worker takes leave of a living master."""
        for part in reversed(self._parts):
            part.stop()
        signal.pthread_sigmask(signal.SIG_SETMASK, self._mask)

    def start(self) -> Ready:
        """Start both parts; returns when the worker is live.

        PartDied when one ends, Stopped when a signal came, Unavailable after START_TIMEOUT_S.
        """
        wiring, places = self._wiring, self._places
        part = self._run("master", "master", wiring.master(places))
        master, epoch = self._until(lambda: self._leads(part))
        disks = [disk.path for disk in wiring.disks]
        discarded = forget_strange_segments(places, epoch, disks)
        where = reachable(master.listen)
        part = self._run("worker", "workers", wiring.worker(places, where))
        worker = self._until(lambda: self._announced(part))
        try:
            with Operator(where, self._secret) as operator:
                status = self._until(lambda: _live(operator.status()))
        except Unavailable:
            self._require_alive()  # a master that has died says more than a lost connection
            raise
        warnings = [text for each in self._parts for text in each.warnings()]
        return Ready(master, worker, status, discarded, warnings)

    def serve(self, serving: Serving, ready: Ready) -> Served:
        """Start inference workers beside the pool, then a gateway; returns when it listens.

        Raises as `start`. The first start with a model may have to unpack it.
        """
        places, master = self._places, reachable(ready.master.listen)
        parts = [
            self._run(name, WORKER_MODULE, serving.worker_options(name, role, places, master))
            for name, role in serving.workers()
        ]
        workers = [self._until(partial(self._announced, each)) for each in parts]
        named = [each.listen for each in workers]
        options = serving.gateway_options(named, places, master)
        part = self._run(GATEWAY, GATEWAY_MODULE, options)
        gateway = self._until(lambda: self._announced(part))
        return Served(serving.model, gateway, workers)

    def wait(self) -> None:
        """Until a signal asks for the end (Stopped) or a part ends by itself (PartDied)."""
        while True:
            self._pause(None)

    def _run(self, name: str, module: str, options: Sequence[str]) -> Part:
        part = Part(name, module, options, self._places, self._lock)
        self._parts.append(part)
        return part

    def _announced(self, part: Part) -> Announcement | None:
        found = read_announcement(self._places.data_dir, part.name)
        return found if found is not None and found.pid == part.pid else None

    def _leads(self, part: Part) -> tuple[Announcement, int] | None:
        found = self._announced(part)
        return None if found is None or found.epoch is None else (found, found.epoch)

    def _until(self, look: Callable[[], Found | None]) -> Found:
        deadline = time.monotonic() + START_TIMEOUT_S
        while (found := look()) is None:
            if time.monotonic() > deadline:
                raise Unavailable(f"the pool was not ready within {START_TIMEOUT_S:.0f} s")
            self._pause(POLL_S)
        return found

    def _pause(self, timeout_s: float | None) -> None:
        """Wait for a signal, at most so long; raises what it means."""
        taken = (
            signal.sigwaitinfo(self._watched)
            if timeout_s is None
            else signal.sigtimedwait(self._watched, timeout_s)
        )
        if taken is not None and taken.si_signo in self._stop_signals:
            raise Stopped
        self._require_alive()

    def _require_alive(self) -> None:
        for part in self._parts:
            part.require_alive()


def reachable(listen: str) -> str:
    """Where a peer on this host reaches a listener: one on all addresses is there on loopback."""
    host, _, port = listen.rpartition(":")
    return {"0.0.0.0": f"127.0.0.1:{port}", "[::]": f"[::1]:{port}"}.get(host, listen)


def _socket(places: Places, name: str) -> Path:
    """Where a Unix socket is: beside the segments if the data folder's path is too long for one."""
    usual = places.data_dir / name
    fits = len(os.fsencode(usual)) <= UNIX_PATH_BYTES_MAX
    return usual if fits else places.segment_dir / name


def _live(status: Status) -> Status | None:
    return status if any(worker.state == "live" for worker in status.workers) else None


def _option(name: str, value: object | None) -> list[str]:
    return [] if value is None else [f"--{name}={value}"]
