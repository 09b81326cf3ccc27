"""Relocations as an operator begins them, and where pages lie by then. Not a test."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvstore.wire.messages.puts import PutPlans
from kvstore.wire.messages.relocation import (
    GetRelocations,
    RelocationRow,
    Relocations,
    StartRelocation,
)
from master.tunables import Tunables
from tests.unit.master_rig import Rig

if TYPE_CHECKING:
    from tests.unit.master_rig import OpenedNamespace

PAGES_OF_CHUNK = 16


def made(*chunks: int, tunables: Tunables | None = None) -> Rig:
    """Workers w1, w2, … with so many chunks each; each page is put once."""
    rig = Rig(tunables or Tunables(cluster="test", replicas=1))
    for number, count in enumerate(chunks, 1):
        rig.add_worker(f"w{number}", chunks=count)
    return rig


def start(rig: Rig, kind: str, **wish: object) -> RelocationRow:
    operator = rig.open("operator", "", "kvharbor")
    reply = rig.ask(operator, StartRelocation(kind, **wish))  # type: ignore[arg-type]  # one each
    assert isinstance(reply, Relocations), reply
    (row,) = reply.rows
    return row


def row_of(rig: Rig, number: str) -> RelocationRow:
    operator = rig.open("operator", "", "kvharbor")
    reply = rig.ask(operator, GetRelocations(number))
    assert isinstance(reply, Relocations), reply
    (row,) = reply.rows
    return row


def holders(space: OpenedNamespace, keys: bytes) -> set[str]:
    """Workers that some of these pages are found at."""
    return {ref.worker for ref in space.match(keys, lease=False).segments}


def put_at(rig: Rig, space: OpenedNamespace, worker: str, keys: bytes, tier: str = "") -> None:
    """Put a chain at one worker, whatever is free elsewhere."""
    segments = rig.master.core.segments.values()
    for segment in segments:
        segment.drained = segment.worker != worker
    rig.master.core.rankings.clear()
    rig.checks = False
    plans = space.begin(keys, tier=tier)
    assert isinstance(plans, PutPlans), plans
    assert not any(map(any, space.report(space.write(plans, keys))))
    for segment in segments:
        segment.drained = rig.master.core.relocations.drain_of(segment.worker) is not None
    rig.master.core.rankings.clear()
    rig.checks = True


def is_empty(rig: Rig, worker: str) -> bool:
    return not rig.workers[worker].records
