"""What is stored of a chunk against what its worker lists, cell by cell; what may contradict it."""

from __future__ import annotations

import msgspec
import pytest

from kvstore import limits
from kvstore.coordination.metadata_store import (
    KEY_BYTES_MAX,
    VALUE_BYTES_MAX,
    require_writable,
)
from kvstore.ids import KEY_BYTES, Generation
from kvstore.lease import inherited_release_s
from kvstore.record import RecordState
from kvstore.wire.messages.membership import (
    ChunkDigest,
    InventoryEnd,
    InventoryWanted,
    OfferInventory,
)
from master import adoption
from master.chunk_values import (
    PREFIX,
    Asked,
    ChainRow,
    ChunkValue,
    decode_chunk,
    encode_chunk,
    key_of,
)
from master.pool_time import Life
from master.restoring import ASIDE
from tests.unit.master_rig import CHUNK, OpenedNamespace, Rig, chain, failure
from tests.unit.stored_pages import (
    KEYS,
    PAGE,
    TTL_S,
    counter,
    end,
    offer,
    record_rows,
    sealed,
    stored_rows,
    ttls,
)

PAGES = CHUNK // PAGE
GRACE_S = inherited_release_s(0.0)
FIRST = key_of("w1-dram", 0)


@pytest.fixture
def space(rig: Rig) -> OpenedNamespace:
    """A namespace of one part, with twelve pages of which the store knows."""
    space = rig.open_namespace()
    space.put(KEYS, ttl_s=TTL_S)
    rig.pass_time(1.0)
    return space


# --- the table of master.inventory ------------------------------------------------------------


def test_an_equal_value_is_taken_in_as_it_is(rig: Rig, space: OpenedNamespace) -> None:
    rig.takeover(2)
    written = len(rig.written)
    assert offer(rig).chunk_starts == ()
    assert space.probe(KEYS) == bytes(12)  # not before the whole inventory is there
    end(rig)
    assert space.probe(KEYS) == b"\1" * 12
    assert ttls(rig) == [TTL_S] * 12
    assert counter(rig, "pages_adopted") == 12
    assert len(rig.master.core.restored) == 0
    rig.pass_time(10.0)
    puts = [key for each in rig.written[written:] for key, _ in each.puts]
    assert FIRST not in puts  # nothing has changed
    assert stored_rows(rig, "w1-dram") == record_rows(rig.segment("w1-dram"))


def test_a_chunk_of_which_nothing_is_stored_is_asked_for(rig: Rig, space: OpenedNamespace) -> None:
    del rig.store[FIRST]
    rig.takeover(2)
    assert offer(rig).chunk_starts == (0,)
    rig.workers["w1"].send_rows(0)
    end(rig)
    assert space.probe(KEYS) == b"\1" * 12
    assert ttls(rig) == [limits.PAGE_TTL_S] * 12
    rig.pass_time(10.0)
    assert stored_rows(rig, "w1-dram") == record_rows(rig.segment("w1-dram"))


def test_of_another_digest_lives_go_on_where_the_generation_is_the_same(
    rig: Rig, space: OpenedNamespace
) -> None:
    worker = rig.workers["w1"]
    del worker.records[0]
    other = worker.records[PAGE]
    later = Generation(other.generation + 1)
    worker.records[PAGE] = msgspec.structs.replace(other, generation=later)
    worker.restart()
    rig.takeover(2)
    assert offer(rig).chunk_starts == (0,)
    worker.send_rows(0)
    end(rig)
    assert space.probe(KEYS) == b"\0" + b"\1" * 11
    assert ttls(rig) == [limits.PAGE_TTL_S] + [TTL_S] * 10
    assert len(rig.master.core.restored) == 0


def test_of_another_class_nothing_is_believed(rig: Rig, space: OpenedNamespace) -> None:
    value = msgspec.structs.replace(decode_chunk(rig.store[FIRST]), size_class=2 * PAGE)
    rig.store[FIRST] = encode_chunk(value, value.digest())
    rig.takeover(2)
    assert offer(rig).chunk_starts == (0,)
    rig.workers["w1"].send_rows(0)
    end(rig)
    assert space.probe(KEYS) == b"\1" * 12
    assert ttls(rig) == [limits.PAGE_TTL_S] * 12


def test_a_chunk_that_is_not_listed_is_not_served_and_its_value_goes(
    rig: Rig, space: OpenedNamespace
) -> None:
    rig.workers["w1"].records.clear()
    rig.takeover(2)
    assert offer(rig).chunk_starts == ()
    end(rig)
    assert space.probe(KEYS) == bytes(12)
    assert rig.master.core.tree(1).pages == 0
    rig.pass_time(10.0)
    assert FIRST not in rig.store
    assert len(rig.master.core.restored) == 0


def test_without_a_worker_nothing_is_served_and_nothing_forgotten(
    rig: Rig, space: OpenedNamespace
) -> None:
    rig.takeover(2)
    rig.pass_time(20.0)
    assert space.probe(KEYS) == bytes(12)
    assert FIRST in rig.store
    rig.takeover(3)  # the next one has it still
    assert offer(rig).chunk_starts == ()
    end(rig)
    assert space.probe(KEYS) == b"\1" * 12


def test_an_inventory_does_not_end_before_its_offer_is_compared(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(adoption, "COST_PER_STEP", 1)
    space = rig.open_namespace()
    for number in range(12):
        space.put(chain(number, 1))
    rig.pass_time(1.0)
    rig.takeover(2)
    worker = rig.workers["w1"]
    worker.connect()
    offered = OfferInventory(worker.segment, worker.incarnation, worker.digests())
    assert worker.ask(offered) is None
    compared = rig.last_request
    early = failure(worker.ask(InventoryEnd(worker.segment, worker.incarnation)))
    assert (early.code, "still being compared" in early.text) == ("unavailable", True)
    rig.settle()
    assert worker.session is not None
    assert rig.reply(worker.session, compared) == InventoryWanted(())
    end(rig)
    assert [space.probe(chain(number, 1)) for number in range(12)] == [b"\1"] * 12


# --- what is not believed -----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("key", "value"),
    [(key_of("other", 0), bytes(VALUE_BYTES_MAX + 1)), (PREFIX + "?" * KEY_BYTES_MAX, b"")],
)
def test_what_no_master_may_write_is_left_where_it_is(
    rig: Rig, space: OpenedNamespace, key: str, value: bytes
) -> None:
    rig.store[key] = value
    rig.takeover(2)
    assert rig.master.damaged == [key]
    rig.workers["w1"].join()
    for each in rig.written:
        require_writable(each.puts, each.deletes)
    assert rig.store[key] == value
    assert space.probe(KEYS) == b"\1" * 12


def test_a_damaged_value_is_set_aside_and_the_rest_is_loaded(
    rig: Rig, space: OpenedNamespace
) -> None:
    space.put(chain(2, PAGES), ttl_s=TTL_S)
    rig.pass_time(1.0)
    bad = bytearray(rig.store[FIRST])
    bad[40] ^= 1
    rig.store[FIRST] = bytes(bad)
    rig.store[PREFIX + "w1-dram/?"] = b"?"
    rig.takeover(2)
    assert offer(rig).chunk_starts == (0,)
    assert rig.store[ASIDE + FIRST] == bytes(bad)
    assert rig.store[ASIDE + PREFIX + "w1-dram/?"] == b"?"
    assert FIRST not in rig.store
    assert counter(rig, "values_set_aside") == 2
    assert rig.master.damaged == [FIRST, PREFIX + "w1-dram/?"]
    rig.workers["w1"].send_rows(0)
    end(rig)
    assert space.probe(KEYS + chain(2, PAGES)) == b"\1" * (12 + PAGES)
    rig.pass_time(10.0)
    assert stored_rows(rig, "w1-dram") == record_rows(rig.segment("w1-dram"))


def test_values_of_a_segment_that_nobody_lends_are_deleted_at_the_start(
    rig: Rig, space: OpenedNamespace
) -> None:
    rig.store[key_of("strange", 0)] = rig.store[FIRST]
    rig.takeover(2)
    rig.tick()
    assert key_of("strange", 0) not in rig.store
    assert counter(rig, "chunk_values_orphaned") == 1
    assert FIRST in rig.store


def test_pages_of_an_unknown_namespace_are_fenced(rig: Rig, space: OpenedNamespace) -> None:
    for key in [key for key in rig.store if key.startswith("namespaces/")]:
        del rig.store[key]
    rig.takeover(2)
    assert offer(rig).chunk_starts == ()
    end(rig)
    assert counter(rig, "extents_unaccounted") == 12
    rig.pass_time(GRACE_S + 1.0)
    assert not rig.workers["w1"].records
    assert FIRST not in rig.store


def test_what_was_removed_meanwhile_does_not_return(rig: Rig, space: OpenedNamespace) -> None:
    rig.takeover(2)
    again = rig.open_namespace()
    assert again.remove(KEYS[4 * KEY_BYTES : 5 * KEY_BYTES]) == b"\0"
    assert offer(rig).chunk_starts == ()
    end(rig)
    assert again.probe(KEYS) == b"\1" * 4 + b"\0" + b"\1" * 7
    assert ttls(rig)[0] == TTL_S
    rig.pass_time(GRACE_S + 7.0)
    assert stored_rows(rig, "w1-dram") == record_rows(rig.segment("w1-dram"))


def test_a_value_makes_no_page_its_own_ancestor(rig: Rig, space: OpenedNamespace) -> None:
    head, tail = chain(7, 3), chain(8, 3)
    rig.workers["w1"].leave()
    rig.add_worker("w2")
    space.put(tail)
    space.put(head, parent=tail[-KEY_BYTES:])
    rig.pass_time(1.0)
    rig.workers["w2"].leave()
    rig.pass_time(5.0)  # w2 is lost, and so is what it held; writers say otherwise now
    rig.add_worker("w3")
    space.put(head)
    rig.workers["w3"].leave()
    rig.workers["w1"].join()
    space.put(tail, parent=head[-KEY_BYTES:])
    rig.pass_time(1.0)
    rig.takeover(2)
    for name in ("w1", "w2"):
        assert offer(rig, name).chunk_starts == ()
        end(rig, name)  # the rig checks I16
    assert space.probe(head + tail) == b"\1\1\0" + b"\1\1\1"
    assert counter(rig, "extents_unaccounted") == 2


def test_digests_of_chunks_that_cannot_lie_there_are_not_believed(
    rig: Rig, space: OpenedNamespace
) -> None:
    value = decode_chunk(rig.store[FIRST])
    digest = value.digest()
    # As of another medium under the name of this one.
    wrong = {
        CHUNK // 4: 4 * PAGE,  # not where a chunk of four frames may begin
        16 * CHUNK: PAGE,  # beyond the end
        PAGE: PAGE,
    }
    for start, size_class in wrong.items():
        each = msgspec.structs.replace(value, size_class=size_class)
        rig.store[key_of("w1-dram", start)] = encode_chunk(each, digest)
    rig.takeover(2)
    worker = rig.workers["w1"]
    worker.connect()
    chunks = tuple(ChunkDigest(start, size, digest) for start, size in wrong.items())
    reply = worker.ask(OfferInventory("w1-dram", 1, (*worker.digests(), *chunks)))
    assert reply == InventoryWanted(tuple(sorted(wrong)))
    assert len(sealed(rig)) == 12


def test_chunks_that_overlap_are_not_both_believed() -> None:
    rig = Rig()
    worker = rig.add_worker(chunk_bytes=32 << 20, chunks=1, join=False)
    worker.connect()
    half = 16 << 20  # where a chunk of this class of pages may begin, and a larger one covers it
    row = ChainRow(0, 1, 0, 1, PAGE, 5, bytes(32), Asked(Life(TTL_S, 0.0, TTL_S)))
    digests = []
    for start, size_class in ((0, 2 * PAGE), (half, PAGE)):
        value = ChunkValue(size_class, [row], KEYS[:KEY_BYTES], bytes(8))
        digest = value.digest()
        rig.master.core.restored.add("w1-dram", start, encode_chunk(value, digest))
        digests.append(ChunkDigest(start, size_class, digest))
    reply = worker.ask(OfferInventory("w1-dram", 1, tuple(digests)))
    assert reply == InventoryWanted((half,))


# --- interruptions ------------------------------------------------------------------------------


def test_a_comparison_that_is_cut_short_begins_anew(
    rig: Rig, space: OpenedNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("master.adoption.COST_PER_STEP", 1)
    space.put(chain(2, 3 * PAGES), ttl_s=TTL_S)
    rig.pass_time(1.0)
    rig.takeover(2)
    worker = rig.workers["w1"]
    worker.connect()
    assert worker.ask(OfferInventory("w1-dram", 1, worker.digests())) is None
    rig.tick()
    assert 0 < len(sealed(rig)) < 12 + 3 * PAGES
    worker.leave()
    wanted = offer(rig).chunk_starts
    for start in wanted:
        worker.send_rows(start)
    end(rig)
    assert len(wanted) <= 1  # the one that was half done
    assert space.probe(KEYS + chain(2, 3 * PAGES)) == b"\1" * (12 + 3 * PAGES)
    assert ttls(rig, chain(2, 3 * PAGES)) == [TTL_S] * (3 * PAGES)


def test_what_a_restored_value_lists_is_not_freed_while_old_leases_may_run(
    rig: Rig, space: OpenedNamespace
) -> None:
    space.match(KEYS)
    rig.takeover(2)
    offer(rig)
    end(rig)
    began_s = rig.master.core.started_s
    run = rig.master.core.tree(1).get(KEYS[:KEY_BYTES])
    assert run is not None
    assert run.leased_until_s == began_s + GRACE_S  # I9
    assert rig.open_namespace().remove(KEYS) == b"\1" * 12
    rig.pass_time(began_s + GRACE_S - 0.5 - rig.now)
    records = rig.workers["w1"].records.values()
    assert [record.state for record in records] == [RecordState.REMOVED] * 12
    rig.pass_time(1.0)
    assert not rig.workers["w1"].records
