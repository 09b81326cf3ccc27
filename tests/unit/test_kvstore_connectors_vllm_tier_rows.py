"""Rows between vLLM's CPU tier and the pool: the right bytes in the right places, or told missing.

Threads are real; a test waits for them with `drain`, or by the answer that it waits for.
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any

import pytest

from kvstore.client.locations import Found, Piece
from kvstore.client.outcomes import MissReason, RefusedReason
from kvstore.connectors.engine_lookups import MEMO_S
from kvstore.connectors.engine_pool import EnginePool
from kvstore.connectors.vllm import tier_rows
from kvstore.connectors.vllm.tier_rows import Ended, TierRows
from kvstore.errors import Unavailable
from kvstore.namespace import opaque
from kvstore.page import engine_key
from kvstore.wire.messages.reads import Located, LocatedCopy, LocatedRun
from tests.fakes import ManualClock
from tests.unit.engine_store import EngineFakeStore

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from kvstore.client.namespaces import OpenedNamespace
    from kvstore.client.outcomes import PutOutcome
    from kvstore.page import PageChain

pytestmark = pytest.mark.usefixtures("leases_end_at_once")
ROWS, ROW = 16, 64
NAMESPACE = opaque("t", "rows of an engine")
KEYS = [bytes([i]) * 36 for i in range(1, 9)]


def pool_key(key: bytes) -> bytes:
    return bytes(engine_key(NAMESPACE.id, key))


class RowStore(EngineFakeStore):
    """One that puts from any memory, as a store does, and says how large what it found is."""

    def __init__(self) -> None:
        super().__init__()
        self.found_bytes = ROW
        self.on_put: Callable[[], None] = lambda: None

    def lookup(
        self,
        opened: OpenedNamespace,
        chain: PageChain,
        **more: Any,  # noqa: ANN401 -- handed on
    ) -> Found:
        found = super().lookup(opened, chain, **more)
        copy = LocatedCopy(0, 0, self.found_bytes, b"", b"", b"")
        located = Located(1, 10.0, (), (LocatedRun(0, len(chain), (copy,)),))
        return Found(opened, chain, (), (Piece(0, located, None, 0.0),), found.readable)

    def put_objects(  # type: ignore[override]  # engines say other things of a put
        self,
        opened: OpenedNamespace,
        names: PageChain,
        source: object,
        offsets: Sequence[int],
        size_bytes: int,
        *,
        wait: bool = True,
        timeout_s: float | None = None,
    ) -> list[PutOutcome]:
        del wait, timeout_s
        self.on_put()
        assert isinstance(source, memoryview)
        buffer = self.buffer(len(source))
        buffer.view[:] = source
        return super().put_objects(opened, names, buffer, offsets, size_bytes)


class Tier:
    """A tier of some rows, each with bytes of its own."""

    def __init__(self, store: RowStore | None = None, save_bytes_max: int = ROWS * ROW) -> None:
        self.store = store or RowStore()
        self.memory = bytearray(b"".join(bytes([100 + i]) * ROW for i in range(ROWS)))
        self.view = memoryview(self.memory).cast("B", (ROWS, ROW))
        self.clock = ManualClock()
        self.pool = EnginePool(lambda: self.store, [NAMESPACE], self.clock)
        self.rows = TierRows(
            self.view, self.pool, self.clock,
            timeout_s=1.0, deadline_s=0.02, save_bytes_max=save_bytes_max,
        )  # fmt: skip

    def row(self, number: int) -> bytes:
        return bytes(self.memory[number * ROW : (number + 1) * ROW])

    def save(self, keys: Sequence[bytes], chunks: Sequence[int]) -> Ended:
        self.rows.save(1, keys, chunks)
        return self.ended()

    def load(self, keys: Sequence[bytes], chunks: Sequence[int]) -> Ended:
        self.rows.load(2, keys, chunks)
        return self.ended()

    def ended(self) -> Ended:
        self.rows.drain()
        (ended,) = self.rows.ended()
        return ended

    def are_there(self, *keys: bytes, request: str = "r") -> list[bool | None]:
        """What the request is told once the pool has answered what the step asked for."""
        for key in keys:
            self.rows.is_there(request, key)
        self.rows.step_ended()
        answered = threading.Event()
        self.rows._asking.run(answered.set)  # noqa: SLF001 -- the only way to wait for an answer
        assert answered.wait(30.0)
        return [self.rows.is_there(request, key) for key in keys]


@pytest.fixture
def tier() -> Iterator[Tier]:
    """One whose threads end with the test."""
    made = Tier()
    yield made
    made.rows.close()
    made.view.release()


def test_rows_are_found_by_a_question_a_step_and_come_to_the_places_asked_for(tier: Tier) -> None:
    saved = tier.save(KEYS[:3], [4, 9, 2])
    assert (saved.became, saved.good) == (("saved_rows",) * 3, tuple(KEYS[:3]))
    assert [tier.rows.is_there("r", key) for key in KEYS[:4]] == [None] * 4
    assert tier.are_there(*KEYS[:4]) == [True, True, True, False]
    assert tier.rows.totals["lookups"] == 1
    loaded = tier.load(KEYS[:3], [0, 1, 15])
    assert (loaded.job, loaded.is_load, loaded.good) == (2, True, tuple(KEYS[:3]))
    assert [tier.row(i)[0] for i in (0, 1, 15, 3)] == [104, 109, 102, 103]
    assert tier.rows.totals["loaded_bytes"] == tier.rows.totals["saved_bytes"] == 3 * ROW
    tier.rows.request_ended("r")
    assert tier.rows.open_rows == 0


def test_many_rows_are_moved_by_a_few_calls(tier: Tier, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tier_rows, "PIECE_BYTES", 3 * ROW)
    assert tier.save(KEYS, range(8)).became == ("saved_rows",) * 8
    assert len(tier.store.heard) == 3
    assert tier.load(KEYS, range(8, 16)).good == tuple(KEYS)
    assert [tier.row(i)[0] for i in range(8, 16)] == list(range(100, 108))


def test_a_row_that_does_not_come_is_told_and_never_promised_to_its_request_again(
    tier: Tier,
) -> None:
    tier.save(KEYS[:4], range(4))
    assert tier.are_there(*KEYS[:4]) == [True] * 4
    tier.store.spoil[pool_key(KEYS[1])] = MissReason.CHECKSUM
    tier.store.lose(pool_key(KEYS[2]))
    loaded = tier.load(KEYS[:4], range(8, 12))
    assert loaded.good == (KEYS[0], KEYS[3])
    assert [tier.row(i)[0] for i in range(8, 12)] == [100, 109, 110, 103]
    assert tier.rows.totals["failed_load_rows"] == 2
    tier.store.spoil.clear()
    assert tier.are_there(*KEYS[:4]) == [True, False, False, True]


def leased_rows(tier: Tier) -> int:
    """How many are leased; what the asking thread has been told is taken in first."""
    tier.rows.is_there("nobody", KEYS[-1])
    tier.rows.request_ended("nobody")
    return tier.store.pages_leased


def test_what_was_leased_is_given_back_when_it_came_or_its_last_request_has_gone(
    tier: Tier,
) -> None:
    tier.save(KEYS[:4], range(4))
    assert tier.are_there(*KEYS[:2]) == [True, True]
    assert tier.are_there(*KEYS[2:4], request="other") == [True, True]
    assert tier.are_there(KEYS[2], request="third") == [True]
    assert leased_rows(tier) == 4
    tier.load(KEYS[:2], [8, 9])
    assert leased_rows(tier) == 2
    tier.rows.request_ended("other")
    assert leased_rows(tier) == 2, "the third still wants one of these, and leases go together"
    tier.rows.request_ended("third")
    assert leased_rows(tier) == 0
    # It was found, and is so no more: it is asked for anew before it is promised.
    assert tier.rows.is_there("r", KEYS[0]) is None


def test_an_answer_that_nobody_waits_for_any_more_is_given_back(tier: Tier) -> None:
    tier.save(KEYS[:1], [0])
    tier.rows.is_there("r", KEYS[0])
    tier.rows.step_ended()
    tier.rows.request_ended("r")
    assert tier.are_there(KEYS[0], request="later") == [True]
    assert leased_rows(tier) == 1
    tier.rows.request_ended("later")
    assert leased_rows(tier) == 0


def test_a_row_that_is_asked_for_anew_is_leased_once(tier: Tier) -> None:
    tier.save(KEYS[:1], [0])
    assert tier.are_there(KEYS[0]) == [True]
    tier.clock.advance(MEMO_S + 1)
    assert tier.are_there(KEYS[0]) == [True]
    assert leased_rows(tier) == 1


def test_what_is_there_already_or_refused_is_no_trouble(tier: Tier) -> None:
    tier.save(KEYS[:1], [0])
    tier.store.refuse[pool_key(KEYS[1])] = RefusedReason.OUT_OF_SPACE
    saved = tier.save(KEYS[:3], [5, 6, 7])
    assert saved.became == ("known_rows", "refused_rows", "saved_rows")
    assert saved.good == (KEYS[0], KEYS[2])
    assert tier.pool.is_worth_asking


@pytest.mark.parametrize("call", ["lookup", "read"])
def test_a_pool_in_trouble_is_a_miss_at_once(tier: Tier, call: str) -> None:
    tier.save(KEYS[:2], [0, 1])
    assert tier.are_there(*KEYS[:2]) == [True, True]
    tier.store.fail[call] = Unavailable("the pool has gone")
    assert tier.load(KEYS[:1], [8]).became == ("failed_load_rows",)
    assert tier.row(8)[0] == 108
    # Neither what is known nor what is not is worth a wait, and nothing is worth a copy.
    assert [tier.rows.is_there("other", key) for key in KEYS[:3]] == [False] * 3
    assert tier.save(KEYS[2:4], [2, 3]).became == ("dropped_rows",) * 2
    assert tier.rows.totals["circuit_opened"] == 1


def test_a_save_that_fails_lets_go_of_its_rows(tier: Tier) -> None:
    tier.store.fail["put_objects"] = Unavailable("the pool has gone")
    saved = tier.save(KEYS, range(8))
    assert (saved.good, saved.became) == ((), ("failed_save_rows",) * 8)


def test_saves_leave_half_of_the_memory_to_others() -> None:
    tier = Tier()
    keys = [bytes([i]) * 36 for i in range(ROWS)]
    tier.rows.save(1, keys[:6], range(6))
    tier.rows.save(2, keys[6:], range(6, 16))
    tier.rows.save(3, KEYS[:1], [0])
    tier.rows.drain()
    assert {each.job: each.became for each in tier.rows.ended()} == {
        1: ("saved_rows",) * 6,
        2: ("saved_rows",) * 2 + ("dropped_rows",) * 8,
        3: ("dropped_rows",),
    }
    assert tier.save(KEYS[:1], [0]).good == (KEYS[0],)  # there is room again
    tier.rows.close()


def test_no_save_is_kept_where_there_is_to_be_no_room_for_any() -> None:
    tier = Tier(save_bytes_max=ROW - 1)
    assert tier.save(KEYS[:1], [0]).became == ("dropped_rows",)
    tier.rows.close()


def test_an_object_of_another_size_is_not_let_into_the_memory(tier: Tier) -> None:
    """Only a faulty writer of the same namespace can have put one."""
    tier.save(KEYS[:1], [0])
    tier.store.found_bytes = 2 * ROW
    assert tier.load(KEYS[:1], [8]).became == ("failed_load_rows",)
    assert tier.row(8)[0] == 108
    tier.store.found_bytes = ROW
    assert tier.load(KEYS[:1], [8]).became == ("loaded_rows",)


def test_closing_ends_what_goes_on_and_lets_go_of_the_memory(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(tier_rows, "PIECE_BYTES", ROW)
    tier = Tier()

    def closing() -> None:
        tier.rows._is_closing = True  # noqa: SLF001 -- as close, which waits for this call

    tier.store.on_put = closing
    tier.rows.save(1, KEYS[:3], [0, 1, 2])
    tier.rows.drain()
    tier.rows.close()
    tier.rows.close()
    (ended,) = tier.rows.ended()
    assert ended.became == ("saved_rows", "failed_save_rows", "failed_save_rows")
    assert tier.store.closed
    tier.view.release()
    tier.memory.extend(b"refused while anything of it is exported")
    tier.rows.load(2, KEYS[:1], [0])
    assert [each.became for each in tier.rows.ended()] == [("dropped_rows",)]
