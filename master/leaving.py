"""Workers that leave: nothing of theirs is found at once; they are told when no reader needs them.

The segments of a worker that leaves are given up as those of a lost one are: misses, open plans
failed, copies cleaned out of the tree; and as those they come back if it does, by its inventory.
What differs is that the worker stays: until then it serves readers whose leases run, and nothing
there is freed. Its pages are not copied to other workers. Must not know reads.
"""

from __future__ import annotations

from math import inf
from typing import TYPE_CHECKING, Final

import msgspec

from kvstore.errors import AccessDenied, Unavailable
from kvstore.lease import inherited_release_s
from kvstore.wire.messages.hello import Done
from master.losses import detach, lose_segment
from master.placing import segments_changed
from master.segments import SegmentState
from master.sessions import Caller

if TYPE_CHECKING:
    from kvstore.wire.messages.membership import LeaveWorker
    from master.core import Core
    from master.membership import Worker
    from master.sessions import Session


FIRST_EPOCH: Final = 1
"""Of a pool's first master, which has no leases of others to wait for."""


class Leave(msgspec.Struct, eq=False):
    """A worker that waits for its readers."""

    caller: Caller
    until_s: float
    """When the last lease on its pages has ended (I9)."""


def leave_worker(core: Core, caller: Caller, message: LeaveWorker) -> None:
    """Give the worker's segments up; answer Done when no lease covers them. Safe to repeat."""
    caller.session.must_be_worker()
    worker = core.workers.get(message.worker)
    if message.worker != caller.session.name:
        raise AccessDenied(f"worker {caller.session.name} takes leave for {message.worker}")
    if worker is None or (worker.session != caller.session.id and not worker.left):
        raise Unavailable(f"worker {message.worker} is not registered here")
    leave = core.leaving.get(worker.id)
    if leave is None:
        leave = core.leaving[worker.id] = Leave(caller, _leased_until_s(core, worker))
        if not worker.left:
            _give_up(core, worker)
    leave.caller = caller
    core.wakeup.by(leave.until_s)


def _leased_until_s(core: Core, worker: Worker) -> float:
    """When the last lease that this or an earlier master granted there has ended (I9)."""
    ends_s = max((each.leased_until_s for each in worker.segments.values()), default=core.now)
    if core.epoch > FIRST_EPOCH:
        ends_s = max(ends_s, inherited_release_s(core.started_s))
    return ends_s


def _give_up(core: Core, worker: Worker) -> None:
    detach(core, worker)
    worker.lost = worker.left = True
    for segment in worker.segments.values():
        if segment.state is not SegmentState.LOST:
            lose_segment(core, segment)
    segments_changed(core)
    core.counters["workers_left"] += 1
    core.note(f"worker {worker.id} leaves")


def answer_leaving(core: Core) -> None:
    """Tell workers that nobody needs them any more."""
    for name in [name for name, leave in core.leaving.items() if leave.until_s <= core.now]:
        core.reply(core.leaving.pop(name).caller, Done())


def next_leave_s(core: Core) -> float:
    """When the next one is to be told."""
    return min((leave.until_s for leave in core.leaving.values()), default=inf)


def session_closed(core: Core, session: Session) -> None:
    """Who left without waiting need not be told."""
    leave = core.leaving.get(session.name)
    if leave is not None and leave.caller.session is session:
        del core.leaving[session.name]
