"""Phase 1: what is admitted, what is throttled and for how long, and who computes the prompt."""

from __future__ import annotations

import msgspec
import pytest

from kvstore import limits
from kvstore.wire.messages import tickets as wire
from kvstore.wire.messages.hello import Done
from master.admitting import staging_budget
from master.tunables import Tunables
from tests.unit.master_rig import chain, failure
from tests.unit.ticket_rig import PAGE_TOKENS, Fleet


def both(policy: str, staging_bytes: int = 0) -> Fleet:
    """A fleet whose colocation policy is that one."""
    return Fleet(
        Tunables(cluster="test", replicas=1, colocation=policy, staging_bytes=staging_bytes)
    )


def test_the_same_request_gets_the_same_ticket() -> None:
    fleet = Fleet()
    fleet.pair()
    wish = fleet.wish(request="one")
    opened = fleet.open(wish)
    assert fleet.open(msgspec.structs.replace(wish, first_token_s=1.0, deadline_s=2.0)) == opened
    assert len(fleet.rig.master.core.tickets) == 1


def test_other_content_under_the_same_id_is_refused() -> None:
    fleet = Fleet()
    fleet.pair()
    fleet.open(fleet.wish(request="one"))
    for other in (
        fleet.wish(seed=2, request="one"),
        fleet.wish(behind=11, request="one"),
        fleet.wish(pages=1, request="one"),
        fleet.wish(adapter="a", request="one"),
    ):
        refusal = failure(fleet.rig.ask(fleet.rig.engine, other))
        assert (refusal.code, refusal.text.split(":")[0]) == ("bad_value", "request")


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("request", ""),
        ("request", "x" * 600),
        ("keys", b"1" * 33),
        ("keys", b""),
        ("keys", bytes(32) * 5000),
        ("prompt_tokens", 0),
        ("prompt_tokens", 1 << 50),
        ("new_tokens", 0),
        ("new_tokens", -1),
        ("first_token_s", float("nan")),
        ("first_token_s", -1.0),
        ("deadline_s", float("inf")),
        ("deadline_s", -0.1),
        ("adapter", "x" * 600),
        ("avoid", ("x",) * 65),
        ("avoid", ("x" * 600,)),
    ],
)
def test_a_field_that_cannot_be_right_is_named(field: str, value: object) -> None:
    fleet = Fleet()
    fleet.pair()
    wish = msgspec.structs.replace(fleet.wish(), **{field: value})
    refusal = failure(fleet.rig.ask(fleet.rig.engine, wish))
    assert refusal.code == "bad_value"
    assert refusal.text.startswith(field)
    fleet.assert_nothing_held()


def test_unknown_namespaces_and_those_of_named_objects_have_no_tickets() -> None:
    fleet = Fleet()
    fleet.pair()
    wish = msgspec.structs.replace(fleet.wish(), namespace=b"x" * 32)
    assert failure(fleet.rig.ask(fleet.rig.engine, wish)).code == "unknown_namespace"
    wish = msgspec.structs.replace(fleet.wish(), namespace=fleet.tails.id)
    assert failure(fleet.rig.ask(fleet.rig.engine, wish)).code == "bad_value"


def test_without_workers_nothing_is_admitted() -> None:
    fleet = Fleet()
    assert fleet.throttled().reason == "no_decode"
    fleet.join("p1", "prefill")
    assert fleet.throttled().reason == "no_decode"
    fleet.join("d1")
    assert fleet.open().prefill == "p1"
    fleet.beat("p1", draining=True)
    assert fleet.throttled().reason == "no_prefill"
    fleet.beat("d1", draining=True)
    assert fleet.throttled().reason == "no_decode"
    assert fleet.rig.master.core.counters["throttled_no_decode"] == 3


def test_decode_credit_is_taken_up_to_the_bound_and_given_back() -> None:
    fleet = Fleet()
    fleet.join("p1", "prefill")
    fleet.join("d1", capacity=1000, batch=100)
    first = fleet.open(fleet.wish(pages=2, behind=0, new_tokens=144))  # 400
    fleet.open(fleet.wish(pages=2, behind=0, new_tokens=144))  # 800 of 800
    refused = fleet.throttled(fleet.wish(pages=0, behind=1, new_tokens=1))
    assert refused.reason == "decode_occupancy"
    assert 0.05 <= refused.retry_after_s <= 30
    fleet.ask(wire.CancelTicket(first.ticket), Done)
    fleet.open(fleet.wish(pages=0, behind=1, new_tokens=1))


def test_an_idle_fleet_takes_what_fits_one_worker_and_no_more() -> None:
    fleet = Fleet()
    fleet.join("p1", "prefill")
    fleet.join("d1", capacity=1000)
    fleet.join("d2", capacity=900)
    fleet.rig.pass_time(limits.TICKET_GRACE_S - 1)
    for name in ("p1", "d1", "d2"):
        fleet.beat(name)
    big = fleet.wish(pages=4, behind=0, new_tokens=489)
    assert fleet.throttled(big).reason == "no_decode"  # another may be about to join
    fleet.rig.pass_time(1)
    refusal = failure(fleet.rig.ask(fleet.rig.engine, big))
    assert (refusal.code, refusal.text.split(":")[0]) == ("bad_value", "new_tokens")
    fleet.open(fleet.wish(pages=4, behind=0, new_tokens=488))  # 1000: above 0.8 of it alone


def test_what_a_draining_worker_runs_takes_no_credit_from_the_others() -> None:
    fleet = Fleet()
    fleet.join("p1", "prefill")
    fleet.join("d1", capacity=1000)
    number, claimed, _ = fleet.install(fleet.wish(pages=4, behind=0, new_tokens=300))
    fleet.join("d2", capacity=1000)
    fleet.beat("d1", (number, claimed.token, 600), draining=True)
    fleet.open(fleet.wish(seed=2, pages=4, behind=0, new_tokens=280))


def test_staging_is_bounded_and_counts_what_the_pool_does_not_have() -> None:
    fleet = both("never", staging_bytes=3 * 4096)
    fleet.pair()
    fleet.space.put(chain(1, 2))
    fleet.open(fleet.wish(seed=1, pages=4, behind=0))  # two of its four pages are there
    assert fleet.rig.master.core.tickets.staged_bytes == 2 * 4096
    refused = fleet.throttled(fleet.wish(seed=2, pages=2, behind=0))
    assert refused.reason == "staging"
    fleet.open(fleet.wish(seed=3, pages=0, behind=PAGE_TOKENS - 1))
    refusal = failure(fleet.rig.ask(fleet.rig.engine, fleet.wish(seed=4, pages=4)))
    assert refusal.code == "out_of_space"


def test_staging_is_a_quarter_of_memory_unless_it_is_set() -> None:
    fleet = Fleet(chunks=4)
    fleet.pair()
    listed = fleet.ask(wire.ListTickets(), wire.TicketList)
    memory = sum(s.geometry.payload_bytes for s in fleet.rig.master.core.segments.values())
    assert listed.staging_budget_bytes == memory // 4
    assert fleet.rig.master.core.tickets.staged_bytes == 0


def test_where_no_memory_is_lent_staging_is_a_quarter_of_the_drives() -> None:
    fleet = Fleet(chunks=4)
    fleet.pair()
    drive = fleet.rig.add_worker("w2", join=False)
    drive.tier = "nvme"
    drive.join()
    fleet.rig.workers["w1"].leave()
    fleet.rig.pass_time(10.0)
    fleet.join("p1", "prefill")
    fleet.join("d1")
    core = fleet.rig.master.core
    assert [each.tier for each in core.segments.values() if each.readable] == ["nvme"]
    assert staging_budget(core) == core.segments["w2-dram"].geometry.payload_bytes // 4
    fleet.open(fleet.wish(pages=2))


def test_a_hand_over_that_takes_too_long_is_refused_where_it_was_measured() -> None:
    fleet = Fleet()
    fleet.pair()
    wish = fleet.wish(pages=4, behind=0, first_token_s=1.0)
    fleet.open(msgspec.structs.replace(wish, request="unmeasured"))
    fleet.beat("p1")  # nothing waits there
    slow = fleet.beat_message("d1", link=8192.0, rtt=0.5)
    fleet.ask(slow, wire.FleetNoted)
    refused = fleet.throttled(wish)
    assert (refused.reason, refused.retry_after_s) == ("migration", 1.5)
    fleet.ask(fleet.beat_message("d1", link=1e6, rtt=0.5), wire.FleetNoted)
    fleet.open(wish)


def test_requests_that_come_at_once_go_to_several_workers() -> None:
    fleet = Fleet()
    fleet.pair()
    fleet.join("p2", "prefill")
    named = {fleet.open(fleet.wish(seed=seed)).prefill for seed in range(2)}
    assert named == {"p1", "p2"}


def test_the_adapter_has_to_be_there() -> None:
    fleet = Fleet()
    fleet.pair()
    refused = fleet.throttled(fleet.wish(adapter="lora"))
    assert (refused.reason, "adapter" in refused.text) == ("no_decode", True)
    fleet.join("d2", adapters=("lora",))
    refused = fleet.throttled(fleet.wish(adapter="lora"))
    assert (refused.reason, "adapter" in refused.text) == ("no_prefill", True)
    fleet.join("p2", "prefill", adapters=("other", "lora"))
    opened = fleet.stage(fleet.wish(adapter="lora"))
    assert (opened.prefill, fleet.route(opened.ticket).decode) == ("p2", "d2")


def test_who_lacks_the_adapter_counts_for_nothing() -> None:
    fleet = both("break_even")
    fleet.join("b1", "both", capacity=2000, adapters=("lora",))
    fleet.join("d1")
    assert fleet.open(fleet.wish(pages=3, adapter="lora")).alone == "no_others"
    fleet.rig.pass_time(limits.TICKET_GRACE_S - 0.5)
    for name in ("b1", "d1"):
        fleet.beat(name)
    fleet.rig.pass_time(0.5)
    large = fleet.wish(seed=2, new_tokens=3000, adapter="lora")
    refusal = failure(fleet.rig.ask(fleet.rig.engine, large))
    assert (refusal.code, refusal.text.split(":")[0]) == ("bad_value", "new_tokens")


def test_a_prefill_worker_on_the_host_of_the_pages_is_preferred() -> None:
    fleet = Fleet()
    host = fleet.rig.master.core.workers["w1"].host
    fleet.join("a", "prefill")
    fleet.join("b", "prefill", host=host)
    fleet.join("d1")
    fleet.space.put(chain(1, 3))
    for name in ("a", "b"):
        fleet.ask(fleet.beat_message(name, link=1e3), wire.FleetNoted)
    opened = fleet.open(fleet.wish(seed=1, pages=3))
    assert (opened.prefill, opened.prefix_tokens) == ("b", 3 * PAGE_TOKENS)


def test_another_prefill_worker_is_named_for_one_that_failed() -> None:
    fleet = Fleet()
    fleet.pair()
    opened = fleet.open()
    fleet.begin(opened)
    fleet.join("p2", "prefill")
    again = fleet.ask(wire.FailPrefill(opened.ticket, "p1"), wire.TicketOpened)
    assert (again.ticket, again.prefill) == (opened.ticket, "p2")
    assert fleet.ask(wire.FailPrefill(opened.ticket, "p1"), wire.TicketOpened) == again
    late = wire.BeginPrefill(opened.ticket, "p1", fleet.lives["p1"])
    assert failure(fleet.rig.ask(fleet.rig.engine, late)).code == "fenced"
    gone = fleet.ask(wire.FailPrefill(opened.ticket, "p2"), wire.Throttled)
    assert gone.reason == "no_prefill"
    fleet.assert_nothing_held()


def test_another_life_of_a_prefill_worker_that_failed_may_try() -> None:
    fleet = Fleet()
    fleet.pair()
    opened = fleet.open()
    fleet.begin(opened)
    old = wire.BeginPrefill(opened.ticket, "p1", fleet.lives["p1"])
    fleet.ask(wire.LeaveFleet(fleet.space.id, "p1", fleet.lives["p1"]), Done)
    fleet.join("p1", "prefill")
    again = fleet.ask(wire.FailPrefill(opened.ticket, "p1"), wire.TicketOpened)
    assert (again.ticket, again.prefill) == (opened.ticket, "p1")
    assert failure(fleet.rig.ask(fleet.rig.engine, old)).code == "fenced"
    fleet.begin(again)
    gone = fleet.ask(wire.FailPrefill(opened.ticket, "p1"), wire.Throttled)
    assert gone.reason == "no_prefill"
    fleet.assert_nothing_held()


def test_a_worker_of_both_roles_runs_what_is_not_worth_a_hand_over() -> None:
    fleet = both("break_even")
    fleet.join("b1", "both")
    fleet.join("d1")
    opened = fleet.open(fleet.wish(pages=0, behind=20))
    assert (opened.prefill, opened.alone) == ("b1", "break_even")
    fleet.begin(opened)
    assert fleet.ticket(opened.ticket).slot is not None
    assert fleet.rig.master.core.tickets.staged_bytes == 0
    assert fleet.rig.master.core.counters["alone_break_even"] == 1
    fleet.beat("b1", (opened.ticket, 0, 5000))
    assert fleet.ticket(opened.ticket).credit_tokens == 5000
    fleet.ask(wire.FinishTicket(opened.ticket, 0), Done)
    fleet.assert_nothing_held()


def test_one_that_was_to_run_alone_may_hand_over_all_the_same() -> None:
    fleet = both("always")
    fleet.join("b1", "both")
    opened = fleet.stage()
    assert opened.alone == "always"
    assert fleet.rig.master.core.tickets.staged_bytes > 0
    assert fleet.route(opened.ticket).decode == "b1"


def test_a_worker_that_ran_alone_is_lost_and_another_is_named() -> None:
    fleet = both("always")
    fleet.join("b1", "both")
    opened = fleet.open()
    fleet.begin(opened)
    fleet.join("b2", "both")
    fleet.ask(wire.LeaveFleet(fleet.space.id, "b1", fleet.lives["b1"]), Done)
    assert fleet.ticket(opened.ticket).slot is None
    assert fleet.rig.master.core.tickets.staged_bytes > 0
    again = fleet.ask(wire.FailPrefill(opened.ticket, "b1"), wire.TicketOpened)
    assert (again.prefill, again.alone) == ("b2", "always")


def test_the_table_of_tickets_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "TICKETS_MAX", 1)
    monkeypatch.setattr(limits, "TICKET_PAGES_MAX", 3)
    fleet = Fleet()
    fleet.pair()
    assert fleet.throttled(fleet.wish(pages=4)).reason == "staging"
    fleet.open()
    refusal = failure(fleet.rig.ask(fleet.rig.engine, fleet.wish()))
    assert refusal.code == "out_of_space"


def test_what_one_worker_runs_alone_holds_pages_as_well(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "TICKET_PAGES_MAX", 3)
    fleet = both("always")
    fleet.join("b1", "both")
    fleet.open(fleet.wish(pages=3))
    assert fleet.throttled(fleet.wish(seed=2, pages=1)).reason == "staging"


def test_outputs_are_as_long_as_they_are_whatever_was_predicted() -> None:
    fleet = Fleet()
    fleet.join("p1", "prefill")
    fleet.join("d1", capacity=10_000)
    number, claimed, _ = fleet.install(fleet.wish(pages=1, behind=0, new_tokens=10))
    fleet.beat("d1", (number, claimed.token, 9000))
    assert fleet.throttled(fleet.wish(seed=2)).reason == "decode_occupancy"
    fleet.beat("d1", (number, claimed.token, 9900))
    assert fleet.ticket(number).credit_tokens == 9900
    fleet.ask(wire.FinishTicket(number, claimed.token), Done)
    fleet.assert_nothing_held()
