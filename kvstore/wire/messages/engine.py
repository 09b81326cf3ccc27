"""A process and its own transfer-engine child, over a socket pair: never on a network.

The child keeps the engine at arm's length: it can be ended, the engine cannot. Requests are
answered in order, one at a time. An answer of Failure to EnginePull leaves it open whether bytes
still arrive: the asker ends the child before it uses the memory again.
"""

from __future__ import annotations

from kvstore.wire.messages.base import Message


class EngineOpen(Message, frozen=True, tag=160):
    """First request: start an engine under this host name or address -> EngineOpened."""

    host: str
    protocol: str
    device: str
    """Names of network devices, comma-separated; empty for all."""
    confined: bool
    """Let nobody but this host reach the engine's ports, which are open on every interface."""


class EngineOpened(Message, frozen=True, tag=161):
    """`peer` (host:port) is what other engines call this one."""

    peer: str


class EngineMap(Message, frozen=True, tag=162):
    """Map a stretch of the one file whose descriptor rides along -> EngineMapped."""

    region: int
    """Number of the caller's choice."""
    file_offset: int
    size_bytes: int
    writable: bool
    served: bool
    """Register it with the engine, so that peers can read it."""


class EngineMapBlock(Message, frozen=True, tag=167):
    """Open a block of a device by its handle, and let peers read it -> EngineMapped.

    On the device cpu its memfd rides along.
    """

    region: int
    device: str
    """What a configuration calls the device."""
    identity: str
    """The device as every process knows it; this and what follows as in AttachDeviceBuffer."""
    size_bytes: int
    ipc: bytes
    offset: int


class EngineMapped(Message, frozen=True, tag=163):
    """`address` is where peers find the region's first byte."""

    address: int


class EngineUnmap(Message, frozen=True, tag=164):
    """Serve the region no more and unmap it -> Done."""

    region: int


class EnginePull(Message, frozen=True, tag=165):
    """Read from a peer's memory into a writable region -> Done after the last byte.

    Packed u64 columns, one entry a page: places in the region, addresses at the peer.
    """

    peer: str
    region: int
    page_bytes: int
    places: bytes
    addresses: bytes


class EnginePush(Message, frozen=True, tag=166):
    """Write the start of a region to a peer -> Done, or Failure when the peer refused.

    For the self-test alone, which wants to be refused.
    """

    peer: str
    region: int
    size_bytes: int
    address: int
