"""Durable values of earlier masters, each taken in by whoever owns its key.

Where pages might be taken for others without a value, one that is damaged stops the start: its
owner raises ConfigError. Of others the pool can do without any one: their owners raise CorruptPage,
and the value is set aside. Must not know what values mean.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from kvstore.coordination.metadata_store import KEY_BYTES_MAX, VALUE_BYTES_MAX
from kvstore.errors import CorruptPage
from master import (
    chunk_values,
    lenders,
    namespaces,
    pins,
    policy_requests,
    pool_time,
    relocations,
    restored_chunks,
    stripes,
    tombstones,
    write_budget,
)

if TYPE_CHECKING:
    from collections.abc import Iterable

    from master.core import Core

ASIDE: Final = "aside/"
LOST_WITH: Final = {
    chunk_values.PREFIX: "its chunk's records are asked for",
    pins.PREFIX: "nothing is pinned by it any more",
    relocations.PREFIX: "it is over; a worker that it drained is filled again",
    stripes.PREFIX: "its pages have the replicas that they have",
    pool_time.KEY: "time goes on from when the youngest page known came in",
    write_budget.KEY: "the budget of writes to drives begins whole",
}
"""What becomes of the pool without a value that was set aside, by how its key begins."""


def restore(core: Core, entries: Iterable[tuple[str, bytes]]) -> None:
    """Take in all that is durable, before the first event; ConfigError where one must be ours."""
    for key, value in sorted(entries):  # namespaces before the pins in them
        try:
            _take_in(core, key, value)
        except CorruptPage:
            _set_aside(core, key, value)
    if core.pool_time.is_lost:
        core.pool_time.go_on_from(core.restored.latest_s())


def lost_with(key: str) -> str:
    """What becomes of the pool without the value that was set aside from this key."""
    return next(text for prefix, text in LOST_WITH.items() if key.startswith(prefix))


def _take_in(core: Core, key: str, value: bytes) -> None:
    if key.startswith(namespaces.PREFIX):
        namespaces.restore(core, key, value)
    elif key.startswith(tombstones.PREFIX):
        core.tombstones.restore(key, value)
    elif key.startswith(lenders.PREFIX):
        core.lenders.restore(key, value)
    elif key.startswith(pins.PREFIX):
        core.pins.restore(core.namespaces, key, value)
    elif key.startswith(chunk_values.PREFIX):
        restored_chunks.restore_chunk(core, key, value)
    elif key == pool_time.KEY:
        core.pool_time.restore(value)
    elif key.startswith(policy_requests.PREFIX):
        policy_requests.restore(core, key, value)
    elif key.startswith(relocations.PREFIX):
        core.relocations.restore(core.namespaces, key, value)
    elif key.startswith(stripes.PREFIX):
        core.stripes.restore(key, value)
    elif key == write_budget.KEY:
        write_budget.restore(core, value)


def _set_aside(core: Core, key: str, value: bytes) -> None:
    """Move it out of the way of the next master. A stranger's, which no master could have written,
    stays where it is.
    """
    core.counters["values_set_aside"] += 1
    core.damaged.append(key)
    aside = ASIDE + key
    if len(value) <= VALUE_BYTES_MAX and len(aside.encode()) <= KEY_BYTES_MAX:
        core.persist(puts=((aside, value),), deletes=(key,), behind=True)
