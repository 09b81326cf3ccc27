"""What LMCache's server asks of its second level, engine-free: objects by its keys, and accounts.

Objects that were stored here are accounted for until they are deleted, a lookup finds them gone, or
too many were stored after them: the pool makes room by itself. Locks are the leases that lookups
take, which end by themselves where they are not taken back.
"""

from __future__ import annotations

import threading
from itertools import compress, islice
from typing import TYPE_CHECKING, Final, NamedTuple, Protocol

from kvstore.connectors.lmcache.naming import BYTES, layout_of, name_of, named_object
from kvstore.connectors.lmcache.pooled import Item
from kvstore.errors import BadValue

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping, Sequence

    from kvstore.connectors.lmcache.naming import NamedObject, ObjectKey
    from kvstore.connectors.lmcache.pooled import PooledObjects


ACCOUNTS_MAX: Final = 1 << 18
"""Objects that are accounted for, at half a kilobyte each: most are gone before they are asked for
again, so nobody finds that out."""


class Metadata(Protocol):
    """What LMCache says of an object; of a single tensor it may say it in the singular only."""

    @property
    def shape(self) -> Sequence[int]:
        """Of the first tensor."""
        ...

    @property
    def dtype(self) -> object:
        """Of the first tensor."""
        ...

    @property
    def shapes(self) -> Sequence[Sequence[int]] | None:
        """One of each tensor."""
        ...

    @property
    def dtypes(self) -> Sequence[object] | None:
        """One of each tensor."""
        ...


class MemoryObject(Protocol):
    """LMCache's object: bytes in its own memory."""

    @property
    def byte_array(self) -> object:
        """The bytes, where they lie."""
        ...

    @property
    def metadata(self) -> Metadata:
        """What they are."""
        ...


class Described(Protocol):
    """LMCache's description of a group's objects."""

    @property
    def shapes(self) -> Sequence[Sequence[int]]:
        """One of each tensor."""
        ...

    @property
    def dtypes(self) -> Sequence[object]:
        """One of each tensor."""
        ...


class Account(NamedTuple):
    """An object that was stored here."""

    name: bytes
    size_bytes: int


class News(NamedTuple):
    """What a task has changed, for LMCache's own accounts: keys and their bytes."""

    keys: Sequence[ObjectKey]
    sizes: Sequence[int]


class L2Objects:
    """The objects of one LMCache server. Thread-safe."""

    def __init__(
        self,
        pooled: PooledObjects,
        stored: Callable[[News], None],
        accessed: Callable[[News], None],
        deleted: Callable[[News], None],
    ) -> None:
        """`stored`, `accessed` and `deleted` hear of changes, in the thread that made them."""
        self.pooled = pooled
        self._stored, self._accessed, self._deleted = stored, accessed, deleted
        self._accounts: dict[ObjectKey, Account] = {}
        self._mutex = threading.Lock()

    def store(self, keys: Sequence[ObjectKey], objects: Sequence[MemoryObject]) -> int | None:
        """Bytes that were not accounted for before; None unless all objects are in the pool."""
        items = [_item(key, each) for key, each in zip(keys, objects, strict=True)]
        done = self.pooled.store(items)
        new = self._account(
            {
                key: Account(item.name, _size(item))
                for key, item, is_in in zip(keys, items, done, strict=True)
                if is_in
            }
        )
        return sum(new) if all(done) else None

    def _account(self, accounts: Mapping[ObjectKey, Account]) -> list[int]:
        """Bytes of each that are new; LMCache hears of all of them, and counts these."""
        with self._mutex:
            sizes = [
                0 if key in self._accounts else account.size_bytes
                for key, account in accounts.items()
            ]
            for key in accounts:
                self._accounts.pop(key, None)
            self._accounts |= accounts  # the newest last
            too_many = max(0, len(self._accounts) - ACCOUNTS_MAX)
            old = dict(islice(self._accounts.items(), too_many))
            for key in old:
                del self._accounts[key]
        if accounts:
            self._stored(News(list(accounts), sizes))
        self._tell_deleted(old)
        return sizes

    def look_up(self, keys: Sequence[ObjectKey], described: Mapping[int, Described]) -> list[bool]:
        """Which objects are there in the layout of their group, or as plain bytes; leased."""
        names = [_names(key, described) for key in keys]
        every = dict.fromkeys(name for some in names for name in some)
        leases = self.pooled.leases
        number = leases.number()
        sizes = self.pooled.sizes(list(every), lease_id=number)
        if sizes is None:
            return [False] * len(keys)
        there = {name: size for name, size in zip(every, sizes, strict=True) if size}
        found = [not there.keys().isdisjoint(some) for some in names]
        leases.took(number, [*compress(keys, found)], [*there])
        self._forget(
            [key for key, is_there in zip(keys, found, strict=True) if not is_there], every
        )
        return found

    def unlock(self, keys: Sequence[ObjectKey]) -> None:
        """Of the lookups that found these objects the first have no use for them any more."""
        self.pooled.leases.let_go(keys)

    def load(self, keys: Sequence[ObjectKey], objects: Sequence[MemoryObject]) -> list[bool]:
        """Which objects have come, verified, into the memory of these."""
        came = self.pooled.load([_item(key, each) for key, each in zip(keys, objects, strict=True)])
        loaded = [key for key, has_come in zip(keys, came, strict=True) if has_come]
        if loaded:
            self._accessed(News(loaded, []))
        return came

    def delete(self, keys: Sequence[ObjectKey]) -> None:
        """Take out what was stored here. In trouble it stays, accounted for, to be deleted again.

        Of objects that another server has stored the layout is not known here: they stay.
        """
        with self._mutex:
            names = [self._accounts[key].name for key in keys if key in self._accounts]
        if names and self.pooled.remove(names):
            self._forget(keys, names)

    def _forget(self, keys: Sequence[ObjectKey], names: Collection[bytes]) -> None:
        """Account no longer for objects under these names, which are gone.

        Under others they may be there: LMCache's keys say nothing of the layout.
        """
        with self._mutex:
            gone = {
                key: self._accounts.pop(key)
                for key in keys
                if key in self._accounts and self._accounts[key].name in names
            }
        self._tell_deleted(gone)

    def _tell_deleted(self, gone: Mapping[ObjectKey, Account]) -> None:
        if gone:
            self._deleted(News(list(gone), [account.size_bytes for account in gone.values()]))

    def page(
        self, model: str | None, size: int, cursor: str | None
    ) -> tuple[list[tuple[NamedObject, int]], str | None]:
        """Objects of a model, or of all, in the whole pool, and where the next page begins.

        ValueError for a page size or a cursor that is none, as LMCache wants it.
        """
        if size <= 0:
            raise ValueError(f"page_size {size}: want 1 or more")
        after = bytes.fromhex(cursor or "")
        named = [
            (name, each)
            for name in self.pooled.names()
            if name > after and (each := _read(name)) and model in (None, each.model_name)
        ]
        some = named[:size]
        sizes = self.pooled.sizes([name for name, _ in some]) or [0] * len(some)
        entries = [(each, n) for (_, each), n in zip(some, sizes, strict=True) if n]
        return entries, some[-1][0].hex() if len(named) > size else None


def _item(key: ObjectKey, each: MemoryObject) -> Item:
    said = each.metadata
    layout = layout_of(said.shapes or [said.shape], said.dtypes or [said.dtype])
    return Item(name_of(key, layout), each.byte_array, may_be_shorter=layout == BYTES)


def _size(item: Item) -> int:
    return memoryview(item.memory).nbytes  # type: ignore[arg-type]  # it was stored as a buffer


def _names(key: ObjectKey, described: Mapping[int, Described]) -> list[bytes]:
    group = described.get(key.object_group_id)
    layout = layout_of(group.shapes, group.dtypes) if group else BYTES
    return [name_of(key, each) for each in dict.fromkeys((layout, BYTES))]


def _read(name: bytes) -> NamedObject | None:
    try:
        return named_object(name)
    except BadValue:
        return None
