"""`kvharbor up` with real processes: start, stop, kill -9, restart, and every refusal to start."""

from __future__ import annotations

import json
import os
import re
import select
import signal
import socket
import subprocess
import sys
import urllib.request
from contextlib import contextmanager, suppress
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING, get_args

import pytest

from kvstore import Attention, CacheGroup, Content, Hit, KVStore, Layout, PageChain, Stored
from kvstore.cli.places import places_of
from kvstore.event_log import read_events, read_header
from kvstore.exit_codes import ExitCode
from kvstore.ids import Epoch
from kvstore.namespace import open_layout
from kvstore.rpc.address import UnixAddress, parse_address
from kvstore.wire.messages.reads import GetStatus, Status
from master.events import Event, Reply, Request, SessionId, SessionOpened
from master.state import MasterState
from master.tunables import Tunables
from tests.cluster.up import (
    ADMIN,
    FREE_PORTS,
    Up,
    clean_environment,
    kvharbor,
    remove_segments,
)
from tests.fakes import payload

if TYPE_CHECKING:
    from collections.abc import Iterator

CONTENT = Content(
    "default", "m", "r", "", "float16", (CacheGroup(Attention.FULL, 4, 2, 64, 64),), "rope"
)
LAYOUT = Layout(page_tokens=16)
NAMESPACE = open_layout(CONTENT, LAYOUT)
CHAIN = PageChain.of_tokens(NAMESPACE.id, range(16 * 40), 16)

pytestmark = [pytest.mark.cluster, pytest.mark.slow]


@pytest.fixture
def data_dir(tmp_path: Path) -> Iterator[Path]:
    """The data folder of a pool that leaves nothing in /dev/shm."""
    folder = tmp_path / "pool"
    yield folder
    remove_segments(folder)


@contextmanager
def watched(*pids: int) -> Iterator[list[int]]:
    """Descriptors that become readable when these processes have ended."""
    descriptors = [os.pidfd_open(pid) for pid in pids]
    try:
        yield descriptors
    finally:
        for descriptor in descriptors:
            os.close(descriptor)


def require_ended(descriptors: list[int]) -> None:
    for descriptor in descriptors:
        ended, _, _ = select.select([descriptor], [], [], 20)
        assert ended, "a part of the pool lives on"


def refused(code: ExitCode, *arguments: str) -> str:
    """Start a pool that refuses to start; returns what it said."""
    done = kvharbor("up", *arguments)
    assert done.returncode == code, (done.returncode, done.stderr)
    assert done.stdout == ""
    return done.stderr


def segment_files(data_dir: Path) -> list[int]:
    """The inodes of the pool's segment files."""
    files = places_of(data_dir).segment_dir.rglob("*")
    return sorted(file.stat().st_ino for file in files if file.stat().st_size > 1 << 20)


def test_the_ready_line_is_true(data_dir: Path) -> None:
    with Up(data_dir, *ADMIN) as up:
        ready = up.ready
        assert ready["event"] == "ready"
        assert ready["pid"] == up.process.pid
        assert (ready["cluster"], ready["epoch"], ready["pages"]) == ("local", 1, 0)
        (segment,) = ready["segments"]
        assert (segment["tier"], segment["capacity_bytes"]) == ("dram", 64 << 20)
        done = kvharbor("status", "--json", "--master", up.master)
        (worker,) = json.loads(done.stdout)["workers"]
        assert worker["state"] == "live"
        with urllib.request.urlopen(f"http://{ready['master']['admin']}/health") as answer:
            assert json.load(answer)["serving"] is True
        with urllib.request.urlopen(f"http://{ready['master']['admin']}/metrics") as answer:
            assert b'kvharbor_workers{state="live"} 1.0' in answer.read()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_stops_everything_cleanly(data_dir: Path, number: signal.Signals) -> None:
    with Up(data_dir, *ADMIN) as up, watched(up.pid("master"), up.pid("worker")) as parts:
        assert up.end(number) == (ExitCode.OK, "")
        require_ended(parts)
    assert not list(data_dir.glob("*.json"))
    assert not list(data_dir.glob("*.sock"))
    assert segment_files(data_dir)


SIZE = NAMESPACE.parts[0].size_bytes
PLACES = [number * SIZE for number in range(len(CHAIN))]


def store_chain(store: KVStore) -> bytes:
    """Put every page of the chain; returns their bytes, one after another."""
    written = b"".join(payload(key, 0, SIZE) for key in CHAIN)
    outcomes = store.put(store.open(CONTENT, LAYOUT), CHAIN, written, PLACES)
    assert outcomes == [Stored()] * len(CHAIN)
    return written


def test_after_kill_9_of_everything_the_same_pages_hit(data_dir: Path) -> None:
    with (
        Up(data_dir) as up,
        watched(up.pid("master"), up.pid("worker")) as parts,
        KVStore.connect(up.master) as store,
    ):
        written = store_chain(store)
        up.process.kill()
        require_ended(parts)
    with Up(data_dir) as up, KVStore.connect(up.master) as store:
        assert up.ready["pages"] == len(CHAIN)
        match = store.match_prefix(store.open(CONTENT, LAYOUT), CHAIN)
        assert match.pages == len(CHAIN)
        read = bytearray(len(written))
        assert store.read(match, read, PLACES) == [Hit()] * len(CHAIN)
        assert read == written


def test_after_kill_9_of_everything_the_segments_are_found(data_dir: Path) -> None:
    with Up(data_dir) as up, watched(up.pid("master"), up.pid("worker")) as parts:
        before = segment_files(data_dir)
        up.process.kill()
        require_ended(parts)
    with Up(data_dir) as up:
        assert up.ready["epoch"] == 2
        assert up.ready["discarded_bytes"] == 0
        assert segment_files(data_dir) == before


def test_a_restart_right_after_kill_9_waits_for_the_parts(data_dir: Path) -> None:
    with Up(data_dir) as up:
        up.process.kill()
        with Up(data_dir) as again:
            assert again.ready["epoch"] == 2


@pytest.mark.parametrize("part", ["master", "worker"])
def test_the_death_of_a_part_ends_the_pool(data_dir: Path, part: str) -> None:
    other = {"master": "worker", "worker": "master"}[part]
    with Up(data_dir) as up, watched(up.pid(other)) as parts:
        os.kill(up.pid(part), signal.SIGKILL)
        code, said = up.wait()
        assert code == ExitCode.CHILD_DIED
        assert said.startswith(f"kvharbor: the {part} ended by itself (signal 9)")
        require_ended(parts)


def test_strangers_bytes_on_every_port_harm_nothing(data_dir: Path) -> None:
    random = Random(2)
    with Up(data_dir, *ADMIN) as up:
        parts = (up.ready["master"], up.ready["worker"])
        ports = [part[port] for part in parts for port in ("listen", "admin")]
        for address in [*ports, f"unix:{up.ready['worker']['unix'].removeprefix('unix:')}"]:
            for size in (1, 4, 16, 300, 70_000):
                where = parse_address(address)
                target = where.path if isinstance(where, UnixAddress) else (where.host, where.port)
                family = socket.AF_UNIX if isinstance(where, UnixAddress) else socket.AF_INET
                with socket.socket(family, socket.SOCK_STREAM) as stranger:
                    stranger.connect(target)
                    with suppress(ConnectionError):  # it may hang up before it has all
                        stranger.sendall(random.randbytes(size))
        with KVStore.connect(up.master) as store:
            store_chain(store)
        assert up.end() == (ExitCode.OK, "")


def test_a_signal_that_is_ignored_stops_nothing(data_dir: Path) -> None:
    with Up(data_dir, wrapper=("nohup",)) as up:
        up.process.send_signal(signal.SIGHUP)
        assert kvharbor("status", "--master", up.master).returncode == 0
        assert up.end()[0] == ExitCode.OK


def test_a_long_folder_name_is_no_hindrance(data_dir: Path) -> None:
    deep = data_dir / ("x" * 100) / ("y" * 100)
    try:
        with Up(deep) as up, KVStore.connect(up.master, transports=("shm",)) as store:
            store_chain(store)
    finally:
        remove_segments(deep)


def test_two_pools_of_one_folder_do_not_run(data_dir: Path) -> None:
    with Up(data_dir) as up:
        said = refused(ExitCode.IN_USE, f"--data-dir={data_dir}", *FREE_PORTS)
        assert f"a pool runs from it (process {up.process.pid})" in said
        done = kvharbor("wipe", f"--data-dir={data_dir}")
        assert done.returncode == ExitCode.IN_USE
        assert kvharbor("status", "--master", up.master).returncode == 0


def test_two_pools_of_two_folders_run(data_dir: Path, tmp_path: Path) -> None:
    other = tmp_path / "other"
    try:
        with Up(data_dir) as first, Up(other) as second:
            assert first.master != second.master
    finally:
        remove_segments(other)


def test_a_taken_port_is_named(data_dir: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = "{}:{}".format(*taken.getsockname())
        options = (f"--data-dir={data_dir}", *FREE_PORTS, f"--listen={address}")
        said = refused(ExitCode.USAGE, *options)
    assert "the master ended by itself (exit code 2)" in said
    assert f"cannot listen on {address}: Address already in use" in said


def test_too_little_memory_is_told_with_both_numbers(data_dir: Path) -> None:
    said = refused(ExitCode.NO_SPACE, f"--data-dir={data_dir}", *FREE_PORTS, "--dram=64TiB")
    assert "the worker ended by itself" in said
    assert re.search(r"has \d+ bytes free, the segment needs 70368744\d+", said)


def test_bad_settings_are_named(data_dir: Path, tmp_path: Path) -> None:
    options = (f"--data-dir={data_dir}", *FREE_PORTS)
    assert "option --dram: got 'lots', want a size" in refused(
        ExitCode.USAGE, *options, "--dram=lots"
    )
    assert "option --listen: got 'x', want host:port" in refused(
        ExitCode.USAGE, *options, "--listen=x"
    )
    file = tmp_path / "c.toml"
    file.write_text("[master]\nleas_ttl_s = 3\n")
    said = refused(ExitCode.USAGE, *options, f"--config={file}")
    assert f"{file}: master.leas_ttl_s: unknown key, did you mean lease_ttl_s?" in said


def test_another_host_may_not_connect_without_a_secret(data_dir: Path) -> None:
    options = (f"--data-dir={data_dir}", *FREE_PORTS, "--listen=0.0.0.0:0")
    assert "set a cluster secret" in refused(ExitCode.USAGE, *options)


def test_a_pool_with_a_secret(data_dir: Path, tmp_path: Path) -> None:
    file = tmp_path / "secret"
    file.write_text("0123456789abcdef0123456789abcdef\n")
    file.chmod(0o600)
    options = (f"--secret-file={file}", "--listen=0.0.0.0:0")
    with Up(data_dir, *options) as up:
        _, _, port = up.master.rpartition(":")
        master = ("status", "--master", f"127.0.0.1:{port}")
        assert kvharbor(*master).returncode == ExitCode.DENIED
        assert kvharbor(*master, f"--secret-file={file}").returncode == 0


def test_settings_come_from_a_file(data_dir: Path, tmp_path: Path) -> None:
    file = tmp_path / "c.toml"
    file.write_text(
        '[cluster]\nname = "paris"\n[master]\nadmin = "off"\nlease_ttl_s = 5\n[worker]\n'
    )
    ports = FREE_PORTS[:2]
    done = kvharbor("up", f"--data-dir={data_dir}", f"--config={file}", *ports, "--dram=1")
    assert done.returncode != 0
    with Up(data_dir, f"--config={file}") as up:
        assert up.ready["cluster"] == "paris"
    # The metadata is that cluster's; a start as another's is a mistake.
    said = refused(ExitCode.USAGE, f"--data-dir={data_dir}", *FREE_PORTS)
    assert "holds cluster 'paris', not 'local'" in said


def test_wipe_and_fresh_begin_anew(data_dir: Path) -> None:
    with Up(data_dir) as up:
        assert up.ready["epoch"] == 1
    with Up(data_dir, "--fresh") as up:
        assert up.ready["epoch"] == 1
    done = kvharbor("wipe", "--json", f"--data-dir={data_dir}")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["freed_bytes"] > 0
    assert not places_of(data_dir).segment_dir.exists()
    assert not (data_dir / "metadata.db").exists()


def test_a_segment_that_is_none_stops_the_start_and_says_what_helps(data_dir: Path) -> None:
    with Up(data_dir) as up:
        (segment,) = Path(up.ready["segment_dir"]).glob("kvharbor-*")
    with segment.open("r+b") as file:
        file.write(b"something else")
    options = (f"--data-dir={data_dir}", *FREE_PORTS, "--dram=64MiB")
    said = refused(ExitCode.USAGE, *options)
    assert f"{segment}: exists and is not a segment" in said
    assert "`kvharbor up --fresh`" in said
    with Up(data_dir, "--fresh"):
        pass


def test_a_start_tells_what_it_warned_of(data_dir: Path) -> None:
    with Up(data_dir, dram="64MiB") as up:
        (warning,) = up.ready["warnings"]
        assert "lend 268435456 bytes or more" in warning
    with Up(data_dir, dram="256MiB") as up:
        (warning,) = up.ready["warnings"]
        assert "67108864 bytes for pages, 268435456 are asked for; it is replaced" in warning
    with Up(data_dir, dram="256MiB") as up:
        assert up.ready["warnings"] == []


def test_segments_without_their_metadata_are_discarded(data_dir: Path) -> None:
    with Up(data_dir):
        pass
    for file in data_dir.glob("metadata.db*"):
        file.unlink()
    with Up(data_dir) as up:
        assert up.ready["discarded_bytes"] > 0
        assert up.ready["epoch"] == 1


def test_damaged_metadata_is_named(data_dir: Path) -> None:
    with Up(data_dir):
        pass
    (data_dir / "metadata.db").write_bytes(b"")
    said = refused(ExitCode.USAGE, f"--data-dir={data_dir}", *FREE_PORTS)
    assert f"metadata file {data_dir}/metadata.db" in said


def replayed_pages(lines: list[str]) -> int:
    """Let a new core, without sockets and clocks, live through these events; its pages then."""
    core = MasterState(Tunables(cluster="local"), Epoch(1))
    now_s = 0.0
    for now_s, event in read_events(lines, {kind.__name__: kind for kind in get_args(Event)}):
        core.handle(event, now_s)
    core.check_invariants()
    ask = SessionId(1_000_000)
    core.handle(SessionOpened(ask, "operator", "", "test", bytes(16)), now_s)
    (reply,) = core.handle(Request(ask, 1, GetStatus()), now_s)
    assert isinstance(reply, Reply)
    assert isinstance(reply.message, Status)
    return reply.message.pages


def test_the_masters_events_can_be_dumped_and_replayed(data_dir: Path) -> None:
    with Up(data_dir) as up:
        with KVStore.connect(up.master) as store:
            store_chain(store)
        done = kvharbor("--json", "debug", "dump", f"--data-dir={data_dir}")
        assert done.returncode == 0, done.stderr
        header, *lines = Path(json.loads(done.stdout)["file"]).read_text().splitlines()
    facts = read_header(header)
    assert facts == {"role": "master", "cluster": "local", "epoch": 1}
    assert replayed_pages(lines) == len(CHAIN)
    done = kvharbor("debug", "dump", f"--data-dir={data_dir}")
    assert done.returncode == ExitCode.UNAVAILABLE


def test_the_ready_text_is_for_people(data_dir: Path) -> None:
    command = [sys.executable, "-P", "-m", "kvstore.cli.main", "up", f"--data-dir={data_dir}"]
    with subprocess.Popen(
        [*command, *FREE_PORTS, *ADMIN, "--dram=64MiB"],
        env=clean_environment(),
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout is not None
        said = process.stdout.readline()
        while not said.endswith("Ctrl-C stops it.\n"):
            line = process.stdout.readline()
            assert line, said
            said += line
        process.send_signal(signal.SIGINT)
        assert process.wait(30) == 0
    for text in ("kvharbor is ready: cluster local, epoch 1", "127.0.0.1:", "dram", "64 MiB"):
        assert text in said
    assert "warning   67108864 bytes are 1 chunks of 67108864" in said
