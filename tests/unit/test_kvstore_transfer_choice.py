"""Which transport is chosen, when it is opened, and what happens after a failure."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

import pytest

from kvstore.errors import ConfigError, Unavailable
from kvstore.limits import READ_STALL_MAX_S
from kvstore.rpc.identity import Identity, Role
from kvstore.segment import Geometry
from kvstore.transfer import choice as choice_module
from kvstore.transfer.choice import LAST_RESORT_S, TRY_AGAIN_S, Choice, load_kind
from kvstore.transfer.transport import ReadSpan
from kvstore.wire.messages.common import Address, Outcome, SegmentRef
from tests.fakes import LoopbackTransport, ManualClock

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from kvstore.transfer.context import TransferContext
    from kvstore.transfer.device import Block

TIMEOUT_S = 1.0
PATIENCE_S = 10.0


class Kind:
    """A kind of transport whose addresses can be made unreachable."""

    def __init__(self) -> None:
        self.dead: set[str] = set()
        self.opened: list[str] = []
        self.left: list[dict[int, Block]] = []
        self.made: list[LoopbackTransport] = []
        self.on_open: Callable[[], object] = lambda: None

    def require(self) -> None:
        """Usable."""

    def open_transport(self, context: TransferContext, timeout_s: float) -> LoopbackTransport:
        """Open, or refuse."""
        assert timeout_s <= TIMEOUT_S
        self.opened.append(context.address.where)
        self.left.append(context.left)
        self.on_open()
        if context.address.where in self.dead:
            raise Unavailable("nobody there")
        self.made.append(LoopbackTransport())
        return self.made[-1]


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


def test_a_silent_worker_is_a_last_resort_that_ranking_does_not_wait_for(
    kinds: dict[str, Kind],
) -> None:
    clock = ManualClock()
    choice = chosen(["shm", "tcp"], clock)
    near, far = ref(("shm", "near", 0)), ref(("tcp", "far", 1 << 40), tier="of the future")
    silent = choice.transport(near, TIMEOUT_S)
    assert silent is not None
    choice.avoid(silent)
    assert choice.rank(near, TIMEOUT_S) is None  # yet: it would stall once more
    clock.advance(TRY_AGAIN_S)
    ranks = [choice.rank(near, TIMEOUT_S), choice.rank(far, TIMEOUT_S)]
    assert ranks == sorted(ranks, key=lambda rank: -(rank or 0))
    assert kinds["shm"].opened == ["near"]
    clock.advance(LAST_RESORT_S - TRY_AGAIN_S)
    ranks = [choice.rank(near, TIMEOUT_S), choice.rank(far, TIMEOUT_S)]
    assert ranks == sorted(ranks, key=lambda rank: rank or 0)
    assert kinds["shm"].opened == ["near"] * 2


def test_a_last_resort_that_answered_is_as_good_as_before(kinds: dict[str, Kind]) -> None:
    del kinds
    clock = ManualClock()
    choice = chosen(["tcp"], clock)
    place = ref(("tcp", "t", 0))
    before = choice.rank(place, TIMEOUT_S)
    silent = choice.transport(place, TIMEOUT_S)
    assert silent is not None
    choice.avoid(silent)
    clock.advance(TRY_AGAIN_S)
    assert choice.rank(place, TIMEOUT_S) != before
    assert choice.transport(place, TIMEOUT_S) is not None
    assert choice.rank(place, TIMEOUT_S) == before


@pytest.mark.parametrize(("took_s", "is_last"), [(0.1, False), (READ_STALL_MAX_S, True)])
def test_who_does_not_answer_a_dial_is_silent_and_who_refuses_is_not(
    kinds: dict[str, Kind], took_s: float, is_last: bool
) -> None:
    clock = ManualClock()
    choice = chosen(["tcp"], clock)
    place = ref(("tcp", "t", 0))
    kinds["tcp"].dead = {"t"}
    kinds["tcp"].on_open = lambda: clock.advance(took_s)
    assert choice.rank(place, TIMEOUT_S) is None
    clock.advance(TRY_AGAIN_S)
    choice.rank(place, TIMEOUT_S)
    assert len(kinds["tcp"].opened) == (1 if is_last else 2)


def test_a_way_of_some_kinds_is_ranked_alone(kinds: dict[str, Kind]) -> None:
    choice = chosen(["shm", "tcp"])
    shm = frozenset({"shm"})
    assert choice.rank(EVERYWHERE, TIMEOUT_S, shm) == choice.rank(EVERYWHERE, TIMEOUT_S)
    assert choice.rank(ref(("tcp", "t", 0)), TIMEOUT_S, shm) is None
    assert kinds["tcp"].opened == []


def test_nobody_waits_for_the_dialling_of_an_address_that_he_does_not_want(
    kinds: dict[str, Kind],
) -> None:
    choice = chosen(["tcp", "extra"])
    slow, other = ref(("tcp", "slow", 0)), ref(("extra", "other", 0))
    others: list[object] = []

    def elsewhere() -> None:
        thread = threading.Thread(
            target=lambda: others.append(choice.transport(other, TIMEOUT_S)), daemon=True
        )
        thread.start()
        thread.join(PATIENCE_S)

    kinds["tcp"].on_open = elsewhere
    assert choice.transport(slow, TIMEOUT_S) is not None
    assert len(others) == 1


def test_what_is_opened_while_the_store_closes_is_closed(kinds: dict[str, Kind]) -> None:
    choice = chosen(["tcp"])
    kinds["tcp"].on_open = choice.close
    assert choice.transport(EVERYWHERE, TIMEOUT_S) is None
    (made,) = kinds["tcp"].made
    assert made.closed


def span_of(segment: SegmentRef, pages: int = 2) -> ReadSpan:
    return ReadSpan(
        segment, 0, 4096, bytes(32 * pages), bytes(8 * pages), bytes(8 * pages), bytes(8 * pages),
        tuple(range(0, 4096 * pages, 4096)),
    )  # fmt: skip


OK, GONE = bytes(1), bytes([Outcome.TRANSPORT])


@pytest.mark.parametrize(
    ("outcomes", "took_s", "opened"),
    [
        (OK + OK, READ_STALL_MAX_S, 1),
        (OK + GONE, 0.1, 1),  # that connection is closed; others may be good
        (GONE + GONE, 0.1, 2),
        (bytes([Outcome.STALE]) * 2, READ_STALL_MAX_S, 1),
    ],
)
def test_a_transport_that_moved_nothing_is_opened_anew(
    kinds: dict[str, Kind], outcomes: bytes, took_s: float, opened: int
) -> None:
    choice = chosen(["tcp"])
    place = ref(("tcp", "t", 0))
    way = choice.transport(place, TIMEOUT_S)
    assert way is not None
    choice.note_read(way, span_of(place), outcomes, took_s)
    assert choice.transport(place, TIMEOUT_S) is not None
    assert len(kinds["tcp"].opened) == opened


@pytest.mark.parametrize("outcomes", [GONE + GONE, OK + GONE])
def test_a_worker_that_fell_silent_is_avoided_also_in_the_middle_of_a_read(
    kinds: dict[str, Kind], outcomes: bytes
) -> None:
    choice = chosen(["tcp"])
    place = ref(("tcp", "t", 0))
    way = choice.transport(place, TIMEOUT_S)
    assert way is not None
    choice.note_read(way, span_of(place), outcomes, READ_STALL_MAX_S)
    assert choice.transport(place, TIMEOUT_S) is None
    assert len(kinds["tcp"].opened) == 1


def test_replicas_of_one_rank_are_told_apart_by_what_reads_took() -> None:
    choice = chosen(["tcp"])
    slow = SegmentRef("s1", 1, "dram", Geometry(1 << 26), "slow", "h", ())
    fast = SegmentRef("s2", 1, "dram", Geometry(1 << 26), "fast", "h", ())
    way = LoopbackTransport()
    for _ in range(10):
        choice.note_read(way, span_of(slow), OK + OK, 0.003)
        choice.note_read(way, span_of(fast), OK + OK, 0.001)
    assert choice.order([slow, fast]) == [1, 0]
    for _ in range(10):
        choice.note_read(way, span_of(fast), GONE + GONE, 0.0)
    assert choice.order([slow, fast]) == [0, 1]
