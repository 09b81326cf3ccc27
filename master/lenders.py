"""Which segments each worker lends, durably: a new master knows whom it does not hear from.

Owns the keys `workers/<worker>`, and the segments of earlier masters that nobody has registered
here yet. What such a segment holds is unknown: a remove has to reach it all the same (I29).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from kvstore.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from master.core import Core
    from master.events import WriteId

PREFIX: Final = "workers/"


class Lenders:
    """Segment names by worker, as they are durable or about to be."""

    __slots__ = ("_names", "_writing", "absent")

    def __init__(self) -> None:
        """Nobody has ever lent anything."""
        self._names: dict[str, tuple[str, ...]] = {}
        self._writing: dict[str, WriteId] = {}
        self.absent: dict[str, str] = {}
        """Worker by segment, for segments that are durable and not registered since the start."""

    def note(
        self, core: Core, worker: str, segments: Iterable[str], then: Callable[[], None]
    ) -> None:
        """Go on with `then` once the worker's list is durable; at once when it is already."""
        names = tuple(sorted(segments))
        if self._names.get(worker, ()) != names:
            self._write(core, {worker: names, **self._without(names, worker)})
        write = self._writing.get(worker)
        if write is None:
            then()
        else:
            core.when_persisted(write, then)

    def _without(self, names: tuple[str, ...], worker: str) -> dict[str, tuple[str, ...]]:
        """What others lend without these segments, where that is less: each has one lender, or a
        later master would give it up when the one that it was taken from comes without it (I13).
        """
        moved = frozenset(names)
        return {
            other: tuple(name for name in theirs if name not in moved)
            for other, theirs in self._names.items()
            if other != worker and not moved.isdisjoint(theirs)
        }

    def _write(self, core: Core, lists: dict[str, tuple[str, ...]]) -> None:
        self._names |= lists
        puts = tuple((PREFIX + each, _packed(names)) for each, names in lists.items() if names)
        deletes = tuple(PREFIX + each for each, names in lists.items() if not names)
        write = core.persist(puts, deletes)
        self._writing |= dict.fromkeys(lists, write)

        def written() -> None:
            for each in lists:
                if self._writing.get(each) == write:
                    del self._writing[each]

        core.when_persisted(write, written)

    def absent_of(self, worker: str) -> list[str]:
        """The worker's segments of before the start that are not registered since."""
        return [segment for segment, lender in self.absent.items() if lender == worker]

    def drop(self, core: Core, worker: str) -> None:
        """The worker and its segments are given up."""
        for segment in self.absent_of(worker):
            del self.absent[segment]
        if self._names.pop(worker, ()):
            self._writing.pop(worker, None)
            core.persist(deletes=(PREFIX + worker,))

    def restore(self, key: str, value: bytes) -> None:
        """Take in one durable value; ConfigError when it is not ours."""
        worker = key.removeprefix(PREFIX)
        names = _unpacked(key, value)
        self._names[worker] = names
        self.absent.update(dict.fromkeys(names, worker))


def _packed(names: tuple[str, ...]) -> bytes:
    """Each name with its length before it, in one byte."""
    encoded = [name.encode() for name in names]
    return b"".join(bytes((len(each),)) + each for each in encoded)


def _unpacked(key: str, value: bytes) -> tuple[str, ...]:
    names: list[str] = []
    at = 0
    while at < len(value):
        stop = at + 1 + value[at]
        try:
            names.append(value[at + 1 : stop].decode())
        except UnicodeDecodeError as error:
            raise ConfigError(f"metadata value {key}: {error}") from error
        at = stop
    if at != len(value) or not all(names):
        raise ConfigError(f"metadata value {key}: {len(value)} bytes are not whole names")
    return tuple(names)
