"""A master with one worker and a namespace, as most tests of the master begin."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from kvstore.connectors import leases
from tests.unit.engine_store import AtOnce
from tests.unit.master_rig import Rig

if TYPE_CHECKING:
    from tests.unit.master_rig import OpenedNamespace


@pytest.fixture
def rig() -> Rig:
    """A master with one worker."""
    made = Rig()
    made.add_worker()
    return made


@pytest.fixture
def space(rig: Rig) -> OpenedNamespace:
    """A namespace of one part."""
    return rig.open_namespace()


@pytest.fixture
def leases_end_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is given back has been when the call that gave it back returns."""
    monkeypatch.setattr(leases, "OneThread", AtOnce)
