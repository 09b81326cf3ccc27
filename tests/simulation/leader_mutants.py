"""Single guards of leadership and of takeovers, switched off; see mutants.py."""

from __future__ import annotations

from typing import TYPE_CHECKING

from msgspec.structs import replace

from kvstore.lease import granter_release_s
from kvstore.limits import LEASE_TTL_MAX_S
from master import adoption as master_adoption
from master import inventory as master_inventory
from master import membership as master_membership
from master.core import Core
from master.leadership import CampaignEnded, Leadership, LeadershipEvent, RenewEnded
from master.restored_chunks import Restored
from tests.simulation.sim_metadata import EtcdClient
from workers.membership import Membership

if TYPE_CHECKING:
    from collections.abc import Iterator

    import pytest

    from kvstore.wire.messages.membership import ChunkDigest, SegmentOffer, WorkerAccepted
    from master.segments import Segment

    Patch = pytest.MonkeyPatch


def leaders_trust_their_lease(patch: Patch) -> None:
    """A leader that cannot renew goes on as if it had."""
    patch.setattr(Core, "is_in_doubt", False)


def leases_count_from_the_answer(patch: Patch) -> None:
    """A leader takes its lease for as young as the answer that it got."""
    handle = Leadership.handle

    def handle_as_new(self: Leadership, event: LeadershipEvent, now: float) -> object:
        if isinstance(event, CampaignEnded | RenewEnded):
            event = replace(event, sent_s=now)
        return handle(self, event, now)

    patch.setattr(Leadership, "handle", handle_as_new)


def anybody_may_write(patch: Patch) -> None:
    """A master's writes depend on nothing."""
    patch.setattr(EtcdClient, "last_write", lambda self: ())


def stored_rows_are_trusted(patch: Patch) -> None:
    """A new leader serves what is stored of a chunk, whatever its worker says."""
    adopt_stored = master_inventory._adopt_stored  # noqa: SLF001 — a guard that is off

    def adopt_any(
        core: Core, segment: Segment, listed: dict[int, ChunkDigest], start: int
    ) -> Iterator[None]:
        size_class, digest = core.restored.digest(segment.id, start) or (0, 0)
        if size_class == listed[start].size_class:
            listed[start] = replace(listed[start], digest=digest)
        return adopt_stored(core, segment, listed, start)

    patch.setattr(master_inventory, "_adopt_stored", adopt_any)


def inventories_are_not_waited_for(patch: Patch) -> None:
    """A leader serves a worker's pages as soon as it has registered."""
    join = master_membership._join  # noqa: SLF001 — as above

    def join_at_once(core: Core, worker: object, offer: SegmentOffer) -> None:
        join(core, worker, offer)  # type: ignore[arg-type]  # passed through
        core.segments[offer.segment].readable = True

    patch.setattr(master_membership, "_join", join_at_once)


def new_leaders_forget(patch: Patch) -> None:
    """A leader takes in nothing that was sealed before its term."""
    patch.setattr(Restored, "digest", lambda self, segment, start: None)
    patch.setattr(master_adoption, "_is_wanted", lambda core, segment, record, above: False)


def robbed_leaders_are_forgotten(patch: Patch) -> None:
    """A leader counts its predecessor's leases from its own start, though that may lead on."""
    patch.setattr(
        master_membership, "inherited_release_s",
        lambda began_at_s: granter_release_s(began_at_s, LEASE_TTL_MAX_S),
    )  # fmt: skip


def workers_go_back(patch: Patch) -> None:
    """A worker follows a leader of an epoch below the one that it has seen."""
    accepted = Membership._accepted  # noqa: SLF001 — as above

    def accepted_anyway(
        self: Membership, reply: WorkerAccepted, call: object, now: float
    ) -> object:
        self.epoch = min(self.epoch, reply.epoch)
        return accepted(self, reply, call, now)  # type: ignore[arg-type]  # passed through

    patch.setattr(Membership, "_accepted", accepted_anyway)
    patch.setattr(Membership, "_highest_epoch", lambda self: 0)  # else the leader notices


def epochs_that_were_are_kept_quiet(patch: Patch) -> None:
    """A worker does not tell a leader which epochs it has met."""
    patch.setattr(Membership, "_highest_epoch", lambda self: 0)


def doubt_counts_as_silence(patch: Patch) -> None:
    """Workers are lost that could not register while their leader was in doubt."""
    patch.setattr(master_membership, "forgive_silence", lambda core, since_s: None)
