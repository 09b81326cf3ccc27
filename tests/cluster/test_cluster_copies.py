"""Pages are copied from worker to worker by every transport, and outlast whoever had them first."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

import pytest

from tests.cluster.pages import SIZE
from tests.cluster.rig import Rig, Shape
from tests.cluster.servers import until

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = [pytest.mark.cluster, pytest.mark.slow]

WAYS = (("shm", "tcp"), ("tcp",), ("tcp", "mooncake"))
TOKENS = 256
PAGES = 64
COPIED_S = 60.0
"""Long enough for a machine that has much else to do."""


def copied(rig: Rig) -> int:
    """Pages that have arrived at another worker."""
    return rig.status(0).counters.get("copied_pages_dram", 0)


def held_bytes(rig: Rig) -> dict[str, int]:
    """What lies sealed at each worker."""
    return {each.worker: each.sealed_bytes for each in rig.status(0).segments}


def has_come_again(rig: Rig, lives: int) -> bool:
    """Whether so many lives of workers have been registered, and all that run serve."""
    return rig.status(0).counters["registrations"] == lives and rig.is_serving()


@pytest.mark.parametrize("ways", WAYS, ids="+".join)
def test_pages_outlast_the_worker_that_they_were_put_to(
    tmp_path: Path, ways: tuple[str, ...]
) -> None:
    shape = Shape(masters=1, members=0, workers=2, worker={"transports": list(ways)})
    with Rig(tmp_path / "pool", shape) as rig, rig.pages("tcp") as pages:
        opened = pages.open()
        chain = opened.chain(range(TOKENS))
        assert len(chain) == PAGES
        pages.store_all(opened, chain)
        until("every page is copied", lambda: copied(rig) == PAGES, COPIED_S)
        assert held_bytes(rig) == dict.fromkeys(("w0", "w1"), PAGES * SIZE)
        for lives, worker in enumerate(rig.workers, 3):
            worker.kill()
            pages.assert_readable(opened, chain)
            worker.launch()
            until("it comes again", partial(has_come_again, rig, lives))


def test_a_worker_that_hangs_while_it_is_read_holds_copies_up_no_longer_than_it_does(
    tmp_path: Path,
) -> None:
    shape = Shape(
        masters=1, members=0, workers=2, worker={"transports": ["tcp"]},
        master={"copy_bytes_per_s": PAGES * SIZE},
    )  # fmt: skip
    with Rig(tmp_path / "pool", shape) as rig, rig.pages("tcp") as pages:
        opened = pages.open()
        chain = opened.chain(range(4 * TOKENS))
        pages.store_all(opened, chain)
        source = max(held_bytes(rig).items(), key=lambda each: each[1])[0]
        (holder,) = (each for each in rig.workers if each.folder.name == source)
        until("copies have begun", lambda: copied(rig) > 0, COPIED_S)
        holder.stop()
        began = copied(rig)
        until("a copy has failed", lambda: rig.status(0).counters.get("moves_cut_short"), COPIED_S)
        assert began < len(chain)
        holder.go_on()
        whole = len(chain) * SIZE
        until("every page is copied", lambda: min(held_bytes(rig).values()) == whole, COPIED_S)
        holder.kill()
        pages.assert_readable(opened, chain)
