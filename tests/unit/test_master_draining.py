"""A pool filled with pages of one size takes pages of another."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from kvstore import limits
from kvstore.ids import KEY_BYTES, ROOT_PARENT
from kvstore.namespace import Layout, open_layout
from kvstore.replica import ExtentState
from kvstore.wire.messages.namespaces import NamespaceOpened, OpenNamespace
from kvstore.wire.messages.puts import PutPlans
from master import draining
from master.state import STEPS_PER_TICK
from master.tunables import Tunables
from tests.unit.master_rig import OpenedNamespace, Rig, chain, small_content

if TYPE_CHECKING:
    from master.extent_allocator import ExtentAllocator

LARGE = 16 * 4096
"""Sixteen times a small page: a whole chunk."""


def large_pages(rig: Rig) -> OpenedNamespace:
    """A namespace of large pages."""
    layout = Layout(page_tokens=2048)
    opened = rig.ask(rig.engine, OpenNamespace(small_content(), layout))
    assert isinstance(opened, NamespaceOpened)
    large = OpenedNamespace(rig, open_layout(small_content(), layout), opened.ordinal)
    assert large.namespace.parts[0].size_bytes == LARGE
    return large


def filled(chunks: int = 2) -> tuple[Rig, OpenedNamespace, OpenedNamespace]:
    """A pool full of small pages, and a namespace of large ones."""
    rig = Rig(Tunables(watermark_high=1.0, watermark_low=0.99))
    rig.add_worker(chunks=chunks)
    small, large = rig.open_namespace(), large_pages(rig)
    for number in range(chunks):
        small.put(chain(number, 16))
    return rig, small, large


def allocator(rig: Rig) -> ExtentAllocator:
    """The one segment's space."""
    return rig.master.core.segments["w1-dram"].allocator


def test_a_chunk_is_emptied_for_another_class() -> None:
    rig, small, large = filled()
    assert large.begin(chain(9, 1), wait=True) is None
    request = rig.last_request
    rig.settle()
    reply = rig.reply(rig.engine, request)
    assert isinstance(reply, PutPlans)
    assert len(reply.spans) == 1
    left = sum(small.probe(chain(0, 16))) + sum(small.probe(chain(1, 16)))
    assert left == 16, "one chunk was emptied, the other left alone"


def test_the_coldest_chunk_is_emptied() -> None:
    rig, small, large = filled()
    for _ in range(10):
        rig.pass_time(1.0)
        small.match(chain(0, 16), lease=False)
    large.begin(chain(9, 1), wait=True)
    rig.settle()
    assert small.probe(chain(0, 16)) == b"\1" * 16


def test_leased_pages_stay_and_the_chunk_opens_again() -> None:
    rig, small, large = filled(chunks=1)
    small.match(chain(0, 16)[: 4 * 32])
    assert large.begin(chain(9, 1), wait=True, timeout_s=60.0) is None
    request = rig.last_request
    rig.pass_time(1.0)
    assert small.probe(chain(0, 16)) == b"\1" * 4 + bytes(12)
    assert not rig.master.core.segments["w1-dram"].draining
    rig.pass_time(limits.LEASE_TTL_S + 1.0)
    assert isinstance(rig.reply(rig.engine, request), PutPlans)


def test_a_chunk_that_is_emptied_takes_nothing_new() -> None:
    rig, small, large = filled(chunks=1)
    rig.holds_commands = True
    large.begin(chain(9, 1), wait=True)
    rig.settle()
    assert allocator(rig).bytes_in[ExtentState.RETIRED] == 16 * 4096
    assert not small.plans(chain(5, 1)).spans
    rig.holds_commands = False
    rig.obey_all()
    rig.settle()
    assert [chunk.size_class for chunk in allocator(rig).chunk_list] == [LARGE]


def test_free_slots_of_a_chunk_that_is_emptied_are_not_planned() -> None:
    rig, small, large = filled(chunks=1)
    small.remove(chain(0, 16)[8 * 32 :])
    rig.pass_time(0.5)
    assert sum(small.probe(chain(0, 16))) == 8
    rig.holds_commands = True
    large.begin(chain(9, 1), wait=True)
    rig.settle()
    assert allocator(rig).bytes_in[ExtentState.FREE] == 8 * 4096
    assert not small.plans(chain(5, 1)).spans


def test_children_elsewhere_go_with_their_parents() -> None:
    rig = Rig()
    rig.add_worker(chunks=1)
    small = rig.open_namespace()
    keys = chain(0, 16)
    small.put(keys)
    rig.add_worker("w2", chunks=1)
    small.put(chain(1, 3), parent=keys[-32:])
    large = large_pages(rig)
    plans = [large.begin(chain(9, 1), wait=True), large.begin(chain(10, 1), wait=True)]
    assert plans == [None, None]
    rig.pass_time(2.0)
    assert len(rig.master.core.plans) == 2
    assert sum(small.probe(keys + chain(1, 3))) == 0


DEPTH = 64


@pytest.mark.parametrize("is_leased", [False, True])
def test_a_deep_chain_is_looked_at_in_proportion_to_its_depth(
    monkeypatch: pytest.MonkeyPatch, *, is_leased: bool
) -> None:
    rig = Rig(Tunables(watermark_high=1.0, watermark_low=0.99))
    rig.add_worker(chunks=DEPTH // 16)
    small, large = rig.open_namespace(), large_pages(rig)
    keys = chain(1, DEPTH)
    for at in range(0, len(keys), KEY_BYTES):  # a run for each page
        small.put(keys[at : at + KEY_BYTES], keys[at - KEY_BYTES : at] if at else ROOT_PARENT)
    if is_leased:
        small.match(keys)
    monkeypatch.setattr(draining, "STEP_RUNS", 1)
    large.begin(chain(9, 1), wait=True)
    rig.tick()
    steps = 0
    while rig.master.core.jobs:
        rig.tick()
        steps += STEPS_PER_TICK
    assert 16 <= steps <= 3 * DEPTH
    assert (sum(small.probe(keys)) == DEPTH) is is_leased
