"""A whole control plane in one thread: built from options, broken by faults, healed, and judged."""

from __future__ import annotations

import contextlib
from functools import partial
from typing import TYPE_CHECKING, Final

from kvstore.ids import SegmentId
from kvstore.limits import LEASE_MARGIN_S, LEASE_TTL_MAX_S
from tests.simulation import master_view
from tests.simulation.checks import Checks
from tests.simulation.disk import DiskStore
from tests.simulation.faults import Faults
from tests.simulation.memory import SegmentMemory
from tests.simulation.options import STAGING, Options, options_of
from tests.simulation.pages import HALVES, WHOLE, Universe
from tests.simulation.pd_fleet import PdFleet
from tests.simulation.scans import at_rest, scan
from tests.simulation.sim_client import SimClient
from tests.simulation.sim_etcd import ETCD, SimEtcd
from tests.simulation.sim_master import SimMaster
from tests.simulation.sim_metadata import EtcdClient, SimDisk
from tests.simulation.sim_operator import OPERATOR, SimOperator
from tests.simulation.sim_worker import SimWorker
from tests.simulation.tasks import spawn
from tests.simulation.workload import Caller
from tests.simulation.world import World

if TYPE_CHECKING:
    from collections import Counter

    from tests.simulation.pd_node import PdNode
    from tests.simulation.sim_metadata import SimStore
    from tests.simulation.store import SegmentStore
    from tests.simulation.tasks import Steps

STEPS_PER_SCAN: Final = 60
REST_S: Final = LEASE_TTL_MAX_S + LEASE_MARGIN_S + 20.0
"""By then every lease, plan, fence and call has ended."""


class Failed(AssertionError):
    """A run broke an invariant: seed, options and story, in that order."""


COUNTED: Final = (
    "replicas_trimmed", "runs_thinned", "replicas_without_room", "replicas_for_heat_wanted",
    "replicas_for_heat_ended", "tickets_abandoned",
)  # fmt: skip
"""By the last master."""


class Simulation:
    """Master, workers and clients of one seed."""

    def __init__(self, seed: int, options: Options | None = None) -> None:
        """Build everything; nothing runs yet."""
        self.seed = seed
        self.options = options_of(seed) if options is None else options
        self.world = World(seed)
        self.checks = Checks(self.world, self.options)
        self.etcd = self._new_etcd() if self.options.etcd else None
        self.masters: dict[str, SimMaster] = {}
        for number in range(self.options.masters):
            self._add_master(f"master{number}", f"host-master{number}")
        self.workers: dict[str, SimWorker] = {}
        for number in range(self.options.workers):
            self._add_worker(f"worker{number}", f"host{number % self.options.hosts}")
        self.universe = Universe(
            self.world.random, self.options.depth, self.options.branches, self.options.names
        )
        self.clients: dict[str, SimClient] = {}
        self.callers: dict[str, list[Caller]] = {}
        for number in range(self.options.clients):
            self._add_client(f"client{number}", f"host{number % self.options.hosts}")
        self.operator = self._new_operator() if self.options.relocations else None
        self.fleet = PdFleet(self) if self.options.tickets else None
        self.faults = Faults(self)
        self._steps_to_scan = STEPS_PER_SCAN

    def _new_etcd(self) -> SimEtcd:
        self.world.add_node(ETCD, "host-etcd")
        etcd = SimEtcd(self.world)
        etcd.watch = self.checks.is_written
        self.checks.etcd = etcd
        return etcd

    def _add_master(self, name: str, host: str) -> None:
        self.world.add_node(name, host)
        store: SimStore = SimDisk(self.world, name, self.options.persist_delay_max_s)
        if self.etcd is not None:
            store = EtcdClient(self.world, name, self.etcd)
        master = SimMaster(self.world, name, store, self.options.tunables, self.checks)
        self.masters[name] = self.checks.masters[name] = master

    def _add_worker(self, name: str, host: str) -> None:
        self.world.add_node(name, host)
        options = self.options
        stores: list[SegmentStore] = [
            SegmentMemory(SegmentId(f"{name}-dram{number or ''}"), options.geometry)
            for number in range(options.segments)
        ]
        stores += [
            DiskStore(SegmentId(f"{name}-nvme{number or ''}"), options.disk_geometry)
            for number in range(options.disks)
        ]
        staging = None
        if options.disks:
            staging = SegmentMemory(SegmentId(f"{name}-staging"), STAGING)
            self.checks.memories[staging.segment] = staging
        worker = SimWorker(self.world, name, stores, self.checks, staging)
        worker.copy_delay_max_s = self.options.slow_pull_s
        worker.masters = self.masters
        worker.others = self.workers
        worker.clients = self.clients_by_name
        self.workers[name] = worker
        self.checks.workers[name] = worker
        self.checks.memories.update(worker.memories)

    def _add_client(self, name: str, host: str) -> None:
        self.world.add_node(name, host)
        client = SimClient(self.world, name, self.masters, self.workers, self.checks)
        self.clients[name] = client
        self.callers[name] = []

    def _new_operator(self) -> SimOperator:
        self.world.add_node(OPERATOR, "host-operator")
        return SimOperator(self.world, OPERATOR, self.masters, self.workers, self.checks)

    def clients_by_name(self, name: str) -> SimClient:
        """A client, for a worker that has its buffer mapped."""
        return self.clients[name] if name in self.clients else self.inference_process(name)

    def inference_process(self, name: str) -> PdNode:
        """A gateway, prefill or decode worker."""
        assert self.fleet is not None
        return self.fleet.nodes[name]

    def close(self) -> None:
        """Give the memory back."""
        for memory in self.checks.memories.values():
            memory.close()

    def abandon(self) -> None:
        """Give the memory back after a failure, as far as no view of it is in some traceback."""
        with contextlib.suppress(BufferError):
            self.close()

    # --- processes --------------------------------------------------------------------------

    def start(self) -> None:
        """Start every process."""
        for master in self.masters.values():
            master.start()
        for worker in self.workers.values():
            worker.start()
        self.world.after_step.append(self._after_step)

    def start_work(self) -> None:
        """Let every client make its calls."""
        for name in self.clients:
            self._start_callers(name)
        if self.operator is not None:
            spawn(self.world, OPERATOR, self.operator.work(self.options.relocations))
        if self.fleet is not None:
            self.fleet.start()

    def _start_callers(self, name: str) -> None:
        client = self.clients[name]
        self.callers[name] = []
        for _ in range(self.options.threads):
            caller = Caller(client, self.universe)
            self.callers[name].append(caller)
            spawn(self.world, name, caller.work(), self.world.random.uniform(0.0, 0.5))

    def stop_work(self) -> None:
        """Let every client end the call that it is making."""
        for callers in self.callers.values():
            for caller in callers:
                caller.is_stopped = True
        if self.operator is not None:
            self.operator.is_stopped = True
        if self.fleet is not None:
            self.fleet.stop_work()

    def crash(self, name: str) -> None:
        """kill -9 of any process."""
        if name == ETCD:
            self.world.crash(ETCD)
        elif name in self.masters:
            self.masters[name].crash()
        elif name in self.workers:
            self.workers[name].crash()
        else:
            self.clients_by_name(name).crash()

    def lose_power(self, name: str) -> None:
        """Kill a worker, and of what its disks had not synced some is lost."""
        self.crash(name)
        for disk in self.workers[name].disks:
            lost = disk.lose_power(self.world.random, self.checks.is_right_record(disk))
            self.world.counts["blocks lost with the power"] += lost

    def restart(self, name: str) -> None:
        """Start a process again that is down."""
        if self.world.is_up(name):
            return
        self.world.start(name)
        if name == ETCD:
            assert self.etcd is not None
            self.etcd.start()
        elif name in self.masters:
            self.masters[name].start()
        elif name in self.workers:
            self.workers[name].start()
        elif name in self.clients:
            self._start_callers(name)
        else:
            self.inference_process(name).start()

    def _after_step(self) -> None:
        self._steps_to_scan -= 1
        if self._steps_to_scan <= 0:
            self._steps_to_scan = STEPS_PER_SCAN
            scan(self.checks)

    # --- the whole story --------------------------------------------------------------------

    def run(self) -> Counter[str]:
        """Faults, then healing, then rest, then a sign of life. Raises Failed, with the story."""
        try:
            self.start()
            self.start_work()
            self.faults.begin()
            self.world.run(self.options.seconds)
            self.faults.heal()
            self.world.run(3.0)
            self._come_to_rest()
            self._show_life()
            self._count_replicas()
        except Exception as error:  # whatever it is, it comes with its story
            raise Failed(f"{error!r}\n{self.options}\n{self.world.story()}") from error
        return self.world.counts

    def _come_to_rest(self) -> None:
        """I18, I19: without calls nothing is left under way."""
        self.stop_work()
        world, checks = self.world, self.checks
        world.run_until(lambda: not at_rest(checks), REST_S, step_s=0.5)
        scan(checks)
        left = at_rest(checks)
        if left:
            checks.fail("I18", f"after {REST_S} s of rest: {left}")

    def _count_replicas(self) -> None:
        master = self.checks.leader
        assert master is not None
        for name in COUNTED:
            self.world.counts[name] += master_view.core_of(master).counters[name]

    def _show_life(self) -> None:
        """Once all is healed, every client can put a page and read it."""
        for name in self.clients:
            done: list[bool] = []
            spawn(self.world, name, self._put_and_read(name, done))
            if not self.world.run_until(partial(bool, done), 20.0):
                self.checks.fail("liveness", f"{name} cannot put and read after all has healed")
        if self.fleet is not None:
            self.fleet.show_life()

    def _put_and_read(self, name: str, done: list[bool]) -> Steps[None]:
        caller = Caller(self.clients[name], self.universe)
        for namespace in (WHOLE, HALVES):
            yield from caller.round_trip(namespace)
        done.append(True)
