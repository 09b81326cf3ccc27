"""Bad input, damage and death, as a program with a real pool meets them."""

from __future__ import annotations

import os
import signal
import time
import warnings
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
import numpy as np
import pytest

from kvstore import (
    AccessDenied,
    BadValue,
    BufferClosed,
    ConfigError,
    Hit,
    KVStore,
    KVStoreError,
    Miss,
    MissReason,
    Refused,
    RefusedReason,
    Stored,
    Unavailable,
)
from kvstore.client.namespaces import OpenedNamespace
from kvstore.namespace import open_layout
from kvstore.page import PageChain
from kvstore.transfer.transport import column
from tests.cluster.pages import SIZE, Pages, content
from tests.cluster.transports import every_transport
from tests.cluster.up import Up, remove_segments
from tests.fakes import payload

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from kvstore.client.locations import Locations

pytestmark = [pytest.mark.cluster, pytest.mark.slow]


@pytest.fixture
def own(own_pool: Up, transport: str) -> Iterator[Pages]:
    """A store on a pool of this test's own."""
    with Pages(own_pool.master, transport, "own") as made:
        yield made


def file_offset(locations: Locations, page: int) -> int:
    """Where a page's first byte lies in its segment file."""
    (piece,) = locations.pieces
    for run in piece.located.runs:
        if run.first <= page < run.first + run.count:
            copy = run.copies[0]
            geometry = piece.located.segments[copy.segment].geometry
            return geometry.payload_base + column(copy.offsets)[page - run.first]
    raise AssertionError(page)


def segment_file(up: Up) -> Path:
    return max(Path(up.ready["segment_dir"]).iterdir(), key=lambda path: path.stat().st_size)


def flip(path: Path, offset: int) -> None:
    with path.open("r+b") as file:
        file.seek(offset)
        (byte,) = file.read(1)
        file.seek(offset)
        file.write(bytes([byte ^ 1]))


# Reaching a pool.


def test_nobody_at_the_masters_address() -> None:
    started_s = time.monotonic()
    with pytest.raises(Unavailable, match=r"127\.0\.0\.1:1"):
        KVStore.connect("127.0.0.1:1", timeout_s=0.5)
    assert time.monotonic() - started_s < 2


def test_something_else_at_the_masters_address(shared_pool: Up) -> None:
    # The worker's port: a listener of ours, but no master.
    with pytest.raises(KVStoreError):
        KVStore.connect(shared_pool.ready["worker"]["listen"], timeout_s=1)


@pytest.mark.parametrize("masters", [[], "nowhere", "host:port", "127.0.0.1:99999"])
def test_what_is_no_address(masters: list[str] | str) -> None:
    with pytest.raises(BadValue):
        KVStore.connect(masters)


def test_a_secret_that_the_pool_has_not(tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    right = b"r" * 32
    secret.write_bytes(right)
    secret.chmod(0o600)
    folder = tmp_path / "pool"
    try:
        with Up(folder, f"--secret-file={secret}") as up:
            for wrong in (None, b"w" * 32):
                with pytest.raises(AccessDenied):
                    KVStore.connect(up.master, secret=wrong, timeout_s=5)
            for transport in ("shm", "tcp"):
                with KVStore.connect(up.master, secret=right, transports=(transport,)) as store:
                    opened = store.open(content(transport), Pages.layout())
                    chain = opened.chain(range(4))
                    data = payload(chain.key(0), 0, SIZE)
                    assert store.put(opened, chain, data, [0]) == [Stored()]
                    match = store.match_prefix(opened, chain)
                    assert store.read(match, bytearray(SIZE), [0]) == [Hit()]
    finally:
        remove_segments(folder)


@pytest.mark.parametrize("transports", [(), ("pigeon",), ("shm", "pigeon")])
def test_transports_that_there_are_not(shared_pool: Up, transports: tuple[str, ...]) -> None:
    with pytest.raises(ConfigError, match="transports"):
        KVStore.connect(shared_pool.master, transports=transports)


# What callers get wrong: told before anything is sent.


def test_wrong_arguments_name_field_and_range(pages: Pages) -> None:
    store, opened = pages.store, pages.open()
    chain = opened.chain(range(8))
    source = bytes(2 * SIZE)
    match = store.match_prefix(opened, chain)

    def refused(call: Callable[[], object], field: str) -> None:
        with pytest.raises(BadValue, match=field) as caught:
            call()
        assert "want" in str(caught.value)

    refused(lambda: store.put(opened, chain, source, [0]), "offsets")
    refused(lambda: store.put(opened, chain, source, [0, SIZE + 1]), "offsets")
    refused(lambda: store.put(opened, chain, source, [-1, 0]), "offsets")
    refused(lambda: store.put(opened, chain, source, [0, 1 << 70]), "offsets")
    refused(lambda: store.put(opened, chain, object(), [0, SIZE]), "source")
    refused(lambda: store.put(opened, chain, source, [0, SIZE], part=1), "part")
    refused(lambda: store.put(opened, chain, source, [0, SIZE], ttl_s=0), "ttl_s")
    refused(lambda: store.put(opened, chain, source, [0, SIZE], timeout_s=-1), "timeout_s")
    twice = PageChain(chain.packed[:32] * 2)
    refused(lambda: store.put(opened, twice, source, [0, SIZE]), "chain")
    strided = np.zeros((2, SIZE), np.uint8)[:, ::2]
    refused(lambda: store.put(opened, chain, strided, [0, SIZE]), "source")
    refused(lambda: store.read(match, source, []), "into")
    refused(lambda: store.read(match, bytearray(SIZE), [0]), "offsets")
    refused(lambda: store.read(match, bytearray(SIZE), [], part=1), "part")
    refused(lambda: store.buffer(0), "size_bytes")
    assert store.probe(opened, chain) == [False, False]


def test_a_namespace_that_the_master_does_not_know(pages: Pages) -> None:
    stranger = OpenedNamespace(open_layout(content("never opened"), Pages.layout()), 12345)
    chain = stranger.chain(range(4))
    with pytest.raises(KVStoreError, match="namespace"):
        pages.put(stranger, chain)


def test_a_content_of_another_tenant(pages: Pages) -> None:
    foreign = msgspec.structs.replace(content("foreign"), tenant="somebody else")
    with pytest.raises(AccessDenied):
        pages.store.open(foreign, Pages.layout())


def test_a_page_without_its_parent(pages: Pages) -> None:
    opened = pages.open()
    orphans = opened.chain(range(12)).slice(2, 3)
    assert pages.put(opened, orphans) == [Refused(RefusedReason.PARENT_MISSING)]


def test_buffers_that_are_closed_or_foreign(pages: Pages, shared_pool: Up) -> None:
    opened = pages.open()
    chain = opened.chain(range(4))
    closed = pages.store.buffer(SIZE)
    closed.close()
    with pytest.raises(BufferClosed):
        pages.store.put(opened, chain, closed, [0])
    with KVStore.connect(shared_pool.master) as other:
        foreign = other.buffer(SIZE)
        with pytest.raises(BufferClosed, match="another store"):
            pages.store.put(opened, chain, foreign, [0])


def test_a_closed_buffers_number_is_not_mistaken_for_another(pages: Pages) -> None:
    opened = pages.open()
    for nth in range(20):
        pages.store_all(opened, opened.chain([nth, 1, 2, 3]))
    for nth in range(20):
        pages.assert_readable(opened, opened.chain([nth, 1, 2, 3]))


# Damage.


def test_a_flipped_bit_is_a_miss_and_reported(own: Pages, own_pool: Up) -> None:
    opened = own.open()
    chain = opened.chain(range(16))
    own.store_all(opened, chain)
    match = own.store.match_prefix(opened, chain)
    flip(segment_file(own_pool), file_offset(match, 2) + SIZE // 2)
    hit, bad = Hit(), Miss(MissReason.CHECKSUM)
    assert own.read_back(match, 4) == [hit, hit, bad, hit]
    # The master was told: soon nobody finds the page, and it can be stored again.
    deadline_s = time.monotonic() + 10
    while own.store.match_prefix(opened, chain).pages != 2:
        assert time.monotonic() < deadline_s, "the suspect is still found"
    assert own.put(opened, chain.slice(2, 3)) == [Stored()]
    own.assert_readable(opened, chain)


def test_a_page_that_was_overwritten_behind_a_lease_is_stale(own: Pages, own_pool: Up) -> None:
    opened = own.open()
    chain = opened.chain(range(8))
    own.store_all(opened, chain)
    match = own.store.match_prefix(opened, chain)
    geometry = match.pieces[0].located.segments[0].geometry
    offset = file_offset(match, 1) - geometry.payload_base
    flip(segment_file(own_pool), geometry.record_offset(offset, SIZE) + 20)
    assert own.read_back(match, 2) == [Hit(), Miss(MissReason.STALE)]


# Fullness.


def test_a_full_pool_with_everything_leased_says_so_within_the_deadline(own: Pages) -> None:
    opened = own.open(1 << 20)
    chain = opened.chain(range(64 * 4))
    outcomes = own.put(opened, chain, timeout_s=2)
    stored = outcomes.count(Stored())
    assert 32 <= stored <= 64
    for refusal in outcomes[stored:]:
        assert isinstance(refusal, Refused)
        assert refusal.reason == RefusedReason.OUT_OF_SPACE
    # What is above the watermark is evicted again; the rest is now leased.
    held = own.store.match_prefix(opened, chain)
    assert stored * 0.9 <= held.pages <= stored
    started_s = time.monotonic()
    (outcome,) = own.put(opened, opened.chain([7, 7, 7, 7]), timeout_s=1.5)
    assert time.monotonic() - started_s < 4
    if outcome != Stored():
        assert isinstance(outcome, Refused)
        assert outcome.reason == RefusedReason.OUT_OF_SPACE
    # Whatever happened, what was leased is still read in full.
    assert own.read_back(held, held.pages) == [Hit()] * held.pages


# Death.


def test_a_killed_worker_ends_calls_with_misses_and_refusals(own: Pages, own_pool: Up) -> None:
    opened = own.open()
    chain = opened.chain(range(16))
    own.store_all(opened, chain)
    match = own.store.match_prefix(opened, chain)
    own_pool.stop("worker")
    try:
        started_s = time.monotonic()
        more = opened.chain([5, 6, 7, 8])
        (outcome,) = own.put(opened, more, timeout_s=2)
        assert isinstance(outcome, Refused)
        assert time.monotonic() - started_s < 4
        outcomes = own.store.read(match, bytearray(4 * SIZE), range(0, 4 * SIZE, SIZE), timeout_s=2)
        assert time.monotonic() - started_s < 8
        for each in outcomes:
            assert each == Hit() or isinstance(each, Miss)
    finally:
        os.kill(own_pool.pid("worker"), signal.SIGCONT)


def test_a_pool_killed_and_started_again_serves_the_same_store(
    tmp_path: Path, transport: str
) -> None:
    folder = tmp_path / "pool"
    try:
        with Up(folder, every_transport(folder)) as first:
            listen = first.master
            with Pages(first.master, transport, "lives on") as pages:
                opened = pages.open()
                chain = opened.chain(range(64))
                pages.store_all(opened, chain)
                match = pages.store.match_prefix(opened, chain)
                for part in ("master", "worker"):
                    os.kill(first.pid(part), signal.SIGKILL)
                first.wait()
                with Up(folder, f"--listen={listen}", every_transport(folder)):
                    outcomes = pages.read_back(match, 16)
                    assert set(map(str, outcomes)) <= {
                        str(Hit()),
                        *(str(Miss(reason)) for reason in MissReason),
                    }
                    pages.assert_readable(opened, chain)
                    more = opened.chain([*range(64), 1, 2, 3, 4])
                    assert pages.put(opened, more)[-1] == Stored()
                    pages.assert_readable(opened, more)
    finally:
        remove_segments(folder)


# Fork.


def in_child(work: Callable[[], None]) -> None:
    """Run in a forked child; fail when that fails."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of forking beside threads
        child = os.fork()
    if child == 0:
        try:
            work()
        except BaseException as error:
            os.write(2, f"in the child: {error!r}\n".encode())
            os._exit(1)
        os._exit(0)
    _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == 0


def test_a_forked_child_has_a_session_of_its_own(pages: Pages) -> None:
    opened = pages.open()
    chain, others = opened.chain(range(16)), opened.chain(range(50, 66))
    pages.store_all(opened, chain)
    buffer = pages.store.buffer(SIZE)

    def work() -> None:
        pages.assert_readable(opened, chain)
        pages.store_all(opened, others)
        try:
            pages.store.put(opened, opened.chain([9, 9, 9, 9]), buffer, [0])
        except BufferClosed:
            return
        raise AssertionError("the parent's buffer was taken")

    in_child(work)
    pages.assert_readable(opened, others)
    assert pages.store.put(opened, opened.chain([8, 8, 8, 8]), buffer, [0]) == [Stored()]


# Views.


def test_views_hold_their_pages_against_everything(shared_pool: Up) -> None:
    with Pages(shared_pool.master, "shm", "views") as pages:
        opened = pages.open()
        chain = opened.chain(range(32))
        pages.store_all(opened, chain)
        with pages.store.views(pages.store.match_prefix(opened, chain)) as views:
            assert pages.store.remove(opened, chain) == [True] * 8
            for nth in range(40):
                pages.store_all(opened, opened.chain([nth, 200, 200, 200, *range(28)]))
            for key, view in zip(chain, views, strict=True):
                assert isinstance(view, memoryview)
                assert view.readonly
                assert bytes(view) == payload(key, 0, SIZE)
            seen = views[0]
        with pytest.raises(ValueError, match="released"):
            bytes(seen)  # type: ignore[arg-type]  # released, that is the point


def test_a_view_in_use_after_its_with_is_warned_of(shared_pool: Up) -> None:
    with Pages(shared_pool.master, "shm", "leaked view") as pages:
        opened = pages.open()
        chain = opened.chain(range(4))
        pages.store_all(opened, chain)
        match = pages.store.match_prefix(opened, chain)
        arrays: list[np.ndarray[tuple[int], np.dtype[np.uint8]]] = []

        def view() -> None:
            with pages.store.views(match) as views:
                assert isinstance(views[0], memoryview)
                arrays.append(np.frombuffer(views[0], np.uint8))

        with pytest.warns(ResourceWarning, match="still in use"):
            view()
        pages.store.remove(opened, chain)
        assert arrays[0].tobytes() == payload(chain.key(0), 0, SIZE)


def test_views_need_shared_memory(shared_pool: Up) -> None:
    with Pages(shared_pool.master, "tcp", "no views") as pages:
        opened = pages.open()
        chain = opened.chain(range(8))
        pages.store_all(opened, chain)
        with pages.store.views(pages.store.match_prefix(opened, chain)) as views:
            assert views == [Miss(MissReason.UNREACHABLE)] * 2
