"""Workers: registration, heartbeat, absence and loss. Who is there, and which segments they lend.

A segment is JOINING from its registration until its inventory is compared (master.inventory),
then LIVE; LOST when its worker was silent for `worker_lost_after_s`. Must not know rows or digests.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Final

import msgspec

from kvstore.coordination.metadata_store import EPOCH_MAX
from kvstore.errors import AccessDenied, BadValue, StaleEpoch, Unavailable
from kvstore.ids import Epoch, lineage_of
from kvstore.lease import inherited_release_s
from kvstore.replica import Tier
from kvstore.require import require_text
from kvstore.segment import check_geometry
from kvstore.wire.messages.common import Address, SegmentRef
from kvstore.wire.messages.hello import Done
from kvstore.wire.messages.membership import (
    Heartbeat,
    HeartbeatNoted,
    RegisterWorker,
    ReportSegment,
    SegmentOffer,
    WorkerAccepted,
)
from master import chunk_writes, lenders
from master.events import CloseSession, RaiseEpoch, SessionId
from master.lanes import Lane
from master.losses import detach, fail_plans, lose_segment
from master.placing import segments_changed
from master.relocations import is_empty
from master.segments import REASON_CHARS_MAX, Medium, Segment, SegmentState
from master.shrinking import joined

if TYPE_CHECKING:
    from collections.abc import Container

    from kvstore.wire.messages.operator import ForgetWorker
    from master.core import Core
    from master.sessions import Caller, Session

SEGMENTS_PER_WORKER_MAX: Final = 1024
ADDRESSES_PER_WORKER_MAX: Final = 64
SEGMENT_NAME_BYTES_MAX: Final = 64
"""What a segment header holds."""
TIERS: Final = tuple(Tier)
MEDIA: Final = tuple(medium.value for medium in Medium)


class Worker(msgspec.Struct, eq=False):
    """One worker, known by its name, through all its lives."""

    id: str
    host: str
    addresses: tuple[Address, ...]
    session: SessionId | None
    """Its control connection; None while it is away."""
    heard_s: float
    segments: dict[str, Segment] = {}
    lost: bool = False
    left: bool = False
    """Lost on its own wish."""
    rack: str = ""
    zone: str = ""
    lane: Lane = msgspec.field(default_factory=Lane)
    copies: Lane = msgspec.field(default_factory=Lane)
    """Those that it reads and those that are read from it."""

    @property
    def state(self) -> SegmentState:
        """That of its segments, as one."""
        if self.lost:
            return SegmentState.LOST
        states = {segment.state for segment in self.segments.values()}
        return SegmentState.JOINING if SegmentState.JOINING in states else SegmentState.LIVE


def state_name(worker: Worker) -> str:
    """What to call the state of a worker."""
    if worker.left:
        return "left"
    segments = worker.segments.values()
    if worker.state is SegmentState.LIVE and any(segment.drained for segment in segments):
        return "drained" if all(map(is_empty, segments)) else "draining"
    return worker.state.value


def register_worker(core: Core, caller: Caller, message: RegisterWorker) -> None:
    """Take a worker's segments in as JOINING; answer WorkerAccepted. Safe to repeat."""
    session = caller.session
    session.must_be_worker()
    if message.worker != session.name:
        raise AccessDenied(f"worker {session.name} registers as {message.worker}")
    _check(core, message)
    if _is_of_a_forgotten_time(core, message):  # I10: and so are its records' generations
        core.actions.append(RaiseEpoch(Epoch(message.epoch)))
        raise StaleEpoch(f"worker {message.worker} knows of epoch {message.epoch}")
    worker = core.workers.get(message.worker)
    if worker is None:
        worker = Worker(message.worker, message.host, (), None, core.now)
        core.workers[worker.id] = worker
    if worker.session not in (None, session.id):
        core.note(f"worker {worker.id} comes anew: its last connection is closed")
        core.actions.append(CloseSession(worker.session))
    detach(core, worker)
    worker.host, worker.addresses = message.host, message.addresses
    worker.rack, worker.zone = message.rack, message.zone
    worker.session, worker.heard_s = session.id, core.now
    worker.lost = worker.left = False
    core.leaving.pop(worker.id, None)
    offered = {offer.segment: offer for offer in message.segments}
    for name in [name for name in worker.segments if name not in offered]:
        if worker.segments[name].state is not SegmentState.LOST:
            lose_segment(core, worker.segments[name])
    for offer in message.segments:
        _join(core, worker, offer)
    core.version += 1
    core.wakeup.by(next_loss_s(core))
    segments_changed(core)
    core.replication.want_scan(core.now + core.tunables.repair_after_s)  # for what it brings back
    core.counters["registrations"] += 1
    core.note(f"worker {worker.id} registers from host {worker.host}: {len(offered)} segments")
    _forget_unoffered(core, worker, offered)
    tunables = core.tunables
    answer = WorkerAccepted(core.epoch, tunables.heartbeat_interval_s, tunables.worker_lost_after_s)
    # Before anything is put there: a later master must know that the segments exist (I29).
    core.lenders.note(core, worker.id, worker.segments, lambda: core.reply(caller, answer))


def _is_of_a_forgotten_time(core: Core, message: RegisterWorker) -> bool:
    """Whether the worker has met a leader that the metadata store has forgotten.

    That one may have had this very epoch: nobody has met it in this term but who has registered.
    """
    if message.epoch != core.epoch:
        return message.epoch > core.epoch
    is_known = any(offer.segment in core.segments for offer in message.segments)
    return message.worker not in core.workers and not is_known


def _forget_unoffered(core: Core, worker: Worker, offered: Container[str]) -> None:
    """Give up segments that the worker lent to an earlier master and does not lend now."""
    for name in core.lenders.absent_of(worker.id):
        if name not in offered:
            _give_up_absent(core, name)


def _give_up_absent(core: Core, segment: str) -> None:
    core.tombstones.forget(segment, core.new_generation())
    chunk_writes.forget(core, segment)
    del core.lenders.absent[segment]


def _check(core: Core, message: RegisterWorker) -> None:
    names = [offer.segment for offer in message.segments]
    if len(names) > SEGMENTS_PER_WORKER_MAX or len(set(names)) != len(names):
        raise BadValue("segments", names, f"at most {SEGMENTS_PER_WORKER_MAX}, each once")
    if len(message.addresses) > ADDRESSES_PER_WORKER_MAX:
        raise BadValue("addresses", len(message.addresses), f"at most {ADDRESSES_PER_WORKER_MAX}")
    for field in ("host", "rack", "zone"):
        require_text(field, getattr(message, field))
    if not 0 <= message.epoch < EPOCH_MAX:
        raise BadValue("epoch", message.epoch, f"0 to {EPOCH_MAX - 1}")
    for offer in message.segments:
        if not 0 < len(offer.segment.encode()) <= SEGMENT_NAME_BYTES_MAX:
            raise BadValue("segment", offer.segment, f"1 to {SEGMENT_NAME_BYTES_MAX} bytes")
        if offer.tier not in TIERS:
            raise BadValue("tier", offer.tier, f"one of {', '.join(TIERS)}")
        check_geometry(offer.geometry.payload_bytes, offer.geometry.chunk_bytes)
        chunks = offer.geometry.payload_bytes // offer.geometry.chunk_bytes
        if not all(0 <= number < chunks for number in offer.released):
            raise BadValue("released", offer.released, f"numbers from 0 to {chunks - 1}")
        known = core.segments.get(offer.segment)
        if known is None:
            continue
        if known.worker != message.worker and known.state is not SegmentState.LOST:
            raise BadValue("segment", offer.segment, f"a segment not lent by {known.worker}")
        if _is_superseded(known, offer):
            want = f"at least {known.incarnation}; is another worker called {message.worker}?"
            raise BadValue("incarnation", offer.incarnation, want)


def _is_superseded(known: Segment, offer: SegmentOffer) -> bool:
    """Whether a later life is known already: of the same file, or while another's owner is here.

    A host that lost its memory begins with a file whose incarnation may be any.
    """
    if offer.incarnation >= known.incarnation:
        return False
    is_other_file = lineage_of(offer.incarnation) != lineage_of(known.incarnation)
    return not is_other_file or known.session is not None


def _join(core: Core, worker: Worker, offer: SegmentOffer) -> None:
    segment = core.segments.get(offer.segment)
    ref = SegmentRef(
        offer.segment,
        offer.incarnation,
        offer.tier,
        offer.geometry,
        worker.id,
        worker.host,
        worker.addresses,
    )
    if segment is not None and (segment.geometry, segment.tier) != (offer.geometry, offer.tier):
        _forget_segment(core, segment)  # another medium under the name of an old one
        segment = None
    if segment is None:
        segment = Segment(ref)
        segment.allocator.changed = partial(core.saving.changed, segment)
        # Readers of an earlier master may hold leases on anything that the inventory lists (I9).
        segment.free_not_before_s = inherited_release_s(core.started_s)
        core.segments[segment.id] = segment
    elif segment.worker != worker.id:
        core.workers[segment.worker].segments.pop(segment.id, None)
    core.lenders.absent.pop(segment.id, None)
    is_new_life = offer.incarnation != segment.incarnation
    if is_new_life:
        fail_plans(core, segment)  # pulls into the old life have ended, new ones are refused (I11)
    segment.ref = ref
    segment.worker, segment.host = worker.id, worker.host
    segment.rack, segment.zone = worker.rack, worker.zone
    segment.incarnation = offer.incarnation
    segment.state, segment.readable = SegmentState.JOINING, False
    segment.medium, segment.reason = Medium.SERVING, ""
    segment.demoted_bytes = 0
    segment.session = worker.session
    worker.segments[segment.id] = segment
    joined(core, segment, offer.released, is_new_life=is_new_life)
    core.relocations.joined(segment, core.now)


def _forget_segment(core: Core, segment: Segment) -> None:
    """It is given up: its copies are cleaned away; if it comes back, it counts as empty (I29)."""
    lose_segment(core, segment)
    core.tombstones.forget(segment.id, core.new_generation())
    chunk_writes.forget(core, segment.id)
    del core.segments[segment.id]
    core.workers[segment.worker].segments.pop(segment.id, None)


def heartbeat(core: Core, caller: Caller, message: Heartbeat) -> None:
    """Answer HeartbeatNoted; `known` is False when the worker must register again."""
    caller.session.must_be_worker()
    worker = core.workers.get(message.worker)
    known = worker is not None and worker.session == caller.session.id and not worker.lost
    core.reply(caller, HeartbeatNoted(core.epoch, known))


def report_segment(core: Core, caller: Caller, message: ReportSegment) -> None:
    """Note how a segment's medium is; one that has failed is lost. Answer Done. Safe to repeat."""
    caller.session.must_be_worker()
    segment = core.segments.get(message.segment)
    if segment is None:
        raise Unavailable(f"segment {message.segment} is not registered")
    if segment.worker != caller.session.name:
        raise AccessDenied(f"segment {segment.id} is not of worker {caller.session.name}")
    if message.incarnation != segment.incarnation:
        raise BadValue("incarnation", message.incarnation, f"{segment.incarnation}, as registered")
    if message.state not in MEDIA:
        raise BadValue("state", message.state, f"one of {', '.join(MEDIA)}")
    medium = Medium(message.state)
    is_lost = segment.state is SegmentState.LOST
    if is_lost and medium is not Medium.FAILED:
        raise Unavailable(f"segment {segment.id} was given up: register again to compare it")
    reason = message.reason[:REASON_CHARS_MAX]
    if (segment.medium, segment.reason) != (medium, reason):
        core.note(f"segment {segment.id} is {medium.value}: {reason}")
    segment.medium, segment.reason = medium, reason
    if medium is Medium.FAILED and not is_lost:
        core.counters["segments_failed"] += 1
        lose_segment(core, segment)
    segments_changed(core)
    core.reply(caller, Done())


def heard_from(core: Core, session: Session) -> None:
    """Any request on its control connection shows that a worker lives."""
    worker = core.workers.get(session.name)
    if worker is not None and worker.session == session.id and not worker.lost:
        worker.heard_s = core.now


def session_closed(core: Core, session: Session) -> None:
    """If that was a worker's control connection, it is away; it is lost when it stays away."""
    worker = core.workers.get(session.name)
    if worker is not None and worker.session == session.id:
        detach(core, worker)
        segments_changed(core)
        # It says what a missed heartbeat says: so a worker that died is lost within the time.
        silent_since_s = core.now - core.tunables.heartbeat_interval_s
        worker.heard_s = min(worker.heard_s, silent_since_s)
        core.wakeup.by(next_loss_s(core))


def forgive_silence(core: Core, since_s: float) -> None:
    """Nobody could be heard between then and now: of anybody's silence this does not count."""
    for worker in core.workers.values():
        if not worker.lost:
            worker.heard_s = core.now - max(0.0, since_s - worker.heard_s)


def lose_silent_workers(core: Core) -> None:
    """Lose the workers that were silent for too long, forget those lost for much longer."""
    for worker in list(core.workers.values()):
        if core.now < _patience_ends_s(core, worker):
            continue
        if worker.lost:
            _forget(core, worker)
            core.note(f"worker {worker.id} is forgotten: it did not come back")
        else:
            worker.lost = True
            detach(core, worker)
            for segment in worker.segments.values():
                lose_segment(core, segment)
            segments_changed(core)
            core.counters["workers_lost"] += 1
            core.note(f"worker {worker.id} is lost: silent for {core.now - worker.heard_s:.1f} s")
    if core.now >= _absence_ends_s(core):
        for lender in dict.fromkeys(core.lenders.absent.values()):
            _forget_absent(core, lender)


def forget_worker(core: Core, caller: Caller, message: ForgetWorker) -> None:
    """Give up, as an operator wishes, what a worker lent that is not here; answer Done."""
    caller.session.must_be_operator()
    name, worker = message.worker, core.workers.get(message.worker)
    if worker is None and not core.lenders.absent_of(name):
        raise BadValue("worker", name, "one that was here, and was not forgotten yet")
    if worker is not None:
        if not worker.lost or name in core.leaving:
            raise BadValue("worker", name, "one that is lost or has left")
        _forget(core, worker)
    _forget_absent(core, name)
    core.note(f"worker {name} is forgotten, as an operator wishes")
    core.persist((), (lenders.PREFIX + name,), lambda: core.reply(caller, Done()))


def _forget(core: Core, worker: Worker) -> None:
    for segment in list(worker.segments.values()):
        _forget_segment(core, segment)
    core.lenders.drop(core, worker.id)
    core.leaving.pop(worker.id, None)
    del core.workers[worker.id]


def _forget_absent(core: Core, worker: str) -> None:
    """Give up what a worker lent to an earlier master and has not brought back since."""
    absent = core.lenders.absent_of(worker)
    for name in absent:
        _give_up_absent(core, name)
    if worker not in core.workers:
        core.lenders.drop(core, worker)


def _absence_ends_s(core: Core) -> float:
    if not core.lenders.absent:
        return float("inf")
    return core.started_s + core.tunables.segment_forget_s


def _patience_ends_s(core: Core, worker: Worker) -> float:
    tunables = core.tunables
    patience_s = tunables.segment_forget_s if worker.lost else tunables.worker_lost_after_s
    return worker.heard_s + patience_s


def next_loss_s(core: Core) -> float:
    """When the next worker will have been silent for too long."""
    ends_s = (_patience_ends_s(core, worker) for worker in core.workers.values())
    return min([_absence_ends_s(core), *ends_s])
