"""The first frames of every connection: who speaks, which versions, proof of the cluster secret.

Order: the listener sends Challenge, the dialler Hello, the listener Welcome or Failure, with
request id 0. These three and Failure never change; everything after is in the version that
Welcome names, the highest that both sides speak. Where the ranges do not meet both are named in
a Failure.
"""

from __future__ import annotations

from kvstore.wire.messages.base import Message


class Challenge(Message, frozen=True, tag=1):
    """Listener to dialler, unasked. `nonce` is fresh and 16 bytes long."""

    cluster: str
    version_min: int
    version_max: int
    nonce: bytes


class Hello(Message, frozen=True, tag=2):
    """Dialler to listener; answered by Welcome or Failure.

    `proof` is HMAC-SHA256 of the cluster secret over everything said up to here, both nonces
    included (kvstore/rpc/handshake.py); empty where no secret is set. `session` (16 random
    bytes) survives reconnects.
    """

    version_min: int
    version_max: int
    role: str
    """engine, worker, master or operator."""
    tenant: str
    name: str
    session: bytes
    nonce: bytes
    proof: bytes
    host: str = ""
    """The machine that the dialler runs on, as workers there call it; empty: unknown."""


class Welcome(Message, frozen=True, tag=3):
    """Listener to dialler: the connection is open.

    `proof` shows that the listener knows the secret too, over everything said and this answer.
    """

    version: int
    epoch: int
    life: bytes
    """16 random bytes that no other life of a listener has."""
    local_address: str
    """"unix:/path", where a dialler of the same host may greet this listener as well; "" for none,
    and for diallers of other hosts."""
    proof: bytes


class Failure(Message, frozen=True, tag=4):
    """Answer to any request that could not be carried out; `code` is of kvstore.errors."""

    code: str
    text: str
    retry_after_s: float = 0.0
    where: tuple[str, ...] = ()
    """Addresses of the leader, with not_leader where they are known."""


class Done(Message, frozen=True, tag=5):
    """Answer to a request whose only result is that it was carried out."""
