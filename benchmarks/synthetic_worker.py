"""A worker that lends memory it does not have: enough for a master to be filled with pages.

It registers one large segment over the real rpc, keeps its heartbeat going, confirms every command,
and seals whatever it is told to. Nothing ever reads from it.
"""

from __future__ import annotations

import asyncio
import ctypes
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from contextlib import AbstractContextManager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Final

from kvstore import limits
from kvstore.announcement import read_announcement
from kvstore.errors import KVStoreError, NotLeader, Unavailable
from kvstore.ids import KEY_BYTES
from kvstore.rpc.connection import Connection
from kvstore.rpc.identity import Identity, Role
from kvstore.rpc.server import dial_peer
from kvstore.segment import Geometry
from kvstore.wire.messages.membership import (
    ExtentsConfirmed,
    FenceExtents,
    FreeExtents,
    Heartbeat,
    InventoryEnd,
    OfferInventory,
    RegisterWorker,
    RetireExtents,
    SegmentOffer,
    WorkerAccepted,
)
from kvstore.wire.messages.puts import Sealed, SealedNoted

if TYPE_CHECKING:
    from types import TracebackType

    from kvstore.client.namespaces import OpenedNamespace
    from kvstore.page import PageChain
    from kvstore.rpc.peer import Peer
    from kvstore.wire.messages.base import Message
    from kvstore.wire.messages.puts import PlanSpan, PutPlans

NAME: Final = "synthetic"
SEGMENT: Final = "synthetic-dram0"
INCARNATION: Final = 1
TIMEOUT_S: Final = 10.0
_PR_SET_PDEATHSIG: Final = 1
_libc: Final = ctypes.CDLL(None)


def _end_with_parent() -> None:
    _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)


class Master(AbstractContextManager["Master"]):
    """A master process of its own, with a synthetic worker that lends `payload_bytes`."""

    def __init__(self, payload_bytes: int) -> None:
        """Start both; returns when puts can be planned."""
        self._folder = Path(tempfile.mkdtemp(prefix="kvharbor-bench-"))
        program = Path(sys.executable).parent / "kvharbor-master"
        options = [f"--data-dir={self._folder}", "--listen=127.0.0.1:0", "--admin=off"]
        with (self._folder / "log").open("wb") as log:
            self._process = subprocess.Popen(
                [str(program), *options], stdout=log, stderr=log, preexec_fn=_end_with_parent
            )
        self.pid = self._process.pid
        try:
            self.address = self._announced()
            self.worker = SyntheticWorker(self.address, payload_bytes)
        except BaseException:
            self._stop()
            raise

    def _announced(self) -> str:
        deadline = time.monotonic() + TIMEOUT_S
        while time.monotonic() < deadline and self._process.poll() is None:
            found = read_announcement(self._folder, "master")
            if found is not None:
                return found.listen
            time.sleep(0.02)
        raise RuntimeError(f"no master:\n{(self._folder / 'log').read_text()[-2000:]}")

    def _stop(self) -> None:
        self._process.terminate()
        try:
            self._process.wait(TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        shutil.rmtree(self._folder, ignore_errors=True)

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.worker.close()
        self._stop()


class SyntheticWorker:
    """Control link in a thread; seals go over a connection of their own, as a real worker's do."""

    def __init__(self, master: str, payload_bytes: int) -> None:
        """Register and be LIVE."""
        self._master = master
        self._geometry = Geometry(payload_bytes // limits.CHUNK_BYTES * limits.CHUNK_BYTES)
        self._live = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._run()), daemon=True)
        self._thread.start()
        if not self._live.wait(TIMEOUT_S):
            raise RuntimeError("the synthetic worker was not accepted")
        identity = Identity(Role.WORKER, name=NAME)
        self._line = Connection.open(master, identity, TIMEOUT_S)

    def start_seal(
        self, plan: PlanSpan, plans: PutPlans, opened: OpenedNamespace, chain: PageChain
    ) -> int:
        """Report a span's pages, a chain, as verified; `finish_seal` takes the answer."""
        layout, parts = opened.namespace.layout, opened.namespace.parts
        message = Sealed(
            plans.segments[plan.segment].segment, INCARNATION, plan.generation, opened.ordinal,
            plan.part, parts[plan.part].size_bytes, layout.page_tokens,
            chain.parent + chain.packed[:-KEY_BYTES], chain.packed, plan.offsets,
            bytes(len(plan.offsets)),
        )  # fmt: skip
        return self._line.start(message, TIMEOUT_S)

    def finish_seal(self, number: int) -> None:
        """The answer must be that every extent is sealed."""
        noted = self._line.finish(number, TIMEOUT_S)
        if not isinstance(noted, SealedNoted) or any(noted.outcomes):
            raise RuntimeError(f"not sealed: {noted!r}")

    def close(self) -> None:
        """Leave."""
        self._line.close()
        self._loop.call_soon_threadsafe(self._task.cancel)
        self._thread.join()

    async def _run(self) -> None:
        self._loop = asyncio.get_running_loop()
        task = asyncio.current_task()
        assert task is not None
        self._task = task
        with suppress(asyncio.CancelledError):
            await self._serve()

    async def _serve(self) -> None:
        peer = await self._accepted()
        self._live.set()
        try:
            while True:
                await asyncio.sleep(limits.HEARTBEAT_INTERVAL_S)
                with suppress(KVStoreError):
                    await peer.call(Heartbeat(NAME, self._epoch, 0), TIMEOUT_S)
        finally:
            peer.close()

    async def _accepted(self) -> Peer:
        """A master listens before it leads, and drops the workers that asked it by then."""
        deadline = time.monotonic() + TIMEOUT_S
        while True:
            try:
                return await self._registered()
            except (NotLeader, Unavailable):
                if time.monotonic() > deadline:
                    raise
                await asyncio.sleep(0.02)

    async def _registered(self) -> Peer:
        identity = Identity(Role.WORKER, name=NAME)
        peer = await dial_peer(self._master, identity, self._confirm, lambda _: None)
        try:
            offer = SegmentOffer(SEGMENT, INCARNATION, "dram", self._geometry)
            accepted = await peer.call(RegisterWorker(NAME, NAME, (), (offer,)), TIMEOUT_S)
            assert isinstance(accepted, WorkerAccepted), accepted
            await peer.call(OfferInventory(SEGMENT, INCARNATION, ()), TIMEOUT_S)
            await peer.call(InventoryEnd(SEGMENT, INCARNATION), TIMEOUT_S)
        except BaseException:
            peer.close()
            raise
        self._epoch = accepted.epoch
        return peer

    def _confirm(self, peer: Peer, request_id: int, message: Message) -> None:
        assert isinstance(message, FenceExtents | FreeExtents | RetireExtents), message
        peer.reply(request_id, ExtentsConfirmed(self._epoch, bytes(len(message.offsets) // 8)))
