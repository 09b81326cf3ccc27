"""A scripted master and one process's memory: what the tests of the client's plans drive them with.

Not a test: shared by test_kvstore_client_*.py.
"""

from __future__ import annotations

import itertools
from array import array
from collections import deque
from typing import TYPE_CHECKING

from kvstore.client.namespaces import OpenedNamespace
from kvstore.client.steps import Performer
from kvstore.errors import KVStoreError
from kvstore.ids import KEY_BYTES
from kvstore.namespace import Attention, CacheGroup, Content, Layout, open_layout
from kvstore.page import payload_checksum
from kvstore.segment import Geometry
from kvstore.transfer.memory import Memory
from kvstore.wire.messages.common import Address, SegmentRef
from kvstore.wire.messages.hello import Done
from kvstore.wire.messages.puts import AbortPut, BeginPut, PageRange, PlanSpan, PutPlans
from kvstore.wire.messages.reads import Located, LocatedCopy, LocatedRun
from tests.fakes import LoopbackTransport, ManualClock, payload

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from kvstore.page import PageChain
    from kvstore.transfer.transport import IngestSpan, ReadSpan
    from kvstore.wire.messages.base import Message

PAGE_TOKENS = 4


def opened(tensor_parallel: int = 1, part_bytes: int = 4096) -> OpenedNamespace:
    """A namespace whose parts have `part_bytes` bytes, one part a rank."""
    dims = part_bytes // (2 * PAGE_TOKENS * 2)
    group = CacheGroup(Attention.FULL, 1, tensor_parallel, dims, dims)
    content = Content("tests", "model", "r1", "", "bfloat16", (group,), "rope")
    layout = Layout(page_tokens=PAGE_TOKENS, tensor_parallel=tensor_parallel)
    return OpenedNamespace(open_layout(content, layout), 7)


def segment(name: str, transport: str = "shm", cost: int = 0) -> SegmentRef:
    """A segment reference of one worker."""
    address = Address(transport, f"/nowhere/{name}", cost)
    return SegmentRef(name, 3, "dram", Geometry(1 << 30), f"worker-{name}", "host", (address,))


def u64(values: Sequence[int]) -> bytes:
    """A packed column."""
    return array("Q", values).tobytes()


def plan(first: int, count: int, generation: int, part: int = 0, at: int = 0) -> PlanSpan:
    """A plan whose extents lie one after the other from `at` * 1 MiB on."""
    offsets = [(at << 20) + i * 4096 for i in range(count)]
    return PlanSpan(first, count, part, 0, generation, u64(offsets))


def plans(
    *spans: PlanSpan,
    present: tuple[PageRange, ...] = (),
    refused: tuple = (),  # type: ignore[type-arg]  # of RefusedRange, whose fields tests spell out
    segments: tuple[SegmentRef, ...] = (),
) -> PutPlans:
    """An answer to BeginPut."""
    return PutPlans(1, segments or (segment("s0"),), spans, present, refused)


class Script(Performer):
    """Answers Asks from a list; moves bytes through a LoopbackTransport; notes everything."""

    def __init__(self, size_bytes: int = 1 << 20) -> None:
        """Start with no answers and zeroed memory."""
        self.clock = ManualClock()
        self.transport = LoopbackTransport()
        self.memory = Memory.of("memory", bytearray(size_bytes), writable=True)
        self.answers: deque[Message | KVStoreError | Callable[[Message], Message]] = deque()
        self.asked: list[Message] = []
        self.patience: list[float] = []
        """How long each answer was to be waited for."""
        self.pauses: list[float] = []
        self.ingested: list[IngestSpan] = []
        self.spans_read: list[ReadSpan] = []
        self.others: list[ReadSpan | None] = []
        """What the reads could have been hedged by."""
        self.read_takes_s = 0.0
        self._ids = itertools.count(1)

    def new_id(self) -> bytes:
        """Request ids in order."""
        return next(self._ids).to_bytes(16, "big")

    def will(self, *answers: Message | KVStoreError | Callable[[Message], Message]) -> Script:
        """Queue answers to the next Asks. AbortPut answers itself."""
        self.answers.extend(answers)
        return self

    def ask(self, message: Message, timeout_s: float) -> Message:
        """The next answer of the list."""
        assert timeout_s >= 0, message
        self.asked.append(message)
        self.patience.append(timeout_s)
        if isinstance(message, AbortPut):
            return Done()
        assert self.answers, f"not in the script: {message!r}"
        answer = self.answers.popleft()
        if isinstance(answer, KVStoreError):
            raise answer
        return answer(message) if callable(answer) else answer

    def ingest(self, spans: Sequence[IngestSpan], timeout_s: float) -> list[bytes]:
        """Store in the loopback transport."""
        self.ingested += spans
        return self.transport.ingest(spans, self.memory, timeout_s)

    def read(
        self,
        spans: Sequence[ReadSpan],
        timeout_s: float,
        others: Sequence[ReadSpan | None] = (),
    ) -> list[bytes]:
        """Read from the loopback transport."""
        self.spans_read += spans
        self.others += others
        self.clock.advance(self.read_takes_s)
        return [self.transport.read(span, self.memory, timeout_s) for span in spans]

    def wipe(self, places: Sequence[int], size_bytes: int) -> None:
        """Zero those places."""
        self.memory.wipe(places, size_bytes)

    def pause(self, seconds: float) -> None:
        """Let virtual time pass."""
        self.pauses.append(seconds)
        self.clock.advance(seconds)

    def asked_of(self, kind: type[Message]) -> list[Message]:
        """The messages of one type, in order."""
        return [message for message in self.asked if type(message) is kind]

    def fill(self, chain: PageChain, places: Sequence[int], size: int, part: int = 0) -> None:
        """Write each page's payload to its place."""
        for key, place in zip(chain, places, strict=True):
            self.memory.view[place : place + size] = payload(key, part, size)

    def assert_holds(
        self, chain: PageChain, places: Sequence[int], size: int, part: int = 0
    ) -> None:
        """Every byte is that of the page."""
        for key, place in zip(chain, places, strict=True):
            assert bytes(self.memory.view[place : place + size]) == payload(key, part, size)

    def store(
        self, where: str, chain: PageChain, offsets: Sequence[int], size: int, part: int = 0
    ) -> None:
        """Put pages into the loopback transport; an extent's generation is its offset + 1."""
        for key, offset in zip(chain, offsets, strict=True):
            held = (key, part, offset + 1, payload(key, part, size))
            self.transport.pages[(where, offset)] = held


def begin_put(message: Message) -> BeginPut:
    """The message as what it must be."""
    assert isinstance(message, BeginPut)
    return message


def copy(
    chain: PageChain, offsets: Sequence[int], size: int, index: int, part: int = 0
) -> LocatedCopy:
    """The columns of a replica whose bytes `Script.store` holds."""
    sums = [payload_checksum(payload(key, part, size), key, part) for key in chain]
    generations = [offset + 1 for offset in offsets]
    return LocatedCopy(part, index, size, u64(offsets), u64(generations), u64(sums))


def located(segments: Sequence[SegmentRef], *runs: LocatedRun, ttl_s: float = 10.0) -> Located:
    """An answer to a lookup."""
    return Located(1, ttl_s, tuple(segments), runs)


def keys_asked(message: BeginPut) -> int:
    """How many pages a BeginPut names."""
    return sum(len(chain.keys) for chain in message.chains) // KEY_BYTES
