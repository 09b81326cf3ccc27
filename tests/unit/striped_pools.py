"""Pools of workers that lend drives only, with cold pages in stripes, for tests of the master."""

from __future__ import annotations

from typing import TYPE_CHECKING

from master import degraded
from master.tunables import Tunables
from tests.unit.master_rig import Rig, chain

if TYPE_CHECKING:
    from collections.abc import Mapping

    from master.stripes import Stripe
    from tests.unit.master_rig import OpenedNamespace

COLD_AFTER_S = 2.0


def tunables(k: int = 2, m: int = 1, **others: object) -> Tunables:
    """Pages of one replica, striped soon after they were put; nothing else moves."""
    parameters: Mapping[str, object] = {
        "k": k, "m": m, "cold_after_s": COLD_AFTER_S, "left_s": 0.0,
    }  # fmt: skip
    values: dict[str, object] = {
        "cluster": "test", "replicas": 1, "repair_after_s": 1.0, "page_ttl_s": 600.0,
        "erasure": "reed-solomon", "erasure_parameters": parameters, "replication": "off",
    }  # fmt: skip
    return Tunables(**{**values, **others})  # type: ignore[arg-type]  # of as many types


def pool(workers: int, of: Tunables | None = None) -> Rig:
    """A master, and workers of a host each that lend a drive."""
    rig = Rig(of or tunables())
    for number in range(workers):
        worker = rig.add_worker(f"w{number}", join=False)
        worker.tier = "nvme"
        worker.join()
    return rig


def put_pages(space: OpenedNamespace, count: int, seed: int = 100) -> list[bytes]:
    """Pages without anything above or below them; their keys."""
    keys = [chain(seed + number, 1) for number in range(count)]
    for each in keys:
        space.put(each)
    return keys


def striped(rig: Rig, count: int = 8, wait_s: float = 5.0) -> list[bytes]:
    """Put so many pages and wait until they were striped; their keys.

    Everything is checked once, at the end.
    """
    rig.checks = False
    keys = put_pages(rig.open_namespace(), count)
    rig.pass_time(wait_s)
    rig.checks = True
    rig.master.check_invariants()
    return keys


def stripes(rig: Rig) -> list[Stripe]:
    """All stripes, in the order in which they were made."""
    return list(rig.master.core.stripes.by_number.values())


def hosts(rig: Rig, stripe: Stripe) -> list[set[str]]:
    """Where each member can be read."""
    every = degraded.standings(rig.master.core, stripe)
    return [{copy.segment.host for copy in each.copies} for each in every]


def is_whole(rig: Rig, stripe: Stripe) -> bool:
    """Whether each member lies on one host, that has no other."""
    found = hosts(rig, stripe)
    return all(len(each) == 1 for each in found) and len(set.union(*found)) == len(found)


def data_of(stripe: Stripe) -> list[bytes]:
    """Keys of its pages."""
    return [member.key for member in stripe.members[: stripe.k]]


def lose(rig: Rig, host: str) -> None:
    """A worker goes, and is given up; what it had is cleaned away."""
    rig.workers[host].leave()
    rig.pass_time(4.0)
    rig.settle()


def holder(rig: Rig, stripe: Stripe, number: int) -> str:
    """The host of a member."""
    (found,) = hosts(rig, stripe)[number]
    return found
