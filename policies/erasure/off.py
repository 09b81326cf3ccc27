"""No stripes: replicas alone."""

from __future__ import annotations

from typing import TYPE_CHECKING

from policies.erasure.protocol import ErasurePolicy
from policies.parameters import Parameters

if TYPE_CHECKING:
    from policies.erasure.protocol import Resting


class Off(ErasurePolicy):
    """What was striped before is kept as it is, read and rebuilt."""

    code = None

    def __init__(self) -> None:
        """There is nothing to set."""
        self.parameters = Parameters()

    def takes(self, page: Resting) -> bool:
        """None."""
        return False
