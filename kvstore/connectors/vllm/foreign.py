"""Values of vLLM's as they are read here: vLLM is not there where types are checked."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from collections.abc import Set as AbstractSet

Vllm: TypeAlias = Any
"""Some object of vLLM's; attributes that it lacks are found by the tests with real engines."""


class Request(Protocol):
    """A request in the scheduler."""

    @property
    def request_id(self) -> str:
        """Its name."""
        ...

    @property
    def block_hashes(self) -> Sequence[bytes]:
        """One for each full block, chained; grows with the request."""
        ...

    @property
    def num_tokens(self) -> int:
        """Of prompt and output."""
        ...

    @property
    def kv_transfer_params(self) -> Mapping[str, object] | None:
        """What its client, or a proxy, has said of its KV."""
        ...


class NewRequest(Protocol):
    """A request that a step is the first for."""

    @property
    def req_id(self) -> str:
        """Its name."""
        ...

    @property
    def block_ids(self) -> Sequence[Sequence[int]]:
        """For each cache group, all blocks."""
        ...

    @property
    def num_computed_tokens(self) -> int:
        """Before the step."""
        ...


class GoingOn(Protocol):
    """Requests of earlier steps; columns of one entry each."""

    @property
    def req_ids(self) -> Sequence[str]:
        """Their names."""
        ...

    @property
    def new_block_ids(self) -> Sequence[Sequence[Sequence[int]] | None]:
        """For each cache group: what came to them; all of it where they are resumed."""
        ...

    @property
    def num_computed_tokens(self) -> Sequence[int]:
        """Before the step."""
        ...

    @property
    def resumed_req_ids(self) -> AbstractSet[str]:
        """Those that had been preempted."""
        ...


class StepOutput(Protocol):
    """What the scheduler has planned for a step."""

    @property
    def scheduled_new_reqs(self) -> Sequence[NewRequest]:
        """Requests that begin."""
        ...

    @property
    def scheduled_cached_reqs(self) -> GoingOn:
        """Requests that go on."""
        ...

    @property
    def num_scheduled_tokens(self) -> Mapping[str, int]:
        """Tokens that the step computes of each."""
        ...
