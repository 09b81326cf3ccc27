"""A pool without I/O: the master's state machine, scripted workers and one engine around it.

Nothing here decides anything: requests go through `MasterState.handle`, seals and freed extents
are confirmed at once, moves after a time that is set, and time is a number that the caller moves
on.

**Capacity.** A worker lends a segment of memory of exactly `capacity_pages` extents of one size
class, one of a drive of `nvme_pages` where that is not 0, and the high watermark is the whole
segment. So nothing goes before the segment is full, and then as much as a put or a move lacks: it
asks, finds no room, waits; the master evicts what is wanted; the freed extents are planned. To see
what batches of evictions cost, set lower watermarks. Pages are small here, so that the bytes a
second that a worker moves are no bound; those that a drive stands are a share of it, and are.
"""

from __future__ import annotations

import hashlib
from array import array
from collections import Counter, deque
from typing import TYPE_CHECKING, Final

import msgspec

from kvstore import limits
from kvstore.errors import BadValue
from kvstore.hints import NO_HINTS
from kvstore.ids import KEY_BYTES, ROOT_PARENT, Epoch
from kvstore.namespace import Attention, CacheGroup, Content, Layout
from kvstore.replica import Tier
from kvstore.require import require_ttl
from kvstore.segment import check_geometry
from kvstore.wire.messages.common import SegmentRef
from kvstore.wire.messages.membership import (
    ExtentsConfirmed,
    FreeExtents,
    InventoryEnd,
    OfferInventory,
    RegisterWorker,
    SegmentOffer,
)
from kvstore.wire.messages.namespaces import NamespaceOpened, OpenNamespace
from kvstore.wire.messages.puts import (
    BeginPut,
    ExtentSource,
    Ingest,
    Ingested,
    PeerSource,
    PutChain,
    PutPlans,
    Sealed,
    SealedNoted,
)
from kvstore.wire.messages.reads import Located, MatchPrefix
from master.events import (
    Command,
    CommandAnswered,
    Persist,
    Persisted,
    Reply,
    Request,
    SessionId,
    SessionOpened,
    Tick,
)
from master.state import MasterState
from master.tunables import GIVEN, Tunables

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from kvstore.hints import Hints
    from kvstore.segment import Geometry
    from kvstore.wire.messages.base import Message
    from master.events import Action, Event

PAGE_BYTES: Final = limits.EXTENT_ALIGN_BYTES
CHUNK_PAGES: Final = (64, 32, 16, 8, 4)
"""Tried in this order: a chunk has a power of two of extents, and the segment whole chunks."""
PUT_WAIT_S: Final = 0.001
"""How long a put waits for room. The requests of a trace come one after the other, so that a long
wait would hold up what came at the same time. Also for how long the pages above it are safe."""
MOVE_S_MAX: Final = 1.0
"""Within the shortest put timeout: nothing has to be fenced."""
NEVER_S: Final = 1e12
NOTHING: Final[dict[str, object]] = {}
TENANT: Final = "replay"
ENGINE: Final = SessionId(1)
WORKER: Final = SessionId(2)
"""The first; others follow."""
ENGINES: Final = SessionId(1 << 20)


class Setting(msgspec.Struct, frozen=True):
    """A pool to be replayed against."""

    capacity_pages: int
    policy: str = "lrfu"
    """Name of an eviction policy, and parameters other than its defaults: name:parameter=value."""
    lease_ttl_s: float = 0.0
    """Of each match; 0: only the pages of the running request are safe, as in most studies, and
    none are brought up from a drive, which takes leases."""
    page_ttl_s: float = limits.PAGE_TTL_S
    watermark_high: float = 1.0
    watermark_low: float = 0.99
    watermark_demote: float = limits.WATERMARK_DEMOTE
    nvme_pages: int = 0
    admission: str = "budget"
    """Which pages a drive takes: a policy and its parameters, written as those of eviction."""
    hints: str = GIVEN
    move_s: float = 0.0
    """Time that a worker takes for a move or a copy."""
    workers: int = 1
    """Each lends so much, on a host of its own."""


class VirtualPool:
    """One master and its peers. Pages are numbers; equal numbers are equal prefixes."""

    def __init__(
        self, setting: Setting, page_tokens: int, changed: Mapping[str, object] = NOTHING
    ) -> None:
        """Make a pool that is ready and empty. `changed`: tunables that no setting is about.

        BadValue for a capacity that no segment has, a time out of bounds and an unknown policy or
        parameter; ConfigError for tunables that contradict each other.
        """
        if not 0 <= setting.move_s <= MOVE_S_MAX:
            raise BadValue("move_s", setting.move_s, f"0 to {MOVE_S_MAX}")
        self.setting = setting
        self.now_s = 0.0
        self.held: dict[str, dict[int, int]] = {}
        """Page by segment and offset of its extent. The first worker's segments are called as
        their tier is, those of others also after the worker."""
        self._copies: Counter[int] = Counter()
        self.freed: list[tuple[str, int]] = []
        """Segment and page of the copies that left, in order; the reader takes them out."""
        self.written: Counter[str] = Counter()
        """Pages that were put, moved or copied, by the segment that took them."""
        self._moving: deque[tuple[float, Command]] = deque()
        """Moves, and when they will have been carried out."""
        self.master = MasterState(msgspec.structs.replace(_tunables(setting), **changed), Epoch(1))
        self._workers: dict[str, SessionId] = {}
        """By the segments that they lend."""
        self._keys: dict[int, bytes] = {}
        self.replies: dict[tuple[SessionId, int], Message] = {}
        self._requests = 0
        self.namespace, self._ordinal = b"", 0
        self._page_tokens = page_tokens
        self._join(page_tokens)

    def advance(self, at_s: float) -> None:
        """Let everything happen that is due up to `at_s`; one in the past changes nothing."""
        while self.next_s() <= at_s:
            self._step()
        self.now_s = max(self.now_s, at_s)

    def holds(self, page: int) -> bool:
        """Whether any tier has it."""
        return self._copies[page] > 0

    def match(self, pages: Sequence[int], hints: Hints = NO_HINTS) -> Counter[str]:
        """How many leading pages are hits, by the tier that serves them."""
        hits: Counter[str] = Counter()
        for found in self.located(pages, hints):
            for run in found.runs:
                hits[found.segments[run.copies[0].segment].tier] += run.count
        return hits

    def engine(self, number: int) -> SessionId:
        """One on the host of this worker; the usual one is on a host that nobody knows."""
        session = SessionId(ENGINES + number)
        if session not in self.master.core.sessions:
            name, host = f"engine-{number}", f"host-{number}"
            self._send(SessionOpened(session, "engine", TENANT, name, name.encode(), host))
        return session

    def located(
        self, pages: Sequence[int], hints: Hints = NO_HINTS, reader: SessionId = ENGINE
    ) -> Iterator[Located]:
        """Where the leading pages are that are hits: one answer or several."""
        for first in range(0, len(pages), limits.BATCH_PAGES_MAX):
            some = pages[first : first + limits.BATCH_PAGES_MAX]
            lease = self.setting.lease_ttl_s > 0
            request = MatchPrefix(self.namespace, self.packed(some), (), lease, hints)
            found = self.ask(reader, request)
            assert isinstance(found, Located), found
            yield found
            if sum(run.count for run in found.runs) < len(some):
                break

    def put(
        self,
        pages: Sequence[int],
        above: int | None,
        hints: Hints = NO_HINTS,
        writer: SessionId = ENGINE,
    ) -> int:
        """Store these consecutive pages below the page `above`; how many are there now.

        It gives up the rest when no room came within PUT_WAIT_S.
        """
        stored = 0
        while stored < len(pages):
            parent = ROOT_PARENT if above is None else self._key(above)
            some = pages[stored : stored + limits.BATCH_PAGES_MAX]
            count = self._put_some(parent, some, hints, writer)
            if not count:
                break
            stored += count
            above = pages[stored - 1]
        return stored

    def _put_some(
        self, parent: bytes, pages: Sequence[int], hints: Hints, writer: SessionId
    ) -> int:
        keys = self.packed(pages)
        request = self._requests.to_bytes(16, "little")
        message = BeginPut(
            request,
            self.namespace,
            (PutChain(parent, keys),),
            (0,),
            (self._page_tokens,),
            PUT_WAIT_S,
            hints=hints,
        )
        plans = self.ask(writer, message)
        assert isinstance(plans, PutPlans), plans
        for span in plans.spans:
            own = slice(span.first * KEY_BYTES, (span.first + span.count) * KEY_BYTES)
            segment = plans.segments[span.segment].segment
            self._seal(
                Sealed(
                    segment, 1, span.generation, self._ordinal, span.part, self._page_tokens,
                    self._page_tokens, (parent + keys)[own], keys[own], span.offsets,
                    bytes(len(span.offsets)),
                ),
                pages[span.first : span.first + span.count],
            )  # fmt: skip
        return min((refused.first for refused in plans.refused), default=len(pages))

    def _seal(self, sealed: Sealed, pages: Sequence[int]) -> None:
        """A worker has these pages now."""
        self.held[sealed.segment].update(zip(array("Q", sealed.offsets), pages, strict=True))
        self._copies.update(pages)
        self.written[sealed.segment] += len(pages)
        noted = self.ask(self._workers[sealed.segment], sealed)
        assert isinstance(noted, SealedNoted), noted
        assert not any(noted.outcomes), noted

    def _join(self, page_tokens: int) -> None:
        self._send(SessionOpened(ENGINE, "engine", TENANT, "engine", b"engine"))
        for number in range(self.setting.workers):
            self._join_worker(number)
        content, layout = _shape(page_tokens)
        opened = self.ask(ENGINE, OpenNamespace(content, layout))
        assert isinstance(opened, NamespaceOpened), opened
        self.namespace, self._ordinal = opened.namespace, opened.ordinal

    def _join_worker(self, number: int) -> None:
        name = f"worker-{number}" if number else "worker"
        session = SessionId(WORKER + number)
        self._send(SessionOpened(session, "worker", "", name, name.encode()))
        sizes = {Tier.DRAM: _geometry("capacity_pages", self.setting.capacity_pages)}
        if self.setting.nvme_pages:
            sizes[Tier.NVME] = _geometry("nvme_pages", self.setting.nvme_pages)
        offers = [
            SegmentOffer(f"{tier}-{number}" if number else tier, 1, tier, geometry)
            for tier, geometry in sizes.items()
        ]
        self.ask(session, RegisterWorker(name, f"host-{number}", (), tuple(offers)))
        for each in offers:
            self.held[each.segment] = {}
            self._workers[each.segment] = session
            self.ask(session, OfferInventory(each.segment, 1, ()))
            self.ask(session, InventoryEnd(each.segment, 1))

    def ask(self, session: SessionId, message: Message) -> Message:
        """The reply; time moves on when it is held back."""
        number = self.post(session, message)
        while (reply := self.replies.pop((session, number), None)) is None:
            self._step()
        return reply

    def post(self, session: SessionId, message: Message) -> int:
        """Ask, and go on: the reply comes to `replies`, under the session and this number."""
        self._requests += 1
        number = self._requests  # a move that ends meanwhile asks, too
        self._send(Request(session, number, message))
        return number

    def next_s(self) -> float:
        """When something happens by itself."""
        due_s = self._moving[0][0] if self._moving else NEVER_S
        return min(self.master.wakeup_s, due_s)

    def _step(self) -> None:
        """Go on to when the next move has been carried out, or when the master wants to."""
        self.now_s = max(self.now_s, self.next_s())
        if self._moving and self._moving[0][0] <= self.now_s:
            self._move(self._moving.popleft()[1])
        else:
            self._send(Tick())

    def _send(self, event: Event) -> None:
        """Handle an event and what follows from it."""
        for action in self.master.handle(event, self.now_s):
            self._carry_out(action)

    def _carry_out(self, action: Action) -> None:
        match action:
            case Reply():
                self.replies[action.session, action.request_id] = action.message
            case Persist():
                self._send(Persisted(action.write))
            case Command(message=Ingest()):
                self._moving.append((self.now_s + self.setting.move_s, action))
            case Command():
                order = action.message
                # All that is planned is sealed in time, nothing is removed and nobody is lost:
                # nothing to fence.
                assert isinstance(order, FreeExtents), order
                held = self.held[order.segment]
                pages = [held.pop(offset) for offset in array("Q", order.offsets)]
                self._copies.subtract(pages)
                self.freed += [(order.segment, page) for page in pages]
                done = ExtentsConfirmed(order.epoch, bytes(len(order.offsets) // 8))
                self._send(CommandAnswered(action.command, done))

    def _move(self, command: Command) -> None:
        """Copy pages from another segment, as a worker's mover does."""
        order = command.message
        assert isinstance(order, Ingest), order
        match order.source:
            case ExtentSource(segment=segment) | PeerSource(segment=SegmentRef(segment=segment)):
                source = self.held[segment]
            case _:
                raise AssertionError(order)
        sealed = Sealed(
            order.segment, 1, order.generation, order.namespace_ordinal, order.part,
            order.part_bytes, order.token_count, (order.parent + order.keys)[:-KEY_BYTES],
            order.keys, order.offsets, order.checksums,
        )  # fmt: skip
        self._seal(sealed, [source[offset] for offset in array("Q", order.source.offsets)])
        outcomes = bytes(len(order.keys) // KEY_BYTES)
        self._send(CommandAnswered(command.command, Ingested(outcomes)))

    def packed(self, pages: Sequence[int]) -> bytes:
        return b"".join(map(self._key, pages))

    def _key(self, page: int) -> bytes:
        key = self._keys.get(page)
        if key is None:
            # The number stands for the whole prefix, so its hash is as good as a hash chain.
            key = self._keys[page] = hashlib.sha256(page.to_bytes(8, "little")).digest()
        return key


def policy_written(text: str) -> tuple[str, dict[str, str]]:
    """Name and parameters of `name:parameter=value:…`, as the registry takes them."""
    name, *written = text.split(":")
    for each in written:
        if "=" not in each:
            raise BadValue("policy", text, "name:parameter=value")
    return name, dict(each.split("=", 1) for each in written)


def _tunables(setting: Setting) -> Tunables:
    require_ttl("page_ttl_s", setting.page_ttl_s)
    name, parameters = policy_written(setting.policy)
    admission, admission_parameters = policy_written(setting.admission)
    return Tunables(
        cluster="replay",
        lease_ttl_s=setting.lease_ttl_s or limits.LEASE_TTL_S,
        page_ttl_s=setting.page_ttl_s,
        heartbeat_interval_s=NEVER_S / 3,
        worker_lost_after_s=NEVER_S,
        watermark_high=setting.watermark_high,
        watermark_low=setting.watermark_low,
        watermark_demote=setting.watermark_demote,
        eviction=name,
        eviction_parameters=parameters,
        nvme_admission=admission,
        nvme_admission_parameters=admission_parameters,
        hints=setting.hints,
    )


def _geometry(field: str, pages: int) -> Geometry:
    for count in CHUNK_PAGES:
        if pages > 0 and pages % count == 0:
            return check_geometry(pages * PAGE_BYTES, count * PAGE_BYTES)
    raise BadValue(field, pages, f"a positive multiple of {CHUNK_PAGES[-1]}")


def _shape(page_tokens: int) -> tuple[Content, Layout]:
    """Pages of a byte a token: sizes do not matter where all are equal."""
    group = CacheGroup(Attention.LATENT, 1, 1, 1, 0)
    content = Content(TENANT, "replay", "", "", "int8", (group,), "")
    return content, Layout(page_tokens=page_tokens)
