"""Pinning pages, taking pins back, listing them, and what their end sets free.

What pins hold back is asked where it happens: eviction (victims, draining) and expiry (reclaim).
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Final

from kvstore import limits
from kvstore.errors import AccessDenied, OutOfSpace
from kvstore.ids import KEY_BYTES
from kvstore.require import require_owner, require_ttl
from kvstore.segment import size_class_of
from kvstore.wire.messages.pins import (
    ListPins,
    PagesPinned,
    PagesUnpinned,
    PinList,
    PinPages,
    PinRow,
    UnpinPages,
)
from master.packed import split_keys
from master.pins import Pin, name_of, value_of
from master.reads import asked_namespace, readable_pages
from master.sessions import OPERATOR, WORKER

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    from master.core import Core
    from master.namespaces import KnownNamespace
    from master.run import Run
    from master.sessions import Caller

ENDED_PER_TICK: Final = 4
"""Pins, of up to BATCH_PAGES_MAX pages each."""
ABOVE_RUNS_MAX: Final = 1024
"""Looked through for one pin (I27)."""


def pin_pages(core: Core, caller: Caller, message: PinPages) -> None:
    """Answer PagesPinned once the pin is durable."""
    known = asked_namespace(core, caller, message.namespace, message.keys)
    require_owner(message.owner)
    require_ttl("ttl_s", message.ttl_s)
    pinned = readable_pages(core, known.tree, message.keys)
    pages = {
        key: _extent_bytes(known, known.tree.get(key))
        for key, there in zip(split_keys(message.keys), pinned, strict=True)
        if there
    }
    answer = PagesPinned(bytes(pinned))
    if not pages:
        core.reply(caller, answer)
        return
    above = _take_in_above(core, known, pages) if message.hard else {}
    _check_room(core, known, message, pages)
    until_s = core.now + message.ttl_s
    number = core.pins.new_number()
    pin = Pin(number, known, message.owner, message.hard, message.ttl_s, until_s, pages)
    changed = core.pins.add(pin, above)
    core.pins.deadlines.place(pin, until_s)
    let_expire(core, known, pages)
    _write(core, [*changed, pin], lambda: core.reply(caller, answer))


def unpin_pages(core: Core, caller: Caller, message: UnpinPages) -> None:
    """Answer PagesUnpinned once that is durable."""
    known = asked_namespace(core, caller, message.namespace, message.keys)
    require_owner(message.owner)
    keys = split_keys(message.keys)
    if not keys:
        keys = [key for pin in core.pins.of_owner(known, message.owner) for key in pin.pages]
    before = core.pins.pages
    changed = core.pins.lift(known, keys, message.owner)
    let_expire(core, known, keys)
    answer = PagesUnpinned(before - core.pins.pages)
    _write(core, changed, lambda: core.reply(caller, answer))


def list_pins(core: Core, caller: Caller, _message: ListPins) -> None:
    """Answer PinList."""
    session = caller.session
    if session.role == WORKER:
        raise AccessDenied(f"role {session.role}: this is for engines and operators")
    rows = [
        PinRow(
            pin.known.namespace.id,
            pin.known.namespace.content.tenant,
            pin.known.namespace.content.model,
            pin.owner,
            pin.hard,
            pin.until_s - core.now,
            len(pin.pages),
            pin.size_bytes,
        )
        for pin in core.pins.all()
        if session.role == OPERATOR or session.tenant == pin.known.namespace.content.tenant
    ]
    core.reply(caller, PinList(tuple(rows)))


def end_pins(core: Core) -> None:
    """Let the pins go whose deadline has come."""
    for pin in core.pins.deadlines.take_due(core.now, ENDED_PER_TICK):
        keys = list(pin.pages)
        core.pins.lift(pin.known, keys, pin.owner)
        let_expire(core, pin.known, keys)
        _write(core, [pin])


def override(core: Core, known: KnownNamespace, keys: bytes, then: Callable[[], None]) -> None:
    """A removal of these pages ends everybody's pins of them; it goes on when that is durable."""
    _write(core, core.pins.lift(known, split_keys(keys), None), then)


def _extent_bytes(known: KnownNamespace, run: Run | None) -> int:
    """What one replica of a readable page takes."""
    assert run is not None, known.ordinal
    parts = known.namespace.parts
    if parts:
        sizes = {part.index: part.size_bytes for part in parts}
    else:
        sizes = {copy.part: copy.part_bytes for copy in run.copies}
    return sum(map(size_class_of, sizes.values()))


def _take_in_above(
    core: Core, known: KnownNamespace, pages: dict[bytes, int]
) -> dict[bytes, bytes]:
    """Add to each page's bytes what it alone would hold above itself; the next hold above each.

    Tails leave first, so a hard pin keeps all that is above it. OutOfSpace where that is too much
    to look through at once.
    """
    holds, tree, left = core.pins.held(known), known.tree, ABOVE_RUNS_MAX
    above: dict[bytes, bytes] = {}
    own = dict(pages)
    for stretch in tree.stretches(b"".join(own)):
        run, stop = stretch.run, stretch.page
        keys = split_keys(run.keys[stop * KEY_BYTES : (stop + stretch.count) * KEY_BYTES])
        above |= zip(keys[1:], keys, strict=False)
        first = keys[0]
        while first not in holds:
            if not stop:
                parent = tree.parent_run(run)
                if parent is None:
                    break
                run, stop = parent, len(parent)
            near = run.key(stop - 1)
            if near in holds or near in own:
                above[first] = near
                break
            if not left:
                raise OutOfSpace(f"more than {ABOVE_RUNS_MAX} runs are above: pin those first")
            left -= 1
            kept = _up_to_held(run, stop, own, holds)
            pages[first] += (stop - kept) * own[first]
            stop = kept
    for key in own.keys() & holds.keys():
        pages[key] = holds[key].size_bytes
    return above


def _up_to_held(run: Run, stop: int, *held: Mapping[bytes, object]) -> int:
    """How many of the first `stop` pages of a run there are up to the last one held."""
    keys = split_keys(run.keys[: stop * KEY_BYTES])
    if all(each.keys().isdisjoint(keys) for each in held):
        return 0
    while not any(keys[-1] in each for each in held):
        keys.pop()
    return len(keys)


def _check_room(
    core: Core, known: KnownNamespace, message: PinPages, pages: dict[bytes, int]
) -> None:
    """OutOfSpace, naming the bound that this pin would pass."""
    pins, tenant = core.pins, known.namespace.content.tenant
    before = [pins.of_page(known, key, message.owner) for key in pages]
    replaced = Counter(pin for pin in before if pin is not None)
    ending = sum(len(pin.pages) == count for pin, count in replaced.items())
    if len(pins) - ending >= limits.PINS_MAX:
        raise OutOfSpace(f"{limits.PINS_MAX} pins are held: take some back")
    if pins.pages + before.count(None) > limits.PINNED_PAGES_MAX:
        raise OutOfSpace(f"{pins.pages} of {limits.PINNED_PAGES_MAX} pages are pinned")
    if message.hard:
        holds = pins.held(known)
        wanted = sum(size for key, size in pages.items() if key not in holds)
        pool = sum(s.geometry.payload_bytes for s in core.segments.values() if s.readable)
        most = int(core.tunables.pin_quota * pool)
        held = pins.hard_bytes[tenant]
        if held + wanted > most:
            raise OutOfSpace(
                f"pin_quota: tenant {tenant} has pinned {held} bytes hard and wants {wanted} more, "
                f"may pin {most}"
            )


def let_expire(core: Core, known: KnownNamespace, keys: Iterable[bytes]) -> None:
    """These pages may have been waiting for a pin's end; sooner than its time no run expires."""
    for stretch in known.tree.stretches(b"".join(keys)):
        run = stretch.run
        core.expiry.place(run, max(core.now, run.expires_s))


def _write(core: Core, changed: list[Pin], then: Callable[[], None] | None = None) -> None:
    """Make what is left of these pins durable, then go on."""
    puts = tuple((name_of(pin), value_of(pin, core.pool_time)) for pin in changed if pin.pages)
    deletes = tuple(name_of(pin) for pin in changed if not pin.pages)
    if puts or deletes:
        core.persist(puts, deletes, then)
    elif then is not None:
        then()
