"""What a transport is opened with, and what a kind of transport must offer to be chosen."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from kvstore.rpc.identity import Identity
    from kvstore.transfer.device import Block
    from kvstore.transfer.transport import Transport
    from kvstore.wire.messages.common import Address


@dataclass(frozen=True, slots=True)
class TransferContext:
    """Who dials, and the one address of a worker among `all_addresses` that is to be used."""

    identity: Identity
    address: Address
    all_addresses: tuple[Address, ...]
    left: dict[int, Block] = field(default_factory=dict)
    """By number, blocks that the worker may have open still after a transport to it failed; they
    outlive the transport, so that the next one has the worker close them."""


class TransportKind(Protocol):
    """A module that implements one transport; kvstore.transfer.choice knows the built-in ones."""

    def require(self) -> None:
        """ConfigError, saying what to install or set, when this process cannot use it."""
        ...

    def open_transport(self, context: TransferContext, timeout_s: float) -> Transport:
        """A way to that worker. Raises Unavailable when the address does not lead there."""
        ...
