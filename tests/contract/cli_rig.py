"""Commands run as programs, and a master that gives them one answer. Not a test."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import threading
from typing import TYPE_CHECKING, Self

from kvstore.errors import Unavailable
from kvstore.rpc.server import Server
from kvstore.wire.messages.reads import (
    PinTotals,
    SegmentStatus,
    Status,
    StoredChunks,
    StripeTotals,
    TierStatus,
    WorkerStatus,
)

if TYPE_CHECKING:
    from kvstore.exit_codes import ExitCode
    from kvstore.rpc.identity import ListenerIdentity
    from kvstore.rpc.peer import Peer
    from kvstore.wire.messages.base import Message

STATUS = Status(
    cluster="c", epoch=4, uptime_s=61.5, pages=10, runs=2, namespaces=1, sessions=3, open_plans=0,
    workers=(
        WorkerStatus("w[red]1", "h", "live", 0.1, ("shm /x.sock", "tcp 127.0.0.1:1"), "r1", "z1"),
    ),
    segments=(
        SegmentStatus("w-dram", "w", "dram", 1 << 30, 3 << 28, 0, 1 << 28, 0, 0, "serving", ""),
        SegmentStatus("w-nvme", "w", "nvme", 0, 0, 0, 0, 0, 0, "failed", "read at 4096: EIO"),
    ),
    tiers=(
        TierStatus("dram", 1, 1 << 30, 1 << 28, 6, 7, 3, 0, 0, 0),
        TierStatus("nvme", 1, 1 << 40, 1 << 39, 9, 1, 0, 12, 3 << 20, 2 << 20),
    ),
    counters={"hits": 8, "misses": 2},
    pins=PinTotals(2, 9, 1 << 20, 3 << 20), master="m1", stored=StoredChunks(9, 2, 12.4),
    stripes=StripeTotals(7, 5 << 20, 2, "k + m: got 6, want at most 4: so many hosts lend drives"),
)  # fmt: skip


class ScriptedMaster:
    """A listener in a thread of its own that answers every request by one message."""

    def __init__(self, listener: ListenerIdentity, answer: Message | None) -> None:
        self._listener = listener
        self._answer = answer
        self._loop = asyncio.new_event_loop()
        self._stop = asyncio.Event()
        self._ready = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self.address = ""

    def __enter__(self) -> Self:
        self._thread.start()
        assert self._ready.wait(10)
        return self

    def __exit__(self, *_: object) -> None:
        self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join(10)

    def _run(self) -> None:
        with asyncio.Runner(loop_factory=lambda: self._loop) as runner:
            runner.run(self._serve())

    async def _serve(self) -> None:
        server = Server(self._listener, lambda *_: None, self._reply, lambda _: None)
        self.address = await server.listen("127.0.0.1:0")
        self._ready.set()
        await self._stop.wait()
        await server.close()

    def _reply(self, peer: Peer, request_id: int, message: Message) -> None:
        del message
        if self._answer is None:
            raise Unavailable("not ready")
        peer.reply(request_id, self._answer)


def kvharbor(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run the command; what belongs to the caller's own pool stays out."""
    inherited = {key: value for key, value in os.environ.items() if "KVHARBOR" not in key}
    return subprocess.run(
        [sys.executable, "-P", "-W", "error", "-m", "kvstore.cli.main", *arguments],
        env=inherited | environment,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def refused(code: ExitCode, *arguments: str, **environment: str) -> str:
    """Run a command that fails with one line; returns the line without the program's name."""
    done = kvharbor(*arguments, **environment)
    assert done.returncode == code, done.stderr
    assert done.stdout == ""
    (line,) = done.stderr.splitlines()
    program, _, text = line.partition(": ")
    assert program == "kvharbor"
    return text
