"""A decode worker ahead of its prompt: when it is chosen, what it may read, and what ends it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from kvstore.ids import KEY_BYTES
from kvstore.wire.messages import tickets as wire
from kvstore.wire.messages.hello import Done
from kvstore.wire.messages.reads import Located, Lookup
from master import part_waits
from master.tickets import TicketState
from tests.unit.master_rig import chain, failure
from tests.unit.replaced import replaced
from tests.unit.ticket_rig import Fleet

if TYPE_CHECKING:
    from master.directory import Tree


def ahead(parts: int = 1, pages: int = 2) -> tuple[Fleet, wire.TicketOpened, int]:
    """A claim ahead of a prompt of so many pages: fleet, ticket, token."""
    fleet = Fleet(parts=parts)
    fleet.pair()
    opened, claimed = fleet.claim_ahead(fleet.wish(seed=1, pages=pages))
    assert (claimed.tokens, claimed.tail) == ((), wire.TailRef())
    assert claimed.keys == chain(1, pages)
    return fleet, opened, claimed.token


def awaits(fleet: Fleet, ticket: int, token: int, *have: int) -> int:
    """Ask for more than that, and have the answer held back; the request."""
    message = wire.AwaitParts(ticket, token, have, 5.0)
    assert fleet.rig.ask(fleet.rig.engine, message) is None
    return fleet.rig.last_request


def test_a_ticket_is_routed_ahead_once_the_rest_computes_as_fast_as_it_moves() -> None:
    fleet = Fleet()
    fleet.pair()
    fleet.ask(fleet.beat_message("d1", link=17024.0), wire.FleetNoted)  # 0.5 s, or 500 tokens
    opened = fleet.open(fleet.wish(pages=4, behind=20))
    assert fleet.ticket(opened.ticket).kv_bytes == 17024
    rig = fleet.rig
    fleet.ask(fleet.beat_message("d1", link=17024.0 * 2), wire.FleetNoted)
    assert rig.ask(rig.engine, wire.AwaitRoute(opened.ticket, 0, 5.0)) is None
    asked = rig.last_request
    for left in (532, 501, 0):
        fleet.begin(opened, left)
        rig.tick()
        assert rig.reply(rig.engine, asked) is None
    fleet.begin(opened, 500)
    rig.tick()
    routed = rig.reply(rig.engine, asked)
    assert isinstance(routed, wire.TicketRouted)
    assert (routed.decode, routed.is_ahead) == ("d1", True)
    fleet.begin(opened, 20)  # what comes later changes nothing
    assert fleet.ticket(opened.ticket).state is TicketState.ROUTED_AHEAD
    fleet.ask(fleet.stage_message(opened), Done)
    assert fleet.route(opened.ticket) == wire.TicketRouted(routed.route, "d1", "d1:1")


@pytest.mark.parametrize("left", [-1, 267])
def test_what_is_left_is_of_the_prompt(left: int) -> None:
    fleet = Fleet()
    fleet.pair()
    opened = fleet.open()
    wrong = wire.BeginPrefill(opened.ticket, "p1", fleet.lives["p1"], left)
    refused = failure(fleet.rig.ask(fleet.rig.engine, wrong))
    assert (refused.code, "tokens_left" in refused.text) == ("bad_value", True)


def test_who_has_claimed_ahead_goes_on_to_the_usual_claim() -> None:
    fleet, opened, token = ahead()
    rig, name = fleet.rig, "d1"
    route = fleet.ticket(opened.ticket).route
    plain = wire.ClaimTicket(opened.ticket, route, name, fleet.lives[name])
    assert failure(rig.ask(rig.engine, plain)).code == "fenced"
    assert failure(rig.ask(rig.engine, wire.TicketInstalled(opened.ticket, token))).code == "fenced"
    fleet.ask(fleet.stage_message(opened), Done)
    late = wire.ClaimTicket(opened.ticket, route, name, fleet.lives[name], True)
    assert failure(rig.ask(rig.engine, late)).code == "fenced"
    claimed = fleet.ask(plain, wire.TicketClaimed)
    assert claimed.token > token
    assert claimed.tokens == (7,)
    asked = wire.AwaitParts(opened.ticket, token, (0,), 5.0)
    assert failure(rig.ask(rig.engine, asked)).code == "fenced"
    fleet.ask(wire.TicketInstalled(opened.ticket, claimed.token), Done)
    fleet.ask(wire.FinishTicket(opened.ticket, claimed.token), Done)
    fleet.assert_nothing_held()


def test_who_waits_for_parts_hears_of_each_page_that_is_put() -> None:
    fleet, opened, token = ahead()
    rig = fleet.rig
    asked = awaits(fleet, opened.ticket, token, 0)
    fleet.space.put(chain(1, 1))
    assert rig.reply(rig.engine, asked) == wire.PartsSealed((1,), False)
    asked = awaits(fleet, opened.ticket, token, 1)
    fleet.space.put(chain(1, 2)[KEY_BYTES:], chain(1, 1))
    assert rig.reply(rig.engine, asked) == wire.PartsSealed((2,), False)
    asked = awaits(fleet, opened.ticket, token, 2)
    fleet.ask(fleet.stage_message(opened), Done)
    assert rig.reply(rig.engine, asked) == wire.PartsSealed((2,), True)
    staged = wire.AwaitParts(opened.ticket, token, (0,), 5.0)
    assert rig.ask(rig.engine, staged) == wire.PartsSealed((2,), True)


def test_who_has_read_more_than_is_staged_then_is_told_so_and_not_refused() -> None:
    fleet, opened, token = ahead()
    rig, keys = fleet.rig, chain(1, 2)
    fleet.space.put(keys)
    staged = replaced(fleet.stage_message(opened), "keys", keys[:KEY_BYTES])
    fleet.ask(staged, Done)
    asked = wire.AwaitParts(opened.ticket, token, (2,), 5.0)
    assert rig.ask(rig.engine, asked) == wire.PartsSealed((2,), True)
    located = fleet.ask(wire.LocateParts(opened.ticket, token, 0, 1, 1), Located)
    assert [(run.first, run.count) for run in located.runs] == [(0, 1)]


def test_parts_are_told_of_one_by_one_and_located_before_a_page_is_complete() -> None:
    fleet, opened, token = ahead(parts=2)
    rig, keys = fleet.rig, chain(1, 2)
    asked = awaits(fleet, opened.ticket, token, 0, 0)
    fleet.space.put(keys, parts=(1,))
    assert rig.reply(rig.engine, asked) == wire.PartsSealed((0, 2), False)
    asked = awaits(fleet, opened.ticket, token, 0, 2)
    located = fleet.ask(wire.LocateParts(opened.ticket, token, 1, 0, 2), Located)
    (run,) = located.runs
    assert (run.first, run.count, [copy.part for copy in run.copies]) == (0, 2, [1])
    assert located.lease_ttl_s > 0
    (page,) = rig.master.core.tree(fleet.space.ordinal).stretches(keys)
    assert page.run.leased_until_s >= rig.now + located.lease_ttl_s
    second = fleet.ask(wire.LocateParts(opened.ticket, token, 1, 1, 1), Located)
    assert [(each.first, each.count) for each in second.runs] == [(0, 1)]
    nothing = fleet.ask(wire.LocateParts(opened.ticket, token, 0, 0, 2), Located)
    assert nothing.runs == ()
    # Nobody else finds them (I15).
    for message in (Lookup(fleet.space.id, keys), Lookup(fleet.space.id, keys, (1,))):
        assert fleet.ask(message, Located).runs == ()
    assert fleet.space.match(keys).runs == ()
    fleet.space.put(keys[:KEY_BYTES], parts=(0,))
    assert rig.reply(rig.engine, asked) == wire.PartsSealed((1, 2), False)
    assert fleet.space.probe(keys) == b"\1\0"


def test_what_is_complete_is_not_looked_at_part_by_part(monkeypatch: pytest.MonkeyPatch) -> None:
    fleet, opened, token = ahead(parts=2, pages=2)
    keys = chain(1, 2)
    fleet.space.put(keys[:KEY_BYTES], parts=(0, 1))
    fleet.space.put(keys[KEY_BYTES:], keys[:KEY_BYTES], parts=(1,))
    looked: list[tuple[int, int]] = []

    def leading(tree: Tree, keys: bytes, part: int, page: int) -> int:
        looked.append((part, page))
        return real(tree, keys, part, page)

    real = part_waits._leading  # noqa: SLF001 -- a call costs as much as there are chunks and parts
    monkeypatch.setattr(part_waits, "_leading", leading)
    asked = wire.AwaitParts(opened.ticket, token, (0, 1), 0.0)
    assert fleet.ask(asked, wire.PartsSealed) == wire.PartsSealed((1, 2), False)
    assert looked == [(0, 1), (1, 1)]


def test_waiting_for_parts_ends_in_time_and_with_its_session() -> None:
    fleet, opened, token = ahead()
    rig, ticket = fleet.rig, fleet.ticket(opened.ticket)
    now = wire.AwaitParts(opened.ticket, token, (0,), 0.0)
    assert rig.ask(rig.engine, now) == wire.PartsSealed((0,), False)
    first = awaits(fleet, opened.ticket, token, 0)
    second = awaits(fleet, opened.ticket, token, 0)
    assert rig.reply(rig.engine, first) == wire.PartsSealed((0,), False)  # its place is taken
    fleet.beat("d1", (opened.ticket, token, 0))
    rig.tick(2.0)
    fleet.beat("d1", (opened.ticket, token, 0))
    assert rig.reply(rig.engine, second) is None
    rig.tick(2.9)
    fleet.beat("d1", (opened.ticket, token, 0))
    rig.tick(0.2)
    assert rig.reply(rig.engine, second) == wire.PartsSealed((0,), False)
    decode = rig.open("engine", "tenant", "d1")
    assert rig.ask(decode, wire.AwaitParts(opened.ticket, token, (0,), 5.0)) is None
    rig.close(decode)
    assert ticket.parts_wait is None
    assert not rig.master.core.tickets.part_waits


@pytest.mark.parametrize("how", ["prefill fails", "route fails", "claimed again", "cancelled"])
def test_waiting_for_parts_ends_with_the_claim(how: str) -> None:
    fleet, opened, token = ahead()
    fleet.join("p2", "prefill")
    rig, ticket = fleet.rig, fleet.ticket(opened.ticket)
    asked = awaits(fleet, opened.ticket, token, 0)
    route = ticket.route
    if how == "prefill fails":
        again = fleet.ask(wire.FailPrefill(opened.ticket, "p1"), wire.TicketOpened)
        assert (again.prefill, ticket.state, ticket.slot) == ("p2", TicketState.OPENED, None)
    elif how == "route fails":
        assert rig.ask(rig.engine, wire.AwaitRoute(opened.ticket, route, 5.0)) is None
        assert ticket.state is TicketState.PREFILLING
    elif how == "claimed again":
        name = "d1"
        fleet.ask(
            wire.ClaimTicket(opened.ticket, route, name, fleet.lives[name], True),
            wire.TicketClaimed,
        )
    else:
        fleet.ask(wire.CancelTicket(opened.ticket), Done)
    code = "unknown_ticket" if how == "cancelled" else "fenced"
    assert failure(rig.reply(rig.engine, asked)).code == code
    assert not rig.master.core.tickets.part_waits
    rig.master.check_invariants()
    fleet.ask(wire.CancelTicket(opened.ticket), Done)
    fleet.assert_nothing_held()


def test_a_prompt_that_is_computed_elsewhere_is_routed_ahead_again() -> None:
    fleet, opened, _ = ahead()
    fleet.join("p2", "prefill")
    again = fleet.ask(wire.FailPrefill(opened.ticket, "p1"), wire.TicketOpened)
    rig = fleet.rig
    rig.tick()
    assert fleet.ticket(opened.ticket).state is TicketState.OPENED
    fleet.begin(again, 266)
    assert fleet.route(opened.ticket).is_ahead
    staged = fleet.stage_message(again)
    fleet.ask(staged, Done)
    assert fleet.ticket(opened.ticket).state is TicketState.ROUTED
    # Too late: whoever claims it has the first token.
    late = wire.FailPrefill(opened.ticket, "p2")
    assert failure(rig.ask(rig.engine, late)).code == "fenced"


def test_who_is_nearly_done_and_finds_no_place_counts_with_those_that_wait() -> None:
    fleet = Fleet()
    fleet.join("p1", "prefill")
    fleet.join("d1", batch=1)
    running, claimed, _ = fleet.install(fleet.wish(seed=2))
    fleet.ask(fleet.beat_message("d1", (running, claimed.token, 270), link=5e3), wire.FleetNoted)
    opened = fleet.open(fleet.wish(seed=1))
    fleet.begin(opened, 266)
    fleet.rig.settle()
    ticket = fleet.ticket(opened.ticket)
    assert ticket.state is TicketState.PREFILLING
    assert list(ticket.fleet.waiting) == [ticket.id]
    assert ticket.fleet.waiting_tokens == ticket.credit_tokens
    fleet.ask(wire.FinishTicket(running, claimed.token), Done)
    assert fleet.route(opened.ticket).is_ahead
    assert ticket.fleet.waiting_tokens == 0


def test_a_decode_worker_that_dies_ahead_is_followed_by_another() -> None:
    fleet, opened, _ = ahead()
    fleet.join("d2")
    fleet.ask(wire.LeaveFleet(fleet.space.id, "d1", fleet.lives["d1"]), Done)
    assert fleet.ticket(opened.ticket).state is TicketState.PREFILLING
    routed = fleet.route(opened.ticket)
    assert (routed.decode, routed.is_ahead) == ("d2", True)


@pytest.mark.parametrize(
    ("message", "code"),
    [
        (wire.AwaitParts(0, 1, (0,), 1.0), "fenced"),
        (wire.LocateParts(0, 1, 0, 0, 1), "fenced"),
        (wire.AwaitParts(0, 0, (), 1.0), "bad_value"),
        (wire.AwaitParts(0, 0, (0, 0), 1.0), "bad_value"),
        (wire.AwaitParts(0, 0, (-1,), 1.0), "bad_value"),
        (wire.AwaitParts(0, 0, (3,), 1.0), "bad_value"),
        (wire.AwaitParts(0, 0, (0,), -1.0), "bad_value"),
        (wire.LocateParts(0, 0, 1, 0, 1), "bad_value"),
        (wire.LocateParts(0, 0, -1, 0, 1), "bad_value"),
        (wire.LocateParts(0, 0, 0, -1, 1), "bad_value"),
        (wire.LocateParts(0, 0, 0, 0, 0), "bad_value"),
        (wire.LocateParts(0, 0, 0, 1, 2), "bad_value"),
    ],
)
def test_wrong_tokens_and_numbers_are_refused(
    message: wire.AwaitParts | wire.LocateParts, code: str
) -> None:
    fleet, opened, token = ahead()
    named = token + 1 if message.token else token
    asked: wire.AwaitParts | wire.LocateParts
    if isinstance(message, wire.AwaitParts):
        asked = wire.AwaitParts(opened.ticket, named, message.have, message.timeout_s)
    else:
        place = message.part, message.first, message.count
        asked = wire.LocateParts(opened.ticket, named, *place)
    assert failure(fleet.rig.ask(fleet.rig.engine, asked)).code == code
    stranger = fleet.rig.open("engine", "other", "engine")
    assert failure(fleet.rig.ask(stranger, asked)).code == "access_denied"
