"""What a policy of roles decides: whether a worker of a fleet should compute prompts or answers."""

from __future__ import annotations

from enum import StrEnum
from typing import TYPE_CHECKING, Protocol

import msgspec

if TYPE_CHECKING:
    from policies.parameters import Parameters


class Want(StrEnum):
    """What one worker more should do, in place of the other."""

    PREFILL = "prefill"
    DECODE = "decode"


class Crew(msgspec.Struct, frozen=True, gc=False):
    """The inference workers of a fleet, and what they have to do."""

    prefills: int
    """That compute prompts and nothing else."""
    decodes: int
    """That generate and nothing else."""
    queue_s: float
    """Time that all who compute prompts together need for those that wait."""
    busy: float
    """Share of them that had a prompt, lately."""
    load: float
    """What answers take of those who generate, or would: of their KV tokens, or of their batches,
    whichever is scarcer. More than 1 where prompts wait that have been computed."""
    rested_s: float
    """Since a worker has changed its role last."""


class RolesPolicy(Protocol):
    """Says which role is short of a worker that the other can spare. Pure."""

    parameters: Parameters
    """May be replaced by others of the same type at any time."""
    measures: bool
    """Whether it is to be asked at all."""
    acts: bool
    """Whether what it says is done; else that is only counted."""

    @property
    def lasting_s(self) -> float:
        """For so long it has to want the same before that is done."""
        ...

    def wanted(self, crew: Crew) -> Want | None:
        """The role that a worker is to change to; None: all stay as they are."""
        ...
