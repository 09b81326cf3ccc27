"""What a master answers while the lease that it leads under is in doubt (I10).

From `leads_until_s` on another may lead. Until Prolonged comes, or the end of the term, nothing is
decided, ordered or stored: lookups are answered as they would have been, without lease and without
a trace, everything else is refused. What peers report meanwhile is taken in, what follows from it
waits. A worker's heartbeats show that it lives, but are no contact with a leader for it: it fences
itself as if there were none (W3), and comes back. It cannot register before the doubt is over, nor
can inference workers beat, so time in doubt does not count as silence.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvstore.errors import Unavailable
from kvstore.wire.messages.reads import GetStatus, Lookup, MatchPrefix, Probe
from kvstore.wire.messages.tickets import GetTerm
from master import membership, presenting, reads, status

if TYPE_CHECKING:
    from kvstore.wire.messages.base import Message
    from master.core import Core
    from master.sessions import Caller


def prolong(core: Core, until_s: float) -> None:
    """The lease is good until then."""
    if core.is_in_doubt and until_s > core.now:
        membership.forgive_silence(core, core.leads_until_s)
        core.tickets.fleets.forgive_silence(core.leads_until_s, core.now)
        core.tickets.gateways.forgive_absence(core.now)
    core.leads_until_s = until_s


def answer(core: Core, caller: Caller, message: Message) -> None:
    """Answer a lookup or a question about the pool; Unavailable for everything else.

    Lookups too are refused once the doubt has lasted for `stale_read_max_s`.
    """
    doubt_s = core.now - core.leads_until_s
    answers_reads = doubt_s < core.tunables.stale_read_max_s
    match message:
        case GetStatus():
            status.get_status(core, caller, message)
        case GetTerm():
            presenting.get_term(core, caller, message)
        case MatchPrefix() | Lookup() if answers_reads:
            reads.locate_unleased(core, caller, message)
        case Probe() if answers_reads:
            reads.probe(core, caller, message)
        case _:
            raise Unavailable(f"this master's lease is in doubt for {doubt_s:.1f} s: try again")
