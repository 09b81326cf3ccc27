"""Who speaks on a connection, and which peers a listener takes. Values only, no I/O."""

from __future__ import annotations

import os
import socket
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Final

from kvstore.errors import BadValue
from kvstore.require import require_text
from kvstore.wire.framing import PROTOCOL_VERSION, PROTOCOL_VERSION_MIN

SESSION_BYTES: Final = 16
LIFE_BYTES: Final = 16


class Role(StrEnum):
    """What a dialler is; decides what a listener lets it do."""

    ENGINE = "engine"
    WORKER = "worker"
    MASTER = "master"
    OPERATOR = "operator"


@dataclass(frozen=True, slots=True)
class VersionRange:
    """Protocol versions that one side speaks, both ends included."""

    lowest: int
    highest: int

    def highest_common(self, other: VersionRange) -> int | None:
        """The version to use with a peer that speaks `other`; None when the ranges do not meet."""
        version = min(self.highest, other.highest)
        return version if version >= max(self.lowest, other.lowest) else None

    def __str__(self) -> str:
        return f"{self.lowest} to {self.highest}"


OUR_VERSIONS: Final = VersionRange(PROTOCOL_VERSION_MIN, PROTOCOL_VERSION)


def this_host() -> str:
    """By which name peers know that they run on one machine, unless somebody gives another."""
    return socket.gethostname()


def new_session() -> bytes:
    """A fresh session token. It survives reconnects, and ends with the process or a fork."""
    return os.urandom(SESSION_BYTES)


def _new_life() -> bytes:
    return os.urandom(LIFE_BYTES)


def _check_secret(secret: bytes | None) -> None:
    if secret is None:
        return
    if not isinstance(secret, bytes):  # not by `require`: no error may show a secret
        raise BadValue("secret", type(secret).__name__, "bytes, or no secret at all")
    if not secret:
        raise BadValue("secret", "", "at least one byte, or no secret at all")


@dataclass(frozen=True, slots=True)
class Identity:
    """A dialler: who it says it is, the secret that proves it, and whom it wants to meet."""

    role: Role
    tenant: str = "default"
    name: str = ""
    secret: bytes | None = field(default=None, repr=False)
    session: bytes = field(default_factory=new_session)
    cluster: str = ""
    """The only cluster to talk to; empty for any."""
    versions: VersionRange = OUR_VERSIONS
    host: str = field(default_factory=this_host)
    """The machine it runs on, by the name that workers of that machine give; empty: unknown."""

    def __post_init__(self) -> None:
        """Raise BadValue for what no listener would take."""
        _check_secret(self.secret)
        if len(self.session) != SESSION_BYTES:
            raise BadValue("session", self.session, f"{SESSION_BYTES} bytes")
        require_text("tenant", self.tenant)
        require_text("name", self.name)
        require_text("host", self.host)

    def renewed(self) -> Identity:
        """The same peer in a new session, e.g. in a forked child."""
        return replace(self, session=new_session())


ALL_ROLES: Final = frozenset(Role)


@dataclass(frozen=True, slots=True)
class ListenerIdentity:
    """A listener: its cluster, the secret it asks for, and the roles it serves."""

    cluster: str
    secret: bytes | None = field(default=None, repr=False)
    roles: frozenset[Role] = ALL_ROLES
    epoch: int = 0
    """Told to diallers in Welcome; 0 where it means nothing."""
    versions: VersionRange = OUR_VERSIONS
    local_address: str = ""
    """A Unix socket of this listener that diallers of this host are told of; "" for none."""
    life: bytes = field(default_factory=_new_life)
    """By which a dialler knows at one address whom it met at another."""

    def __post_init__(self) -> None:
        """Raise BadValue for an empty secret, which would look like one and protect nothing."""
        _check_secret(self.secret)
