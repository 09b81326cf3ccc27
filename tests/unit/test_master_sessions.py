"""What goes with a connection, and what stays with its owner while another connection is open."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tests.unit.master_rig import TENANT, Rig, chain

if TYPE_CHECKING:
    from master.events import SessionId


def two_connections(rig: Rig) -> tuple[SessionId, SessionId]:
    """The same engine, connected twice."""
    token = b"one and the same"
    return rig.open("engine", TENANT, "twin", token), rig.open("engine", TENANT, "twin", token)


def test_an_answer_held_back_for_a_closed_connection_is_forgotten() -> None:
    rig = Rig()
    rig.add_worker()
    space = rig.open_namespace()
    keys = chain(1, 2)
    assert space.begin(keys) is not None  # by another engine, which never writes
    first, second = two_connections(rig)
    assert space.begin(keys, wait=True, session=first) is None
    assert len(rig.master.core.waiting) == 1
    rig.close(first)
    assert not len(rig.master.core.waiting)
    rig.close(rig.engine)  # whose put now fails: somebody could be woken
    owner = rig.master.core.sessions[second].owner
    assert not owner.waits
