"""Which transport is chosen, when it is opened, and what happens after a failure."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from kvstore.errors import ConfigError, Unavailable
from kvstore.rpc.identity import Identity, Role
from kvstore.segment import Geometry
from kvstore.transfer import choice as choice_module
from kvstore.transfer.choice import TRY_AGAIN_S, Choice, load_kind
from kvstore.wire.messages.common import Address, SegmentRef
from tests.fakes import LoopbackTransport, ManualClock

if TYPE_CHECKING:
    from collections.abc import Iterable

    from kvstore.transfer.context import TransferContext
    from kvstore.transfer.device import Block

TIMEOUT_S = 1.0


class Kind:
    """A kind of transport whose addresses can be made unreachable."""

    def __init__(self) -> None:
        self.dead: set[str] = set()
        self.opened: list[str] = []
        self.left: list[dict[int, Block]] = []

    def require(self) -> None:
        """Usable."""

    def open_transport(self, context: TransferContext, timeout_s: float) -> LoopbackTransport:
        """Open, or refuse."""
        assert timeout_s <= TIMEOUT_S
        self.opened.append(context.address.where)
        self.left.append(context.left)
        if context.address.where in self.dead:
            raise Unavailable("nobody there")
        return LoopbackTransport()


@pytest.fixture
def kinds(monkeypatch: pytest.MonkeyPatch) -> dict[str, Kind]:
    made = {name: Kind() for name in ("shm", "mooncake", "tcp", "extra")}
    monkeypatch.setattr(choice_module, "load_kind", made.__getitem__)
    return made


def chosen(names: Iterable[str], clock: ManualClock | None = None) -> Choice:
    identity = Identity(Role.ENGINE)
    return Choice(tuple(names), lambda: identity, clock or ManualClock())


def ref(*addresses: tuple[str, str, int], tier: str = "dram") -> SegmentRef:
    made = tuple(Address(*address) for address in addresses)
    return SegmentRef("s", 1, tier, Geometry(1 << 26), "w", "h", made)


EVERYWHERE = ref(("tcp", "t", 0), ("extra", "e", 0), ("mooncake", "m", 0), ("shm", "s", 50))


def test_shared_memory_comes_first_then_the_engine_then_the_stream(kinds: dict[str, Kind]) -> None:
    best = ["shm", "mooncake", "tcp", "extra"]
    for i in range(len(best)):
        assert chosen(best[i:]).transport(EVERYWHERE, TIMEOUT_S) is not None
        assert [len(kinds[name].opened) for name in best] == [1] * (i + 1) + [0] * (3 - i)


def test_an_open_transport_has_the_name_of_its_kind(kinds: dict[str, Kind]) -> None:
    del kinds
    choice = chosen(["mooncake", "tcp"])
    way = choice.transport(EVERYWHERE, TIMEOUT_S)
    assert way is not None
    assert choice.kind_of(way) == "mooncake"
    choice.drop(way)
    assert choice.kind_of(way) == "closed"


def test_within_a_kind_the_cheapest_address_is_used(kinds: dict[str, Kind]) -> None:
    two = ref(("tcp", "dear", 9), ("tcp", "cheap", 1))
    choice = chosen(["tcp"])
    choice.transport(two, TIMEOUT_S)
    choice.transport(two, TIMEOUT_S)
    assert kinds["tcp"].opened == ["cheap"]


def test_ranks_order_segments_by_the_way_to_them(kinds: dict[str, Kind]) -> None:
    del kinds
    choice = chosen(["shm", "tcp"])
    near, far = ref(("shm", "s", 3)), ref(("tcp", "t", 0))
    ranks = [choice.rank(each, TIMEOUT_S) for each in (near, far, ref(("carrier", "x", 0)))]
    assert ranks[0] is not None
    assert ranks[1] is not None
    assert ranks[0] < ranks[1]
    assert ranks[2] is None


def test_one_host_comes_before_a_faster_medium_and_that_before_cost(
    kinds: dict[str, Kind],
) -> None:
    del kinds
    choice = chosen(["shm", "tcp"])
    best_first = [
        ref((transport, transport, cost), tier=tier)
        for transport in ("shm", "tcp")
        for tier in ("dram", "hbm", "nvme", "of the future")
        for cost in (0, 1 << 40)
    ]
    ranks = [choice.rank(each, TIMEOUT_S) for each in best_first]
    assert ranks == sorted(set(ranks), key=lambda rank: rank or 0)


@pytest.mark.parametrize("tier", ["nvme", "of the future"])
@pytest.mark.parametrize("memory", ["dram", "hbm"])
def test_the_engine_reaches_memory_alone(kinds: dict[str, Kind], tier: str, memory: str) -> None:
    ways = (("mooncake", "m", 0), ("tcp", "t", 9))
    choice = chosen(["mooncake", "tcp"])
    choice.transport(ref(*ways, tier=tier), TIMEOUT_S)
    assert (kinds["mooncake"].opened, kinds["tcp"].opened) == ([], ["t"])
    assert choice.rank(ref(ways[0], tier=tier), TIMEOUT_S) is None
    choice.transport(ref(*ways, tier=memory), TIMEOUT_S)
    assert kinds["mooncake"].opened == ["m"]


def test_an_address_that_fails_is_passed_over_and_tried_again_later(kinds: dict[str, Kind]) -> None:
    clock = ManualClock()
    kinds["shm"].dead = {"s"}
    choice = chosen(["shm", "tcp"], clock)
    for _ in range(3):
        assert choice.transport(EVERYWHERE, TIMEOUT_S) is not None
    assert kinds["shm"].opened == ["s"]
    assert kinds["tcp"].opened == ["t"]
    kinds["shm"].dead = set()
    clock.advance(TRY_AGAIN_S)
    choice.transport(EVERYWHERE, TIMEOUT_S)
    assert kinds["shm"].opened == ["s", "s"]


def test_no_way_is_none(kinds: dict[str, Kind]) -> None:
    kinds["tcp"].dead = {"t"}
    choice = chosen(["tcp"])
    assert choice.transport(EVERYWHERE, TIMEOUT_S) is None
    assert choice.rank(EVERYWHERE, TIMEOUT_S) is None


def test_what_a_worker_may_have_open_outlives_a_transport(kinds: dict[str, Kind]) -> None:
    choice = chosen(["tcp"])
    for _ in range(2):
        opened = choice.transport(EVERYWHERE, TIMEOUT_S)
        assert opened is not None
        choice.drop(opened)
    choice.transport(ref(("tcp", "another", 0)), TIMEOUT_S)
    first, again, another = kinds["tcp"].left
    assert first is again
    assert first is not another


def test_a_dropped_transport_is_closed_and_opened_anew(kinds: dict[str, Kind]) -> None:
    choice = chosen(["tcp"])
    first = choice.transport(EVERYWHERE, TIMEOUT_S)
    assert isinstance(first, LoopbackTransport)
    choice.drop(first)
    assert first.closed
    second = choice.transport(EVERYWHERE, TIMEOUT_S)
    assert second is not first
    choice.drop(first)
    assert choice.transport(EVERYWHERE, TIMEOUT_S) is second
    assert kinds["tcp"].opened == ["t", "t"]


def test_after_closing_nothing_is_opened(kinds: dict[str, Kind]) -> None:
    choice = chosen(["tcp"])
    transport = choice.transport(EVERYWHERE, TIMEOUT_S)
    assert isinstance(transport, LoopbackTransport)
    choice.close()
    choice.close()
    assert transport.closed
    assert choice.transport(EVERYWHERE, TIMEOUT_S) is None
    assert kinds["tcp"].opened == ["t"]


def test_configured_transports_must_be_there(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match="at least one"):
        chosen([])
    with pytest.raises(ConfigError, match="'pigeon' is unknown, want any of"):
        chosen(["shm", "pigeon"])
    monkeypatch.setitem(choice_module.BUILT_IN, "broken", "kvstore.no_such_module")
    with pytest.raises(ConfigError, match="transport broken: cannot be loaded"):
        chosen(["broken"])


@pytest.mark.parametrize("name", ["shm", "tcp"])
def test_built_in_transports_load(name: str) -> None:
    assert hasattr(load_kind(name), "open_transport")


def test_a_transport_that_is_avoided_is_not_opened_again_for_a_while(
    kinds: dict[str, Kind],
) -> None:
    clock = ManualClock()
    choice = chosen(["tcp", "extra"], clock)
    both = ref(("tcp", "t", 0), ("extra", "e", 0))
    silent = choice.transport(both, TIMEOUT_S)
    assert silent is not None
    choice.avoid(silent)
    assert choice.transport(both, TIMEOUT_S) is not silent
    assert (kinds["tcp"].opened, kinds["extra"].opened) == (["t"], ["e"])
    clock.advance(TRY_AGAIN_S)
    choice.transport(both, TIMEOUT_S)
    assert kinds["tcp"].opened == ["t", "t"]
