"""The prefix layer against a store in a dict: which pages move, and which never do."""

from __future__ import annotations

import os
import threading
from typing import TYPE_CHECKING

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstore import errors
from kvstore.client import staging
from kvstore.client.outcomes import MissReason, RefusedReason
from kvstore.client.prefix import Fetched, Kept
from kvstore.hints import Hints
from tests.fake_store import FakeStore
from tests.prefix_engine import TOKENS, Engine, text

if TYPE_CHECKING:
    from collections.abc import Iterator

    from kvstore.client.prefix import CopyPages


@pytest.fixture
def store() -> Iterator[FakeStore]:
    made = FakeStore()
    yield made
    for buffer in made.buffers:
        buffer.close()


@pytest.mark.parametrize("length", range(3 * TOKENS + 2))
def test_only_full_pages_are_stored_and_the_last_token_is_left(
    store: FakeStore, length: int
) -> None:
    engine = Engine(store)
    kept = engine.store(text(length))
    assert kept == Kept(length // TOKENS, 0, length // TOKENS * engine.page_bytes)
    assert len(store.held) == length // TOKENS
    fetched = engine.fetch(text(length))
    assert fetched.pages == max(0, length - 1) // TOKENS
    assert fetched.trouble == ""


@given(st.integers(1, 40), st.integers(1, 40), st.integers(0, 40), st.integers(1, 7))
def test_the_shared_prefix_is_what_comes_back(
    stored: int, asked: int, common: int, batch_pages: int
) -> None:
    store = FakeStore()
    engine = Engine(store, batch_pages)
    engine.store(text(stored))
    other = text(asked)[:common] + text(asked, salt=7)[common:]
    shared = min(common, stored, asked)
    # The last token is always computed, so a page that ends with it does not count.
    want = min(shared // TOKENS, (asked - 1) // TOKENS)
    assert engine.fetch(other).pages == want
    engine.prefix.close()


@pytest.mark.parametrize("pipeline", [1, 2])
def test_pages_of_several_parts_and_batches_come_back_whole(
    store: FakeStore, pipeline: int
) -> None:
    engine = Engine(store, batch_pages=2, pipeline=pipeline)
    assert len(engine.opened.namespace.parts) == pipeline
    assert engine.store(text(7 * TOKENS)).stored == 7
    assert len(store.held) == 7 * pipeline
    assert engine.fetch(text(7 * TOKENS + 1)).pages == 7


def test_a_page_is_stored_once_and_longer_texts_add_their_own(store: FakeStore) -> None:
    engine = Engine(store)
    assert engine.store(text(2 * TOKENS)).stored == 2
    assert engine.store(text(2 * TOKENS)) == Kept(0, 2)
    assert engine.store(text(5 * TOKENS)) == Kept(3, 2, 3 * engine.page_bytes)
    assert set(store.puts.values()) == {1}


def test_identical_prompts_at_once_are_stored_once(store: FakeStore) -> None:
    engine = Engine(store, batch_pages=2)
    start = threading.Barrier(4)
    kept: list[Kept] = []

    def run() -> None:
        start.wait()
        kept.append(engine.store(text(9 * TOKENS)))

    threads = [threading.Thread(target=run) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [each.stored + each.present for each in kept] == [9] * 4
    assert sum(each.stored for each in kept) == 9
    assert set(store.puts.values()) == {1}
    assert engine.fetch(text(9 * TOKENS + 1)).pages == 9


def test_nothing_is_asked_for_a_text_without_pages(store: FakeStore) -> None:
    store.fail = dict.fromkeys(("match_prefix", "read", "put_parts", "buffer"), errors.Fenced())
    engine = Engine(store)
    assert engine.fetch(text(TOKENS)) == Fetched()
    assert engine.store(text(TOKENS - 1)) == Kept()
    assert engine.fetch([]) == Fetched()


def test_a_page_that_does_not_come_ends_the_prefix(store: FakeStore) -> None:
    engine = Engine(store, batch_pages=2)
    engine.store(text(6 * TOKENS))
    chain = engine.opened.chain(text(6 * TOKENS))
    store.spoil[chain.key(3)] = MissReason.CHECKSUM
    fetched = engine.fetch(text(6 * TOKENS + 1))
    assert (fetched.pages, fetched.trouble) == (3, "checksum")


def test_a_part_that_does_not_come_ends_the_prefix(store: FakeStore) -> None:
    engine = Engine(store, batch_pages=8, pipeline=2)
    engine.store(text(6 * TOKENS))
    chain = engine.opened.chain(text(6 * TOKENS))
    whole = store.read

    def read(*args: object, part: int = 0) -> list[object]:
        if part == 1:
            store.spoil[chain.key(4)] = MissReason.LEASE_ENDED
        return list(whole(*args, part=part))  # type: ignore[arg-type]  # handed through unchanged

    store.read = read  # type: ignore[method-assign,assignment]  # watches which part is read
    fetched = engine.fetch(text(6 * TOKENS + 1))
    assert (fetched.pages, fetched.trouble) == (4, "lease_ended")


def test_pages_evicted_between_batches_end_the_prefix(store: FakeStore) -> None:
    engine = Engine(store, batch_pages=2)
    engine.store(text(6 * TOKENS))
    chain = engine.opened.chain(text(6 * TOKENS))
    whole = store.match_prefix
    asked: list[int] = []

    def match_prefix(*args: object, hints: Hints | None = None) -> object:
        asked.append(1)
        if len(asked) == 2:
            store.lose(chain.key(3))
        return whole(*args, hints=hints)  # type: ignore[arg-type]  # handed through unchanged

    store.match_prefix = match_prefix  # type: ignore[method-assign,assignment]  # evicts midway
    fetched = engine.fetch(text(6 * TOKENS + 1))
    assert (fetched.pages, fetched.trouble) == (3, "evicted meanwhile")


def test_hints_go_with_every_question_and_put(store: FakeStore) -> None:
    engine, hints = Engine(store, batch_pages=2), Hints(turn=3)
    tokens = text(4 * TOKENS + 1)
    engine.prefix.store(tokens, engine.pack(tokens), hints=hints)
    engine.prefix.fetch(tokens, lambda _: lambda *_: None, hints=hints)
    assert [each[2] for each in store.heard] == [hints] * 4  # two batches each


def test_the_end_of_a_session_is_a_hint_for_its_whole_chain(store: FakeStore) -> None:
    engine, closed = Engine(store), Hints(session_closed=True)
    engine.prefix.hint(text(3 * TOKENS + 1), closed)
    assert store.heard == [(engine.opened.chain(text(3 * TOKENS)), False, closed)]
    store.fail["hint"] = errors.Unavailable("no master")
    engine.prefix.hint(text(TOKENS), closed)
    store.fail["hint"] = errors.LayoutMismatch("wrong")
    with pytest.raises(errors.LayoutMismatch):
        engine.prefix.hint(text(TOKENS), closed)


@pytest.mark.parametrize("call", ["match_prefix", "read", "buffer"])
def test_a_pool_in_trouble_is_a_miss(store: FakeStore, call: str) -> None:
    engine = Engine(store)
    engine.store(text(2 * TOKENS))
    engine.prefix.close()
    store.fail[call] = errors.Unavailable("no master")
    assert engine.fetch(text(2 * TOKENS + 1)) == Fetched(trouble="unavailable: no master")


@pytest.mark.parametrize("call", ["probe", "put_parts", "buffer"])
def test_a_pool_in_trouble_stores_nothing(store: FakeStore, call: str) -> None:
    store.fail[call] = errors.OutOfSpace("full")
    assert Engine(store).store(text(2 * TOKENS)) == Kept(trouble="out_of_space: full")


@pytest.mark.parametrize("call", ["probe", "put_parts", "match_prefix", "read"])
def test_a_callers_mistake_is_raised(store: FakeStore, call: str) -> None:
    engine = Engine(store)
    engine.store(text(TOKENS))
    store.fail[call] = errors.UnknownNamespace("never opened")
    use = engine.fetch if call in {"match_prefix", "read"} else engine.store
    with pytest.raises(errors.UnknownNamespace):
        use(text(2 * TOKENS))


def test_tokens_that_no_page_can_hold_are_refused(store: FakeStore) -> None:
    engine = Engine(store)
    with pytest.raises(errors.BadValue, match="tokens"):
        engine.prefix.fetch([-1] * (TOKENS + 1), lambda _: engine.pack([]))
    with pytest.raises(errors.BadValue, match="tokens"):
        engine.prefix.store([1 << 32] * TOKENS, engine.pack([]))


def test_a_refused_page_ends_the_store(store: FakeStore) -> None:
    engine = Engine(store, batch_pages=2)
    chain = engine.opened.chain(text(6 * TOKENS))
    store.refuse[chain.key(3)] = RefusedReason.OUT_OF_SPACE
    kept = engine.store(text(6 * TOKENS))
    assert kept == Kept(3, 0, 3 * engine.page_bytes, "out_of_space")
    assert len(store.held) == 3


def test_pages_evicted_after_the_probe_are_stored_again(store: FakeStore) -> None:
    engine = Engine(store)
    engine.store(text(2 * TOKENS))
    store.evict_after_probe = list(engine.opened.chain(text(2 * TOKENS)))
    kept = engine.store(text(4 * TOKENS))
    assert (kept.stored, kept.present, kept.trouble) == (4, 0, "")
    store.evict_after_probe = []
    assert engine.fetch(text(4 * TOKENS + 1)).pages == 4


def test_staging_buffers_are_reused_and_bounded(store: FakeStore) -> None:
    engine = Engine(store)
    for _ in range(5):
        engine.store(text(3 * TOKENS))
        engine.fetch(text(3 * TOKENS + 1))
    assert len(store.buffers) == 1
    assert store.buffers[0].size_bytes == 3 * engine.page_bytes
    engine.prefix.close()
    assert store.buffers[0].closed


def test_surplus_staging_is_closed(store: FakeStore) -> None:
    calls = staging.IDLE_MAX + 2
    engine = Engine(store)
    engine.store(text(TOKENS))
    together = threading.Barrier(calls)

    def begin(pages: int) -> CopyPages:
        assert pages == 1

        def unpack(first: int, count: int, memory: memoryview) -> None:
            assert (first, count, memory.nbytes) == (0, 1, engine.page_bytes)
            together.wait()  # Every call holds a buffer at this moment.

        return unpack

    threads = [
        threading.Thread(target=engine.prefix.fetch, args=(text(TOKENS + 1), begin))
        for _ in range(calls)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sum(not buffer.closed for buffer in store.buffers) == staging.IDLE_MAX


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")  # 3.12: other tests' threads
def test_a_forked_child_uses_buffers_of_its_own(store: FakeStore) -> None:
    engine = Engine(store)
    engine.store(text(2 * TOKENS))
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            code = 0 if engine.fetch(text(2 * TOKENS + 1)).pages == 2 else 2
        finally:
            os._exit(code)
    assert os.waitpid(pid, 0)[1] == 0
    assert len(store.buffers) == 1


def test_namespaces_do_not_share_pages(store: FakeStore) -> None:
    engine = Engine(store)
    engine.store(text(2 * TOKENS))
    other = Engine(store, pipeline=2)
    assert other.opened.namespace.id != engine.opened.namespace.id
    assert other.fetch(text(2 * TOKENS + 1)) == Fetched()
