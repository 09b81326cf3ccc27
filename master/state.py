"""The master's state machine: `handle(event, now) -> actions`, the only mutator. Dispatch only.

Synchronous and deterministic: no clock, no socket, no randomness. What an event means is in the
operations (puts, reads, removal, membership, inventory, reclaim, losses); what they share is Core.
"""

from __future__ import annotations

from math import inf
from typing import TYPE_CHECKING, Final, TypeVar, cast

from kvstore.errors import CallerError, InvariantBroken, KVStoreError
from kvstore.wire.messages.membership import (
    Heartbeat,
    InventoryEnd,
    InventoryRows,
    LeaveWorker,
    OfferInventory,
    RegisterWorker,
    ReportDamage,
    ReportSegment,
)
from kvstore.wire.messages.namespaces import OpenNamespace
from kvstore.wire.messages.operator import (
    ForgetWorker,
    GetPolicies,
    ResetPolicy,
    SetPolicy,
    ShrinkSegment,
)
from kvstore.wire.messages.pins import ListPins, PinPages, UnpinPages
from kvstore.wire.messages.puts import AbortPut, BeginPut, Sealed
from kvstore.wire.messages.reads import (
    GetStatus,
    GiveBackLease,
    GiveHints,
    ListObjects,
    Lookup,
    MatchPrefix,
    Prefetch,
    Probe,
    Remove,
    RenewLease,
    ReportSuspect,
)
from kvstore.wire.messages.relocation import (
    CancelRelocation,
    GetRelocations,
    StartRelocation,
)
from kvstore.wire.messages.replicas import AwaitReplicas, GetReplicas, RepairNow, SetReplicas
from kvstore.wire.messages.tickets import (
    AwaitParts,
    AwaitRoute,
    BeginPrefill,
    CancelTicket,
    ClaimTicket,
    FailPrefill,
    FinishTicket,
    FleetBeat,
    GetTerm,
    JoinFleet,
    LeaveFleet,
    ListTickets,
    LocateParts,
    OpenTicket,
    PresentTicket,
    RunAlone,
    ShedTicket,
    StageTicket,
    TicketInstalled,
)
from master import (
    admitting,
    chunk_writes,
    claims,
    confirmations,
    doubt,
    fleet_membership,
    handing_over,
    heat,
    incomplete,
    inventory,
    leaving,
    losses,
    membership,
    moves,
    namespaces,
    parts_ahead,
    pinning,
    policy_requests,
    presenting,
    puts,
    reads,
    reclaim,
    relocation,
    relocation_requests,
    removal,
    replica_requests,
    replication,
    restoring,
    routing,
    running_alone,
    shrinking,
    status,
    stopping,
    stripe_making,
    striping,
    suspects,
    ticket_requests,
    tiering,
)
from master.awaited import await_replicas
from master.core import Core
from master.event_ring import EventRing
from master.events import (
    CommandAnswered,
    Persisted,
    Prolonged,
    Request,
    SessionClosed,
    SessionOpened,
    Tick,
)
from master.invariants import check_invariants
from master.plans import Owner
from master.sessions import WORKER, Caller, Session

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from kvstore.ids import Epoch
    from kvstore.wire.messages.base import Message
    from master.events import Action, Event
    from master.tunables import Tunables

    Handler = Callable[[Core, Caller, Message], None]

M = TypeVar("M", bound="Message")
STEPS_PER_TICK: Final = 2


class _Handlers(dict["type[Message]", "Handler"]):
    """Which handler each message has; the types of the two agree."""

    def on(self, message: type[M], handler: Callable[[Core, Caller, M], None]) -> None:
        """This message has that handler."""
        self[message] = cast("Handler", handler)


def _handlers() -> _Handlers:
    handlers = _Handlers()
    on = handlers.on
    on(OpenNamespace, namespaces.open_namespace)
    on(BeginPut, puts.begin_put)
    on(AbortPut, stopping.abort_put)
    on(Sealed, puts.sealed)
    on(MatchPrefix, reads.match_prefix)
    on(Lookup, reads.lookup)
    on(Prefetch, reads.prefetch)
    on(GiveHints, reads.give_hints)
    on(Probe, reads.probe)
    on(ListObjects, reads.list_objects)
    on(RenewLease, reads.renew_lease)
    on(GiveBackLease, reads.give_back_lease)
    on(ReportSuspect, suspects.report_suspect)
    on(Remove, removal.remove)
    on(GetStatus, status.get_status)
    on(PinPages, pinning.pin_pages)
    on(UnpinPages, pinning.unpin_pages)
    on(ListPins, pinning.list_pins)
    on(ForgetWorker, membership.forget_worker)
    on(GetPolicies, policy_requests.get_policies)
    on(SetPolicy, policy_requests.set_policy)
    on(ResetPolicy, policy_requests.reset_policy)
    on(ShrinkSegment, shrinking.shrink_segment)
    on(AwaitReplicas, await_replicas)
    on(GetReplicas, replica_requests.get_replicas)
    on(SetReplicas, replica_requests.set_replicas)
    on(RepairNow, replica_requests.repair_now)
    on(StartRelocation, relocation_requests.start_relocation)
    on(GetRelocations, relocation_requests.get_relocations)
    on(CancelRelocation, relocation_requests.cancel_relocation)
    on(RegisterWorker, membership.register_worker)
    on(Heartbeat, membership.heartbeat)
    on(ReportSegment, membership.report_segment)
    on(ReportDamage, losses.report_damage)
    on(LeaveWorker, leaving.leave_worker)
    on(OfferInventory, inventory.offer_inventory)
    on(InventoryRows, inventory.inventory_rows)
    on(InventoryEnd, inventory.inventory_end)
    _add_tickets(handlers)
    return handlers


def _add_tickets(handlers: _Handlers) -> None:
    on = handlers.on
    on(JoinFleet, fleet_membership.join_fleet)
    on(FleetBeat, fleet_membership.fleet_beat)
    on(LeaveFleet, fleet_membership.leave_fleet)
    on(OpenTicket, admitting.open_ticket)
    on(FailPrefill, admitting.fail_prefill)
    on(RunAlone, running_alone.run_alone)
    on(BeginPrefill, handing_over.begin_prefill)
    on(StageTicket, handing_over.stage_ticket)
    on(AwaitRoute, routing.await_route)
    on(AwaitParts, parts_ahead.await_parts)
    on(LocateParts, parts_ahead.locate_parts)
    on(ClaimTicket, claims.claim_ticket)
    on(TicketInstalled, claims.ticket_installed)
    on(ShedTicket, claims.shed_ticket)
    on(FinishTicket, claims.finish_ticket)
    on(CancelTicket, claims.cancel_ticket)
    on(GetTerm, presenting.get_term)
    on(PresentTicket, presenting.present_ticket)
    on(ListTickets, ticket_requests.list_tickets)


HANDLERS: Final = _handlers()


class MasterState:
    """One master. Mutated by `handle` alone."""

    def __init__(
        self,
        tunables: Tunables,
        epoch: Epoch,
        restored: Iterable[tuple[str, bytes]] = (),
        leads_until_s: float = inf,
    ) -> None:
        """Start leading in `epoch`, with the durable values of earlier masters.

        `leads_until_s` is when the lease that it leads under may end, unless Prolonged comes.

        Raises ConfigError when one of them is not ours.
        """
        self.core = Core(tunables, epoch)
        self.core.leads_until_s = leads_until_s
        self.ring = EventRing()
        restoring.restore(self.core, restored)
        chunk_writes.drop_orphans(self.core)

    def handle(self, event: Event, now: float) -> list[Action]:
        """Change the state by one event; what is to be done about it, in order.

        `now` never goes back. Wrong requests are answered with Failure; InvariantBroken is our own
        bug and leaves the state unfit for use.
        """
        core = self.core
        self.ring.append(now, event)
        core.set_time(now)
        match event:
            case Request():
                self._request(event)
            case CommandAnswered():
                known = moves.answered(core, event.command, event.reply)
                if not known and not stripe_making.answered(core, event.command, event.reply):
                    confirmations.confirm(core, event.command, event.reply)
            case Persisted():
                core.persisted(event.write)
            case SessionOpened():
                self._opened(event)
            case SessionClosed():
                self._closed(event)
            case Prolonged(until_s):
                doubt.prolong(core, until_s)
            case Tick() if not core.is_in_doubt:
                self._tick()
        if not core.is_in_doubt:
            self._follow_up()
        return core.take_actions()

    @property
    def damaged(self) -> list[str]:
        """Keys of the durable values that were no good: set aside, while the rest was loaded."""
        return self.core.damaged

    @property
    def wakeup_s(self) -> float:
        """When the next Tick is wanted at the latest; one too early does no harm."""
        return inf if self.core.is_in_doubt else self.core.wakeup.at_s

    def check_invariants(self) -> None:
        """Raise InvariantBroken when the state contradicts itself. Takes a full scan."""
        check_invariants(self.core)
        if self.core.wakeup.at_s > self._next_deadline_s():
            raise InvariantBroken(f"I18: no Tick is wanted before {self.core.wakeup.at_s}")

    def _request(self, event: Request) -> None:
        core = self.core
        session = core.sessions.get(event.session)
        if session is None:
            return
        caller = Caller(session, event.request_id)
        if session.role == WORKER:
            membership.heard_from(core, session)
        handler = doubt.answer if core.is_in_doubt else HANDLERS.get(type(event.message))
        try:
            if handler is None:
                raise CallerError(f"{type(event.message).__name__} is not for a master")
            handler(core, caller, event.message)
        except KVStoreError as error:
            core.refuse(caller, error)

    def _opened(self, event: SessionOpened) -> None:
        owners = self.core.owners
        key = event.role, event.tenant, event.token
        owner = owners.get(key)
        if owner is None:
            owner = owners[key] = Owner(key, {}, {}, {})
        owner.sessions[event.session] = None
        self.core.tickets.gateways.came(key)
        self.core.sessions[event.session] = Session(
            event.session, event.role, event.tenant, event.name, owner, event.host
        )

    def _closed(self, event: SessionClosed) -> None:
        core = self.core
        session = core.sessions.pop(event.session, None)
        if session is None:
            return
        membership.session_closed(core, session)
        leaving.session_closed(core, session)
        stopping.release_session(core, session)
        core.replication.awaited.drop(session)
        core.tickets.drop_waits(session)
        owner = session.owner
        del owner.sessions[session.id]
        if not owner.sessions:
            stopping.release_owner(core, owner)
            del core.owners[owner.key]
            core.tickets.gateways.went(owner.key, core.now)

    def _tick(self) -> None:
        core = self.core
        membership.lose_silent_workers(core)
        leaving.answer_leaving(core)
        stopping.fail_overdue_puts(core)
        puts.answer_overdue_waits(core)
        removal.answer_overdue_removals(core)
        core.orders.queue_due(core.now)
        core.run_jobs(STEPS_PER_TICK)
        incomplete.drop_incomplete(core)
        pinning.end_pins(core)
        reclaim.expire_runs(core)
        reclaim.make_room(core)
        tiering.look(core)
        shrinking.look(core)
        relocation.look(core)
        heat.look(core)
        replication.look(core)
        striping.look(core)
        fleet_membership.lose_silent(core)
        claims.expire(core)
        claims.end_abandoned(core)
        routing.look(core)
        chunk_writes.look(core)
        core.wakeup.at_s = self._next_deadline_s()

    def _next_deadline_s(self) -> float:
        core = self.core
        return min(
            core.put_deadlines.next_s(),
            core.waiting.by_deadline.next_s(),
            core.orders.next_s(),
            core.removals.deadlines.next_s(),
            core.incomplete.next_s(),
            core.expiry.next_s(),
            core.pins.deadlines.next_s(),
            reclaim.next_reclaim_s(core),
            core.moves.look_at_s,
            core.shrinking.look_at_s,
            core.relocations.look_at_s,
            core.heat.look_at_s,
            core.replication.next_s(),
            core.stripes.look_at_s,
            core.tickets.fleets.silence.next_s(),
            core.tickets.deadlines.next_s(),
            core.tickets.gateways.away.next_s(),
            routing.next_s(core),
            chunk_writes.next_look_s(core),
            membership.next_loss_s(core),
            leaving.next_leave_s(core),
        )

    def _follow_up(self) -> None:
        """What every event may have made possible or necessary."""
        core = self.core
        if core.waiting.woken:
            puts.retry_woken(core)
        removal.store_tombstones(core)
        core.orders.dispatch(core.actions)
        if core.jobs or core.waiting.woken:
            core.wakeup.by(core.now)
