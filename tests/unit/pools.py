"""Small pools with a drive below memory, and what tests of policies do with pools. Not a test."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvstore.wire.messages.operator import PoliciesInForce
from master import victims
from master.tunables import Tunables
from tests.unit.master_rig import OpenedNamespace, Rig, chain

if TYPE_CHECKING:
    from kvstore.wire.messages.operator import GetPolicies, PolicyRow, ResetPolicy, SetPolicy

PAGE = 4096
TIERED = Tunables(watermark_demote=0.4, watermark_low=0.6, watermark_high=0.8, nvme_admission="all")


def rig_with(
    chunks: int = 4, nvme_chunks: int = 64, tunables: Tunables = TIERED
) -> tuple[Rig, OpenedNamespace]:
    """A pool with little memory, a drive, and a namespace of one part of 4 KiB."""
    rig = Rig(tunables)
    rig.add_worker(chunks=chunks, nvme_chunks=nvme_chunks)
    return rig, rig.open_namespace()


def held(rig: Rig, segment: str) -> set[bytes]:
    """The pages that lie in a segment, by its worker's records."""
    return {bytes(record.key) for record in rig.segment(segment).records.values()}


def put_chains(rig: Rig, space: OpenedNamespace, chains: range, pages: int = 4) -> None:
    """Put chains, one second after the other."""
    for number in chains:
        space.put(chain(number, pages))
        rig.pass_time(1.0)


def evict(rig: Rig, goal_bytes: int, searches: int = 100) -> tuple[int, int]:
    """Evict from the segment of the one worker; bytes that go, and searches that are left."""
    segment = rig.master.core.segments["w1-dram"]
    chunks = segment.allocator.chunk_list
    return victims.evict_some(rig.master.core, segment, chunks, goal_bytes, searches)


def ask(rig: Rig, message: GetPolicies | SetPolicy | ResetPolicy) -> dict[str, PolicyRow]:
    """An operator's question; the policies in force, by their kind."""
    reply = rig.ask(rig.open("operator", "", "kvharbor"), message)
    assert isinstance(reply, PoliciesInForce), reply
    return {row.kind: row for row in reply.policies}
