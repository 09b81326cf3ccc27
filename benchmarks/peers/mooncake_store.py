"""Mooncake Store as its documents advise to run it: master, owner of memory, requesters.

One process each, TCP, `batch_put_from` and `batch_get_into` on registered buffers, fresh keys,
every return code checked, every byte compared. The caller measures requesters with the connection
pool and without; 0.3.13.post1 uses it unless told otherwise. Owner and requester are different
processes, because within one the store copies instead of transferring.
"""

from __future__ import annotations

import ctypes
import importlib.metadata
import importlib.util
import socket
import subprocess
import tempfile
import time
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from benchmarks.harness import MIB, ProcessClock, Sample
from benchmarks.peers.child import START_TIMEOUT_S, Child, PeerFailed, die_with_parent
from benchmarks.regions import Region, same
from workers.drills.ports import free_port

if TYPE_CHECKING:
    from collections.abc import Iterator
    from multiprocessing.connection import Connection
    from types import TracebackType

OURS: Final = "kvstore.connectors.mooncake"
DISTRIBUTION: Final = "mooncake-transfer-engine-non-cuda"
RING_BYTES: Final = 128 * MIB
"""Of each requester, twice: four times the cache of the machines we know."""
STAGING_BYTES: Final = 16 * MIB
SEED: Final = 7


def version() -> str:
    """The release that is installed."""
    return importlib.metadata.version(DISTRIBUTION)


class MooncakeStore(AbstractContextManager["MooncakeStore"]):
    """The whole peer: leaving the context stops every process of it."""

    def __init__(self, segment_bytes: int, pools: tuple[bool, ...] = (False, True)) -> None:
        """Start master, owner and one requester for each kind of connection handling."""
        self._processes: list[subprocess.Popen[bytes]] = []
        self._children: list[Child] = []
        self._log = Path(tempfile.mkstemp(prefix="mooncake-master-")[1])
        try:
            self.master_address = self._start_master()
            self._owner = self._child(_own_memory, self.master_address, segment_bytes)
            self.requesters = {
                pool: Requester(self._child(_request, self.master_address, pool=pool), self._pids())
                for pool in pools
            }
            self._warm(segment_bytes)
        except BaseException:
            self.close()
            raise

    def _warm(self, segment_bytes: int) -> None:
        """Touch most of the segment, so that no measured put pays for its first page faults."""
        batch = 4
        turns = segment_bytes * 85 // 100 // (batch * 16 * MIB)
        for pool, requester in self.requesters.items():
            for turn in range(turns if not pool else 1):
                requester.put(f"warm/{pool}", turn, 16 * MIB, batch)
            for turn in range(turns if not pool else 1):
                requester.remove(f"warm/{pool}", turn, batch)

    def _start_master(self) -> str:
        folder = importlib.util.find_spec("mooncake")
        assert folder is not None, "mooncake is not installed"
        assert folder.origin is not None
        rpc, metrics = free_port(), free_port()
        self._master_command = [
            str(Path(folder.origin).parent / "mooncake_master"),
            f"--rpc_port={rpc}",
            "--rpc_address=127.0.0.1",
            f"--metrics_port={metrics}",
            "--metrics_host=127.0.0.1",
            "--enable_metric_reporting=false",
        ]
        self._processes.append(self._launch_master())
        return self._await_master(self._processes[0], rpc)

    def restart_master(self) -> None:
        """kill -9 the master and start another at the same place at once, as a supervisor would."""
        self._processes[0].kill()
        self._processes[0].wait()
        self._processes[0] = self._launch_master()

    def _launch_master(self) -> subprocess.Popen[bytes]:
        with self._log.open("wb") as log:
            return subprocess.Popen(
                self._master_command, stdout=log, stderr=log, preexec_fn=die_with_parent
            )

    def _await_master(self, master: subprocess.Popen[bytes], rpc: int) -> str:
        deadline = time.monotonic() + START_TIMEOUT_S
        while time.monotonic() < deadline and master.poll() is None:
            with socket.socket() as probe:
                if probe.connect_ex(("127.0.0.1", rpc)) == 0:
                    return f"127.0.0.1:{rpc}"
            time.sleep(0.02)
        raise PeerFailed(f"mooncake_master did not start:\n{self._tail()}")

    def _tail(self) -> str:
        return self._log.read_text(errors="replace")[-2000:]

    def _child(self, main: object, *args: object, pool: bool = False) -> Child:
        child = Child(main, args, pool=pool)
        self._children.append(child)
        child.ready()
        return child

    def _pids(self) -> list[int]:
        return [self._processes[0].pid, self._owner.pid]

    @property
    def master_pid(self) -> int:
        """For its memory."""
        return self._processes[0].pid

    def close(self) -> None:
        """Stop everything, whatever state it is in."""
        for child in reversed(self._children):
            child.stop()
        for process in self._processes:
            process.terminate()
            try:
                process.wait(5)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        self._log.unlink(missing_ok=True)

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


class Requester:
    """The client side, in a process of its own; times are taken inside that process."""

    def __init__(self, child: Child, pids: list[int]) -> None:
        """`pids`: the processes that work for it."""
        self._child = child
        self._clock = ProcessClock([*pids, child.pid])

    def put(self, label: str, turn: int, page_bytes: int, pages: int) -> Sample:
        """Store batch number `turn` of the source region under fresh keys."""
        return self._timed("put", label, turn, page_bytes, pages)

    def get(self, label: str, turn: int, page_bytes: int, pages: int) -> Sample:
        """Fetch what `put` stored under the same label and turn, and compare it."""
        return self._timed("get", label, turn, page_bytes, pages)

    def put_each(self, label: str, turn: int, page_bytes: int, pages: int) -> Sample:
        """Store the pages one call after the other; the sample is one page's share."""
        return self._shared("put_each", label, turn, page_bytes, pages)

    def get_each(self, label: str, turn: int, page_bytes: int, pages: int) -> Sample:
        """Fetch them one call after the other; the sample is one page's share."""
        return self._shared("get_each", label, turn, page_bytes, pages)

    def remove(self, label: str, turn: int, pages: int) -> None:
        """Take a batch out again, leased or not."""
        self._child.call("remove", label, turn, pages)

    def exists(self, label: str, turn: int, pages: int, repeats: int) -> list[float]:
        """Seconds of `repeats` calls that ask for the same keys."""
        return self._seconds("exists", label, turn, pages, repeats)

    def found(self, label: str, turn: int, pages: int) -> int:
        """How many of these keys the store says it has; -1 while it answers with errors."""
        return self._whole("found", label, turn, pages)

    def tried(self, label: str, turn: int, page_bytes: int, pages: int) -> int:
        """Try to store a batch; how many keys were stored."""
        return self._whole("tried", label, turn, page_bytes, pages)

    def _whole(self, *request: object) -> int:
        answer = self._child.call(*request)
        assert isinstance(answer, int)
        return answer

    def _timed(self, op: str, label: str, turn: int, page_bytes: int, pages: int) -> Sample:
        before = self._clock.now_s()
        seconds = self._child.call(op, label, turn, page_bytes, pages)
        # What it spends on comparing bytes is not the store's.
        overhead = self._child.call("overhead")
        assert isinstance(seconds, float)
        assert isinstance(overhead, float)
        return Sample(seconds, page_bytes * pages, self._clock.now_s() - before - overhead)

    def _shared(self, op: str, label: str, turn: int, page_bytes: int, pages: int) -> Sample:
        whole = self._timed(op, label, turn, page_bytes, pages)
        return Sample(whole.seconds / pages, page_bytes, whole.cpu_s / pages)

    def _seconds(self, *request: object) -> list[float]:
        answer = self._child.call(*request)
        assert isinstance(answer, list)
        return answer


@contextmanager
def drop_in(master: str, pids: list[int]) -> Iterator[Requester]:
    """The same requester, in a process of its own, by our drop-in's names on a pool of ours."""
    child = Child(_request, (master, OURS), pool=True)
    try:
        child.ready()
        yield Requester(child, pids)
    finally:
        child.stop()


def _own_memory(pipe: Connection, master: str, segment_bytes: int) -> None:
    from mooncake.store import MooncakeDistributedStore

    store = MooncakeDistributedStore()
    code = store.setup("127.0.0.1", "P2PHANDSHAKE", segment_bytes, STAGING_BYTES, "tcp", "", master)
    assert code == 0, code
    pipe.send(("ok", "ready"))
    pipe.recv()


def _request(pipe: Connection, master: str, library: str = "mooncake.store") -> None:
    worker = _RequesterProcess(master, library)
    pipe.send(("ok", "ready"))
    while True:
        op, *args = pipe.recv()
        try:
            pipe.send(("ok", getattr(worker, op)(*args)))
        except PeerFailed as error:
            pipe.send(("failed", str(error)))


class _RequesterProcess:
    """What runs in the requester's process; public methods are the calls it answers."""

    def __init__(self, master: str, library: str) -> None:
        self._store: Any = importlib.import_module(library).MooncakeDistributedStore()
        code = self._store.setup("127.0.0.1", "P2PHANDSHAKE", 0, STAGING_BYTES, "tcp", "", master)
        assert code == 0, code
        self._source = Region(RING_BYTES, seed=SEED)
        self._into = Region(RING_BYTES)
        for region in (self._source, self._into):
            assert self._store.register_buffer(region.address, region.size_bytes) == 0
        self._overhead_s = 0.0

    @staticmethod
    def _keys(label: str, turn: int, pages: int) -> list[str]:
        return [f"{label}/{turn}/{i}" for i in range(pages)]

    def overhead(self) -> float:
        """Processor seconds spent on comparing since this was last asked."""
        spent, self._overhead_s = self._overhead_s, 0.0
        return spent

    def put(self, label: str, turn: int, page_bytes: int, pages: int) -> float:
        return self._put(label, turn, page_bytes, pages, pages)

    def put_each(self, label: str, turn: int, page_bytes: int, pages: int) -> float:
        return self._put(label, turn, page_bytes, pages, 1)

    def get(self, label: str, turn: int, page_bytes: int, pages: int) -> float:
        return self._get(label, turn, page_bytes, pages, pages)

    def get_each(self, label: str, turn: int, page_bytes: int, pages: int) -> float:
        return self._get(label, turn, page_bytes, pages, 1)

    def _put(self, label: str, turn: int, page_bytes: int, pages: int, step: int) -> float:
        keys = self._keys(label, turn, pages)
        offsets = self._source.offsets(turn, page_bytes, pages)
        addresses = [self._source.address + at for at in offsets]
        codes: list[int] = []
        started = time.perf_counter()
        for i in range(0, pages, step):
            j = i + step
            codes += self._store.batch_put_from(keys[i:j], addresses[i:j], [page_bytes] * step)
        seconds = time.perf_counter() - started
        if codes != [0] * pages:
            raise PeerFailed(f"batch_put_from: codes {sorted(set(codes))}")
        return seconds

    def _get(self, label: str, turn: int, page_bytes: int, pages: int, step: int) -> float:
        keys = self._keys(label, turn, pages)
        offsets = self._into.offsets(turn, page_bytes, pages)
        for at in offsets:
            ctypes.memset(self._into.address + at, 0, min(page_bytes, 64))
        addresses = [self._into.address + at for at in offsets]
        codes: list[int] = []
        started = time.perf_counter()
        for i in range(0, pages, step):
            j = i + step
            codes += self._store.batch_get_into(keys[i:j], addresses[i:j], [page_bytes] * step)
        seconds = time.perf_counter() - started
        if codes != [page_bytes] * pages:
            raise PeerFailed(f"batch_get_into: codes {sorted(set(codes))}")
        self._compare(turn, page_bytes, pages)
        return seconds

    def _compare(self, turn: int, page_bytes: int, pages: int) -> None:
        started = time.process_time()
        into = self._into.offsets(turn, page_bytes, pages)[0]
        source = self._source.offsets(turn, page_bytes, pages)[0]
        if not same(self._into.address + into, self._source.address + source, page_bytes * pages):
            raise PeerFailed("batch_get_into: other bytes than were put")
        self._overhead_s += time.process_time() - started

    def remove(self, label: str, turn: int, pages: int) -> None:
        codes = self._store.batch_remove(self._keys(label, turn, pages), True)
        if codes != [0] * pages:
            raise PeerFailed(f"batch_remove: codes {sorted(set(codes))}")

    def exists(self, label: str, turn: int, pages: int, repeats: int) -> list[float]:
        keys = self._keys(label, turn, pages)
        seconds = []
        for _ in range(repeats):
            started = time.perf_counter()
            answers = self._store.batch_is_exist(keys)
            seconds.append(time.perf_counter() - started)
            if answers != [1] * pages:
                raise PeerFailed(f"batch_is_exist: answers {sorted(set(answers))}")
        return seconds

    def found(self, label: str, turn: int, pages: int) -> int:
        answers = self._store.batch_is_exist(self._keys(label, turn, pages))
        return -1 if min(answers) < 0 else answers.count(1)

    def tried(self, label: str, turn: int, page_bytes: int, pages: int) -> int:
        offsets = self._source.offsets(turn, page_bytes, pages)
        addresses = [self._source.address + at for at in offsets]
        keys = self._keys(label, turn, pages)
        codes: list[int] = self._store.batch_put_from(keys, addresses, [page_bytes] * pages)
        return codes.count(0)
