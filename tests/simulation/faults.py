"""What goes wrong, when, and for how long: crashes, pauses, cuts, flipped bits, changes of weather.

Chooses by the options; every fault ends after a while by itself, and all of them on `heal`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from kvstore.limits import WORKER_LOST_AFTER_S
from kvstore.record import RecordState
from tests.simulation.sim_etcd import ETCD
from tests.simulation.world import FAIR

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.simulation.sim_worker import SimWorker
    from tests.simulation.simulation import Simulation

DISK_FAULTS: Final = ("writes fail", "reads fail", "loses power")
ETCD_FAULTS: Final = ("ends leases", "changes its leader", "is full")
RESIGNS: Final = 0.3
"""Share of the masters that end which are asked to."""
RESIGNING_S: Final = 0.05
TURN_S: Final = 0.5
"""How often the coin is tossed for each kind of fault."""


class Faults:
    """The nemesis of one simulation."""

    def __init__(self, simulation: Simulation) -> None:
        """Nothing is wrong yet."""
        self._simulation = simulation
        self._world = simulation.world
        self._random = simulation.world.random
        self._options = simulation.options
        self._is_over = False

    def begin(self) -> None:
        """Let things go wrong from now on."""
        self._world.weather = self._options.weather
        self._world.after(TURN_S, self._turn)

    def _turn(self) -> None:
        if self._is_over:
            return
        options, chance = self._options, self._world.chance
        if chance(options.crashes * TURN_S):
            self._one(self._crash)
        if chance(options.pauses * TURN_S):
            self._one(self._pause)
        if chance(options.cuts * TURN_S):
            self._cut()
        if chance(options.flips * TURN_S):
            self._flip()
        if chance(options.disk_faults * TURN_S):
            self._one_disk()
        if chance(options.etcd_faults * TURN_S):
            self._etcd()
        self._world.after(self._random.uniform(0.0, 2 * TURN_S), self._turn)

    def _one(self, fault: Callable[[str], None]) -> None:
        kinds = self._options.fault_kinds
        names = [n for n in self._world.nodes if n.rstrip("0123456789") in kinds]
        names = [n for n in names if self._world.is_up(n) and not self._world.nodes[n].paused]
        if names:
            fault(self._random.choice(names))

    def _crash(self, name: str) -> None:
        master = self._simulation.masters.get(name)
        if master is not None and self._random.random() < RESIGNS:
            self._count("resign", name)
            master.stop()
            self._world.after(RESIGNING_S, lambda: self._kill(name))
        else:
            self._count("crash", name)
            self._kill(name)

    def _kill(self, name: str) -> None:
        if self._world.is_up(name):
            self._simulation.crash(name)
        down_s = 0.0 if self._is_over else self._random.choice((0.05, 0.5, 1.0, 4.0))
        self._world.after(down_s, lambda: self._simulation.restart(name))

    def _pause(self, name: str) -> None:
        """Around every threshold: heartbeat, half of T, T, put timeout, lease."""
        self._count("pause", name)
        half = WORKER_LOST_AFTER_S / 2
        stopped_s = self._random.choice((0.1, half, 2 * half, 2 * half + 1, 6.0, 12.0))
        self._world.pause(name)
        life = self._world.nodes[name].life
        self._world.after(stopped_s + self._random.random(), lambda: self._resume(name, life))

    def _resume(self, name: str, life: int) -> None:
        status = self._world.nodes[name]
        if status.paused and status.life == life:
            self._world.resume(name)

    def _cut(self) -> None:
        """One way or both, between two nodes or around one."""
        nodes = list(self._world.nodes)
        one = self._random.choice(nodes)
        others = [n for n in nodes if n != one]
        if self._random.random() < 0.5:
            others = [self._random.choice(others)]
        pairs = {(one, other) for other in others}
        way = self._random.random()
        if way < 0.3:
            pairs = {(other, one) for one, other in pairs}
        elif way < 0.7:
            pairs |= {(other, one) for one, other in pairs}
        self._world.counts["fault cut"] += 1
        self._world.note(f"cut {sorted(pairs)}")
        self._world.cut |= pairs
        self._world.after(self._random.choice((0.3, 1.0, 2.0, 5.0)), lambda: self._mend(pairs))

    def _mend(self, pairs: set[tuple[str, str]]) -> None:
        self._world.note("mend")
        self._world.cut -= pairs

    def _flip(self) -> None:
        memory = self._random.choice(list(self._simulation.checks.memories.values()))
        sealed = [r for r in memory.all_records() if r.state is RecordState.SEALED]
        if not sealed:
            return
        record = self._random.choice(sealed)
        self._world.note(f"flip a bit in {memory.segment}+{record.offset}")
        if self._random.random() < 0.7:
            self._world.counts["fault flipped payload"] += 1
            memory.flip_payload_bit(self._random, record)
        else:
            self._world.counts["fault flipped record"] += 1
            memory.flip_record_bit(self._random, record)

    def _one_disk(self) -> None:
        """A disk takes no more writes, or gives nothing back, or the power of its host fails."""
        workers = [w for w in self._simulation.workers.values() if w.disks and w.core is not None]
        if not workers:
            return
        worker = self._random.choice(workers)
        disk, kind = self._random.choice(worker.disks), self._random.choice(DISK_FAULTS)
        self._world.counts[f"fault disk {kind}"] += 1
        self._world.note(f"disk {disk.segment}: {kind}")
        if kind == "writes fail":
            disk.fail_writes()
        elif kind == "reads fail":
            disk.fail_reads()
        else:
            self._simulation.lose_power(worker.name)
        down_s = self._random.choice((0.05, 1.0, 4.0, 8.0))
        self._world.after(down_s, lambda: self._replace_disk(worker))

    def _replace_disk(self, worker: SimWorker) -> None:
        """The operator starts the worker anew, on disks that work."""
        if not self._world.is_up(worker.name):
            self._simulation.restart(worker.name)
        elif any(disk.is_ailing for disk in worker.disks):
            self._simulation.crash(worker.name)
            self._simulation.restart(worker.name)

    def _etcd(self) -> None:
        """Leases that end too early or too late, or no room."""
        etcd = self._simulation.etcd
        if etcd is None or not self._world.is_up(ETCD) or self._world.nodes[ETCD].paused:
            return
        kind = self._random.choice(ETCD_FAULTS)
        self._world.counts[f"fault etcd {kind}"] += 1
        self._world.note(f"etcd {kind}")
        if kind == "ends leases":
            etcd.expire_leases()
        elif kind == "changes its leader":
            etcd.change_leader()
        else:
            etcd.is_full = True
            self._world.after(self._random.choice((0.5, 2.0, 8.0)), etcd.make_room)

    def _count(self, what: str, name: str) -> None:
        self._world.counts[f"fault {what} {name.rstrip('0123456789')}"] += 1

    def heal(self) -> None:
        """Everything works again, and goes on working."""
        self._is_over = True
        self._simulation.checks.is_healed = True
        world = self._world
        world.note("heal")
        world.weather = FAIR
        world.cut.clear()
        for name, status in world.nodes.items():
            if status.paused:
                world.resume(name)
            if not status.up:
                self._simulation.restart(name)
        if self._simulation.etcd is not None:
            self._simulation.etcd.make_room()
        for worker in self._simulation.workers.values():
            self._replace_disk(worker)
