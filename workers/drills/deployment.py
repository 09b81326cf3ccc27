"""What drills are held on: masters, a pool worker, inference workers and a gateway, as processes.

    this host:  etcd (where there are two masters), masters, gateways, prefill workers
    the other:  the pool worker, decode workers    (the same host where there is but one)

Between two hosts everything goes over TCP: prompts' KV, control, tokens. The pool worker has an
address on each of the two links, as the masters have.
"""

from __future__ import annotations

import json
import os
import secrets
import shutil
import sys
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Final

import msgspec

from kvstore.child import tied
from kvstore.client.store import KVStore
from kvstore.client.tickets import list_tickets
from kvstore.config import read_secret
from kvstore.errors import ConfigError
from workers.drills.load import Target
from workers.drills.network import RAILS, Network, far, near
from workers.drills.ports import LOOPBACK, free_port
from workers.drills.processes import START_S, Process, others, until

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from typing import Self

    from kvstore.wire.messages.tickets import FleetRow, TicketList

DRAM: Final = "256MiB"
CHUNK: Final = "16MiB"
SEGMENT_DIR: Final = Path("/dev/shm")
REVISIONS: Final = ("tiny", "tiny-2")
"""Models that differ in nothing but their weights."""


class Shape(msgspec.Struct, frozen=True):
    """How much of each."""

    prefills: int
    decodes: int
    masters: int
    """1, or 2 that find each other by etcd."""
    hosts: int
    """1, or 2 with a network between them."""


class Deployment:
    """A context manager around all of it; a gateway serves inside."""

    def __init__(self, folder: Path, shape: Shape) -> None:
        """Prepare; `folder` is empty, and its name short: Unix sockets lie below it."""
        self.shape = shape
        self.network = Network()
        self.model = REVISIONS[0]
        self.masters: dict[str, Process] = {}
        self.workers: dict[str, Process] = {}
        """Inference workers."""
        self._folder = folder
        self._cluster = f"drill-{os.getpid()}"
        self._undo = ExitStack()
        self._started = 0
        self._places: list[str] = []
        """Of masters, for everybody."""

    def __enter__(self) -> Self:
        """Start it all. PartDied, Unavailable, ConfigError or AccessDenied where that fails."""
        with ExitStack() as undo:
            if self.shape.hosts > 1:
                undo.enter_context(self.network)
            undo.callback(self._remove_segments)
            self._undo = undo
            self._start_pool()
            for role, count in (("prefill", self.shape.prefills), ("decode", self.shape.decodes)):
                for number in range(1, count + 1):
                    self.start_worker(f"{role}-{number}")
            self.start_gateway("gateway", list(self.workers))
            key = read_secret(self._secret_file)
            self._store = undo.enter_context(
                KVStore.connect(",".join(self._places), secret=key, name="drill")
            )
            self._undo = undo.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        """End every process and give the memory back."""
        self._undo.close()

    @property
    def target(self) -> Target:
        """Where requests go."""
        return Target(self.gateway.listen, self.model)

    def named(self, role: str) -> list[str]:
        """The inference workers of a role."""
        return [name for name in self.workers if name.startswith(role)]

    def start_worker(self, name: str) -> None:
        """Start an inference worker of the present model; its name begins with its role."""
        role = name.partition("-")[0]
        where = far(RAILS[-1]) if self._is_far(role) else self._addresses()[0]
        options = (
            f"--role={role}", f"--name={name}", f"--model={self.model}", "--threads=1",
            f"--listen={where}:0",
        )  # fmt: skip
        self.workers[name] = self._start(
            name, name, "workers.serve", *options, far=self._is_far(role)
        )

    def restore(self) -> None:
        """Start again what was killed; returns when all of it listens."""
        whole = (*self.masters.values(), *self.workers.values())
        for each in whole:
            if not each.is_running:
                each.start()
        for each in whole:
            each.await_listening()

    def retire(self, *names: str) -> None:
        """Ask inference workers to leave for good; returns when they have."""
        for name in names:
            self.workers.pop(name).end()

    def start_gateway(self, name: str, workers: Sequence[str]) -> None:
        """Start one for those workers, once they listen; returns when it listens itself."""
        options = [f"--worker={self.workers[each].listen}" for each in workers]
        self.gateway = self._start(
            name, "gateway", "workers.gateway", f"--listen={LOOPBACK}:0", *options
        )
        self.gateway.await_listening()

    def leader(self) -> str:
        """The master that leads, once one does."""
        until("a master leads", self._leaders, START_S)
        return self._leaders()[0]

    def tickets(self) -> TicketList:
        """What the leader knows of tickets and inference workers."""
        return self._store.carry_out(list_tickets())

    def fleet(self) -> dict[str, FleetRow]:
        """The inference workers that the leader knows, by name."""
        return {row.worker: row for row in self.tickets().workers}

    def leftovers(self) -> list[str]:
        """What requests hold of the pool: nothing, where there is none."""
        found = self.tickets()
        held = {
            "tickets": found.tickets,
            "bytes of staging": found.staging_bytes,
            "KV tokens of workers": sum(row.used_tokens for row in found.workers),
            "slots": sum(row.running for row in found.workers),
            "queued tokens": sum(row.queued_tokens for row in found.workers),
            "pins": len(self._store.pins()),
        }
        return [f"{count} {what}" for what, count in held.items() if count]

    def _leaders(self) -> list[str]:
        running = {name: each for name, each in self.masters.items() if each.is_running}
        found = {name: each.announcement() for name, each in running.items()}
        return [name for name, said in found.items() if said is not None and said.epoch is not None]

    def _start_pool(self) -> None:
        self._secret_file = self._folder / "secret"
        self._secret_file.touch(0o600)
        self._secret_file.write_text(secrets.token_hex(32))
        etcd = self._start_etcd() if self.shape.masters > 1 else {}
        for number in range(1, self.shape.masters + 1):
            self._start_master(f"master-{number}", etcd)
        self.leader()
        pool = self._prepared("pool", "worker", "workers", {"worker": self._pool_settings()})
        pool.start()
        pool.await_listening()

    def _start_etcd(self) -> dict[str, object]:
        """The section that says where it is."""
        own = Path(sys.prefix) / "bin" / "etcd"
        program = str(own) if own.exists() else shutil.which("etcd")
        if program is None:
            raise ConfigError("etcd: not found on PATH; masters that follow each other need it")
        client, peer = (f"http://{LOOPBACK}:{free_port()}" for _ in range(2))
        options = (
            "--name=etcd", f"--data-dir={self._folder / 'etcd' / 'data'}",
            f"--listen-client-urls={client}", f"--advertise-client-urls={client}",
            f"--listen-peer-urls={peer}", f"--initial-advertise-peer-urls={peer}",
            f"--initial-cluster=etcd={peer}",
        )  # fmt: skip
        process = Process("etcd", "", self._folder / "etcd", others(program, *options))
        process.start()
        self._undo.callback(process.discard)
        return {"endpoints": [client.removeprefix("http://")]}

    def _start_master(self, name: str, etcd: Mapping[str, object]) -> None:
        port, hosts = free_port(), self._addresses()
        places = [f"{host}:{port}" for host in hosts]
        own: dict[str, object] = {
            "name": name,
            "listen": f"0.0.0.0:{port}" if len(hosts) > 1 else places[0],
            "advertise": places,
            "admin": "off",
            "metadata": "etcd" if etcd else "sqlite",
        }
        self._places += places
        sections = {"master": own, **({"etcd": etcd} if etcd else {})}
        self.masters[name] = self._prepared(name, "master", "master", sections)
        self.masters[name].start()

    def _pool_settings(self) -> dict[str, object]:
        own: dict[str, object] = {
            "id": "pool", "master": self._places, "admin": "off", "dram": DRAM, "chunk": CHUNK,
            "segment_dir": str(SEGMENT_DIR), "listen": f"{LOOPBACK}:0",
        }  # fmt: skip
        if self.shape.hosts > 1:
            port = free_port()
            places = [f"{far(rail)}:{port}" for rail in RAILS]
            own |= {"listen": f"0.0.0.0:{port}", "advertise": places}
            own |= {"transports": ["tcp"], "host": "far"}
        return own

    def _prepared(
        self, name: str, role: str, module: str, sections: Mapping[str, Mapping[str, object]]
    ) -> Process:
        """A master or a pool worker with a configuration of its own."""
        folder = self._folder / name
        config = self._folder / f"{name}.toml"
        cluster = {"name": self._cluster, "secret_file": str(self._secret_file)}
        own = {**sections, role: {**sections[role], "data_dir": str(folder)}, "cluster": cluster}
        config.write_text(_toml(own))
        command = tied(module, f"--config={config}")
        is_far = self._is_far(role)
        process = Process(name, role, folder, self.network.there(command) if is_far else command)
        self._undo.callback(process.discard)
        return process

    def _start(
        self, name: str, announced: str, module: str, *options: str, far: bool = False
    ) -> Process:
        """An inference worker or a gateway."""
        folder = self._folder / name
        command = tied(
            module, f"--master={','.join(self._places)}", f"--secret-file={self._secret_file}",
            f"--data-dir={folder}", *options,
        )  # fmt: skip
        process = Process(name, announced, folder, self.network.there(command) if far else command)
        self._undo.callback(process.discard)
        process.start()
        return process

    def _is_far(self, role: str) -> bool:
        return self.shape.hosts > 1 and role in ("worker", "decode")

    def _addresses(self) -> list[str]:
        """Of this host, for others."""
        return [near(rail) for rail in RAILS] if self.shape.hosts > 1 else [LOOPBACK]

    def _remove_segments(self) -> None:
        for segment in SEGMENT_DIR.glob(f"kvharbor-{self._cluster}-*"):
            segment.unlink()


def _toml(sections: Mapping[str, Mapping[str, object]]) -> str:
    """A configuration; values are written as JSON, which TOML reads alike for these types."""
    lines: list[str] = []
    for section, values in sections.items():
        lines.append(f"[{section}]")
        lines += [f"{name} = {json.dumps(value)}" for name, value in values.items()]
    return "\n".join(lines) + "\n"
