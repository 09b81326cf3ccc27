"""Guards of relocations, switched off: see mutants.py."""

from __future__ import annotations

from typing import TYPE_CHECKING

from master import relocating
from master.segments import Medium, Segment

if TYPE_CHECKING:
    import pytest

    from master.core import Core
    from master.relocations import Relocation
    from master.run import Copy, Run

    Patch = pytest.MonkeyPatch


def relocations_take_the_last(patch: Patch) -> None:
    """A copy goes whether or not another one stays."""

    def going(
        core: Core, relocation: Relocation, run: Run, copy: Copy, arrived: Segment
    ) -> list[bool]:
        del core, relocation, arrived
        return [bool(each) for each in copy.present(0, len(run))]

    patch.setattr(relocating, "_going", going)


def drained_workers_are_filled(patch: Patch) -> None:
    """Puts and copies go to a worker that is to be empty."""

    def takes_plans(self: Segment) -> bool:
        return self.takes_orders and self.medium is Medium.SERVING

    patch.setattr(Segment, "takes_plans", property(takes_plans))
