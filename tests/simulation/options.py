"""What a seed decides before anything happens: sizes, times, weather, and how often what fails.

Printed in full when a run fails, so that a story can be read without the code at hand.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from random import Random
from typing import Any, Final

from kvstore import limits
from kvstore.segment import Geometry
from master.tunables import HOST, WORKER, Tunables
from tests.simulation.world import FAIR, Weather

CHUNK_BYTES: Final = 64 * limits.KIB
ODD_PACE: Final = 4 * (CHUNK_BYTES // 2 - limits.KIB)
"""Bytes a second that a scrubber verifies, at which looks begin behind the last page of a chunk."""
STAGED_BYTES: Final = 96 * limits.KIB
"""Of tickets, all together: three or four of them."""
STAGING: Final = Geometry(CHUNK_BYTES, CHUNK_BYTES)
"""Of the memory where each worker stages pages of its disks: little, so that slots are reused."""


@dataclass(frozen=True)
class Options:
    """One simulation. Times in seconds, chances between 0 and 1, rates per second."""

    masters: int = 1
    etcd: bool = False
    """Whether metadata lies in etcd, as it does where there are several masters."""
    workers: int = 1
    clients: int = 2
    hosts: int = 2
    segments: int = 1
    """Of each worker."""
    chunks: int = 4
    """Of 64 KiB, in each segment."""
    disks: int = 0
    """Segments on disks of each worker."""
    disk_chunks: int = 8
    seconds: float = 20.0
    """Of faults, before everything heals."""
    lease_ttl_s: float = 10.0
    page_ttl_s: float = 30.0
    weather: Weather = FAIR
    depth: int = 6
    branches: int = 6
    names: int = 12
    pause_s: float = 0.3
    """Longest pause of a client between two calls."""
    threads: int = 1
    """Calls that a client makes at a time."""
    removes: float = 0.08
    views: float = 0.1
    pins: float = 0.0
    slow_copy: float = 0.0
    slow_copy_max_s: float = 3.0
    slow_pull_s: float = 0.002
    disturb: float = 0.0
    persist_delay_max_s: float = 0.02
    cuts: float = 0.0
    crashes: float = 0.0
    pauses: float = 0.0
    flips: float = 0.0
    scrub_bytes_per_s: int = 0
    """Of each segment, verified by its worker unasked."""
    disk_faults: float = 0.0
    watermark_demote: float = 0.5
    admission: str = "all"
    promote_hits: int = 2
    heat_bytes_per_s: float = 0.0
    """Read a second of a run that has one replica, for another; 0: more than is ever read here."""
    replicas: int = 1
    """That pages want for which nobody asked for more."""
    replicas_apart: str = HOST
    repair_after_s: float = 2.0
    copy_bytes_per_s: int = limits.COPY_BYTES_PER_S
    relocations: float = 0.0
    """Wishes of an operator."""
    tickets: float = 0.0
    """Requests a second of each gateway; 0: there is neither gateway nor inference worker."""
    both: int = 0
    """Inference workers of role both, who may be asked to do all of a request."""
    roles: bool = False
    """Whether prefill and decode workers change their roles, and some have refused a ticket."""
    etcd_faults: float = 0.0
    stale_read_max_s: float = 300.0
    fault_kinds: tuple[str, ...] = ()
    """Who is crashed and paused: master, worker, client, etcd, gateway, prefill, decode, both."""

    @property
    def geometry(self) -> Geometry:
        """Of every segment."""
        return Geometry(self.chunks * CHUNK_BYTES, CHUNK_BYTES)

    @property
    def disk_geometry(self) -> Geometry:
        """Of every segment on a disk."""
        return Geometry(self.disk_chunks * CHUNK_BYTES, CHUNK_BYTES)

    @property
    def tunables(self) -> Tunables:
        """The master's settings."""
        return Tunables(
            lease_ttl_s=self.lease_ttl_s, page_ttl_s=self.page_ttl_s, page_age_max_s=600.0,
            watermark_demote=self.watermark_demote, nvme_admission=self.admission,
            promote_hits=self.promote_hits, stale_read_max_s=self.stale_read_max_s,
            replicas=self.replicas, replicas_apart=self.replicas_apart,
            repair_after_s=self.repair_after_s, copy_bytes_per_s=self.copy_bytes_per_s,
            replication_parameters=self._heat, staging_bytes=STAGED_BYTES,
            route_ahead=1e6,  # whenever a prefill worker lets it
            colocation_parameters={"tokens": 0}, roles_parameters=RESTLESS,
        )  # fmt: skip

    @property
    def _heat(self) -> dict[str, object]:
        if not self.heat_bytes_per_s:
            return {}
        return {"port_bytes_per_s": self.heat_bytes_per_s, "port_share": 1.0, "window_s": 5.0}


CALM: Final = Options()
RESTLESS: Final[dict[str, object]] = {
    "queue_s": 0.01, "busy_max": 1.0, "load": 0.3, "load_max": 1.0, "lasting_s": 0.0,
    "dwell_s": 1.0,
}  # fmt: skip
"""Parameters of roles: whatever waits is a reason to change, where workers offer it."""


def weather_of(random: Random) -> Weather:
    """Some weather: from fair to foul."""
    return Weather(
        loss=random.choice((0.0, 0.0, 0.005, 0.03)),
        duplicate=random.choice((0.0, 0.05)),
        delay_max_s=random.choice((0.001, 0.01, 0.1)),
        slow=random.choice((0.0, 0.01, 0.05)),
        slow_max_s=random.choice((0.5, 2.0, 6.0)),
        ordered=random.random() < 0.6,
    )


def options_of(seed: int) -> Options:
    """The options of a seed."""
    random = Random(seed * 2 + 1)
    kinds = [kind for kind in ("master", "worker", "client") if random.random() < 0.6]
    drawn = Options(
        workers=random.choice((1, 2, 2, 3)),
        clients=random.choice((2, 3, 4)),
        hosts=random.choice((1, 2, 3)),
        segments=random.choice((1, 1, 2)),
        chunks=random.choice((2, 3, 4, 6)),
        seconds=random.choice((10.0, 15.0, 25.0)),
        lease_ttl_s=random.choice((0.8, 2.0, 10.0)),
        page_ttl_s=random.choice((1.5, 6.0, 60.0)),
        weather=weather_of(random),
        depth=random.choice((3, 6, 10)),
        branches=random.choice((3, 6, 10)),
        names=random.choice((4, 12, 24)),
        pause_s=random.choice((0.1, 0.5, 1.0)),
        threads=random.choice((1, 2)),
        removes=random.choice((0.0, 0.08, 0.25)),
        views=random.choice((0.0, 0.1, 0.3)),
        slow_copy=random.choice((0.0, 0.01, 0.1)),
        slow_copy_max_s=random.choice((0.5, 3.0)),
        slow_pull_s=random.choice((0.002, 0.05, 0.5)),
        disturb=random.choice((0.0, 0.1)),
        persist_delay_max_s=random.choice((0.005, 0.5)),
        cuts=random.choice((0.0, 0.1, 0.3)),
        crashes=random.choice((0.0, 0.05, 0.2)),
        pauses=random.choice((0.0, 0.05, 0.2)),
        flips=random.choice((0.0, 0.0, 0.3)),
        fault_kinds=tuple(kinds),
    )
    drawn = replace(drawn, **_more_of(random))
    # Of dice of their own, so that the others fall as they always did.
    drawn = replace(drawn, **_replicas_of(Random(f"replicas {seed}"), drawn.workers))
    heat_bytes_per_s = Random(f"heat {seed}").choice((0.0, 0.0, 4.0 * limits.KIB))
    drawn = replace(drawn, heat_bytes_per_s=heat_bytes_per_s)
    pace = Random(f"scrub {seed}").choice((0, 0, CHUNK_BYTES, ODD_PACE))
    wishes = Random(f"operator {seed}").choice((0.0, 0.0, 0.3)) if drawn.workers > 1 else 0.0
    masters = _masters_of(random, drawn.fault_kinds)
    drawn = replace(drawn, scrub_bytes_per_s=pace, relocations=wishes, **masters)
    return replace(drawn, **_tickets_of(Random(f"tickets {seed}"), drawn.fault_kinds))


def _more_of(random: Random) -> dict[str, Any]:
    """Fields of Options about pins and disks: some pools have disks, a few nothing else."""
    disks = random.choice((0, 0, 0, 1, 2))
    drawn = {
        "disks": disks,
        "pins": random.choice((0.0, 0.0, 0.1)),
        "disk_chunks": random.choice((2, 4, 12)),
        "watermark_demote": random.choice((0.1, 0.3, 0.85)),
        "admission": random.choice(("all", "all", "second-touch")),
        "promote_hits": random.choice((1, 2)),
        "disk_faults": random.choice((0.0, 0.1, 0.3)),
    }
    if disks:
        drawn["chunks"] = random.choice((2, 2, 3))
        drawn["segments"] = random.choice((0, 1, 1, 1, 2))
        drawn["branches"] = random.choice((10, 20))
        drawn["page_ttl_s"] = random.choice((6.0, 60.0, 60.0))
    return drawn


def _replicas_of(random: Random, workers: int) -> dict[str, Any]:
    """Fields of Options about replicas: most pools want more than one, and have more workers."""
    replicas = random.choice((1, 1, 2, 2, 3))
    if replicas == 1:
        return {}
    return {
        "replicas": replicas,
        "replicas_apart": random.choice((HOST, WORKER)),
        "repair_after_s": random.choice((0.5, 2.0, 6.0)),
        "copy_bytes_per_s": random.choice((16 * limits.KIB, limits.MIB, limits.COPY_BYTES_PER_S)),
        "workers": max(workers, random.choice((2, 3, 4))),
    }


def _tickets_of(random: Random, kinds: tuple[str, ...]) -> dict[str, Any]:
    """Fields of Options about tickets: a third of the pools serve requests, of those every other
    one has a worker of both roles, and every other one some that change theirs.
    """
    tickets = random.choice((0.0, 0.0, 0.0, 0.0, 0.5, 2.0))
    if not tickets:
        return {}
    struck = [kind for kind in ("gateway", "prefill", "decode") if random.random() < 0.5]
    both, roles = random.choice((0, 1)), random.random() < 0.5
    if both and random.random() < 0.5:
        struck.append("both")
    fault_kinds = (*kinds, *struck)
    return {"tickets": tickets, "fault_kinds": fault_kinds, "both": both, "roles": roles}


def _masters_of(random: Random, kinds: tuple[str, ...]) -> dict[str, Any]:
    """Fields of Options about who leads: in three pools of eight metadata lies in etcd."""
    masters = random.choice((0, 0, 0, 0, 0, 1, 2, 3))
    if not masters:
        return {}
    return {
        "masters": masters,
        "etcd": True,
        "etcd_faults": random.choice((0.0, 0.1, 0.3)),
        "stale_read_max_s": random.choice((0.0, 1.0, 300.0)),
        "fault_kinds": (*kinds, "etcd") if random.random() < 0.5 else kinds,
    }
