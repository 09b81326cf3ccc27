"""A pool of several hosts in which one chain is read much. Not a test."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvstore.ids import KEY_BYTES
from kvstore.wire.messages.reads import MatchPrefix
from master.events import SessionId, SessionOpened
from master.tunables import Tunables
from tests.unit.master_rig import OpenedNamespace, Rig, chain

if TYPE_CHECKING:
    from master.run import Run

PAGES = 8
PAGE = 4096
POOL_PAGES = 256
"""Of each worker."""
WINDOW_S = 10.0
CHAIN = chain(1, PAGES)
READ_A_SECOND = PAGES * PAGE
"""Bytes a second, where all pages are read once a second."""


def pool(workers: int = 4, replication: str = "enforce") -> tuple[Rig, OpenedNamespace]:
    """Workers on hosts of their names; one run may take what four reads a second of CHAIN are."""
    parameters = {"port_bytes_per_s": 8 * READ_A_SECOND, "window_s": WINDOW_S}
    rig = Rig(
        Tunables(
            "test",
            replicas=1,
            replication=replication,
            replication_parameters={} if replication == "off" else parameters,
        )
    )
    for number in range(workers):
        rig.add_worker(f"w{number}")
    space = rig.open_namespace()
    space.put(CHAIN)
    return rig, space


def the_run(rig: Rig, key: bytes = CHAIN[:KEY_BYTES]) -> Run:
    """The run that has this page."""
    run = rig.master.core.tree(1).get(key)
    assert run is not None
    return run


def reader(rig: Rig, host: str) -> SessionId:
    """An engine on this host."""
    session = SessionId(9000 + len(rig.master.core.sessions))
    rig.send(SessionOpened(session, "engine", "tenant", "reader", bytes(16), host))
    return session


def read(
    rig: Rig,
    space: OpenedNamespace,
    a_second: int,
    seconds: float,
    *chains: bytes,
    session: SessionId | None = None,
) -> None:
    """Match these pages so often, for so long."""
    rig.checks = False  # of all these events, but for the last
    for _ in range(round(seconds)):
        rig.pass_time(1.0, 1.0)
        for keys in (chains or (CHAIN,)) * a_second:
            rig.ask(session or rig.engine, MatchPrefix(space.id, keys, ()))
    rig.checks = True
    rig.tick()


def hosts(rig: Rig) -> set[str]:
    """Where the first page can be read."""
    return {copy.segment.host for copy in the_run(rig).copies if copy.generation(0)}
