"""Decode workers that wait for parts of a prompt's pages while it is being computed.

One a ticket at most, and so bounded as they are (I7). Each is woken by the pages of which it lacks
a part; what has become of the ticket ends it, too. Must not know who may ask.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from kvstore.errors import Fenced, UnknownTicket
from kvstore.ids import KEY_BYTES
from kvstore.wire.messages.tickets import PartsSealed
from master.packed import split_keys
from master.wheel import Wheel

if TYPE_CHECKING:
    from master.core import Core
    from master.directory import Tree
    from master.sessions import Session
    from master.tickets import PartsWait, Ticket
    from master.wheel import Wakeup

GRAIN_S: Final = 0.02
ANSWERED_PER_TICK: Final = 64


class PartWaits:
    """All of them, by the pages whose sealing may end them."""

    __slots__ = ("_by_page", "by_deadline")

    def __init__(self, wakeup: Wakeup) -> None:
        """Start with none; `wakeup` hears of deadlines."""
        self.by_deadline: Wheel[PartsWait] = Wheel(GRAIN_S, wakeup)
        self._by_page: dict[tuple[int, bytes], dict[PartsWait, None]] = {}

    def __len__(self) -> int:
        return len(self.by_deadline)

    def __bool__(self) -> bool:
        return bool(self._by_page)

    def park(self, wait: PartsWait, until_s: float) -> None:
        """Keep an answer back until more is sealed than it has, or until then."""
        ticket, pages = wait.ticket, set(wait.have)
        keys = [ticket.keys[page * KEY_BYTES : (page + 1) * KEY_BYTES] for page in sorted(pages)]
        wait.blocked_on = tuple((ticket.known.ordinal, key) for key in keys if key)
        for place in wait.blocked_on:
            self._by_page.setdefault(place, {})[wait] = None
        self.by_deadline.place(wait, until_s)
        ticket.parts_wait = wait

    def unpark(self, wait: PartsWait) -> None:
        """It is answered, or nobody wants it."""
        wait.ticket.parts_wait = None
        self.by_deadline.discard(wait)
        for place in wait.blocked_on:
            others = self._by_page[place]
            del others[wait]
            if not others:
                del self._by_page[place]

    def drop_session(self, session: Session) -> None:
        """Nobody is there any more who could be answered (I18)."""
        for wait in [each for each in self.by_deadline if each.caller.session is session]:
            self.unpark(wait)

    def sealed(self, core: Core, namespace: int, keys: bytes) -> None:
        """A part of these pages can be read now: answer those that have waited for it."""
        woken: dict[PartsWait, None] = {}
        for key in split_keys(keys):
            woken.update(self._by_page.get((namespace, key), {}))
        for wait in woken:
            answer_if_more(core, wait)

    def look(self, core: Core) -> None:
        """Answer those whose time is up."""
        for wait in self.by_deadline.take_due(core.now, ANSWERED_PER_TICK):
            answer(core, wait)


def answer_if_more(core: Core, wait: PartsWait) -> bool:
    """Tell who waits what there is, if that is more than it has."""
    if sealed_parts(core, wait.ticket, wait.have) == wait.have:
        return False
    answer(core, wait)
    return True


def answer(core: Core, wait: PartsWait) -> None:
    """Tell who waits what there is. Fenced where the ticket is claimed anew, or by nobody;
    UnknownTicket where it has ended.
    """
    ticket = wait.ticket
    if ticket.parts_wait is wait:
        core.tickets.part_waits.unpark(wait)
    if core.tickets.find(ticket.id) is not ticket:
        core.refuse(wait.caller, UnknownTicket(f"ticket {ticket.id} is {ticket.state}"))
        return
    if wait.token != ticket.token:
        error = Fenced(f"ticket {ticket.id}: claim {wait.token} is not the present one")
        core.refuse(wait.caller, error)
        return
    pages, is_staged = sealed_parts(core, ticket, wait.have), bool(ticket.tokens)
    core.reply(wait.caller, PartsSealed(pages, is_staged))


def sealed_parts(core: Core, ticket: Ticket, have: tuple[int, ...]) -> tuple[int, ...]:
    """Leading pages of which each part can be read, where so many are known to.

    Part by part is looked only behind those that are complete, which may be many (I27).
    """
    tree, keys, whole = ticket.known.tree, ticket.keys, min(have)
    leading = tree.leading(keys[whole * KEY_BYTES :], core.version)
    whole += sum(stretch.count for stretch in leading)
    return tuple(_leading(tree, keys, part, max(page, whole)) for part, page in enumerate(have))


def _leading(tree: Tree, keys: bytes, part: int, page: int) -> int:
    """The first page from `page` on of which this part cannot be read."""
    start = page
    for stretch in tree.stretches(keys[start * KEY_BYTES :], prefix_only=True):
        stop = stretch.page + stretch.count
        gap = stretch.run.part_present(part).find(0, stretch.page, stop)
        page = start + stretch.first + (stop if gap < 0 else gap) - stretch.page
        if gap >= 0:
            break
    return page
