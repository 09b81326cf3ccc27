"""Why puts stop before they are done: AbortPut, silence, the end of their owner's last connection.

What stops is given up bit by bit (puts.py): one owner may have planned a whole pool.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvstore import limits
from kvstore.errors import BadValue
from kvstore.wire.messages.hello import Done
from master.puts import DUE_PER_TICK_MAX, fail_in_steps, fail_plan, give_up, stop_planning

if TYPE_CHECKING:
    from collections.abc import Iterator

    from kvstore.wire.messages.puts import AbortPut
    from master.core import Core
    from master.plans import Owner, Plan, Put
    from master.sessions import Caller, Session


def abort_put(core: Core, caller: Caller, message: AbortPut) -> None:
    """Give up these plans, as far as they are open and the caller's own. Safe to repeat."""
    if len(message.generations) > limits.BATCH_PAGES_MAX:
        raise BadValue("generations", len(message.generations), f"at most {limits.BATCH_PAGES_MAX}")
    core.start(_abort(core, caller, message))


def _abort(core: Core, caller: Caller, message: AbortPut) -> Iterator[None]:
    """A job: Done comes when nothing of them is open any more."""
    yield from fail_in_steps(core, _own_plans(core, caller.session.owner, message.generations))
    core.reply(caller, Done())


def _own_plans(core: Core, owner: Owner, generations: tuple[int, ...]) -> Iterator[Plan]:
    for generation in generations:
        plan = core.plans.get(generation)
        if plan is not None and plan.put.owner is owner:
            yield plan


def fail_overdue_puts(core: Core) -> None:
    """Give up the puts that made no progress for their timeout (I18)."""
    silent: list[Put] = []
    for put in core.put_deadlines.take_due(core.now, DUE_PER_TICK_MAX):
        deadline_s = put.progress_s + put.timeout_s
        if deadline_s > core.now or put.asker is not None:
            core.put_deadlines.place(put, max(deadline_s, core.now))
        elif put.owner is core.moves.owner:
            core.counters["moves_timed_out"] += 1
            for plan in list(put.plans.values()):  # one
                fail_plan(core, plan)
        else:
            core.counters["puts_timed_out"] += 1
            silent.append(put)
    give_up(core, silent)


def release_session(core: Core, session: Session) -> None:
    """Answers that were held back for this connection have nowhere to go any more (I18)."""
    waits = session.owner.waits
    for request in [each for each, held in waits.items() if held.session == session.id]:
        core.waiting.forget(waits.pop(request))


def release_owner(core: Core, owner: Owner) -> None:
    """Its last connection is gone: nothing that it held is left to it (I18)."""
    puts = list(owner.puts.values())
    for put in puts:
        if put.asker is not None:
            stop_planning(core, put)
    give_up(core, puts)
    assert not owner.puts, owner.key
    assert not owner.waits, owner.key
