"""A real master process, spoken to over its real socket by a scripted worker and client."""

from __future__ import annotations

import asyncio
import os
import signal
import sqlite3
import struct
import subprocess
import sys
from contextlib import closing
from typing import TYPE_CHECKING

import pytest

from kvstore.announcement import read_announcement
from kvstore.cli import operator
from kvstore.errors import DeadlineExceeded
from kvstore.exit_codes import ExitCode
from kvstore.ids import KEY_BYTES
from kvstore.namespace import Attention, CacheGroup, Content, Layout, open_layout
from kvstore.page import PageChain
from kvstore.replica import Tier
from kvstore.rpc.identity import Identity, Role
from kvstore.rpc.server import dial_peer
from kvstore.segment import Geometry
from kvstore.wire.messages.common import Outcome
from kvstore.wire.messages.hello import Done
from kvstore.wire.messages.membership import (
    InventoryEnd,
    InventoryWanted,
    OfferInventory,
    RegisterWorker,
    SegmentOffer,
    WorkerAccepted,
)
from kvstore.wire.messages.namespaces import NamespaceOpened, OpenNamespace
from kvstore.wire.messages.operator import PoliciesInForce, ResetPolicy
from kvstore.wire.messages.puts import BeginPut, PutChain, PutPlans, Sealed, SealedNoted
from kvstore.wire.messages.reads import GetStatus, Located, MatchPrefix, Probe, Probed, Status
from tests.cluster.up import clean_environment

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable
    from pathlib import Path
    from typing import Self

    from kvstore.rpc.peer import Peer
    from kvstore.wire.messages.base import Message

pytestmark = [pytest.mark.cluster, pytest.mark.slow]

START_S = 30
CALL_S = 10
SEGMENT = SegmentOffer("s", 1, Tier.DRAM.value, Geometry(1 << 22, 1 << 20))
CONTENT = Content(
    "default", "m", "r", "", "float16", (CacheGroup(Attention.FULL, 2, 1, 8, 8),), "rope"
)
LAYOUT = Layout(page_tokens=16)
NAMESPACE = open_layout(CONTENT, LAYOUT)
CHAIN = PageChain.of_tokens(NAMESPACE.id, range(16 * 8), 16)


class Master:
    """A context manager around one master process on a free port."""

    def __init__(self, data_dir: Path, *options: str) -> None:
        self._data_dir = data_dir
        self._options = options

    def __enter__(self) -> Self:
        (self._data_dir / "master.json").unlink(missing_ok=True)
        options = (f"--data-dir={self._data_dir}", "--listen=127.0.0.1:0", "--admin=off")
        self.process = subprocess.Popen(
            [sys.executable, "-P", "-m", "master", *options, *self._options],
            env=clean_environment(),
            stderr=subprocess.PIPE,
            text=True,
        )
        assert self.process.stderr is not None
        for line in self.process.stderr:
            if "leading in epoch" in line:
                break
        found = read_announcement(self._data_dir, "master")
        assert found is not None
        assert found.pid == self.process.pid
        self.address, self.epoch = found.listen, found.epoch
        return self

    def __exit__(self, *_: object) -> None:
        self.process.terminate()
        self.process.communicate(timeout=START_S)

    def end(self, number: signal.Signals) -> int:
        self.process.send_signal(number)
        self.process.communicate(timeout=START_S)
        return self.process.returncode

    def with_peers(self, use: Callable[[Peer, Peer], Awaitable[None]]) -> None:
        """Connect a client and a worker, each answering commands by Done, for `use`."""

        async def life() -> None:
            client, worker = [await self._dial(role) for role in (Role.ENGINE, Role.WORKER)]
            try:
                async with asyncio.timeout(START_S):
                    await use(client, worker)
            finally:
                client.close()
                worker.close()

        asyncio.run(life())

    async def _dial(self, role: Role) -> Peer:
        def answer(peer: Peer, request_id: int, message: Message) -> None:
            del message
            peer.reply(request_id, Done())

        return await dial_peer(self.address, Identity(role, name="w"), answer, lambda _: None)


def refused(data_dir: Path, *options: str) -> tuple[int, str]:
    """The exit code and the last words of a master that does not start."""
    done = subprocess.run(
        [sys.executable, "-P", "-m", "master", f"--data-dir={data_dir}", "--admin=off", *options],
        env=clean_environment(),
        capture_output=True,
        text=True,
        timeout=START_S,
        check=False,
    )
    return done.returncode, done.stderr


async def opened(client: Peer) -> int:
    """Open the namespace; returns its ordinal."""
    answer = await client.call(OpenNamespace(CONTENT, LAYOUT), CALL_S)
    assert isinstance(answer, NamespaceOpened)
    assert answer.namespace == NAMESPACE.id
    return answer.ordinal


async def register(worker: Peer) -> None:
    """Offer one empty segment."""
    accepted = await worker.call(RegisterWorker("w", "h", (), (SEGMENT,)), CALL_S)
    assert isinstance(accepted, WorkerAccepted)
    wanted = await worker.call(OfferInventory("s", 1, ()), CALL_S)
    assert wanted == InventoryWanted(())
    assert await worker.call(InventoryEnd("s", 1), CALL_S) == Done()


async def put(client: Peer, worker: Peer, ordinal: int) -> None:
    """Plan the chain and seal every extent of it, as the worker would."""
    (part,) = NAMESPACE.parts
    begin = BeginPut(
        os.urandom(16), NAMESPACE.id, (PutChain(CHAIN.parent, CHAIN.packed),), (0,),
        (part.size_bytes,), 5.0,
    )  # fmt: skip
    plans = await client.call(begin, CALL_S)
    assert isinstance(plans, PutPlans)
    assert sum(span.count for span in plans.spans) == len(CHAIN)
    for span in plans.spans:
        pages = CHAIN.slice(span.first, span.first + span.count)
        parents = pages.parent + pages.packed[:-KEY_BYTES]
        checksums = struct.pack(f"<{span.count}Q", *range(span.count))
        noted = await worker.call(
            Sealed(
                "s", 1, span.generation, ordinal, 0, part.size_bytes, LAYOUT.page_tokens, parents,
                pages.packed, span.offsets, checksums,
            ),
            CALL_S,
        )  # fmt: skip
        assert noted == SealedNoted(bytes([Outcome.OK]) * span.count)


def test_a_page_is_found_once_its_worker_has_sealed_it(tmp_path: Path) -> None:
    async def use(client: Peer, worker: Peer) -> None:
        ordinal = await opened(client)
        await register(worker)
        absent = await client.call(Probe(NAMESPACE.id, CHAIN.packed), CALL_S)
        assert absent == Probed(bytes(len(CHAIN)))
        await put(client, worker, ordinal)
        present = await client.call(Probe(NAMESPACE.id, CHAIN.packed), CALL_S)
        assert present == Probed(b"\1" * len(CHAIN))
        located = await client.call(MatchPrefix(NAMESPACE.id, CHAIN.packed), CALL_S)
        assert isinstance(located, Located)
        assert sum(run.count for run in located.runs) == len(CHAIN)
        assert located.lease_ttl_s > 0
        status = await client.call(GetStatus(), CALL_S)
        assert isinstance(status, Status)
        assert status.pages == len(CHAIN)

    with Master(tmp_path) as master:
        master.with_peers(use)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_namespaces_keep_their_numbers_over_restarts(
    tmp_path: Path, number: signal.Signals
) -> None:
    ordinals: list[int] = []

    async def use(client: Peer, worker: Peer) -> None:
        del worker
        ordinals.append(await opened(client))

    with Master(tmp_path) as master:
        master.with_peers(use)
        assert master.epoch == 1
        want = -number if number == signal.SIGKILL else ExitCode.OK
        assert master.end(number) == want
    with Master(tmp_path) as master:
        assert master.epoch == 2
        master.with_peers(use)
    assert ordinals[0] == ordinals[1]


def test_a_second_master_fences_the_first(tmp_path: Path) -> None:
    async def use(client: Peer, worker: Peer) -> None:
        del worker
        await client.call(OpenNamespace(CONTENT, LAYOUT), 1)

    other = tmp_path / "other"
    other.mkdir()
    (other / "metadata.db").symlink_to(tmp_path / "metadata.db")
    with Master(tmp_path) as first, Master(other) as second:
        assert second.epoch == 2
        with pytest.raises(Exception, match=r"closed|lost|closing|listener|deadline"):
            first.with_peers(use)
        assert first.process.wait(START_S) == ExitCode.STALE
        second.with_peers(use)


@pytest.mark.parametrize("unix", ["master.sock", "other.sock", "off"])
def test_a_second_master_in_the_same_folder_does_not_harm_the_first(
    tmp_path: Path, unix: str
) -> None:
    async def use(client: Peer, worker: Peer) -> None:
        del worker
        await opened(client)

    with Master(tmp_path) as first:
        where = unix if unix == "off" else tmp_path / unix
        code, said = refused(tmp_path, "--listen=127.0.0.1:0", f"--unix={where}")
        assert code == ExitCode.IN_USE
        holder = f"a master runs from it (process {first.process.pid})"
        assert f"data folder {tmp_path}: {holder}" in said
        told = read_announcement(tmp_path, "master")
        assert told is not None
        assert told.pid == first.process.pid
        first.with_peers(use)
    with Master(tmp_path) as next_one:
        assert next_one.epoch == 2  # no epoch was raised by the one that was refused


def test_a_second_master_at_the_same_socket_is_refused(tmp_path: Path) -> None:
    async def use(client: Peer, worker: Peer) -> None:
        del worker
        await opened(client)

    path = tmp_path / "master.sock"
    with Master(tmp_path) as first:
        code, said = refused(tmp_path / "other", "--listen=127.0.0.1:0", f"--unix={path}")
        assert code == ExitCode.USAGE
        assert f"another process listens on unix:{path}" in said
        first.with_peers(use)


def test_what_is_in_force_and_cannot_be_stored_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(operator, "CALL_TIMEOUT_S", 0.5)
    reset = ResetPolicy("eviction")
    with Master(tmp_path) as master, operator.Operator(master.address, None) as asking:
        with closing(sqlite3.connect(tmp_path / "metadata.db")) as other:
            other.execute("BEGIN IMMEDIATE")
            with pytest.raises(DeadlineExceeded, match="in force, but not durable yet"):
                asking.change(reset, PoliciesInForce)
        monkeypatch.undo()
        assert asking.change(reset, PoliciesInForce).policies


def test_the_socket_is_the_owners_alone_and_a_dead_one_is_replaced(tmp_path: Path) -> None:
    async def use(client: Peer, worker: Peer) -> None:
        del worker
        await opened(client)

    with Master(tmp_path) as master:
        assert master.end(signal.SIGKILL) == -signal.SIGKILL
    path = tmp_path / "master.sock"
    assert path.is_socket()
    with Master(tmp_path) as master:
        assert path.stat().st_mode & 0o777 == 0o600
        master.address = f"unix:{path}"
        master.with_peers(use)
    assert not path.exists()


def test_a_section_that_nobody_would_read_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "m.toml"
    file.write_text('[etcd]\nendpoints = ["10.0.0.1:2379"]\n')
    got, said = refused(tmp_path, "--config", str(file))
    assert got == ExitCode.USAGE
    assert "etcd.endpoints: not for master.metadata = 'sqlite', want 'etcd'" in said
    got, said = refused(tmp_path, "--etcd-endpoints", "10.0.0.1:2379")
    assert got == ExitCode.USAGE
    assert "option --etcd-endpoints: not for master.metadata" in said


@pytest.mark.parametrize(
    ("line", "want"),
    [
        ('eviction = "random"', "eviction: got 'random', want one of lrfu, lru, rent, s3-fifo"),
        ("eviction_parameters = {half = 1}", "got 'half', want one of ghost_factor, half_life_s"),
        ("watermark_low = 0.97", "watermark_low: got 0.97, want more than 0, less than watermark_"),
        ("page_ttl_s = 0", "page_ttl_s: got 0, want a positive number of seconds, or inf"),
        ("erasure_parameters = {k = 4}", "parameter: got 'k', want none"),
    ],
)
def test_a_setting_that_cannot_be_stops_the_start(tmp_path: Path, line: str, want: str) -> None:
    file = tmp_path / "m.toml"
    file.write_text(f"[master]\n{line}\n")
    got, said = refused(tmp_path, "--config", str(file))
    assert got == ExitCode.USAGE
    (last,) = said.splitlines()
    assert last.startswith("kvharbor-master: ")
    assert want in last


@pytest.mark.parametrize(
    ("options", "code", "want"),
    [
        (("--nope",), ExitCode.USAGE, "unrecognized arguments: --nope"),
        (("--listen", "x"), ExitCode.USAGE, "option --listen: got 'x', want host:port"),
        (("--listen", "0.0.0.0:0"), ExitCode.USAGE, "set a cluster secret"),
        (("--cluster-name", "A"), ExitCode.USAGE, "option --cluster-name: got 'A'"),
        (("--config", "/absent"), ExitCode.USAGE, "/absent: cannot be read"),
        (("--secret-file", "/absent"), ExitCode.USAGE, "secret file /absent: cannot be read"),
        (("--data-dir", "/proc/x"), ExitCode.USAGE, "folder /proc/x: cannot be made"),
        (("--unix", "/none/" + "x" * 102), ExitCode.USAGE, "a path of at most 107 bytes"),
        (("--listen=127.0.0.1:0", "--unix=/none/s"), ExitCode.USAGE, "unix:/none/s: No such file"),
        (("--unix", "/proc/version"), ExitCode.USAGE, "/proc/version exists and is not a socket"),
    ],
)
def test_a_start_that_is_refused_says_why(
    tmp_path: Path, options: tuple[str, ...], code: ExitCode, want: str
) -> None:
    got, said = refused(tmp_path, *options)
    assert got == code, said
    assert said.splitlines()[-1].startswith("kvharbor-master: ")
    assert want in said
