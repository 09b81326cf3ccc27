"""Pools with several fleets beside each other, each with a gateway: processes of one model.

Each fleet is a tenant's, so that none has another's pages; those that are not asked are idle. When
prompts are handed over is a master's setting: fleets that differ in it have pools of their own. All
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
    route_ahead: float = 0.0
    """Of its master; 0: prompts are handed over once all of them is computed."""
    layer_groups: int = 1


class Pools:
    """Fleets of one model, and a pool for each `route_ahead` of theirs: a context manager."""

    def __init__(
        self, model: str, shapes: tuple[Shape, ...], dram: str, kv_tokens: int, first_token_s: float
    ) -> None:
        """Remember what to start: `dram` is each pool's, `kv_tokens` what the workers of a fleet
        have room for together, `first_token_s` what gateways tell of their clients' patience."""
        self._model = model
        self._shapes = shapes
        self._dram = dram
        self._kv_tokens = kv_tokens
        self._first_token_s = first_token_s
        self._processes: dict[Path, subprocess.Popen[bytes]] = {}
        self._ups: dict[float, Up] = {}
        """Pools, by `route_ahead`."""
        self._stores: list[KVStore] = []
        self._undo = ExitStack()
        self.gateways: dict[str, str] = {}
        """Addresses, by the fleet's name."""

    def __enter__(self) -> Self:
        """Start everything; returns when all gateways listen."""
        with self._undo:
            self._folder = Path(tempfile.mkdtemp(prefix="kvharbor-bench-"))
            self._undo.callback(shutil.rmtree, self._folder, ignore_errors=True)
            for route_ahead in sorted({shape.route_ahead for shape in self._shapes}):
                self._start_pool(route_ahead)
            self._undo.callback(self._stop_all)
            self._start_all()
            self._undo = self._undo.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._undo.close()

    def clock(self, shape: Shape) -> ProcessClock:
        """Processor time of that fleet, its gateway and its pool."""
        folder, up = self._folder / shape.name, self._ups[shape.route_ahead]
        own = [process.pid for at, process in self._processes.items() if at.parent == folder]
        return ProcessClock([*own, up.pid("master"), up.pid("worker")])

    def left_over(self) -> int:
        """Once all is quiet: tickets, running requests, KV tokens, staged bytes and pins."""
        try:
            until("everything is given back", lambda: not self._held(), IDLE_S)
        except AssertionError:
            return self._held()
        return 0

    def _held(self) -> int:
        return sum(_held(store) for store in self._stores)

    def _start_pool(self, route_ahead: float) -> None:
        folder = self._folder / f"pool-{len(self._ups)}"
        config = folder.with_suffix(".toml")
        config.write_text(f"[master]\nroute_ahead = {route_ahead}\n")
        self._undo.callback(remove_segments, folder)
        up = self._undo.enter_context(Up(folder, f"--config={config}", dram=self._dram))
        self._ups[route_ahead] = up
        # Workers that can do both do both: what they are is then one fleet that hands nothing
        # over, beside others that hand over everything.
        done = kvharbor("policy", "set", "colocation", "always", f"--master={up.master}")
        assert done.returncode == 0, done.stderr
        self._stores.append(self._undo.enter_context(KVStore.connect(up.master)))

    def _start_all(self) -> None:
        for shape in self._shapes:
            (self._folder / shape.name).mkdir()
            decoders = sum(role != "prefill" for role in shape.roles)
            shared = [f"--model={self._model}", f"--threads={shape.threads}"]
            shared.append(f"--capacity-tokens={self._kv_tokens // decoders}")
            shared.append(f"--layer-groups={shape.layer_groups}")
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
        folder, master = self._folder / shape.name, self._ups[shape.route_ahead].master
        command = [sys.executable, "-P", "-m", module, f"--master={master}", *own]
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


def _held(store: KVStore) -> int:
    found = store.carry_out(list_tickets())
    used = sum(row.used_tokens + row.running + row.queued_tokens for row in found.workers)
    return found.tickets + found.staging_bytes + used + len(store.pins())
