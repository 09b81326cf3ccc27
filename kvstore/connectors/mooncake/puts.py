"""What a put or an upsert does with each of its objects, and which code that is.

A put keeps what is there, and says 0, as Mooncake does. An upsert removes what is there and puts
anew, so a reader finds the old value, nothing, or the new one, and never a mixture.
"""

from __future__ import annotations

import logging
import os
from math import inf
from typing import TYPE_CHECKING, Final

from kvstore import limits
from kvstore.client.outcomes import AlreadyThere
from kvstore.connectors.mooncake.addresses import gather, size_of
from kvstore.connectors.mooncake.codes import Code, code_of_put
from kvstore.connectors.mooncake.large import (
    MANIFEST_BYTES,
    VERSION_BYTES,
    Manifest,
    needs_manifest,
)
from kvstore.connectors.mooncake.objects import Value
from kvstore.connectors.mooncake.values import SoftPinAction
from kvstore.errors import OutOfSpace
from kvstore.page import NAME_BYTES_MAX
from kvstore.transfer.memory import Memory

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvstore.connectors.mooncake.objects import Objects
    from kvstore.connectors.mooncake.values import ReplicateConfig

_LOG: Final = logging.getLogger("kvharbor")
PIN_OWNER: Final = "mooncake"
SOFT_PIN_S: Final = 1800.0
"""Of a soft pin that names no time."""
UPSERT_TRIES_MAX: Final = 8
"""Somebody else may put the name between our removal and our put."""


def store_values(
    objects: Objects, values: Sequence[Value], config: ReplicateConfig, *, replace: bool
) -> list[Code]:
    """Store objects; a code for each, in order. Of a name that comes twice one value is stored.

    Which one is as if they came one after the other: the first, or with `replace` the last.
    """
    good = [value for value in values if _is_good(value)]
    chosen = {value.name: value for value in (good if replace else reversed(good))}
    put = _Put(objects, _replicas(config), replace=replace)
    put.store(list(chosen.values()))
    _pin(objects, put.codes, config)
    return [put.codes[value.name] if _is_good(value) else Code.INVALID_PARAMS for value in values]


def _is_good(value: Value) -> bool:
    return bool(value.slices) and 0 < len(value.name) <= NAME_BYTES_MAX


def _replicas(config: ReplicateConfig) -> int:
    """As many as usual where the program has left Mooncake's default."""
    wanted = config.replica_num
    return 0 if wanted <= 1 else min(wanted, limits.REPLICAS_MAX)


class _Put:
    """One call's objects, under distinct names."""

    def __init__(self, objects: Objects, replicas: int, *, replace: bool) -> None:
        self._objects = objects
        self._replicas = replicas
        self._replace = replace
        self.codes: dict[bytes, Code] = {}

    def store(self, values: list[Value]) -> None:
        large = [value for value in values if _is_large(value)]
        if large:
            self._clear_the_way([value.name for value in large])
        heads = [value for value in values if not _is_large(value)]
        if self._replace and heads:
            self._objects.remove([value.name for value in heads])
        self._store_heads(heads)
        for value in large:
            if value.name not in self.codes:
                self._store_large(value)

    def _clear_the_way(self, names: list[bytes]) -> None:
        """Of large objects: those that are whole stay, unless they are replaced; others go."""
        whole = self._objects.whole(names)
        for name in names:
            if name in whole and not self._replace:
                self.codes[name] = Code.OK
        gone = [name for name in names if name not in self.codes]
        if gone:
            self._objects.remove(gone)

    def _store_large(self, value: Value) -> None:
        manifest = Manifest(os.urandom(VERSION_BYTES), size_of(value.slices))
        code = self._objects.put_pieces(manifest, value.slices, self._replicas)
        if code:
            self.codes[value.name] = code
            return
        packed = bytearray(manifest.pack())
        address = Memory.of("manifest", packed, writable=False).address
        others = self._store_heads([Value(value.name, ((address, MANIFEST_BYTES),))])
        if others or self.codes[value.name]:
            self._objects.drop_pieces([manifest])

    def _store_heads(self, values: list[Value]) -> list[bytes]:
        """Put what lies under the names themselves; the names that somebody else has put."""
        left = values
        for attempt in range(UPSERT_TRIES_MAX if self._replace else 1):
            if attempt:
                self._objects.remove([value.name for value in left])
            outcomes = self._objects.put(left, self._replicas)
            put = list(zip(left, outcomes, strict=True))
            self.codes |= {value.name: code_of_put(outcome) for value, outcome in put}
            left = [value for value, outcome in put if isinstance(outcome, AlreadyThere)]
            if not left:
                break
        names = [value.name for value in left]
        if self._replace:
            self.codes |= dict.fromkeys(names, Code.REPLICA_IS_NOT_READY)
        return names


def _is_large(value: Value) -> bool:
    size = size_of(value.slices)
    head = bytearray(size if size == MANIFEST_BYTES else 0)
    if head:
        gather(value.slices, Memory.of("head", head, writable=True).address)
    return needs_manifest(size, bytes(head))


def _pin(objects: Objects, codes: dict[bytes, Code], config: ReplicateConfig) -> None:
    """Pin what was stored, or there, as was asked. What cannot be pinned hard does not stay."""
    names = [name for name, code in codes.items() if not code]
    action = config.soft_pin_action
    if not names:
        return
    if action == SoftPinAction.DISABLE:
        objects.unpin(names, PIN_OWNER)
    if not config.with_hard_pin and action != SoftPinAction.ENABLE:
        return
    ttl_ms = config.soft_pin_ttl_ms
    ttl_s = SOFT_PIN_S if ttl_ms is None else ttl_ms / 1000
    if config.with_hard_pin:
        ttl_s = inf
    elif ttl_s <= 0:
        return
    else:
        ttl_s = min(max(ttl_s, limits.PAGE_TTL_MIN_S), limits.PAGE_TTL_MAX_S)
    try:
        objects.pin(names, PIN_OWNER, ttl_s, hard=config.with_hard_pin)
    except OutOfSpace as error:
        if not config.with_hard_pin:
            _LOG.warning("mooncake: soft pins are not held: %s", error)
            return
        objects.remove(names)
        codes |= dict.fromkeys(names, Code.NO_AVAILABLE_HANDLE)
