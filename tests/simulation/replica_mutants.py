"""Guards of repair, switched off: see mutants.py."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from master import heat, placing, trimming
from master.replication import Replication
from master.retiring import retire_copy
from master.tunables import HOST

if TYPE_CHECKING:
    import pytest

    from master.core import Core
    from master.run import Run

    Patch = pytest.MonkeyPatch

REPLICAS: Final[dict[str, object]] = {
    "replicas": 2,
    "replicas_apart": HOST,
    "workers": 3,
    "hosts": 3,
    "repair_after_s": 0.5,
    "crashes": 0.4,
    "fault_kinds": ("worker",),
    "disks": 0,
    "segments": 1,
}
CROWDED: Final = {**REPLICAS, "hosts": 2, "workers": 4}
HEAT: Final[dict[str, object]] = {
    "workers": 3, "hosts": 3, "replicas": 1, "heat_bytes_per_s": 1024.0, "page_ttl_s": 60.0,
}  # fmt: skip


def repair_forgets(patch: Patch) -> None:
    """Nobody notes what a put has stored, or a copy has not."""
    patch.setattr(Replication, "note_closed", lambda *args: None)


def losses_are_not_looked_into(patch: Patch) -> None:
    """Of what a lost worker had, no other copies are made."""
    patch.setattr(Replication, "note_loss", lambda self, until_s: None)


def copies_go_to_one_host(patch: Patch) -> None:
    """Where a page lies already does not matter for where it is copied."""
    patch.setattr(placing, "_holders", lambda run, part, pages: [])


def repair_does_not_hear_of_heat(patch: Patch) -> None:
    """More replicas are wanted of what is read much, and nobody is told to make them."""
    patch.setattr(heat, "_tell", lambda core, hot: None)


def trimming_leaves_none(patch: Patch) -> None:
    """Pages that have too many replicas lose all of them."""

    def trim(core: Core, run: Run, parts: int, wanted: int) -> None:
        del parts, wanted
        for copy in run.copies:
            retire_copy(core, run, copy, 0, len(run))

    patch.setattr(trimming, "trim", trim)
