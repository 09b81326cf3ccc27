"""Pages between the pool and the memory of SGLang's device, without the host's cache between.

Knows no class of SGLang's. A load that was begun and fails ends its request, so only what is
leased is claimed, and what does not come at once is asked for once more. All layers of a row are
read and verified before the first of them is copied; layers are told as they are ready.
"""

from __future__ import annotations

import logging
import threading
from collections import OrderedDict, deque
from typing import TYPE_CHECKING, Final, NamedTuple, Protocol

import torch

from kvstore.connectors.one_thread import OneThread
from kvstore.connectors.sglang.device_pages import DevicePages, pieces_of_rows
from kvstore.connectors.sglang.hits import leading

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from kvstore.connectors.sglang.rows import Rows

_LOG: Final = logging.getLogger("kvharbor")
KNOWN_MAX: Final = 1 << 16
"""Pages known to be in the pool: what was loaded is offered again, and not stored again."""
LATE_S: Final = 0.05
"""The scheduler waits for lookups: a pool that takes longer, again and again, is left alone."""
END_S: Final = 30.0
"""For what is under way, when all of it has to end."""


class Counter(Protocol):
    """SGLang's count of layers that have come, for each batch of loads."""

    def update_producer(self) -> int:
        """Begin a batch: its number."""
        ...

    def complete(self, index: int, layer: int) -> None:
        """Tell that a layer is there."""
        ...

    def fail(self, index: int, error: BaseException) -> None:
        """Tell that it will not come whole."""
        ...


class Load(NamedTuple):
    """Pages that a request waits for, and the tokens' places on the device."""

    keys: tuple[str, ...]
    indices: torch.Tensor


class Links:
    """One rank's. Its methods are for the scheduler's thread."""

    def __init__(
        self, rows: Rows, pages: DevicePages, prefix: str, counter: Counter, *, writes: bool
    ) -> None:
        """`prefix` of names tells whose share a row is; one of those that are alike `writes`."""
        self._rows = rows
        self._pages = pages
        self._prefix = prefix
        self._counter = counter
        self._writes = writes
        self._waiting: dict[str, Load] = {}
        self._known: OrderedDict[str, None] = OrderedDict()
        self._mutex = threading.Lock()
        self._done: deque[bool] = deque()
        self._loads = OneThread("kvharbor-loads")
        self._saves = OneThread("kvharbor-saves")

    def _names(self, keys: Sequence[str]) -> list[bytes]:
        return [f"{self._prefix}{key}".encode() for key in keys]

    # Loads.

    def lookup(self, request: str, keys: Sequence[str]) -> list[int]:
        """Prefixes that are there, in pages, and leased until the request's load has ended."""
        there = self._rows.there(self._names(keys), LATE_S, request) or ()
        found = leading(there)
        with self._mutex:
            for key, is_there in zip(keys, there, strict=False):
                if not is_there:
                    self._known.pop(key, None)
        return list(range(1, found + 1))

    def load(self, request: str, load: Load) -> None:
        """Have these pages come with the next batch."""
        self._waiting[request] = load

    def cancel(self, request: str) -> bool:
        """Whether a load had not begun, and does not."""
        self._rows.let_go(request)
        return self._waiting.pop(request, None) is not None

    def start(self, ready: Callable[[], None]) -> int:
        """Begin a batch of all that waits, once `ready` has returned: its number, -1 for none."""
        if not self._waiting:
            return -1
        batch, self._waiting = self._waiting, {}
        index = self._counter.update_producer()
        if not self._loads.run(lambda: self._load(index, batch, ready)):
            self._counter.fail(index, LookupError("the engine has left the pool"))
        return index

    def _load(self, index: int, batch: Mapping[str, Load], ready: Callable[[], None]) -> None:
        """In the thread for loads."""
        try:
            ready()
            loads = batch.values()
            rows = [self._read(each.keys) for each in loads]
            for layer in range(self._pages.layers):
                for each, some in zip(loads, rows, strict=True):
                    self._pages.scatter(layer, some, each.indices)
                self._pages.settle()
                self._counter.complete(index, layer)
        except Exception as error:  # of whatever kind: the request must not wait
            self._counter.fail(index, error)
        for request in batch:
            self._rows.let_go(request)

    def _read(self, keys: Sequence[str]) -> torch.Tensor:
        rows = self._pages.host_rows(len(keys))
        pieces = pieces_of_rows(rows)
        missing = list(range(len(keys)))
        for _ in range(2):
            names = self._names([keys[i] for i in missing])
            came = self._rows.read(names, self._pages.page_bytes, [pieces[i] for i in missing])
            missing = [i for i, ok in zip(missing, came, strict=True) if not ok]
            if not missing:
                self._know(keys)
                return rows
        raise LookupError(f"{len(missing)} of {len(keys)} pages did not come")

    # Saves.

    def save(self, keys: Sequence[str], indices: torch.Tensor, ready: Callable[[], None]) -> None:
        """Store pages once `ready` has returned; `taken` has what became of it, in order."""
        if not self._saves.run(lambda: self._save(tuple(keys), indices, ready)):
            self._done.append(False)

    def _save(self, keys: Sequence[str], indices: torch.Tensor, ready: Callable[[], None]) -> None:
        """In the thread for saves."""
        try:
            stored = not self._writes or self._store(keys, indices, ready)
        except Exception:  # V5
            _LOG.exception("kvharbor: a save")
            stored = False
        self._done.append(stored)

    def _store(self, keys: Sequence[str], indices: torch.Tensor, ready: Callable[[], None]) -> bool:
        with self._mutex:
            new = [i for i, key in enumerate(keys) if key not in self._known]
        if not new:
            return True
        ready()
        pages = indices.view(len(keys), -1)[torch.tensor(new)].flatten()
        rows = self._pages.gather(pages)
        some = [keys[i] for i in new]
        stored = self._rows.write(self._names(some), self._pages.page_bytes, pieces_of_rows(rows))
        self._know([key for key, ok in zip(some, stored, strict=True) if ok])
        return all(stored)

    def _know(self, keys: Sequence[str]) -> None:
        with self._mutex:
            for key in keys:
                self._known[key] = None
                self._known.move_to_end(key)
            while len(self._known) > KNOWN_MAX:
                self._known.popitem(last=False)

    @property
    def done(self) -> int:
        """Saves that have ended and were not taken."""
        return len(self._done)

    def take(self) -> bool:
        """Whether the oldest of them stored all its pages."""
        return self._done.popleft()

    # The end.

    def reset(self) -> None:
        """Let what is under way end, and forget all of it."""
        self._waiting.clear()
        for thread in (self._loads, self._saves):
            over = threading.Event()
            if thread.run(over.set):
                over.wait(END_S)
        self._done.clear()
        with self._mutex:
            self._known.clear()

    def close(self) -> None:
        """End the threads and the connection."""
        self._loads.close(END_S)
        self._saves.close(END_S)
        self._rows.close()
