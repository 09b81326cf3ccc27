"""Calls about whole objects as bytes: put, get, exist, remove; and what is known of replicas."""

from __future__ import annotations

import logging
import re
from typing import TYPE_CHECKING, Final, TypeVar

from kvstore.connectors.mooncake.addresses import joined, slices_of
from kvstore.connectors.mooncake.codes import Code
from kvstore.connectors.mooncake.located import replicas_of
from kvstore.connectors.mooncake.objects import Value
from kvstore.connectors.mooncake.puts import store_values
from kvstore.connectors.mooncake.session import Session, name_of, names_of
from kvstore.connectors.mooncake.values import DEFAULT_CONFIG, BufferHandle, ReplicaDescriptor
from kvstore.errors import BadValue

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvstore.connectors.mooncake.objects import Objects
    from kvstore.connectors.mooncake.values import ReplicateConfig

_LOG: Final = logging.getLogger("kvharbor")
B = TypeVar("B", bound=bytearray)


class ByteCalls(Session):
    """See Mooncake's reference; here is only said what is not said there."""

    # Storing.

    def put(self, key: str, value: object, config: ReplicateConfig = DEFAULT_CONFIG) -> int:
        """Store one object; what is there under the name stays."""
        return self._store([_of_parts(key, [value])], config)[0]

    def put_parts(self, key: str, *args: object, config: ReplicateConfig = DEFAULT_CONFIG) -> int:
        """Store several buffers, one after the other, as one object."""
        return self._store([_of_parts(key, args)], config)[0]

    def put_batch(
        self,
        keys: Sequence[str],
        values: Sequence[object],
        config: ReplicateConfig = DEFAULT_CONFIG,
    ) -> int:
        """Store several objects: 0, or the code of the first that was not stored."""
        return self._store_batch(keys, values, config, replace=False)

    def upsert(self, key: str, value: object, config: ReplicateConfig = DEFAULT_CONFIG) -> int:
        """Store one object in place of what is there."""
        return self._store([_of_parts(key, [value])], config, replace=True)[0]

    def upsert_parts(
        self, key: str, *args: object, config: ReplicateConfig = DEFAULT_CONFIG
    ) -> int:
        """As `put_parts`, in place of what is there."""
        return self._store([_of_parts(key, args)], config, replace=True)[0]

    def upsert_batch(
        self,
        keys: Sequence[str],
        values: Sequence[object],
        config: ReplicateConfig = DEFAULT_CONFIG,
    ) -> int:
        """As `put_batch`, in place of what is there."""
        return self._store_batch(keys, values, config, replace=True)

    def _store_batch(
        self,
        keys: Sequence[str],
        values: Sequence[object],
        config: ReplicateConfig,
        *,
        replace: bool,
    ) -> int:
        if len(keys) != len(values):
            return Code.INVALID_PARAMS
        batch = [_of_parts(key, [value]) for key, value in zip(keys, values, strict=True)]
        return next((code for code in self._store(batch, config, replace=replace) if code), Code.OK)

    def _store(
        self, values: Sequence[Value], config: ReplicateConfig, *, replace: bool = False
    ) -> list[int]:
        def store(objects: Objects) -> list[int]:
            return list(store_values(objects, values, config, replace=replace))

        return self._carry_out(store, lambda code: [code] * len(values))

    # Reading.

    def get(self, key: str) -> bytes:
        """An object; nothing where it is not there, or cannot be read."""
        return self.get_batch([key])[0]

    def get_batch(self, keys: Sequence[str]) -> list[bytes]:
        """Several objects, each as `get`."""
        found = self._read_new(keys, bytearray)
        return [b"" if each is None else bytes(each) for each in found]

    def get_buffer(self, key: str) -> BufferHandle | None:
        """An object in memory of its own, or None."""
        return self.batch_get_buffer([key])[0]

    def batch_get_buffer(self, keys: Sequence[str]) -> list[BufferHandle | None]:
        """Several objects, each as `get_buffer`."""
        return self._read_new(keys, BufferHandle)

    def _read_new(self, keys: Sequence[str], kind: type[B]) -> list[B | None]:
        """Read each object once into new memory; keys that are the same share it."""
        names = names_of(keys)

        def read(objects: Objects) -> list[B | None]:
            finding = objects.find(names)
            made = {i: kind(size) for i, size in enumerate(finding.sizes) if size}
            places = {i: slices_of(each) for i, each in made.items()}
            codes = objects.read(finding, places)
            good = {finding.names[i]: made[i] for i, code in codes.items() if code == Code.OK}
            return [good.get(name) for name in names]

        return self._carry_out(read, lambda _: [None] * len(names))

    def get_size(self, key: str) -> int:
        """Bytes of an object, or a code."""

        def measure(objects: Objects) -> int:
            return objects.find([name_of(key)]).sizes[0] or Code.OBJECT_NOT_FOUND

        return self._carry_out(measure, int)

    def is_exist(self, key: str) -> int:
        """1, 0 or a code."""
        return self.batch_is_exist([key])[0]

    def batch_is_exist(self, keys: Sequence[str]) -> list[int]:
        """1, 0 or a code for each. Keeps nothing from being evicted."""
        names = names_of(keys)

        def ask(objects: Objects) -> list[int]:
            return list(map(int, objects.exist(names)))

        return self._carry_out(ask, lambda code: [code] * len(names))

    # Replicas.

    def get_replica_desc(self, key: str) -> list[ReplicaDescriptor]:
        """Replicas of an object; of one with pieces those of its manifest."""
        return self.batch_get_replica_desc([key]).get(key, [])

    def batch_get_replica_desc(self, keys: Sequence[str]) -> dict[str, list[ReplicaDescriptor]]:
        """Those of the objects that are there."""
        keys_of = {name_of(key): key for key in keys}

        def ask(objects: Objects) -> dict[str, list[ReplicaDescriptor]]:
            finding = objects.find(keys_of)
            listed = zip(finding.names, replicas_of(finding.found), strict=True)
            return {keys_of[name]: replicas for name, replicas in listed if replicas}

        return self._carry_out(ask, lambda _: {})

    def batch_replica_clear(self, keys: Sequence[str], segment_name: str = "") -> list[str]:
        """Remove objects whole, and tell which were there. Of one segment alone: nothing."""
        if segment_name:
            _LOG.error("mooncake: replicas of one segment cannot be cleared: drain its worker")
            return []
        removed = self.batch_remove(keys)
        return [key for key, code in zip(keys, removed, strict=True) if code == Code.OK]

    # Removing.

    def remove(self, key: str, force: bool = False) -> int:
        """Take an object out, read or not: who reads it goes on, and nobody else finds it."""
        return self.batch_remove([key], force)[0]

    def batch_remove(self, keys: Sequence[str], force: bool = False) -> list[int]:
        """A code for each."""
        del force
        names = names_of(keys)

        def remove(objects: Objects) -> list[int]:
            return [Code.OK if gone else Code.OBJECT_NOT_FOUND for gone in objects.remove(names)]

        return self._carry_out(remove, lambda code: [code] * len(names))

    def remove_by_regex(self, regex_pattern: str, force: bool = False) -> int:
        """Take out all whose name has a match of a pattern (Python's); how many, or a code."""
        del force
        try:
            pattern = re.compile(regex_pattern)
        except (re.error, OverflowError, RecursionError) as error:
            _LOG.error("mooncake: remove_by_regex: %s", error)
            return Code.INVALID_PARAMS

        def remove(objects: Objects) -> int:
            return sum([sum(objects.remove(names)) for names in _matching(objects, pattern)])

        return self._carry_out(remove, int)

    def remove_all(self, force: bool = False) -> int:
        """Take out everything of this namespace; how many objects, or a code."""
        del force
        return self._carry_out(lambda objects: objects.clear(), int)


def _of_parts(key: str, parts: Sequence[object]) -> Value:
    """An object of buffers, which stay as large as they are; without bytes where it cannot be."""
    name = name_of(key)
    views = [memoryview(part) for part in parts]  # type: ignore[arg-type]  # TypeError for none
    try:
        return Value(name, joined(each for view in views for each in slices_of(view)), views)
    except BadValue as error:
        _LOG.error("mooncake: %r: %s", key, error)
        return Value(name, ())


def _matching(objects: Objects, pattern: re.Pattern[str]) -> list[list[bytes]]:
    """Names that match, batch by batch. An object whose name cannot be read now is no match."""
    return [
        [
            name
            for name in names
            if name is not None and pattern.search(name.decode("utf-8", "surrogatepass"))
        ]
        for _, names in objects.listed()
    ]
