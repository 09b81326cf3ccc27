"""A master's core with scripted workers and engines around it: no I/O, time by hand.

`Rig.settle()` lets everything due happen; after every event all invariants are checked.
"""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING

from kvstore.ids import KEY_BYTES, ROOT_PARENT, Epoch
from kvstore.namespace import Attention, CacheGroup, Content, Layout, Namespace, open_layout
from kvstore.segment import check_geometry
from kvstore.wire.messages.hello import Failure
from kvstore.wire.messages.namespaces import NamespaceOpened, OpenNamespace
from kvstore.wire.messages.puts import (
    BeginPut,
    Ingest,
    PutChain,
    PutPlans,
    Sealed,
    SealedNoted,
)
from kvstore.wire.messages.reads import Located, MatchPrefix, Probe, Probed, Remove, Removed
from master.events import (
    CloseSession,
    Command,
    CommandAnswered,
    Note,
    Persist,
    Persisted,
    Reply,
    Request,
    SessionClosed,
    SessionId,
    SessionOpened,
    Tick,
)
from master.state import MasterState
from master.tunables import Tunables
from tests.unit.master_worker import PAGE_TOKENS, FakeSegment, FakeWorker

if TYPE_CHECKING:
    from kvstore.wire.messages.base import Message
    from master.events import Action, Event
    from master.plans import Owner

TENANT = "tenant"
CHUNK = 64 * 1024
"""Four frames of 16 KiB: small enough to fill."""


def chain(seed: int, pages: int) -> bytes:
    """Packed keys of a made-up chain."""
    return hashlib.shake_128(b"chain %d" % seed).digest(pages * KEY_BYTES)


def small_content(parts: int = 1, tenant: str = TENANT) -> Content:
    """Content whose pages have `parts` parts of 4 KiB each, in `small_layout`."""
    group = CacheGroup(Attention.FULL, 1, parts, 8, 8)
    return Content(tenant, f"model-{parts}", "1", "", "float16", (group,), "rope")


def small_layout(parts: int = 1) -> Layout:
    """128 tokens a page and one head a rank: 128 * 16 * 2 bytes = 4 KiB a part."""
    return Layout(page_tokens=PAGE_TOKENS, tensor_parallel=parts)


class Rig:
    """One master, its peers and its store."""

    def __init__(
        self, tunables: Tunables | None = None, epoch: int = 1, now: float = 1000.0
    ) -> None:
        self.tunables = tunables or Tunables(cluster="test", replicas=1)
        self.now = now
        self.store: dict[str, bytes] = {}
        self.written: list[Persist] = []
        """All that became durable, in order."""
        self.master = MasterState(self.tunables, Epoch(epoch))
        self.replies: dict[tuple[SessionId, int], Message] = {}
        self.commands: list[Command] = []
        self.persists: list[Persist] = []
        self.closed: list[SessionId] = []
        self.notes: list[str] = []
        self.holds_persists = False
        self.holds_commands = False
        self.holds_moves = False
        self.moves: list[Command] = []
        """Moves that were asked for and are held."""
        self.workers: dict[str, FakeWorker] = {}
        self.checks = True
        self.puts = 0
        self._sessions = 0
        self._requests = 0
        self.engine = self.open("engine", TENANT, "engine")

    def takeover(self, epoch: int) -> None:
        """Another master, with what was stored; nobody is connected to it."""
        self.master = MasterState(self.tunables, Epoch(epoch), sorted(self.store.items()))
        self.replies.clear()
        self.commands.clear()
        self.moves.clear()
        self.persists.clear()
        for worker in self.workers.values():
            worker.session = None
        self.engine = self.open("engine", TENANT, "engine")

    def send(self, event: Event) -> None:
        """Handle one event, carry its actions out, and check everything."""
        self._carry_out(self.master.handle(event, self.now))
        if self.checks:
            self.master.check_invariants()

    def _carry_out(self, actions: list[Action]) -> None:
        for action in actions:
            match action:
                case Reply():
                    self.replies[action.session, action.request_id] = action.message
                case Command():
                    self.commands.append(action)
                case Persist():
                    self.persists.append(action)
                case CloseSession():
                    self.closed.append(action.session)
                case Note():
                    self.notes.append(action.text)
        if not self.holds_persists:
            self.store_all()
        if not self.holds_commands:
            self.obey_all()

    def store_all(self) -> None:
        """Let every pending write become durable."""
        pending, self.persists = self.persists, []
        for persist in pending:
            self.written.append(persist)
            self.store.update(persist.puts)
            for key in persist.deletes:
                self.store.pop(key, None)
            self.send(Persisted(persist.write))

    def obey_all(self) -> None:
        """Let the workers carry out and answer every pending command."""
        pending, self.commands = self.commands, []
        for command in pending:
            if self.holds_moves and isinstance(command.message, Ingest):
                self.moves.append(command)
            else:
                self.obey(command)

    def obey(self, command: Command) -> None:
        """Let one command be carried out and answered; None when its worker is not there."""
        worker = next((w for w in self.workers.values() if w.session == command.session), None)
        reply = None if worker is None else worker.answer(command.message)
        self.send(CommandAnswered(command.command, reply))

    def open(
        self, role: str, tenant: str, name: str, token: bytes = b"", host: str = ""
    ) -> SessionId:
        """Open a session; its token is its own unless given."""
        self._sessions += 1
        session = SessionId(self._sessions)
        token = token or b"token %d" % session
        self.send(SessionOpened(session, role, tenant, name, token, host))
        return session

    def close(self, session: SessionId) -> None:
        """End a session."""
        self.send(SessionClosed(session))

    def ask(self, session: SessionId, message: Message) -> Message | None:
        """Send a request; its reply, None when it is held back."""
        self._requests += 1
        self.send(Request(session, self._requests, message))
        return self.reply(session, self._requests)

    def reply(self, session: SessionId, request_id: int) -> Message | None:
        """Take the reply to a request."""
        return self.replies.pop((session, request_id), None)

    def engine_owner(self) -> Owner:
        """What the engine holds."""
        return self.master.core.sessions[self.engine].owner

    @property
    def last_request(self) -> int:
        """Id of the request that was sent last."""
        return self._requests

    def settled(self, session: SessionId | None, reply: Message | None) -> Message | None:
        """The reply to the last request, after as many ticks as a job may take."""
        request = self._requests
        for _ in range(100):
            if reply is not None or session is None:
                return reply
            self.tick()
            reply = self.reply(session, request)
        raise AssertionError("no reply")

    def tick(self, after_s: float = 0.0) -> None:
        """Let time pass."""
        self.now += after_s
        self.send(Tick())

    def settle(self) -> None:
        """Tick until nothing is due now."""
        for _ in range(1000):
            if self.master.wakeup_s > self.now:
                return
            self.tick()
        raise AssertionError("the master never rests")

    def pass_time(self, seconds: float, step_s: float = 0.25) -> None:
        """Let time pass with heartbeats and ticks."""
        end = self.now + seconds
        while self.now < end:
            self.now = min(end, self.now + step_s)
            for worker in self.workers.values():
                if worker.session is not None:
                    worker.beat()
            self.tick()
            self.settle()

    def add_worker(
        self,
        name: str = "w1",
        chunks: int = 16,
        chunk_bytes: int = CHUNK,
        *,
        nvme_chunks: int = 0,
        join: bool = True,
    ) -> FakeWorker:
        """A worker with memory, and with a drive where that has chunks."""
        geometry = check_geometry(chunks * chunk_bytes, chunk_bytes)
        worker = FakeWorker(self, name, f"{name}-dram", geometry)
        if nvme_chunks:
            geometry = check_geometry(nvme_chunks * chunk_bytes, chunk_bytes)
            worker.lower = FakeSegment(f"{name}-nvme", "nvme", geometry)
        self.workers[name] = worker
        if join:
            worker.join()
        return worker

    def worker_of(self, segment: str) -> FakeWorker:
        """The worker that lends this segment."""
        return next(
            w for w in self.workers.values() if any(s.segment == segment for s in w.segments)
        )

    def segment(self, name: str) -> FakeSegment:
        """The segment of this name, as its worker has it."""
        return next(s for s in self.worker_of(name).segments if s.segment == name)

    def open_namespace(
        self, parts: int = 1, session: SessionId | None = None, *, heads: int = 1
    ) -> OpenedNamespace:
        """Open a namespace with `parts` parts of `heads` times 4 KiB."""
        content, layout = small_content(parts * heads), small_layout(parts)
        reply = self.ask(session or self.engine, OpenNamespace(content, layout))
        assert isinstance(reply, NamespaceOpened), reply
        return OpenedNamespace(self, open_layout(content, layout), reply.ordinal)


class OpenedNamespace:
    """A namespace as an engine uses it."""

    def __init__(self, rig: Rig, namespace: Namespace, ordinal: int) -> None:
        self.rig = rig
        self.id = namespace.id
        self.namespace = namespace
        self.ordinal = ordinal

    def begin(  # noqa: PLR0913 -- as many as the message has
        self,
        keys: bytes,
        parent: bytes = ROOT_PARENT,
        parts: tuple[int, ...] = (0,),
        *,
        wait: bool = False,
        timeout_s: float = 5.0,
        ttl_s: float | None = None,
        session: SessionId | None = None,
        request: bytes | None = None,
        tier: str = "",
        replicas: int = 0,
        strict: bool = False,
    ) -> Message | None:
        """Plan a put of one chain; PutPlans, Failure, or None when it waits."""
        self.rig.puts += 1
        sizes = tuple(self.namespace.parts[part].size_bytes for part in parts)
        message = BeginPut(
            request or self.rig.puts.to_bytes(16, "little"),
            self.id,
            (PutChain(parent, keys),),
            parts,
            sizes,
            timeout_s,
            wait,
            ttl_s,
            tier=tier,
            replicas=replicas,
            strict=strict,
        )
        return self.rig.ask(session or self.rig.engine, message)

    def plans(
        self,
        keys: bytes,
        parent: bytes = ROOT_PARENT,
        parts: tuple[int, ...] = (0,),
        *,
        ttl_s: float | None = None,
        session: SessionId | None = None,
    ) -> PutPlans:
        """Plan a put that is answered at once."""
        reply = self.begin(keys, parent, parts, ttl_s=ttl_s, session=session)
        assert isinstance(reply, PutPlans), reply
        return reply

    def write(self, plans: PutPlans, keys: bytes, parent: bytes = ROOT_PARENT) -> list[Sealed]:
        """Let the workers pull all that was granted; their reports, not sent yet."""
        reports = []
        for span in plans.spans:
            at = slice(span.first * KEY_BYTES, (span.first + span.count) * KEY_BYTES)
            above = keys[at.start - KEY_BYTES : at.start] if span.first else parent
            segment = self.rig.segment(plans.segments[span.segment].segment)
            size = self.namespace.parts[span.part].size_bytes
            report = segment.write(self.ordinal, span, keys[at], above, size)
            if report is not None:
                reports.append(report)
        return reports

    def report(self, reports: list[Sealed]) -> list[bytes]:
        """Send reports; their outcomes."""
        outcomes = []
        for report in reports:
            session = self.rig.worker_of(report.segment).session
            assert session is not None
            reply = self.rig.ask(session, report)
            assert isinstance(reply, SealedNoted), reply
            outcomes.append(reply.outcomes)
        return outcomes

    def put(
        self,
        keys: bytes,
        parent: bytes = ROOT_PARENT,
        parts: tuple[int, ...] = (0,),
        *,
        ttl_s: float | None = None,
    ) -> PutPlans:
        """Put a chain, all the way."""
        plans = self.plans(keys, parent, parts, ttl_s=ttl_s)
        outcomes = self.report(self.write(plans, keys, parent))
        assert not any(map(any, outcomes)), outcomes
        return plans

    def probe(self, keys: bytes) -> bytes:
        """One byte a page: 1 readable."""
        reply = self.rig.ask(self.rig.engine, Probe(self.id, keys))
        assert isinstance(reply, Probed), reply
        return reply.present

    def match(self, keys: bytes, *, lease: bool = True) -> Located:
        """Match a prefix."""
        reply = self.rig.ask(self.rig.engine, MatchPrefix(self.id, keys, (), lease))
        assert isinstance(reply, Located), reply
        return reply

    def remove(self, keys: bytes, timeout_s: float = 5.0) -> bytes | None:
        """Remove pages; None when the answer is held back."""
        request = Remove(self.id, keys, timeout_s)
        reply = self.rig.ask(self.rig.engine, request)
        if reply is None:
            return None
        assert isinstance(reply, Removed), reply
        return reply.removed


def failure(reply: Message | None) -> Failure:
    """The reply as a failure."""
    assert isinstance(reply, Failure), reply
    return reply
