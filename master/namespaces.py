"""Namespaces known to this master: ordinals, trees, and their durable values.

Owns the keys `namespaces/<id>`. An ordinal is never reused: it is in the workers' records.
"""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING, Final

import msgspec

from kvstore import limits
from kvstore.errors import ConfigError, MalformedMessage, OutOfSpace, UnknownNamespace
from kvstore.ids import short
from kvstore.namespace import Namespace, open_layout
from kvstore.require import require_replicas, require_ttl
from kvstore.wire.encoding import decode, encode
from kvstore.wire.messages.namespaces import NamespaceOpened, OpenNamespace
from master.directory import Tree
from master.events import WriteId

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from master.core import Core
    from master.sessions import Caller

PREFIX: Final = "namespaces/"
_ORDINAL: Final = struct.Struct("<I")


class KnownNamespace(msgspec.Struct, eq=False):
    """A namespace, its short number, and its pages."""

    namespace: Namespace
    ordinal: int
    tree: Tree
    ttl_s: float | None
    """Of its pages; None: the master's."""
    is_durable: bool
    writing: WriteId | None = None
    """The last write of its value, until that is done."""
    replicas: int = 0
    """Of its pages; 0: the master's."""


class Namespaces:
    """All known namespaces."""

    __slots__ = ("_by_id", "_by_ordinal", "_last_ordinal")

    def __init__(self) -> None:
        """Start with none."""
        self._by_id: dict[bytes, KnownNamespace] = {}
        self._by_ordinal: dict[int, KnownNamespace] = {}
        self._last_ordinal = 0

    def __len__(self) -> int:
        return len(self._by_id)

    def __iter__(self) -> Iterator[KnownNamespace]:
        return iter(self._by_id.values())

    def find(self, namespace: bytes) -> KnownNamespace | None:
        """The namespace of this id, if it is known."""
        return self._by_id.get(namespace)

    def get(self, namespace: bytes) -> KnownNamespace:
        """The namespace of this id; UnknownNamespace until it is open here, and durably so.

        Nothing is planned before: its ordinal in a record would mean another one after a crash.
        """
        known = self._by_id.get(namespace)
        if known is None or not known.is_durable:
            raise UnknownNamespace(f"namespace {short(namespace)}: open it first")
        return known

    def by_ordinal(self, ordinal: int) -> KnownNamespace | None:
        """The namespace of this number, if there is one."""
        return self._by_ordinal.get(ordinal)

    def next_ordinal(self) -> int:
        """A number that no namespace has had; OutOfSpace when the table is full."""
        if len(self._by_id) >= limits.NAMESPACES_MAX:
            raise OutOfSpace(f"{limits.NAMESPACES_MAX} namespaces are open")
        return self._last_ordinal + 1

    def add(self, known: KnownNamespace) -> None:
        """Make it known."""
        self._by_id[known.namespace.id] = known
        self._by_ordinal[known.ordinal] = known
        self._last_ordinal = max(self._last_ordinal, known.ordinal)


def _added(
    core: Core, namespace: Namespace, ordinal: int, ttl_s: float | None, replicas: int
) -> KnownNamespace:
    tree = Tree(ordinal, namespace.parts_a_page, core.expiry)
    known = KnownNamespace(namespace, ordinal, tree, ttl_s, is_durable=False, replicas=replicas)
    core.namespaces.add(known)
    return known


def restore(core: Core, key: str, value: bytes) -> None:
    """Take in one durable value; ConfigError when it is not ours."""
    try:
        (ordinal,) = _ORDINAL.unpack_from(value)
        message = decode(value[_ORDINAL.size :])
        if not isinstance(message, OpenNamespace):
            raise MalformedMessage(type(message).__name__)
    except (struct.error, MalformedMessage) as error:
        raise ConfigError(f"metadata value {key}: {error}") from error
    namespace = open_layout(message.content, message.layout)
    if key != PREFIX + namespace.id.hex():
        raise ConfigError(f"metadata value {key}: holds namespace {namespace.id.hex()}")
    known = _added(core, namespace, ordinal, message.ttl_s, message.replicas)
    known.is_durable = True


def open_namespace(core: Core, caller: Caller, message: OpenNamespace) -> None:
    """Answer NamespaceOpened once the namespace's value is durable; safe to repeat."""
    caller.session.must_own(message.content)
    if message.ttl_s is not None:
        require_ttl("ttl_s", message.ttl_s)
    require_replicas("replicas", message.replicas)
    namespace = open_layout(message.content, message.layout)
    known = core.namespaces.find(namespace.id)
    if known is None:
        ordinal = core.namespaces.next_ordinal()
        known = _added(core, namespace, ordinal, message.ttl_s, message.replicas)
        _write(core, known)
    else:
        ttl_s = known.ttl_s if message.ttl_s is None else message.ttl_s
        replicas = message.replicas or known.replicas
        if replicas != known.replicas:
            core.replication.want_scan(core.now)
        if (ttl_s, replicas) != (known.ttl_s, known.replicas):
            known.ttl_s, known.replicas = ttl_s, replicas
            _write(core, known)
    answer = NamespaceOpened(namespace.id, known.ordinal)
    if known.writing is None:
        core.reply(caller, answer)
    else:
        core.when_persisted(known.writing, lambda: core.reply(caller, answer))


def set_replicas(
    core: Core, known: KnownNamespace, replicas: int, then: Callable[[], None]
) -> None:
    """So many of its pages are wanted from now on; `then`: once that is durable."""
    known.replicas = replicas
    core.replication.want_scan(core.now)
    _write(core, known)
    assert known.writing is not None, known.ordinal
    core.when_persisted(known.writing, then)


def open_own(core: Core, namespace: Namespace) -> KnownNamespace:
    """A namespace of the pool's own, of which one replica is enough; it may not be durable yet."""
    known = _added(core, namespace, core.namespaces.next_ordinal(), None, 1)
    _write(core, known)
    return known


def _write(core: Core, known: KnownNamespace) -> None:
    namespace = known.namespace
    key = PREFIX + namespace.id.hex()
    message = OpenNamespace(namespace.content, namespace.layout, known.ttl_s, known.replicas)
    write = core.persist(puts=((key, _ORDINAL.pack(known.ordinal) + encode(message)),))

    def written() -> None:
        known.is_durable = True
        if known.writing == write:
            known.writing = None

    core.when_persisted(write, written)
    known.writing = write
