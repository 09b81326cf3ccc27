"""What is left of a lookup of named objects, and that neighbours which lie alike are one run."""

from __future__ import annotations

from kvstore.client.locations import Found, Piece, check_located
from kvstore.client.namespaces import OpenedNamespace
from kvstore.connectors.mooncake.located import only
from kvstore.namespace import opaque
from kvstore.page import PageChain, name_key
from kvstore.wire.messages.reads import Located, LocatedCopy, LocatedRun
from kvstore.wire.messages.stripes import StripedPage
from tests.unit.client_scripts import segment, u64

OPENED = OpenedNamespace(opaque("tests", "objects"), 1)
Where = tuple[int, int]
"""Segment and bytes of one replica."""


def copy(number: int, where: Where, *, decoded: bool = False) -> LocatedCopy:
    """Part 0 of object `number`, with columns that tell it apart."""
    offsets, generations, checksums = u64([4096 * number]), u64([number + 1]), u64([number + 100])
    stripes = (StripedPage(1, 1, 0, ()),) if decoded else ()
    return LocatedCopy(0, *where, offsets, generations, checksums, stripes)


def found(objects: dict[int, list[Where]], decoded: int = -1) -> Found:
    """A lookup's answer: objects by their number, a run each."""
    runs = [
        LocatedRun(n, 1, tuple(copy(n, where, decoded=n == decoded) for where in replicas))
        for n, replicas in objects.items()
    ]
    count = max(objects) + 1
    chain = PageChain(b"".join(name_key(OPENED.namespace.id, b"%d" % n) for n in range(count)))
    located = Located(1, 10.0, (segment("near"), segment("far")), tuple(runs))
    readable = bytes(n in objects for n in range(count))
    return Found(OPENED, chain, (0,), (Piece.of(0, located, 0.0, leased=True),), readable)


def runs_of(left: Found) -> list[tuple[int, int]]:
    """First object and number of objects of each run."""
    return [(run.first, run.count) for piece in left.pieces for run in piece.located.runs]


def test_neighbours_that_lie_alike_are_one_run_with_all_their_columns() -> None:
    replicas = [(0, 64), (1, 64)]
    left = only(found(dict.fromkeys(range(5), replicas)), range(1, 4))
    (run,) = left.pieces[0].located.runs
    assert (run.first, run.count) == (1, 3)
    for (number, size), each in zip(replicas, run.copies, strict=True):
        assert (each.part, each.segment, each.part_bytes) == (0, number, size)
        assert each.offsets == u64([4096, 8192, 12288])
        assert each.generations == u64([2, 3, 4])
        assert each.checksums == u64([101, 102, 103])
    assert check_located(left.pieces[0].located, 5, OPENED.namespace) == bytes((0, 1, 1, 1, 0))


def test_what_lies_elsewhere_or_has_another_size_stays_a_run_of_its_own() -> None:
    near, far, larger = (0, 64), (1, 64), (0, 65)
    objects = [[near], [near], [far], [larger], [near, far], [far, near], [near], [near]]
    whole = found(dict(enumerate(objects)))
    assert runs_of(only(whole, range(8))) == [(0, 2), (2, 1), (3, 1), (4, 1), (5, 1), (6, 2)]


def test_objects_with_others_between_them_are_not_neighbours() -> None:
    whole = found({n: [(0, 64)] for n in (0, 1, 3, 4, 5)})
    assert runs_of(only(whole, {0, 1, 3, 5})) == [(0, 2), (3, 1), (5, 1)]
    assert runs_of(only(whole, ())) == []


def test_what_is_decoded_from_others_is_never_joined() -> None:
    whole = found({n: [(0, 64)] for n in range(4)}, decoded=1)
    assert runs_of(only(whole, range(4))) == [(0, 1), (1, 1), (2, 2)]
