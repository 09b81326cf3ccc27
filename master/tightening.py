"""Admission by first tokens: nobody is let in behind prompts that take longer than it will wait.

What waits before a prompt is known when it comes: what its worker has to compute, at the speed that
the worker has. That may err, so it is held against what really happens: while the 99th percentile
of first tokens (from OpenTicket to StageTicket, in parts of what each wished for) is above
`first_token_over`, less and less waiting is admitted; else slowly more again. An idle worker is
given work however tight it is, so that no fleet shuts itself out. Must not know of credit, nor of
staging. Nothing of it is stored.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from master.core import Core
    from master.fleets import Fleet, FleetWorker
    from master.tickets import Ticket

WINDOW_S: Final = 20.0
LOOK_S: Final = 5.0
"""From one change of the share to the next: what it did has to be seen first."""
FEW: Final = 5
"""First tokens; with fewer of them, one that is late may be an accident: nothing gets tighter."""
WAIT_SHARE: Final = 0.5
"""Of what is wished for a first token, the wait for its turn: the rest is to compute it. Equal for
all prompts, so that long ones are not kept out by short ones."""
SHRINKS: Final = 0.8
GROWS: Final = 0.05
SHARE_MIN: Final = 0.1


def note_staged(core: Core, ticket: Ticket, worker: FleetWorker) -> None:
    """A prompt is computed. Of load it says nothing where it takes too long by itself, nor where
    another worker, or another master, had begun it before: that one is what took the time.
    """
    wished_s, speed = ticket.wish.first_token_s, worker.tokens_per_s
    fresh = ticket.wish.prompt_tokens - ticket.prefix_tokens
    if not wished_s or not speed or fresh / speed > wished_s:
        return
    if ticket.failed_prefills or not ticket.prefill_life:
        return
    first = ticket.fleet.first_tokens
    first.recent.append((core.now, (core.now - ticket.opened_s) / wished_s))
    _look(core, ticket.fleet)


def excess_s(core: Core, worker: FleetWorker, wished_s: float) -> float:
    """How much longer than admitted a prompt would wait for its turn there; at most 0: it may."""
    _look(core, worker.fleet)
    queued = worker.queued_tokens
    if not queued or not worker.tokens_per_s:
        return 0.0
    most_s = wished_s * WAIT_SHARE * worker.fleet.first_tokens.share
    return queued / worker.tokens_per_s - most_s


def _look(core: Core, fleet: Fleet) -> None:
    """Shrink what is admitted, or let it grow, once in LOOK_S.

    Where few requests come, what made it tight is over: it grows, but while one of them is late.
    """
    first, now_s = fleet.first_tokens, core.now
    if now_s < first.look_at_s:
        return
    first.look_at_s = now_s + LOOK_S
    while first.recent and first.recent[0][0] < now_s - WINDOW_S:
        first.recent.popleft()
    took = sorted(share for _, share in first.recent)
    if not took or took[-1 - len(took) // 100] <= core.tunables.first_token_over:
        first.share = min(1.0, first.share + GROWS)
    elif len(took) >= FEW:
        first.share = max(SHARE_MIN, first.share * SHRINKS)
        first.recent.clear()  # what comes from now on says whether that was enough
        core.counters["admission_tightened"] += 1
