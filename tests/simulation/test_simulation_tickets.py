"""Requests from admission to the last token, while a part of what carries them out goes away."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from kvstore import limits
from tests.simulation.scene import Scene

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.simulation.pd_fleet import PdFleet
    from tests.simulation.pd_gateway import PdGateway
    from tests.simulation.scene import Pending


class Served:
    """A pool with a fleet, whose gateways serve only what a test asks for."""

    def __init__(self, *, roles: bool = False, both: int = 0) -> None:
        """Everybody has joined."""
        self.scene = Scene(hosts=2, chunks=4, tickets=1.0, roles=roles, both=both)
        fleet = self.scene.simulation.fleet
        assert fleet is not None
        self.fleet: PdFleet = fleet
        fleet.stop_work()
        fleet.start()
        members = fleet.workers.values()
        self.scene.run_until(lambda: all(each.member is not None for each in members))
        self.scene.run(1.0)
        self.gateway: PdGateway = fleet.gateways["gateway0"]

    def ask(self, left_s: float = 20.0) -> Pending[str]:
        """Begin a request."""
        return self.scene.start(self.gateway, self.gateway.serve(left_s))

    def decoding(self) -> str:
        """The decode worker that has a request, once some tokens of it have come."""

        def is_streaming() -> bool:
            return any(
                each.claim and len(each.tokens) > 1 for each in self.gateway.requests.values()
            )

        self.scene.run_until(is_streaming)
        return next(name for name, each in self.fleet.workers.items() if each.running)

    def finished(self, pending: Pending[str]) -> None:
        """It ends with its last token, and leaves nothing behind."""
        assert self.scene.finish(pending) == "finished"
        self.scene.rest()

    def count(self, what: str) -> int:
        """How often that happened."""
        return self.scene.world.counts[f"tickets: {what}"]


@pytest.fixture
def calm(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody hangs up, sheds or refuses, but where a test says so."""
    monkeypatch.setattr("tests.simulation.pd_gateway.HANGS_UP", 0.0)
    monkeypatch.setattr("tests.simulation.pd_workers.SHEDS", 0.0)
    monkeypatch.setattr("tests.simulation.pd_workers.REFUSES", 0.0)
    monkeypatch.setattr("tests.simulation.pd_gateway.TOKENS_MIN", 8)


@pytest.fixture
def served(calm: None, request: pytest.FixtureRequest) -> Iterator[Served]:
    """What a test's parameter says of the fleet, else the usual one."""
    served = Served(**getattr(request, "param", {}))
    yield served
    served.scene.simulation.abandon()


LONE = pytest.mark.parametrize("served", [{"both": 1}], indirect=True)
RESTLESS = pytest.mark.parametrize("served", [{"roles": True}], indirect=True)


def test_a_request_gets_each_token_once(served: Served) -> None:
    served.finished(served.ask())
    assert (served.count("staged"), served.count("installed")) == (1, 1)


def test_another_decode_worker_goes_on_where_one_dies(served: Served) -> None:
    pending = served.ask()
    name = served.decoding()
    served.scene.simulation.crash(name)
    served.scene.run(1.0)
    served.scene.simulation.restart(name)
    served.finished(pending)
    assert (served.count("staged"), served.count("installed")) == (1, 2)


def test_who_sleeps_through_its_fencing_is_not_listened_to(served: Served) -> None:
    pending = served.ask()
    name = served.decoding()
    served.scene.world.pause(name)
    served.scene.run(7.0)
    served.scene.world.resume(name)
    served.finished(pending)
    assert served.count("installed") == 2


def test_another_prefill_worker_is_asked_where_one_is_gone(served: Served) -> None:
    pending = served.ask()
    tickets = served.scene.core.tickets
    served.scene.run_until(lambda: bool(tickets.all()))
    name = tickets.all()[0].prefill
    served.scene.simulation.crash(name)
    served.scene.run_until(lambda: tickets.all()[0].prefill != name)
    served.scene.simulation.restart(name)
    served.finished(pending)


def test_a_ticket_outlives_its_master(served: Served) -> None:
    pending = served.ask()
    served.decoding()
    served.scene.replace_master()
    served.finished(pending)
    assert served.count("not wanted") == 0
    assert (served.count("staged"), served.count("installed")) == (1, 1)


def test_what_is_shed_is_taken_up_without_a_second_prefill(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tests.simulation.pd_workers.SHEDS", 0.5)
    served.finished(served.ask())
    assert served.count("shed") >= 1
    assert served.count("staged") == 1
    assert served.count("computed again") == 0


def test_a_gateway_that_dies_leaves_nothing_behind(served: Served) -> None:
    served.ask()
    served.decoding()
    served.scene.simulation.crash(served.gateway.name)
    served.scene.run(limits.GATEWAY_LOST_AFTER_S + 2 * limits.FLEET_BEAT_S)
    assert not served.scene.core.tickets.all()
    assert not any(each.running for each in served.fleet.workers.values())
    served.scene.rest()


def test_a_gateway_that_was_cut_off_for_a_moment_has_its_tickets(served: Served) -> None:
    pending = served.ask()
    served.decoding()
    served.scene.world.cut |= {(served.gateway.name, served.scene.leader.name)}
    served.scene.run(limits.GATEWAY_LOST_AFTER_S - 1.0)
    served.scene.world.cut.clear()
    served.finished(pending)
    assert served.scene.core.counters["tickets_abandoned"] == 0


@LONE
def test_one_worker_does_all_of_it_where_two_have_refused_it(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tests.simulation.pd_workers.REFUSES", 1.0)
    served.finished(served.ask())
    assert (served.count("staged"), served.count("installed")) == (1, 0)
    assert (served.count("to be gone on with alone"), served.count("done alone")) == (1, 1)


@LONE
def test_another_worker_is_found_where_the_one_that_does_all_of_it_dies(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tests.simulation.pd_workers.REFUSES", 1.0)
    pending = served.ask()
    requests = served.gateway.requests
    served.scene.run_until(lambda: any(each.alone for each in requests.values()))
    served.scene.run_until(lambda: any(len(each.tokens) > 2 for each in requests.values()))
    monkeypatch.setattr("tests.simulation.pd_workers.REFUSES", 0.0)
    served.scene.simulation.crash("both0")
    served.scene.run(1.0)
    served.scene.simulation.restart("both0")
    served.finished(pending)
    assert (served.count("staged"), served.count("installed")) == (2, 1)


@RESTLESS
def test_workers_that_change_their_role_lose_nothing(served: Served) -> None:
    workers = served.fleet.workers.values()
    for _ in range(10):
        for pending in [served.ask(60.0) for _ in range(4)]:
            assert served.scene.finish(pending, 60.0) == "finished"
    changes = served.count("changed to prefill"), served.count("changed to decode")
    assert min(changes) >= 1, changes
    assert {"prefill", "decode"} == {each.role for each in workers}
    served.scene.rest()
