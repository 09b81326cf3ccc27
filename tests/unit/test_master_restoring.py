"""One damaged value: what a new master can do without is set aside, for the rest it stops."""

from __future__ import annotations

import pytest

from kvstore.errors import ConfigError
from kvstore.wire.messages.pins import ListPins, PagesPinned, PinList, PinPages
from master import lenders, namespaces, pins, pool_time, tombstones, write_budget
from master.restoring import ASIDE, lost_with
from tests.unit.master_rig import OpenedNamespace, Rig, chain
from tests.unit.stored_pages import KEYS, TTL_S, counter, end, offer

PIN_S = 60.0
LATER_S = 30.0
YOUNG = chain(2, 3)


@pytest.fixture
def space(rig: Rig) -> OpenedNamespace:
    """A namespace with a pinned chain, and another put when half of the pin's time has gone."""
    space = rig.open_namespace()
    space.put(KEYS, ttl_s=TTL_S)
    reply = rig.ask(rig.engine, PinPages(space.id, KEYS, "o", False, PIN_S))
    assert isinstance(reply, PagesPinned)
    rig.pass_time(LATER_S)
    space.put(YOUNG, ttl_s=TTL_S)
    rig.pass_time(1.0)
    return space


def take_over(rig: Rig) -> None:
    """Another master of another host, and the worker's pages."""
    rig.now += 5000.0  # this clock's
    rig.takeover(2)
    offer(rig)
    end(rig)


def pin_left_s(rig: Rig) -> float:
    """How long the only pin goes on."""
    reply = rig.ask(rig.engine, ListPins())
    assert isinstance(reply, PinList)
    (row,) = reply.pins
    return row.left_s


def life_left_s(rig: Rig, keys: bytes) -> float:
    """How long the run goes on that this chain is in."""
    (stretch,) = rig.master.core.tree(1).stretches(keys)
    return stretch.run.expires_s - rig.now


@pytest.mark.parametrize("prefix", [pins.PREFIX, pool_time.KEY, write_budget.KEY])
def test_what_the_pool_can_do_without_is_set_aside_and_the_rest_is_loaded(
    rig: Rig, space: OpenedNamespace, prefix: str
) -> None:
    key = next((each for each in rig.store if each.startswith(prefix)), prefix)
    rig.store[key] = b"?"
    take_over(rig)
    assert space.probe(KEYS + YOUNG) == b"\1" * 15
    assert rig.master.damaged == [key]
    assert lost_with(key)
    assert counter(rig, "values_set_aside") == 1
    assert rig.store[ASIDE + key] == b"?"
    assert rig.store.get(key) != b"?"
    assert rig.master.core.pins.pages == (0 if prefix == pins.PREFIX else 12)
    rig.takeover(3)
    assert rig.master.damaged == []


@pytest.mark.parametrize(
    ("prefix", "value"),
    [(namespaces.PREFIX, b"?"), (lenders.PREFIX, b"\2?"), (tombstones.PREFIX, b"?")],
)
def test_without_what_keeps_pages_apart_no_master_starts(
    rig: Rig, space: OpenedNamespace, prefix: str, value: bytes
) -> None:
    key = next((each for each in rig.store if each.startswith(prefix)), prefix + "00")
    rig.store[key] = value
    with pytest.raises(ConfigError, match=key):
        rig.takeover(2)
    assert rig.store[key] == value


@pytest.mark.parametrize("clock", [None, b"?"])
def test_without_its_moment_pool_time_goes_on_from_the_youngest_page(
    rig: Rig, space: OpenedNamespace, clock: bytes | None
) -> None:
    del rig.store[pool_time.KEY]
    if clock is not None:
        rig.store[pool_time.KEY] = clock
    take_over(rig)
    assert rig.master.core.pool_time.restored_s == LATER_S
    assert pin_left_s(rig) == PIN_S - LATER_S
    assert life_left_s(rig, KEYS) == TTL_S - LATER_S
    assert life_left_s(rig, YOUNG) == TTL_S
    rig.pass_time(PIN_S - LATER_S + 1.0)
    assert not rig.master.core.pins.pages


def test_without_any_moment_pins_begin_anew(rig: Rig, space: OpenedNamespace) -> None:
    for key in [each for each in rig.store if each.startswith(("segments/", pool_time.KEY))]:
        del rig.store[key]
    rig.takeover(2)
    rig.tick()
    assert pin_left_s(rig) == PIN_S
