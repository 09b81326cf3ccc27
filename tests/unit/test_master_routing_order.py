"""Which of the tickets that wait for a decode worker is routed first: as the policy has it."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from kvstore.wire.messages.hello import Done
from master.tunables import Tunables
from tests.unit.ticket_rig import Fleet

SHORT, LONG = 10, 900
WAITING = (
    ("p1", "p2", LONG), ("p1", "p2", LONG), ("p1", "p2", SHORT), ("p2", "p1", LONG),
)  # fmt: skip
"""By whom they are computed and by whom not, and expected output."""


@pytest.mark.parametrize(("policy", "order"), [
    ("kv_aware", [0, 1, 2, 3]),
    ("shortest_first", [2, 0, 1, 3]),
    ("transfer_balance", [0, 3, 1, 2]),
])  # fmt: skip
def test_tickets_that_wait_are_routed_in_the_order_of_the_policy(
    policy: str, order: list[int]
) -> None:
    fleet = Fleet(Tunables("test", replicas=1, colocation="never", decode_routing=policy))
    for name in ("p1", "p2"):
        fleet.join(name, "prefill")
    fleet.join("d1")
    opened = [
        fleet.open(replace(fleet.wish(seed, new_tokens=new), avoid=(other,)))
        for seed, (_, other, new) in enumerate(WAITING, 1)
    ]
    assert [each.prefill for each in opened] == [by for by, _, _ in WAITING]
    fleet.beat("d1", draining=True)
    for each in opened:
        fleet.begin(each)
        fleet.ask(fleet.stage_message(each), Done)
        assert not fleet.ticket(each.ticket).route
        fleet.rig.tick(0.1)
    fleet.beat("d1")
    routes = [fleet.route(each.ticket).route for each in opened]
    assert sorted(range(4), key=routes.__getitem__) == order
