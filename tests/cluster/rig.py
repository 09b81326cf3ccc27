"""A whole pool with its etcd as real processes, and proxies where a network could fail.

    clients ──▶ masters ──▶ proxies ──▶ etcd (one member or three)
    workers ──▶ proxies ──▶ masters

Clients reach masters and workers straight; masters tell everybody the address that workers use.
"""

from __future__ import annotations

import itertools
import os
import time
from contextlib import ExitStack, suppress
from math import inf
from pathlib import Path
from typing import TYPE_CHECKING, Final, TypeVar

import msgspec

from kvstore.errors import KVStoreError, Unavailable
from kvstore.rpc.connection import Connection
from kvstore.rpc.identity import Identity, Role
from kvstore.standing import Standing
from kvstore.wire.messages.reads import GetStatus, Status
from kvstore.wire.messages.replicas import GetReplicas, ReplicaReport
from tests.cluster.history import Call, read_history
from tests.cluster.load_client import Load
from tests.cluster.load_process import LoadProcess
from tests.cluster.pages import Pages
from tests.cluster.servers import Server, obtained, until
from tests.cluster.tcp_proxy import Proxies
from tests.etcd_server import EtcdOptions, EtcdServers
from workers.drills.ports import free_port

if TYPE_CHECKING:
    from collections.abc import Mapping
    from typing import Self

    from kvstore.wire.messages.base import Message

Answer = TypeVar("Answer")
SEGMENT_DIR: Final = Path("/dev/shm")
ASK_S: Final = 1.0
OPERATION_S: Final = 10.0
SERVING: Final = ("live", "draining", "drained")
"""States of workers whose pages are read."""
LOG_SHOWN_MAX: Final = 4000
_names = itertools.count(1)


class Shape(msgspec.Struct, frozen=True, kw_only=True):
    """How many processes of each kind, and what differs from the defaults."""

    masters: int = 2
    workers: int = 1
    members: int = 1
    """Of etcd; 0: the masters (one) keep their metadata in SQLite."""
    dram: str = "64MiB"
    chunk: str = "16MiB"
    master: dict[str, object] = {}
    """Settings of every master."""
    worker: dict[str, object] = {}
    """Settings of every worker."""
    quota_bytes: int = 0
    """Of etcd's space; 0: plenty."""
    seed: int = 0
    """Of the proxies."""


class Rig:
    """A context manager around all of it; everything runs, and pages can be stored, inside."""

    def __init__(self, folder: Path, shape: Shape | None = None) -> None:
        """Prepare; `folder` holds the data of all."""
        self.shape = shape or Shape()
        self.folder = folder
        self.cluster = f"rig-{os.getpid()}-{next(_names)}"
        self.addresses = tuple(f"127.0.0.1:{free_port()}" for _ in range(self.shape.masters))
        """Where clients find the masters."""
        self._undo = ExitStack()
        self._loads: list[LoadProcess] = []

    def __enter__(self) -> Self:
        try:
            self.prepare()
            for server in self.servers:
                server.launch()
            for server in self.servers:
                server.await_ready()
            until("workers serve", self.is_serving)
        except BaseException:
            self._show_logs()
            self.close()
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is not None:
            self._show_logs()
        self.close()

    def _show_logs(self) -> None:
        for server in getattr(self, "servers", ()):
            print(f"---- {server}\n{server.log()[-LOG_SHOWN_MAX:]}")

    def prepare(self) -> None:
        """Start etcd and the proxies; masters and workers are made, but not started."""
        options = EtcdOptions(quota_bytes=self.shape.quota_bytes)
        (self.folder / "etcd").mkdir(parents=True)
        self.etcd = EtcdServers(self.folder / "etcd", self.shape.members, options)
        if self.shape.members:
            self._undo.enter_context(self.etcd)
        self.proxies = self._undo.enter_context(Proxies())
        seeds = itertools.count(self.shape.seed)
        self.to_etcd = [
            [self.proxies.front_of(each, next(seeds)) for each in self.etcd.addresses]
            for _ in range(self.shape.masters)
        ]
        """For each master, in front of each member."""
        self.to_masters = [self.proxies.front_of(each, next(seeds)) for each in self.addresses]
        """In front of each master, for the workers."""
        self.masters = [self._master(number) for number in range(self.shape.masters)]
        self.workers = [self._worker(number) for number in range(self.shape.workers)]
        self.servers = (*self.masters, *self.workers)

    def close(self) -> None:
        """End every process and give the memory back."""
        for load in self._loads:
            load.discard()
        for server in getattr(self, "servers", ()):
            server.discard()
        self._undo.close()
        for segment in SEGMENT_DIR.glob(f"kvharbor-{self.cluster}-*"):
            segment.unlink()

    def _master(self, number: int) -> Server:
        name = f"m{number}"
        settings: dict[str, object] = {
            "name": name,
            "data_dir": str(self.folder / name),
            "listen": self.addresses[number],
            "advertise": [self.to_masters[number].address],
            "unix": "off",
            "admin": "off",
            "metadata": "etcd" if self.shape.members else "sqlite",
        }
        sections: dict[str, Mapping[str, object]] = {
            "cluster": {"name": self.cluster},
            "master": settings | self.shape.master,
        }
        if self.shape.members:
            sections["etcd"] = {"endpoints": [each.address for each in self.to_etcd[number]]}
        return Server("master", self.folder / name, sections)

    def _worker(self, number: int) -> Server:
        name = f"w{number}"
        settings: dict[str, object] = {
            "id": name,
            "data_dir": str(self.folder / name),
            "master": [each.address for each in self.to_masters],
            "listen": f"127.0.0.1:{free_port()}",
            "admin": "off",
            "host": name,
            "dram": self.shape.dram,
            "chunk": self.shape.chunk,
        }
        sections: dict[str, Mapping[str, object]] = {
            "cluster": {"name": self.cluster},
            "worker": settings | self.shape.worker,
        }
        return Server("worker", self.folder / name, sections)

    def segment_file(self, worker: int) -> Path:
        """Where a worker's memory is."""
        return SEGMENT_DIR / f"kvharbor-{self.cluster}-w{worker}-dram0"

    # What the pool says of itself.

    def status(self, number: int) -> Status:
        """A master's own, however busy it is, or just changing its part."""

        def answer() -> Status | None:
            with suppress(Unavailable):
                return self._ask(number, GetStatus(), Status)
            return None

        status = obtained(f"master {number} answers", answer)
        assert status is not None
        return status

    def ask(self, question: Message, kind: type[Answer]) -> Answer:
        """What the leader answers an operator; KVStoreError when it does not."""
        return self._ask(self.leader(), question, kind, OPERATION_S)

    def _ask(
        self, number: int, question: Message, kind: type[Answer], patience_s: float = ASK_S
    ) -> Answer:
        identity = Identity(Role.OPERATOR, cluster=self.cluster)
        connection = Connection.open(self.addresses[number], identity, ASK_S)
        try:
            reply = connection.call(question, patience_s)
        finally:
            connection.close()
        assert isinstance(reply, kind), reply
        return reply

    def standings(self) -> dict[int, Status]:
        """What each master that answers says of itself, the latest epoch first."""
        found: dict[int, Status] = {}
        for number, master in enumerate(self.masters):
            if master.is_running and not master.is_stopped:
                with suppress(KVStoreError):
                    found[number] = self._ask(number, GetStatus(), Status)
        return dict(sorted(found.items(), key=lambda each: -each[1].epoch))

    def leaders(self) -> list[int]:
        """The masters that say that they lead, the latest first."""
        found = self.standings()
        return [number for number, status in found.items() if status.standing == Standing.LEADING]

    def leader(self) -> int:
        """The master that leads; waits until there is one."""
        return obtained("a master leads", self.leaders)[0]

    def standby(self) -> int:
        """Another one that answers; waits until there is one."""
        leader = self.leader()
        return min(obtained("a master stands by", lambda: set(self.standings()) - {leader}))

    def is_serving(self) -> bool:
        """Whether a leader has all the workers that run, in their present lives."""
        asked_s = time.monotonic()
        lived_s = {
            each.folder.name: asked_s - each.launched_s for each in self.workers if each.is_running
        }
        for status in self.standings().values():
            if status.standing == Standing.LEADING:
                serving = (each for each in status.workers if each.state in SERVING)
                heard_ago_s = {each.worker: each.heard_ago_s for each in serving}
                return all(heard_ago_s.get(name, inf) < lived_s[name] for name in lived_s)
        return False

    def state_of(self, worker: str) -> str:
        """What the leader says of a worker."""
        workers = self.status(self.leader()).workers
        return next((each.state for each in workers if each.worker == worker), "")

    def lacking(self) -> int:
        """How many pages have fewer replicas than they are to have."""
        report = self.ask(GetReplicas(), ReplicaReport)
        return sum(each.lacking for each in report.namespaces)

    def has_replicas(self) -> bool:
        """Whether every worker that runs serves, and every page has its replicas."""
        with suppress(KVStoreError):
            return self.is_serving() and not self.lacking()
        return False

    def is_whole(self) -> bool:
        """Whether besides every master answers."""
        return self.is_serving() and len(self.standings()) == len(self.masters)

    # Who uses it.

    def pages(self, transport: str = "shm", model: str = "rig") -> Pages:
        """A store of this process."""
        return Pages(self.addresses, transport, model)

    def load(self, number: int, clients: int, **settings: object) -> LoadProcess:
        """Start a client; see Load for what can be set."""
        path = self.folder / f"history-{len(self._loads)}"
        given = {"masters": self.addresses, "history": str(path), "seed": self.shape.seed}
        given |= {"number": number, "clients": clients, "life": len(self._loads), **settings}
        self._loads.append(LoadProcess(msgspec.convert(given, Load)))
        return self._loads[-1]

    def calls(self) -> list[Call]:
        """What all clients did so far."""
        return [call for load in self._loads for call in read_history(load.history)]

    def heal(self) -> None:
        """Let everything run and pass again."""
        for proxy in (*self.to_masters, *itertools.chain(*self.to_etcd)):
            proxy.heal()
        for server in self.servers:
            if server.is_stopped:
                server.go_on()
            elif not server.is_running:
                server.launch()
