"""Leases that are given back: with the last who wants them, never another's, or not at all."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvstore.connectors.engine_pool import EnginePool
from kvstore.connectors.leases import KEPT_S, LeaseBook, Leases
from kvstore.errors import BadValue
from tests.fakes import ManualClock
from tests.unit.engine_store import EngineFakeStore

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvstore.connectors.engine_pool import Reached

A, B, C = b"a", b"b", b"c"


def took(book: LeaseBook, *holders: object, names: Sequence[bytes] = (A,), at_s: float = 0) -> int:
    number = book.number()
    book.took(number, holders, names, at_s)
    return number


def test_leases_of_a_lookup_end_together_with_the_last_who_wants_any_of_them() -> None:
    book = LeaseBook()
    number = took(book, A, B, names=(A, B, C))
    assert book.let_go([A, "nobody"]) == {}
    assert book.let_go([A]) == {}
    assert book.let_go([B]) == {number: (A, B, C)}
    assert len(book) == 0


def test_who_was_promised_twice_lets_go_of_the_older_first() -> None:
    book = LeaseBook()
    first, second = took(book, A), took(book, A)
    assert first != second
    assert book.let_go([A]) == {first: (A,)}
    assert book.let_go([A]) == {second: (A,)}
    assert book.let_go([A]) == {}


def test_leases_that_have_lapsed_are_forgotten_and_the_younger_are_not() -> None:
    book = LeaseBook()
    took(book, A, B)
    younger = took(book, A, at_s=1)
    last = took(book, C, at_s=KEPT_S)
    assert len(book) == 2
    assert book.let_go([A, B, C]) == {younger: (A,), last: (A,)}


def reached(store: EngineFakeStore) -> EnginePool:
    """A pool that has been asked for something before: else nothing can be leased."""
    pool = EnginePool(lambda: store, [], ManualClock())
    pool.call("a lookup", lambda _: None, None)
    return pool


def told(pool: EnginePool) -> tuple[Leases, list[tuple[int, Sequence[bytes]]]]:
    heard: list[tuple[int, Sequence[bytes]]] = []

    def give_back(_: Reached, names: Sequence[bytes], number: int) -> None:
        heard.append((number, names))

    return Leases(pool, ManualClock(), give_back), heard


def test_the_pool_is_told_beside_those_who_let_go() -> None:
    leases, heard = told(reached(EngineFakeStore()))
    first, second, third = [leases.number() for _ in range(3)]
    leases.took(first, ["r"], [A])
    leases.took(second, [], [B])
    leases.took(third, [], [])
    leases.let_go(["r"])
    with leases.reading([C]) as number:
        pass
    leases.close()
    assert heard == [(second, [B]), (first, [A]), (number, [C])]
    leases.let_go(["r"])
    leases.close()


def test_what_cannot_be_given_back_lapses_and_harms_nobody() -> None:
    pool = reached(EngineFakeStore())

    def refuse(*_: object) -> None:
        raise BadValue("lease_id", 0, "another")

    leases = Leases(pool, ManualClock(), refuse)
    leases.took(leases.number(), [], [A])
    leases.close()
    assert pool.is_worth_asking
