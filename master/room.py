"""Room for what a ticket was promised: kept on one decode worker until it has a slot on any.

That a fleet has so many KV tokens free helps nobody if no worker of it has: a finished prefill is
to find a place to go. So whoever is admitted has room kept for it where least would be left free,
in order that those that want much find some, too. It binds nobody: a worker is chosen by what each
has once the prompt is computed, and may be any with room that is kept for nobody else.

Those who have room kept on one worker have it in the order in which they came. Where nobody has
enough, as after a loss, a ticket is kept behind the others where most is free: what comes free
there gathers for it, and those that want less, and come later, do not take it first. Nor do they
take what comes free elsewhere: before anybody is admitted room is spread anew. Must not know of
places in batches beyond whether there is one, nor of prompts.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from contextlib import contextmanager
from itertools import islice
from typing import TYPE_CHECKING, Final

from kvstore.errors import InvariantBroken

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from master.fleets import Fleet, FleetWorker
    from master.tickets import Ticket, Tickets

SPREAD_MAX: Final = 16
"""Tickets that are given room elsewhere at once (I27)."""


def needed_tokens(ticket: Ticket) -> int:
    """What it takes on a worker: at least one token more than it has, as it is to generate."""
    return max(ticket.credit_tokens, ticket.kv_tokens + 1)


def fits(worker: FleetWorker, ticket: Ticket) -> bool:
    """Whether so much is free there beside slots, and beside what is kept for others (I44): for
    those that came before it, where room is kept for it, else for all.
    """
    if ticket.room is not worker:
        return worker.open_tokens >= needed_tokens(ticket)
    return worker.open_tokens >= 0 or ticket.id in served(worker)


def served(worker: FleetWorker) -> set[int]:
    """Whose room there is free: where it is not for one, it is for none of those behind it."""
    found: set[int] = set()
    left = worker.free_tokens
    for number, tokens in worker.kept.items():
        left -= tokens
        if left < 0:
            break
        found.add(number)
    return found


def takes(worker: FleetWorker, ticket: Ticket) -> bool:
    """Whether it can have a slot there now."""
    return worker.free_places > 0 and worker.has(ticket.wish.adapter) and fits(worker, ticket)


def keep(ticket: Ticket, *, wanted: bool) -> None:
    """Where it is wanted: as before, if that is still possible, else wherever it is best."""
    room, fleet = ticket.room, ticket.fleet
    if not wanted:
        let_go(ticket)
        fleet.roomless.pop(ticket.id, None)
    elif room is not None and could_hold(room, ticket):
        _take(ticket, room)
    else:
        (fleet.openings or Openings(fleet)).move(ticket)


@contextmanager
def found_at_once(fleet: Fleet) -> Iterator[None]:
    """Many tickets lose what they have. Nothing else changes meanwhile what is open (I27)."""
    fleet.openings = Openings(fleet)
    try:
        yield
    finally:
        fleet.openings = None


def _take(ticket: Ticket, worker: FleetWorker | None) -> None:
    """So much as it needs by now, there."""
    ticket.room = worker
    if worker is None:
        ticket.fleet.roomless[ticket.id] = None
        return
    tokens = needed_tokens(ticket)
    worker.kept_tokens += tokens - worker.kept.get(ticket.id, 0)
    worker.kept[ticket.id] = tokens


def let_go(ticket: Ticket) -> None:
    """It needs none any more, or not there."""
    if ticket.room is not None:
        ticket.room.kept_tokens -= ticket.room.kept.pop(ticket.id)
        ticket.room = None


def could_hold(worker: FleetWorker, ticket: Ticket) -> bool:
    """Whether it could if it had nothing else."""
    is_member = ticket.fleet.workers.get(worker.name) is worker and worker.decodes
    is_large_enough = worker.wish.capacity_tokens >= needed_tokens(ticket)
    return is_member and is_large_enough and worker.has(ticket.wish.adapter)


class Openings:
    """What the workers of a fleet have open, least first: found once for many tickets (I27)."""

    def __init__(self, fleet: Fleet) -> None:
        """As it is now; only `move` may change it."""
        self._fleet = fleet
        self._rows: dict[str, list[tuple[int, str]]] = {}

    def _of(self, adapter: str) -> list[tuple[int, str]]:
        rows = self._rows.get(adapter)
        if rows is None:
            decoders = self._fleet.decoders(adapter)
            rows = self._rows[adapter] = sorted((w.open_tokens, w.name) for w in decoders)
        return rows

    def most(self, adapter: str) -> int:
        """On one worker that has it; 0 where there is none."""
        rows = self._of(adapter)
        return rows[-1][0] if rows else 0

    def best(self, ticket: Ticket) -> FleetWorker | None:
        """Where least is left free, of those that did not fail it; else where it fits the soonest,
        of those that could hold it if they had nothing else.
        """
        rows, workers = self._of(ticket.wish.adapter), self._fleet.workers
        first = bisect_left(rows, (needed_tokens(ticket), ""))
        if first < len(rows):
            fitting = (name for _, name in islice(rows, first, None) if name not in ticket.failed)
            return workers[next(fitting, rows[first][1])]
        roomiest = (workers[name] for _, name in reversed(rows))
        return next((worker for worker in roomiest if could_hold(worker, ticket)), None)

    def move(self, ticket: Ticket) -> None:
        """Let it have room where that is best, and nowhere else."""
        if ticket.room is not None:
            left, before = ticket.room, ticket.room.open_tokens
            let_go(ticket)
            self._note(left, before)
        ticket.fleet.roomless.pop(ticket.id, None)
        best = self.best(ticket)
        before = 0 if best is None else best.open_tokens
        _take(ticket, best)
        if best is not None:
            self._note(best, before)

    def _note(self, worker: FleetWorker, before: int) -> None:
        for rows in self._rows.values():
            at = bisect_left(rows, (before, worker.name))
            if at < len(rows) and rows[at] == (before, worker.name):
                del rows[at]
                insort(rows, (worker.open_tokens, worker.name))


def spread(book: Tickets, fleet: Fleet) -> bool:
    """Keep room elsewhere for those for whom it is not free where they have it, if it is there.

    As after a new master's first worker had all, or where an answer outgrew what was expected. The
    longest first. False: these were SPREAD_MAX, and there may be more.
    """
    workers = fleet.decoders()
    if all(worker.open_tokens >= 0 for worker in workers):
        return True
    openings, moved = Openings(fleet), 0
    for worker in workers:
        left = worker.free_tokens
        for number, tokens in list(worker.kept.items()) if worker.open_tokens < 0 else ():
            ticket = book.find(number)
            assert ticket is not None, number
            if left >= tokens or openings.most(ticket.wish.adapter) < tokens:
                left -= tokens
                continue
            openings.move(ticket)
            moved += 1
            if moved == SPREAD_MAX:
                return False
    return True


def settle(book: Tickets, fleet: Fleet) -> None:
    """Somebody takes requests now, or does so no longer."""
    kept = [number for worker in fleet.workers.values() for number in worker.kept]
    keep_anew(book, fleet, [*fleet.roomless, *kept])


def keep_anew(book: Tickets, fleet: Fleet, numbers: Iterable[int]) -> None:
    """Room of these, where it is no longer possible as it was."""
    openings = fleet.openings or Openings(fleet)
    for number in list(numbers):
        ticket = book.find(number)
        assert ticket is not None, number
        if ticket.room is None or not could_hold(ticket.room, ticket):
            openings.move(ticket)


def check(fleet: Fleet, tickets: list[Ticket]) -> None:
    """I44: InvariantBroken unless each of these has room where it could have any, and no other."""
    wanting = [ticket for ticket in tickets if ticket.slot is None]
    for ticket in wanting:
        room = ticket.room
        is_kept = room is not None and ticket.id in room.kept and could_hold(room, ticket)
        could = any(could_hold(worker, ticket) for worker in fleet.workers.values())
        if is_kept != could or (ticket.id in fleet.roomless) == could:
            raise InvariantBroken(f"I44: no room is kept for ticket {ticket.id}")
    for worker in fleet.workers.values():
        mine = {ticket.id: needed_tokens(ticket) for ticket in wanting if ticket.room is worker}
        if worker.kept != mine or worker.kept_tokens != sum(mine.values()):
            raise InvariantBroken(f"I44: {worker.name} keeps {worker.kept}, not {mine}")
