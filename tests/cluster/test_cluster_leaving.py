"""A worker that is asked to end (SIGTERM): its readers come first, and its pages come back."""

from __future__ import annotations

import os
import signal
import threading
import time
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from kvstore import Hit, KVStore
from kvstore.exit_codes import ExitCode
from tests.cluster.pages import PAGE_TOKENS, SIZE, Pages
from tests.cluster.servers import Server, free_port, until
from tests.fakes import payload

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = pytest.mark.cluster

PAGES = 64
LEASE_S = 3.0


@contextmanager
def pool(folder: Path) -> Iterator[tuple[str, Server]]:
    """A master whose leases are short, and a worker: where the first is, and the second."""
    cluster = {"name": f"leaving-{os.getpid()}-{time.monotonic_ns()}"}
    where = f"127.0.0.1:{free_port()}"
    common = {"unix": "off", "admin": "off"}
    master = Server("master", folder / "master", {
        "cluster": cluster,
        "master": {"data_dir": str(folder / "master"), "listen": where, "lease_ttl_s": LEASE_S,
                   **common},
    })  # fmt: skip
    worker = Server("worker", folder / "worker", {
        "cluster": cluster,
        "worker": {"id": "w", "data_dir": str(folder / "worker"), "master": [where],
                   "listen": f"127.0.0.1:{free_port()}", "admin": "off", "dram": "64MiB",
                   "chunk": "16MiB"},
    })  # fmt: skip
    try:
        master.start()
        worker.start()
        until("the worker serves", lambda: states(where) == ["live"])
        yield where, worker
    finally:
        worker.discard()
        master.discard()
        for segment in Path("/dev/shm").glob(f"kvharbor-{cluster['name']}-*"):
            segment.unlink()


def states(where: str) -> list[str]:
    """Of the workers, as the master sees them."""
    with KVStore.connect(where) as store:
        return [worker.state for worker in store.stat().workers]


def test_reads_under_a_lease_end_well_and_the_next_life_has_every_page(tmp_path: Path) -> None:
    with pool(tmp_path) as (where, worker), Pages(where, "tcp", "leaving") as pages:
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
        os.kill(worker.pid, signal.SIGTERM)
        gone_s = until(
            "no lookup finds its pages", lambda: not any(pages.store.probe(opened, chain))
        )
        assert worker.is_running  # it waits for the reader
        reader.join()
        assert all(each == [Hit()] for each in found)
        assert worker.wait() == ExitCode.OK
        assert gone_s < LEASE_S
        assert states(where) == ["left"]

        worker.start()
        until("it serves again", lambda: states(where) == ["live"])
        pages.assert_readable(opened, chain)
