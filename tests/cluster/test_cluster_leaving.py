"""A worker that is asked to end (SIGTERM): its readers come first, and its pages come back."""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING

import pytest

from kvstore import Hit
from kvstore.exit_codes import ExitCode
from tests.cluster.pages import PAGE_TOKENS, SIZE
from tests.cluster.rig import Rig, Shape
from tests.cluster.servers import until
from tests.fakes import payload

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.cluster

PAGES = 64
LEASE_S = 3.0


def test_reads_under_a_lease_end_well_and_the_next_life_has_every_page(tmp_path: Path) -> None:
    shape = Shape(masters=1, members=0, master={"lease_ttl_s": LEASE_S})
    with Rig(tmp_path / "pool", shape) as rig, rig.pages("tcp") as pages:
        (worker,) = rig.workers
        opened = pages.open()
        chain = opened.chain(range(PAGES * PAGE_TOKENS))
        pages.store_all(opened, chain)
        began = threading.Event()
        found: list[list[object]] = []

        def read_on() -> None:
            """Read what was located before the worker was asked to end, page by page."""
            into = bytearray(SIZE)
            match = pages.store.match_prefix(opened, chain)
            # A renewal, for which the second half of a lease is, would tell that it is gone.
            ends_s = match.leased_until_s - LEASE_S / 2
            while time.monotonic() < ends_s:
                found.append([*pages.store.read(match, into, [0])])
                assert bytes(into) == payload(chain.key(0), 0, SIZE)
                began.set()

        reader = threading.Thread(target=read_on)
        reader.start()
        began.wait()
        worker.terminate()
        until("no lookup finds its pages", lambda: not any(pages.store.probe(opened, chain)))
        assert worker.is_running  # it waits for the reader
        reader.join()
        assert all(each == [Hit()] for each in found)
        assert worker.wait() == ExitCode.OK
        assert [each.state for each in rig.status(0).workers] == ["left"]

        worker.start()
        until("it serves again", rig.is_serving)
        pages.assert_readable(opened, chain)
