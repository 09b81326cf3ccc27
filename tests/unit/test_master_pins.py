"""The book of pins: whose pins a page has, what they come to, and what is ours in the store."""

from __future__ import annotations

import struct
from collections import Counter
from math import inf, nan
from typing import TYPE_CHECKING

import pytest

from kvstore.errors import CorruptPage, InvariantBroken
from kvstore.ids import KEY_BYTES
from kvstore.wire.encoding import encode
from kvstore.wire.messages.hello import Done
from kvstore.wire.messages.pins import PinPages
from kvstore.wire.messages.reads import GetStatus, PinTotals, Status
from master.packed import split_keys
from master.pins import PREFIX, Pin, Pins, name_of, value_of
from master.pool_time import PoolTime
from master.run import Run
from master.tunables import Tunables
from master.wheel import Wakeup
from tests.unit.master_rig import TENANT, Rig, chain

if TYPE_CHECKING:
    from kvstore.wire.messages.base import Message

KEYS = chain(1, 8)
PAGES = split_keys(KEYS)
NAMESPACES = Rig().open_namespace().rig.master.core.namespaces
KNOWN = NAMESPACES.by_ordinal(1)
SIZE = 4096
NOW = 1000.0
ONE = f"{1:016x}"
WORD = SIZE.to_bytes(8, "little")


def book(*pins: tuple[str, bool, list[bytes]]) -> Pins:
    """A book with these pins: owner, hard, pages."""
    assert KNOWN is not None
    made = Pins(Wakeup())
    for owner, hard, keys in pins:
        pages = dict.fromkeys(keys, SIZE)
        pin = Pin(made.new_number(), KNOWN, owner, hard, 60.0, NOW + 60.0, pages)
        made.deadlines.place(pin, pin.until_s)
        made.add(pin)
    made.check()
    return made


def stored(
    request: Message | None = None, *, pages: int = 1, until_s: float = 60.0, size: bytes = WORD
) -> bytes:
    """A pin as it is stored; by default a good one of one page."""
    assert KNOWN is not None
    if request is None:
        request = PinPages(KNOWN.namespace.id, KEYS[: pages * KEY_BYTES], "o", True, 60.0)
    return struct.pack("<Id", pages, until_s) + size + encode(request)


def run_of(keys: bytes = KEYS) -> Run:
    """A run of these pages."""
    assert KNOWN is not None
    return Run(KNOWN.ordinal, bytes(KEY_BYTES), keys, 1.0, 0.0, 1.0)


def test_what_is_kept_ends_with_the_last_pinned_page() -> None:
    pins = book(("a", False, PAGES[4:6]), ("b", True, PAGES[1:3]))
    assert (pins.kept(run_of()), pins.kept_if_possible(run_of())) == (3, 6)
    assert not pins.is_soft(run_of())
    head = run_of(KEYS[: 6 * KEY_BYTES])
    assert pins.is_soft(head)
    assert pins.kept_if_possible(head) == 3, "a soft pin at the end is given up first"
    assert pins.is_hard(run_of(KEYS[: 3 * KEY_BYTES]))
    assert pins.kept(run_of(chain(2, 4))) == 0


def test_a_hard_pin_beside_a_soft_one_is_hard() -> None:
    pins = book(("a", False, PAGES), ("b", True, PAGES))
    assert pins.is_hard(run_of())
    assert not pins.is_soft(run_of())


def test_lifting_is_the_owners_but_for_a_removal() -> None:
    assert KNOWN is not None
    pins = book(("a", True, PAGES), ("b", True, PAGES[:2]))
    assert pins.hard_bytes == Counter({TENANT: 8 * SIZE}), "each page once"
    (changed,) = pins.lift(KNOWN, PAGES[:4], "a")
    assert list(changed.pages) == PAGES[4:]
    assert pins.hard_bytes == Counter({TENANT: 6 * SIZE})
    assert (len(pins), pins.pages) == (2, 6)
    assert pins.lift(KNOWN, PAGES[:4], "a") == []
    assert len(pins.lift(KNOWN, PAGES, None)) == 2
    assert (len(pins), pins.pages, pins.hard_bytes[TENANT]) == (0, 0, 0)
    assert len(pins.deadlines) == 0
    pins.check()


def test_soft_bytes_count_by_owner() -> None:
    assert KNOWN is not None
    pins = book(("a", False, PAGES[:4]), ("b", False, PAGES[:2]), ("c", True, PAGES))
    assert pins.soft_bytes == 6 * SIZE
    again = Pin(
        pins.new_number(), KNOWN, "a", True, 60.0, NOW + 60.0, dict.fromkeys(PAGES[:1], SIZE)
    )
    pins.add(again)
    assert pins.soft_bytes == 5 * SIZE, "a hard pin takes the place of the owner's soft one"
    pins.lift(KNOWN, PAGES[:2], None)
    assert pins.soft_bytes == 2 * SIZE
    pins.check()
    pins.soft_bytes += 1
    with pytest.raises(InvariantBroken, match=r"I31: .* pinned softly"):
        pins.check()


def test_the_status_tells_what_pins_hold() -> None:
    rig = Rig(Tunables("test", pin_quota=1.0))
    rig.add_worker()
    space = rig.open_namespace()
    space.put(KEYS)
    for owner, hard, keys in (("a", False, KEYS[:64]), ("b", True, KEYS[32:64])):
        rig.ask(rig.engine, PinPages(space.id, keys, owner, hard, 60.0))
    status = rig.ask(rig.engine, GetStatus())
    assert isinstance(status, Status)
    assert status.pins == PinTotals(2, 3, 2 * SIZE, 2 * SIZE), "the page above is held, too"


def test_what_a_hold_needs_above_stays_counted_until_it_ends() -> None:
    assert KNOWN is not None
    pins = book(("a", True, PAGES[:1]), ("b", True, PAGES[1:2]))
    pin = Pin(3, KNOWN, "c", True, 60.0, NOW + 60.0, {PAGES[3]: 2 * SIZE})
    pins.deadlines.place(pin, pin.until_s)
    assert pins.add(pin, {PAGES[3]: PAGES[1]}) == []
    pins.lift(KNOWN, PAGES[:2], None)
    pins.check()
    assert pins.hard_bytes == Counter({TENANT: 3 * SIZE})
    pins.lift(KNOWN, PAGES, "c")
    pins.check()
    assert not pins.hard_bytes.total()


def test_a_number_is_never_used_twice() -> None:
    assert KNOWN is not None
    pins = book(("a", True, PAGES))
    pins.lift(KNOWN, PAGES, None)
    assert pins.new_number() == 2


def test_what_is_durable_comes_back_with_the_time_that_is_left() -> None:
    assert KNOWN is not None
    rig = Rig()
    rig.open_namespace()
    (pin,) = book(("a", True, PAGES)).all()
    found = Pins(Wakeup())
    before, after = PoolTime(), PoolTime()
    before.start(NOW)
    found.restore(rig.master.core.namespaces, name_of(pin), value_of(pin, before))
    after.restore(before.value(NOW + 45.0))
    after.start(2000.0)
    found.start(after)
    found.check()
    (again,) = found.all()
    assert (again.number, again.owner, again.hard, again.pages) == (1, "a", True, pin.pages)
    assert again.until_s == 2015.0
    assert found.new_number() == 2


@pytest.mark.parametrize(
    ("key", "value"),
    [
        (ONE, b""),
        ("x", bytes(12)),
        ("1", stored()),
        ("-000000000000001", stored()),
        (ONE, stored(until_s=nan)),
        (ONE, stored(until_s=-1.0)),
        (ONE, stored(pages=0, size=b"")),
        (ONE, stored(size=bytes(8))),
        (ONE, stored(size=b"\xff" * 8)),
        (ONE, stored(size=b"\1")),
        (ONE, stored(request=Done())),
        (ONE, stored(request=PinPages(b"", b"", "o", True, 1.0))),
        (ONE, stored(request=PinPages(b"", bytes(32), "", True, 1.0))),
        (ONE, stored(request=PinPages(b"", bytes(32), "o", True, nan))),
        (ONE, stored(request=PinPages(b"n" * 32, bytes(32), "o", True, 1.0))),
    ],
)
def test_values_that_are_not_ours_are_named(key: str, value: bytes) -> None:
    pins = Pins(Wakeup())
    with pytest.raises(CorruptPage, match=PREFIX + key):
        pins.restore(NAMESPACES, PREFIX + key, value)
    assert not pins.pages


def test_no_pin_has_more_left_than_it_was_made_with() -> None:
    pins = Pins(Wakeup())
    pins.restore(NAMESPACES, PREFIX + ONE, stored(until_s=9000.0))
    time = PoolTime()
    time.go_on_from(10.0)
    time.start(NOW)
    pins.start(time)
    (pin,) = pins.all()
    assert pin.until_s == NOW + 60.0


@pytest.mark.parametrize("what", ["page", "bytes", "users", "end"])
def test_what_does_not_add_up_is_seen(what: str) -> None:
    pins = book(("a", True, PAGES))
    (pin,) = pins.all()
    if what == "page":
        del pin.pages[PAGES[0]]
    elif what == "bytes":
        pins.hard_bytes[TENANT] += 1
    elif what == "users":
        assert KNOWN is not None
        pins.held(KNOWN)[PAGES[0]].users += 1
    else:
        pin.until_s = inf
    with pytest.raises(InvariantBroken, match="I31"):
        pins.check()
