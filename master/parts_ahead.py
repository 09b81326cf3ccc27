"""A claimed ticket's pages part by part, before they are complete: for who has the claim alone.

Parts are sealed one by one, each with its checksum, and found by nobody until a page has all of
them (I15). Who has claimed a ticket may read what there is already, so that moving its KV takes
place while the rest is computed. Must not know who computes it, nor how a route comes about.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvstore import limits
from kvstore.errors import BadValue
from kvstore.ids import KEY_BYTES
from master.claims import require_claim
from master.part_waits import answer, answer_if_more
from master.reads import answer_part, pieces
from master.seconds import check_seconds
from master.ticket_changes import require_ticket
from master.tickets import PartsWait

if TYPE_CHECKING:
    from kvstore.wire.messages.tickets import AwaitParts, LocateParts
    from master.core import Core
    from master.sessions import Caller
    from master.tickets import Ticket


def await_parts(core: Core, caller: Caller, message: AwaitParts) -> None:
    """Answer PartsSealed once there are more than it has, or the ticket is staged, or in time."""
    ticket = require_ticket(core, caller, message.ticket)
    require_claim(ticket, message.token)
    check_seconds("timeout_s", message.timeout_s)
    parts, pages = ticket.known.tree.parts, len(_all_keys(ticket)) // KEY_BYTES
    if len(message.have) != parts or not all(0 <= each <= pages for each in message.have):
        raise BadValue("have", message.have, f"{parts} numbers, each 0 to {pages}")
    if ticket.parts_wait is not None:  # one caller a ticket: the later one has its place
        answer(core, ticket.parts_wait)
    wait = PartsWait(caller, ticket, message.token, message.have)
    if ticket.tokens or not message.timeout_s:
        answer(core, wait)
    elif not answer_if_more(core, wait):
        timeout_s = min(message.timeout_s, limits.CALL_TIMEOUT_MAX_S)
        core.tickets.part_waits.park(wait, core.now + timeout_s)


def _all_keys(ticket: Ticket) -> bytes:
    """Of the prompt: of its pages fewer may be staged than somebody has read ahead."""
    return max(ticket.keys, ticket.wish.keys, key=len)


def locate_parts(core: Core, caller: Caller, message: LocateParts) -> None:
    """Answer Located with leases: where this part is of those pages, complete or not."""
    ticket = require_ticket(core, caller, message.ticket)
    require_claim(ticket, message.token)
    tree, keys = ticket.known.tree, _all_keys(ticket)
    pages = len(keys) // KEY_BYTES
    if not 0 <= message.part < tree.parts:
        raise BadValue("part", message.part, f"0 to {tree.parts - 1}")
    if not 0 <= message.first < message.first + message.count <= pages:
        named = message.first, message.count
        raise BadValue("first, count", named, f"some of the ticket's {pages} pages")
    keys = keys[message.first * KEY_BYTES :][: message.count * KEY_BYTES]
    found = [
        piece
        for stretch in tree.stretches(keys)
        for piece in pieces(stretch, stretch.run.part_present(message.part))
    ]
    answer_part(core, caller, found, message.part)
