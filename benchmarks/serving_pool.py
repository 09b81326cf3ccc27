"""A pool with several fleets beside each other, each with a gateway: processes of one model.

Each fleet is a tenant's, so that none has another's pages; those that are not asked are idle. All
lies on one machine: what fleets do is compared there, not how fast links are.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final

from benchmarks.harness import ProcessClock
from kvstore import KVStore
from kvstore.announcement import read_announcement
from kvstore.client.tickets import list_tickets
from tests.cluster.servers import die_with_parent, until
from tests.cluster.up import Up, clean_environment, kvharbor, remove_segments

if TYPE_CHECKING:
    from typing import Self

START_S: Final = 600.0
IDLE_S: Final = 60.0


@dataclass(frozen=True)
class Shape:
    """A fleet: the role of each of its workers, and the threads that each computes with."""

    name: str
    roles: tuple[str, ...]
    threads: int = 1


class Pool:
    """A pool and fleets of one model: a context manager."""

    def __init__(
        self, model: str, shapes: tuple[Shape, ...], dram: str, kv_tokens: int, first_token_s: float
    ) -> None:
        """Remember what to start: `kv_tokens` is what the workers of a fleet have room for
        together, `first_token_s` what gateways tell the master of their clients' patience."""
        self._model = model
        self._shapes = shapes
        self._dram = dram
        self._kv_tokens = kv_tokens
        self._first_token_s = first_token_s
        self._processes: dict[Path, subprocess.Popen[bytes]] = {}
        self._undo = ExitStack()
        self.gateways: dict[str, str] = {}
        """Addresses, by the fleet's name."""

    def __enter__(self) -> Self:
        """Start everything; returns when all gateways listen."""
        with self._undo:
            self._folder = Path(tempfile.mkdtemp(prefix="kvharbor-bench-"))
            self._undo.callback(shutil.rmtree, self._folder, ignore_errors=True)
            self._undo.callback(remove_segments, self._folder / "pool")
            up = self._undo.enter_context(Up(self._folder / "pool", dram=self._dram))
            self._up, self._master = up, up.master
            self._undo.callback(self._stop_all)
            # Workers that can do both do both: what they are is then one fleet that hands nothing
            # over, beside others that hand over everything.
            done = kvharbor("policy", "set", "colocation", "always", f"--master={up.master}")
            assert done.returncode == 0, done.stderr
            self._store = self._undo.enter_context(KVStore.connect(up.master))
            self._start_all()
            self._undo = self._undo.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._undo.close()

    def clock(self, shape: Shape) -> ProcessClock:
        """Processor time of that fleet, its gateway and the pool."""
        folder = self._folder / shape.name
        own = [process.pid for at, process in self._processes.items() if at.parent == folder]
        return ProcessClock([*own, self._up.pid("master"), self._up.pid("worker")])

    def left_over(self) -> int:
        """Once all is quiet: tickets, running requests, KV tokens, staged bytes and pins."""
        try:
            until("everything is given back", lambda: not self._held(), IDLE_S)
        except AssertionError:
            return self._held()
        return 0

    def _held(self) -> int:
        found = self._store.carry_out(list_tickets())
        used = sum(row.used_tokens + row.running + row.queued_tokens for row in found.workers)
        return found.tickets + found.staging_bytes + used + len(self._store.pins())

    def _start_all(self) -> None:
        for shape in self._shapes:
            (self._folder / shape.name).mkdir()
            decoders = sum(role != "prefill" for role in shape.roles)
            shared = [f"--model={self._model}", f"--threads={shape.threads}"]
            shared.append(f"--capacity-tokens={self._kv_tokens // decoders}")
            for number, role in enumerate(shape.roles):
                name = f"{role}-{number}"
                own = [f"--role={role}", f"--name={name}", *shared]
                self._start(shape, name, "workers.serve", own)
        for shape in self._shapes:
            for number, role in enumerate(shape.roles):
                self._where(shape, f"{role}-{number}")
            one = self._where(shape, f"{shape.roles[0]}-0")
            own = [f"--worker={one}", f"--first-token-s={self._first_token_s}"]
            self._start(shape, "gateway", "workers.gateway", [*own, "--listen=127.0.0.1:0"])
        for shape in self._shapes:
            self.gateways[shape.name] = self._where(shape, "gateway")

    def _start(self, shape: Shape, name: str, module: str, own: list[str]) -> None:
        folder = self._folder / shape.name
        command = [sys.executable, "-P", "-m", module, f"--master={self._master}", *own]
        command += [f"--tenant={shape.name}", f"--data-dir={folder}"]
        with (folder / f"{name}.log").open("wb") as log:
            self._processes[folder / name] = subprocess.Popen(
                command, env=clean_environment(), stdin=subprocess.DEVNULL, stdout=log, stderr=log,
                preexec_fn=die_with_parent,
            )  # fmt: skip

    def _where(self, shape: Shape, name: str) -> str:
        """The address of a program, once it listens."""
        folder = self._folder / shape.name

        def listens() -> bool:
            log = (folder / f"{name}.log").read_text
            assert self._processes[folder / name].poll() is None, log()
            return read_announcement(folder, name) is not None

        until(f"{name} of {shape.name} listens", listens, START_S)
        found = read_announcement(folder, name)
        assert found is not None
        return found.listen

    def _stop_all(self) -> None:
        for process in reversed(self._processes.values()):
            process.kill()
            process.wait()
