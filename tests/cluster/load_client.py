"""A client that puts, reads and removes pages at random, and writes its history. Not a test.

`python -m tests.cluster.load_client JSON` (a Load); SIGTERM ends it after the call that runs. It
ends otherwise only when the pool answers something that no fault explains.

Documents of `SHARED` are put by everybody, with the same bytes, and never removed. Every other one
belongs to a client, who alone puts and removes it, with other bytes after each removal: so bytes
that come back after their removal are told from those that were put again.
"""

from __future__ import annotations

import signal
import sys
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING, Final

import msgspec

from kvstore import AlreadyThere, Hit, KVStore, KVStoreError, Stored
from kvstore.clock import SystemClock
from kvstore.errors import CallerError
from tests.cluster.history import (
    MISSED,
    REFUSED,
    STORED,
    THERE,
    WAS_NOT,
    WAS_THERE,
    Op,
    Recorder,
    digest,
)
from tests.cluster.pages import Pages, content
from tests.fakes import payload

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from kvstore import PageChain

PUT_SHARE: Final = 0.15
REMOVE_SHARE: Final = 0.02
VIEW_SHARE: Final = 0.2
SHARED: Final = -1


class Load(msgspec.Struct, frozen=True):
    """What one client does."""

    masters: tuple[str, ...]
    history: str
    seed: int
    number: int
    """Of this client, among `clients`."""
    clients: int
    life: int = 0
    """A client that takes a killed one's place has a higher one: its bytes are others."""
    transport: str = "shm"
    model: str = "load"
    page_bytes: int = 4096
    document_pages: int = 32
    documents: int = 16
    """Of each client."""
    timeout_s: float = 10.0
    """Of every call."""
    replicas: int = 0
    """Which puts ask for, and wait for: a page with fewer counts as refused. 0: as pages get."""


class Document(msgspec.Struct, frozen=True):
    """A chain of pages that belongs to a client, or to all."""

    owner: int
    number: int

    def tokens(self, pages: int) -> list[int]:
        """The prompt whose pages they are."""
        head = [self.owner + 1, self.number]
        return [*head, *range(Pages.layout().page_tokens * pages - len(head))]


class Client:
    """The client at work."""

    def __init__(self, load: Load) -> None:
        """Connect and open the namespace."""
        self._load = load
        self._draw = Random(f"{load.seed}/{load.number}")
        self._recorder = Recorder(Path(load.history), SystemClock())
        self._store = KVStore.connect(
            load.masters, transports=(load.transport,), timeout_s=load.timeout_s
        )
        self._opened = self._store.open(content(load.model, load.page_bytes), Pages.layout())
        self._room = self._store.buffer(load.document_pages * load.page_bytes)
        self._versions: dict[Document, int] = {}
        self.is_ending = False

    def run(self) -> None:
        """Until the signal comes."""
        while not self.is_ending:
            drawn = self._draw.random()
            if drawn < REMOVE_SHARE:
                self._remove(self._document(self._load.number))
            elif drawn < REMOVE_SHARE + PUT_SHARE:
                self._put(self._document(self._draw.choice((SHARED, self._load.number))))
            else:
                self._read(self._document(self._draw.randrange(SHARED, self._load.clients)))
        self._store.close()
        self._recorder.close()

    def _document(self, owner: int) -> Document:
        return Document(owner, self._draw.randrange(self._load.documents))

    def _chain(self, document: Document) -> PageChain:
        pages = self._load.document_pages
        if self._draw.random() < 0.5:  # a prefix of it
            pages = self._draw.randint(1, pages)
        return self._opened.chain(document.tokens(pages))

    def _offsets(self, pages: int) -> range:
        return range(0, pages * self._load.page_bytes, self._load.page_bytes)

    def _put(self, document: Document) -> None:
        chain = self._chain(document)
        version = self._version(document)
        digests = []
        for key, at in zip(chain, self._offsets(len(chain)), strict=True):
            page = payload(key + version, 0, self._load.page_bytes)
            self._room.view[at : at + len(page)] = page
            digests.append(digest(page))

        def put() -> list[str]:
            offsets = self._offsets(len(chain))
            replicas = self._load.replicas
            outcomes = self._store.put(
                self._opened, chain, self._room, offsets, replicas=replicas, strict=replicas > 0
            )
            words = {Stored: STORED, AlreadyThere: THERE}
            return [words.get(type(outcome), REFUSED) for outcome in outcomes]

        self._call(Op.PUT, chain, put, digests)

    def _version(self, document: Document) -> bytes:
        """What tells the bytes of this document's pages from those before their last removal."""
        if document.owner == SHARED:
            return b""
        numbers = (self._load.life, self._versions.get(document, 0))
        return b"".join(number.to_bytes(4, "little") for number in numbers)

    def _remove(self, document: Document) -> None:
        # A whole document: its pages' bytes change together.
        chain = self._opened.chain(document.tokens(self._load.document_pages))
        self._versions[document] = self._versions.get(document, 0) + 1

        def remove() -> list[str]:
            gone = self._store.remove(self._opened, chain)
            return [WAS_THERE if each else WAS_NOT for each in gone]

        self._call(Op.REMOVE, chain, remove)

    def _read(self, document: Document) -> None:
        chain = self._chain(document)
        is_viewed = self._load.transport == "shm" and self._draw.random() < VIEW_SHARE
        read = self._views if is_viewed else self._copies
        self._call(Op.READ, chain, lambda: read(chain))

    def _copies(self, chain: PageChain) -> list[str]:
        match = self._store.match_prefix(self._opened, chain)
        offsets = self._offsets(match.pages)
        outcomes = self._store.read(match, self._room, offsets)
        size = self._load.page_bytes
        found = [
            digest(self._room.view[at : at + size]) if outcome == Hit() else MISSED
            for outcome, at in zip(outcomes, offsets, strict=True)
        ]
        return found + [MISSED] * (len(chain) - match.pages)

    def _views(self, chain: PageChain) -> list[str]:
        match = self._store.match_prefix(self._opened, chain)
        with self._store.views(match) as views:
            found = [digest(v) if isinstance(v, memoryview) else MISSED for v in views]
            del views
        return found + [MISSED] * (len(chain) - match.pages)

    def _call(
        self,
        op: Op,
        chain: PageChain,
        work: Callable[[], Sequence[str]],
        digests: Sequence[str] = (),
    ) -> None:
        """Do it and write it down; an error that tells the caller to mend itself is let out."""
        call = self._recorder.began(op, [key.hex() for key in chain], digests)
        try:
            results = work()
        except CallerError:
            raise
        except KVStoreError as error:
            self._recorder.failed(call, error.code)
        else:
            self._recorder.ended(call, results)


def main(argument: str) -> None:
    """Run one client."""
    client = Client(msgspec.json.decode(argument, type=Load))

    def end(*_: object) -> None:
        client.is_ending = True

    signal.signal(signal.SIGTERM, end)
    print("at work", flush=True)
    client.run()


if __name__ == "__main__":
    main(*sys.argv[1:])
