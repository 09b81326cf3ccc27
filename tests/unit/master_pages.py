"""A chain of eight pages, and short looks at answers and extents that tests of puts share."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from kvstore.ids import KEY_BYTES
from tests.unit.master_rig import Rig, chain

if TYPE_CHECKING:
    from kvstore.replica import ExtentState
    from kvstore.wire.messages.puts import PutPlans, Sealed

KEYS = chain(1, 8)
KEY = KEYS[:KEY_BYTES]


def key(page: int) -> bytes:
    """Key of one page of KEYS."""
    return KEYS[page * KEY_BYTES : (page + 1) * KEY_BYTES]


def upto(page: int) -> bytes:
    """Keys of the pages of KEYS before this one."""
    return KEYS[: page * KEY_BYTES]


def bytes_in(rig: Rig, state: ExtentState, name: str = "w1-dram") -> int:
    """Bytes of a segment in this state."""
    return rig.master.core.segments[name].allocator.bytes_in[state]


def refused(plans: PutPlans) -> list[tuple[int, int, int]]:
    """(first, count, reason) of what was refused."""
    return [(each.first, each.count, each.reason) for each in plans.refused]


def granted(plans: PutPlans) -> list[tuple[int, int, int]]:
    """(first, count, part) of what was granted."""
    return [(each.first, each.count, each.part) for each in plans.spans]


def piece(report: Sealed, page: int, count: int = 1) -> Sealed:
    """The report of some pages alone."""
    stop = page + count
    return msgspec.structs.replace(
        report,
        parents=report.parents[page * 32 : stop * 32],
        keys=report.keys[page * 32 : stop * 32],
        offsets=report.offsets[page * 8 : stop * 8],
        checksums=report.checksums[page * 8 : stop * 8],
    )
