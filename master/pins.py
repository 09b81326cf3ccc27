"""The book of pins: whose pages stay in the pool until when, by number, page and tenant.

Owns the keys `pins/<number>`. Must not know trees, requests or what a pin holds back. A pin is kept
by its pages' keys and not with the runs that hold them: so it outlives the split of a run, the loss
and return of a worker, and a master: its end is durable in pool time. Every owner's pin of a page
counts for itself; what hard pins hold back counts once.
"""

from __future__ import annotations

import struct
from array import array
from collections import Counter
from math import inf
from typing import TYPE_CHECKING, Final

import msgspec

from kvstore.errors import CorruptPage, InvariantBroken, MalformedMessage
from kvstore.ids import KEY_BYTES
from kvstore.require import require_owner, require_ttl
from kvstore.wire.encoding import decode, encode
from kvstore.wire.messages.pins import PinPages
from master.namespaces import KnownNamespace, Namespaces
from master.packed import split_keys
from master.ticket_pins import TicketPins
from master.wheel import NOWHERE, Wheel

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    from master.pool_time import PoolTime
    from master.run import Run
    from master.wheel import Wakeup

PREFIX: Final = "pins/"
GRAIN_S: Final = 0.25
_HEAD: Final = struct.Struct("<Id")
"""How many pages, and when the pin ends, in pool time."""
PAGE_BYTES_MAX: Final = 1 << 48
"""Nothing larger is held back for one page."""


class Pin(msgspec.Struct, eq=False):
    """What one PinPages has left."""

    number: int
    known: KnownNamespace
    owner: str
    hard: bool
    ttl_s: float
    until_s: float
    pages: dict[bytes, int]
    """Bytes of each page's extents, by its key; of a hard one with what it holds above itself."""
    bucket: int = NOWHERE

    @property
    def size_bytes(self) -> int:
        """Of all its pages."""
        return sum(self.pages.values())


class Hold(msgspec.Struct, gc=False):
    """What a hard-pinned page holds back: itself, and the pages above it up to the next hold."""

    size_bytes: int
    above: bytes | None
    """The page of that next hold."""
    users: int = 0
    """Hard pins of the page, and holds right below: with the last of them the hold ends."""


class Pins:
    """All pins, by number and by page."""

    def __init__(self, wakeup: Wakeup) -> None:
        """Start with none; `wakeup` hears of deadlines."""
        self.deadlines: Wheel[Pin] = Wheel(GRAIN_S, wakeup)
        self.hard_bytes: Counter[str] = Counter()
        """Held back by hard pins, by tenant."""
        self.pages = 0
        """Pinned, each as often as it has owners."""
        self.soft_bytes = 0
        """Of those that are pinned softly, each as often as it has owners."""
        self._pins: dict[int, Pin] = {}
        self._by_page: dict[int, dict[bytes, dict[str, Pin]]] = {}
        """By the namespace's ordinal, the page's key, and the owner."""
        self._holds: dict[int, dict[bytes, Hold]] = {}
        """By the namespace's ordinal and the page's key."""
        self._last_number = 0
        self.tickets = TicketPins()
        """Pages that tickets hold, which stay as if they were pinned hard."""

    def __len__(self) -> int:
        return len(self._pins)

    def __bool__(self) -> bool:
        return bool(self._pins) or bool(self.tickets.pages)

    def all(self) -> Iterable[Pin]:
        """Every pin, oldest first."""
        return self._pins.values()

    def new_number(self) -> int:
        """A number that no pin has, here or in the store."""
        return self._last_number + 1

    def add(self, pin: Pin, above: Mapping[bytes, bytes] | None = None) -> list[Pin]:
        """Take in a pin instead of its owner's earlier ones of its pages; those that changed.

        `above`: the next hold above a page, for those that have one, of this pin or held already.
        """
        if pin.hard:
            self._hold(pin, above or {})
        else:
            self.soft_bytes += pin.size_bytes
        changed = self.lift(pin.known, pin.pages, pin.owner)
        by_page = self._by_page.setdefault(pin.known.ordinal, {})
        for key in pin.pages:
            by_page.setdefault(key, {})[pin.owner] = pin
        self._pins[pin.number] = pin
        self._last_number = max(self._last_number, pin.number)
        self.pages += len(pin.pages)
        return changed

    def held(self, known: KnownNamespace) -> Mapping[bytes, Hold]:
        """What hard pins hold back in this namespace, by the key of the lowest page."""
        return self._holds.get(known.ordinal, {})

    def _hold(self, pin: Pin, above: Mapping[bytes, bytes]) -> None:
        holds = self._holds.setdefault(pin.known.ordinal, {})
        made = {
            key: Hold(size, above.get(key)) for key, size in pin.pages.items() if key not in holds
        }
        holds |= made
        for key in pin.pages:
            holds[key].users += 1
        for hold in made.values():
            if hold.above is not None:
                holds[hold.above].users += 1
        self.hard_bytes[pin.known.namespace.content.tenant] += sum(
            hold.size_bytes for hold in made.values()
        )

    def _let_go(self, known: KnownNamespace, lowest: bytes) -> None:
        holds, key = self._holds[known.ordinal], lowest
        while True:
            hold = holds[key]
            hold.users -= 1
            if hold.users:
                return
            del holds[key]
            self.hard_bytes[known.namespace.content.tenant] -= hold.size_bytes
            if hold.above is None:
                return
            key = hold.above

    def start(self, pool_time: PoolTime) -> None:
        """Time begins, and that of the pins that were found in the store goes on.

        None has more left than it was made with, even where pool time was lost.
        """
        for pin in self._pins.values():
            pin.until_s = pool_time.own_s(min(pin.until_s, pool_time.restored_s + pin.ttl_s))
            self.deadlines.place(pin, pin.until_s)

    def lift(self, known: KnownNamespace, keys: Iterable[bytes], owner: str | None) -> list[Pin]:
        """End the owner's pins of these pages, without one everybody's; the pins that changed."""
        changed: dict[Pin, list[bytes]] = {}
        by_page = self._by_page.get(known.ordinal, {})
        for key in keys:
            owners = by_page.get(key, {})
            for each in list(owners) if owner is None else [owner]:
                pin = owners.pop(each, None)
                if pin is not None:
                    changed.setdefault(pin, []).append(key)
            if key in by_page and not owners:
                del by_page[key]
        for pin, lifted in changed.items():
            self.pages -= len(lifted)
            for key in lifted:
                size_bytes = pin.pages.pop(key)
                if pin.hard:
                    self._let_go(known, key)
                else:
                    self.soft_bytes -= size_bytes
            if not pin.pages:
                self.deadlines.discard(pin)
                del self._pins[pin.number]
        return list(changed)

    def of_owner(self, known: KnownNamespace, owner: str) -> list[Pin]:
        """All that this owner has pinned in this namespace."""
        return [pin for pin in self._pins.values() if (pin.known, pin.owner) == (known, owner)]

    def of_page(self, known: KnownNamespace, key: bytes, owner: str) -> Pin | None:
        """This owner's pin of this page."""
        return self._by_page.get(known.ordinal, {}).get(key, {}).get(owner)

    def is_soft(self, run: Run) -> bool:
        """Whether the last page of `run` goes only when nothing else may."""
        owners = self._by_page.get(run.namespace, {}).get(run.last_key)
        return bool(owners) and not self.is_hard(run)

    def is_hard(self, run: Run) -> bool:
        """Whether the last page of `run` stays."""
        owners = self._by_page.get(run.namespace, {}).get(run.last_key)
        return _is_hard(owners) or run.last_key in self.tickets.of(run.namespace)

    def kept(self, run: Run) -> int:
        """How many leading pages of `run` stay: those up to the last hard-pinned one."""
        return self._up_to_last(run, _is_hard)

    def kept_if_possible(self, run: Run) -> int:
        """The same, with soft-pinned ones, unless the last page is one."""
        return self.kept(run) if self.is_soft(run) else self._up_to_last(run, bool)

    def named(self, run: Run) -> int:
        """How many leading pages of `run` there are up to the last pinned one, soft or hard."""
        return self._up_to_last(run, bool)

    def _up_to_last(self, run: Run, holds: Callable[[dict[str, Pin] | None], bool]) -> int:
        by_page = self._by_page.get(run.namespace, {})
        held = self.tickets.of(run.namespace)
        if not by_page and not held:
            return 0
        page = len(run)
        while page:
            key = run.key(page - 1)
            if key in held or holds(by_page.get(key)):
                break
            page -= 1
        return page

    def check(self) -> None:
        """Raise InvariantBroken unless pins, index and counts agree, and each has its end (I31)."""
        rows = {
            (pin.known.ordinal, key, pin.owner): pin
            for pin in self._pins.values()
            for key in pin.pages
        }
        indexed = {
            (ordinal, key, owner): pin
            for ordinal, by_page in self._by_page.items()
            for key, owners in by_page.items()
            for owner, pin in owners.items()
        }
        if rows != indexed or self.pages != len(rows):
            raise InvariantBroken(f"I31: {len(rows)} pinned pages, {len(indexed)} in the index")
        for pin in self._pins.values():
            if not pin.pages or (pin.bucket == NOWHERE) != (pin.until_s == inf):
                raise InvariantBroken(f"I31: pin {pin.number} of {len(pin.pages)} pages never ends")
        soft_bytes = sum(pin.size_bytes for pin in self._pins.values() if not pin.hard)
        if self.soft_bytes != soft_bytes:
            raise InvariantBroken(f"I31: {self.soft_bytes} bytes pinned softly, not {soft_bytes}")
        self._check_holds()

    def _check_holds(self) -> None:
        users = Counter(
            (pin.known.ordinal, key) for pin in self._pins.values() if pin.hard for key in pin.pages
        )
        total = 0
        for ordinal, holds in self._holds.items():
            users.update((ordinal, each.above) for each in holds.values() if each.above is not None)
            total += sum(each.size_bytes for each in holds.values())
        counted = {
            (ordinal, key): each.users
            for ordinal, holds in self._holds.items()
            for key, each in holds.items()
        }
        if counted != users:
            raise InvariantBroken(f"I31: {len(counted)} pages hold others, {len(users)} are to")
        if self.hard_bytes.total() != total or min(self.hard_bytes.values(), default=0) < 0:
            raise InvariantBroken(f"I31: {self.hard_bytes} bytes are counted, {total} are held")

    def restore(self, namespaces: Namespaces, key: str, value: bytes) -> None:
        """Take in one durable value; CorruptPage when it is not ours, and then nothing is pinned by
        it any more. Its end is in pool time until time begins.
        """
        try:
            number = _number_of(key)
            count, until_s = _HEAD.unpack_from(value)
            stop = _HEAD.size + 8 * count
            sizes = array("Q", value[_HEAD.size : stop])
            message = decode(value[stop:])
            if not isinstance(message, PinPages) or len(message.keys) != count * KEY_BYTES:
                raise MalformedMessage(type(message).__name__)
            if not until_s >= 0:
                raise MalformedMessage("it ends at no time")
            if not 0 < max(sizes, default=0) <= PAGE_BYTES_MAX:
                raise MalformedMessage("its pages have no size")
            require_owner(message.owner)
            require_ttl("ttl_s", message.ttl_s)
        except (struct.error, ValueError, MalformedMessage) as error:
            raise CorruptPage(f"metadata value {key}: {error}") from error
        known = namespaces.find(message.namespace)
        if known is None:
            raise CorruptPage(f"metadata value {key}: of an unknown namespace")
        pages = dict(zip(split_keys(message.keys), sizes, strict=True))
        self.add(Pin(number, known, message.owner, message.hard, message.ttl_s, until_s, pages))


def _is_hard(owners: dict[str, Pin] | None) -> bool:
    return owners is not None and any(pin.hard for pin in owners.values())


def name_of(pin: Pin) -> str:
    """Key of its durable value."""
    return _name(pin.number)


def _name(number: int) -> str:
    return f"{PREFIX}{number:016x}"


def _number_of(key: str) -> int:
    """ValueError unless that is how the key of a pin looks."""
    number = int(key.removeprefix(PREFIX), 16)
    if number < 0 or _name(number) != key:
        raise ValueError(f"{key} is no pin's key")
    return number


def value_of(pin: Pin, pool_time: PoolTime) -> bytes:
    """Its durable value: its end, the sizes of its pages, and the request that would make it."""
    keys, namespace = b"".join(pin.pages), pin.known.namespace.id
    sizes = array("Q", pin.pages.values()).tobytes()
    message = PinPages(namespace, keys, pin.owner, pin.hard, pin.ttl_s)
    return _HEAD.pack(len(pin.pages), pool_time.stored_s(pin.until_s)) + sizes + encode(message)
