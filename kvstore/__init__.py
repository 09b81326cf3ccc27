"""kvharbor's shared language and client SDK: what an inference engine imports.

This file is the public API and nothing else. Names load what they need when first used, so that
`import kvstore` is cheap and master and workers do not load the client.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from kvstore.aio import AsyncKVStore as AsyncKVStore
    from kvstore.client.locations import Found as Found
    from kvstore.client.locations import Match as Match
    from kvstore.client.namespaces import OpenedNamespace as OpenedNamespace
    from kvstore.client.outcomes import AlreadyThere as AlreadyThere
    from kvstore.client.outcomes import Hit as Hit
    from kvstore.client.outcomes import Miss as Miss
    from kvstore.client.outcomes import MissReason as MissReason
    from kvstore.client.outcomes import Refused as Refused
    from kvstore.client.outcomes import RefusedReason as RefusedReason
    from kvstore.client.outcomes import Stored as Stored
    from kvstore.client.store import KVStore as KVStore
    from kvstore.errors import AccessDenied as AccessDenied
    from kvstore.errors import BadValue as BadValue
    from kvstore.errors import BufferClosed as BufferClosed
    from kvstore.errors import CallerError as CallerError
    from kvstore.errors import ConfigError as ConfigError
    from kvstore.errors import DeadlineExceeded as DeadlineExceeded
    from kvstore.errors import KVStoreError as KVStoreError
    from kvstore.errors import LayoutMismatch as LayoutMismatch
    from kvstore.errors import OutOfSpace as OutOfSpace
    from kvstore.errors import Unavailable as Unavailable
    from kvstore.hints import Hints as Hints
    from kvstore.namespace import Attention as Attention
    from kvstore.namespace import CacheGroup as CacheGroup
    from kvstore.namespace import Content as Content
    from kvstore.namespace import Layout as Layout
    from kvstore.page import PageChain as PageChain
    from kvstore.transfer.buffer import Buffer as Buffer

_HOMES: Final = {
    "kvstore.aio": ("AsyncKVStore",),
    "kvstore.client.locations": ("Found", "Match"),
    "kvstore.client.namespaces": ("OpenedNamespace",),
    "kvstore.client.outcomes": (
        "AlreadyThere",
        "Hit",
        "Miss",
        "MissReason",
        "Refused",
        "RefusedReason",
        "Stored",
    ),
    "kvstore.client.store": ("KVStore",),
    "kvstore.errors": (
        "AccessDenied",
        "BadValue",
        "BufferClosed",
        "CallerError",
        "ConfigError",
        "DeadlineExceeded",
        "KVStoreError",
        "LayoutMismatch",
        "OutOfSpace",
        "Unavailable",
    ),
    "kvstore.hints": ("Hints",),
    "kvstore.namespace": ("Attention", "CacheGroup", "Content", "Layout"),
    "kvstore.page": ("PageChain",),
    "kvstore.transfer.buffer": ("Buffer",),
}
_MODULE_OF: Final = {name: module for module, names in _HOMES.items() for name in names}


def __getattr__(name: str) -> object:
    """Load a public name on first use."""
    module = _MODULE_OF.get(name)
    if module is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value: object = getattr(import_module(module), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted([*globals(), *_MODULE_OF])
