"""`kvharbor tickets` as a program: what it prints, and what it asks."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest

from kvstore.exit_codes import ExitCode
from kvstore.rpc.identity import ListenerIdentity
from kvstore.wire.messages.hello import Done
from kvstore.wire.messages.tickets import FleetRow, TicketList, TicketRow
from tests.contract.cli_rig import ScriptedMaster, kvharbor

if TYPE_CHECKING:
    from collections.abc import Iterator

TICKET = (3 << 32) | 17
ROW = TicketRow(
    TICKET, "chat[red]-1", "t1", "m", "routed", "p1", "", 900, 64, 964, 3 << 20, 2, 1.25, 28.75
)
WORKER = FleetRow("d1", "t1", "m", "r1", "decode", "live", "host-2", 0, 964, 4000, 1, 8)
LIST = TicketList(5, (ROW,), (WORKER,), 3 << 20, 1 << 30)


@pytest.fixture(scope="module")
def master() -> Iterator[str]:
    """One that has tickets."""
    with ScriptedMaster(ListenerIdentity("c"), LIST) as running:
        yield running.address


@pytest.fixture(scope="module")
def obedient() -> Iterator[str]:
    """One that has done everything."""
    with ScriptedMaster(ListenerIdentity("c"), Done()) as running:
        yield running.address


@pytest.mark.parametrize("words", [(), ("show",)])
def test_tickets_for_people_and_for_programs(master: str, words: tuple[str, ...]) -> None:
    done = kvharbor("tickets", *words, KVHARBOR_MASTER=master)
    assert done.returncode == 0, done.stderr
    lines = [" ".join(each.split()) for each in done.stdout.splitlines()]
    assert f"{TICKET} chat[red]-1 routed p1 - 900 64 964 3 MiB 2 1.2 28.8 t1 m" in lines
    assert "d1 t1 m r1 decode live host-2 0 964 4000 1 8" in lines
    assert "5 tickets, of which 1 are shown; staged: 3 MiB of 1 GiB" in done.stdout
    found = json.loads(kvharbor("--json", "tickets", *words, KVHARBOR_MASTER=master).stdout)
    assert (found["tickets"], found["staging_budget_bytes"]) == (5, 1 << 30)
    assert found["rows"][0]["ticket"] == TICKET
    assert found["workers"][0]["capacity_tokens"] == 4000


def test_a_ticket_is_ended(obedient: str) -> None:
    done = kvharbor("tickets", "cancel", str(TICKET), "--master", obedient)
    assert done.stdout == f"ticket {TICKET} is cancelled\n", done.stderr
    done = kvharbor("tickets", "cancel", str(TICKET), "--json", "--master", obedient)
    assert json.loads(done.stdout) == {"cancelled": TICKET}


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("cancel", "0"), "greater than or equal to 1"),
        (("cancel", "chat-1"), "integer"),
        (("--master", "a:1", "cancel", "1"), "--master: got 'a:1', want it after cancel"),
    ],
)
def test_what_cannot_be_meant_is_refused(words: tuple[str, ...], said: str) -> None:
    done = kvharbor("tickets", *words)
    assert done.returncode == ExitCode.USAGE
    assert said in done.stderr
