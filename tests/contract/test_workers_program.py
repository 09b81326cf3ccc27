"""The program `kvharbor-worker` as a process: how it starts, refuses to start, and ends."""

from __future__ import annotations

import fcntl
import json
import os
import signal
import subprocess
import sys
import urllib.error
import urllib.request
from contextlib import contextmanager
from typing import IO, TYPE_CHECKING

import pytest

from kvstore.announcement import Announcement, read_announcement
from kvstore.exit_codes import ExitCode
from kvstore.rpc.dialling import dial
from kvstore.rpc.identity import Identity, Role
from kvstore.wire.messages.hello import Done
from kvstore.wire.messages.membership import LeaveWorker, RegisterWorker, SegmentOffer
from tests.contract.scripted_leader import Leader
from tests.contract.worker_rig import soon
from tests.unit.worker_segments import memory_folder

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

TIMEOUT_S = 60


@pytest.fixture
def folder() -> Iterator[Path]:
    with memory_folder() as made:
        yield made


@pytest.fixture
def leader() -> Iterator[Leader]:
    made = Leader()
    yield made
    made.stop()


def command(folder: Path, leader: Leader, **options: str) -> list[str]:
    given = {
        "master": leader.address,
        "worker-id": "w",
        "cluster-name": "testing",
        "data-dir": str(folder),
        "segment-dir": str(folder),
        "dram": "8MiB",
        "chunk": "1MiB",
        "listen": "127.0.0.1:0",
        "admin": "127.0.0.1:0",
        **{name.replace("_", "-"): value for name, value in options.items()},
    }
    written = [f"--{name}={value}" for name, value in given.items()]
    return [sys.executable, "-P", "-m", "workers", *written]


@contextmanager
def started(folder: Path, leader: Leader, **options: str) -> Iterator[subprocess.Popen[bytes]]:
    """A worker that serves."""
    process = subprocess.Popen(command(folder, leader, **options), stderr=subprocess.DEVNULL)
    try:
        leader.await_served()
        yield process
    finally:
        process.kill()
        process.wait()


@contextmanager
def closing_of(process: subprocess.Popen[str]) -> Iterator[IO[str]]:
    """What a process logs, until the test is done with it."""
    assert process.stderr is not None
    try:
        yield process.stderr
    finally:
        process.kill()
        process.communicate()


def announced(
    folder: Path, process: subprocess.Popen[bytes] | subprocess.Popen[str]
) -> Announcement:
    while (found := read_announcement(folder, "worker")) is None or found.pid != process.pid:
        assert process.poll() is None
    return found


def refused(folder: Path, leader: Leader, **options: str) -> tuple[int, str]:
    """The exit code and last words of a worker that does not start."""
    done = subprocess.run(
        command(folder, leader, **options), capture_output=True, text=True, timeout=TIMEOUT_S,
        check=False,
    )  # fmt: skip
    return done.returncode, done.stderr


def get(url: str) -> tuple[int, str]:
    try:
        with urllib.request.urlopen(url, timeout=TIMEOUT_S) as reply:
            return reply.status, reply.read().decode()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.read().decode()


@pytest.mark.parametrize("sent", [signal.SIGTERM, signal.SIGINT])
def test_a_worker_serves_and_ends_cleanly(
    folder: Path, leader: Leader, sent: signal.Signals
) -> None:
    with started(folder, leader) as process:
        found = announced(folder, process)
        assert (found.worker, found.cluster) == ("w", "testing")
        assert found.unix == str(folder / "worker.sock")
        while get(f"http://{found.admin}/health")[0] != 200:  # the last answer is on its way
            assert process.poll() is None
        look = json.loads(get(f"http://{found.admin}/status")[1])
        assert look["segments"][0]["capacity_bytes"] == 8 << 20
        assert "kvharbor_worker_serving 1.0" in get(f"http://{found.admin}/metrics")[1]
        process.send_signal(sent)
        assert process.wait(TIMEOUT_S) == ExitCode.OK
    assert read_announcement(folder, "worker") is None
    assert not (folder / "worker.sock").exists()
    assert (folder / "kvharbor-testing-w-dram0").exists()  # its pages hit after a restart


@pytest.mark.parametrize("second", [signal.SIGTERM, signal.SIGINT])
def test_a_worker_waits_for_its_readers_and_a_second_signal_ends_it(
    folder: Path, leader: Leader, second: signal.Signals
) -> None:
    leader.lets_go = False
    with started(folder, leader) as process:
        found = announced(folder, process)
        process.terminate()
        assert leader.expect(LeaveWorker) == LeaveWorker("w")
        link, _ = dial(f"unix:{found.unix}", Identity(Role.ENGINE, cluster="testing"), soon())
        link.close()  # readers are still let in
        assert process.poll() is None
        process.send_signal(second)
        assert process.wait(TIMEOUT_S) == ExitCode.OK


def test_a_worker_that_is_let_go_ends(folder: Path, leader: Leader) -> None:
    leader.lets_go = False
    with started(folder, leader) as process:
        process.terminate()
        leader.expect(LeaveWorker)
        leader.answer(Done())
        assert process.wait(TIMEOUT_S) == ExitCode.OK


def test_a_disk_is_lent_below_the_memory_and_found_again(
    folder: Path, leader: Leader, tmp_path: Path
) -> None:
    lives: list[SegmentOffer] = []
    for _ in range(2):
        with started(folder, leader, nvme=f"{tmp_path}:4MiB", staging="1MiB") as process:
            memory, disk = leader.expect(RegisterWorker).segments
            assert (memory.tier, disk.tier) == ("dram", "nvme")
            assert disk.geometry.payload_bytes == 4 << 20
            lives.append(disk)
            admin = announced(folder, process).admin
            metrics = get(f"http://{admin}/metrics")[1]
            assert 'kvharbor_worker_disk_state{segment="w-nvme-' in metrics
            assert "kvharbor_worker_staging_capacity_bytes 1.048576e+06" in metrics
            look = json.loads(get(f"http://{admin}/status")[1])["segments"][1]["disk"]
            assert (look["service"], look["reason"]) == ("serving", "")
            process.terminate()
            assert process.wait(TIMEOUT_S) == ExitCode.OK
    first, second = lives
    assert (second.segment, second.incarnation) == (first.segment, first.incarnation + 1)
    assert [each.name for each in tmp_path.iterdir()] == [f"kvharbor-testing-{first.segment}"]


@pytest.mark.parametrize(("pace", "rounds"), [("1TiB", 3), ("0", 0)])
def test_segments_are_gone_through_unasked_at_the_pace_that_was_set(
    folder: Path, leader: Leader, pace: str, rounds: int
) -> None:
    with started(folder, leader, scrub_bytes_per_s=pace) as process:
        admin = announced(folder, process).admin

        def gone_through() -> int:
            look = json.loads(get(f"http://{admin}/status")[1])["segments"][0]["scrub"]
            return int(look["rounds"])

        while gone_through() < rounds:
            assert process.poll() is None
        assert (gone_through() > 0) == (rounds > 0)


def test_a_device_is_lent_beside_the_memory(folder: Path, leader: Leader) -> None:
    lives: list[SegmentOffer] = []
    for _ in range(2):
        with started(folder, leader, hbm="cpu:4MiB") as process:
            memory, device = leader.expect(RegisterWorker).segments
            assert (memory.tier, device.tier) == ("dram", "hbm")
            assert (device.segment, device.geometry.payload_bytes) == ("w-hbm-cpu", 4 << 20)
            lives.append(device)
            admin = announced(folder, process).admin
            look = json.loads(get(f"http://{admin}/status")[1])["segments"][0]
            assert (look["tier"], look["capacity_bytes"]) == ("hbm", 4 << 20)
            process.terminate()
            assert process.wait(TIMEOUT_S) == ExitCode.OK
    assert lives[0].incarnation != lives[1].incarnation


def test_a_device_that_does_not_do_stops_the_start(folder: Path, leader: Leader) -> None:
    code, text = refused(folder, leader, hbm="cuda:99:4MiB")
    assert (code, "device: got 'cuda:99', want one of cpu" in text) == (ExitCode.USAGE, True), text
    code, text = refused(folder, leader, hbm="cpu:1000000GiB")
    assert (code, "bytes free, segment w-hbm-cpu needs" in text) == (ExitCode.NO_SPACE, True), text


def test_after_a_kill_the_next_start_replaces_what_was_left(folder: Path, leader: Leader) -> None:
    with started(folder, leader) as process:
        announced(folder, process)
    assert (folder / "worker.sock").exists()
    with started(folder, leader) as process:
        assert announced(folder, process).pid == process.pid


def test_a_second_worker_on_the_same_segment_is_refused(folder: Path, leader: Leader) -> None:
    with started(folder, leader):
        code, text = refused(folder, leader, data_dir=str(folder / "other"))
        assert code == ExitCode.IN_USE
        assert "another process owns this segment" in text
        code, text = refused(folder, leader, worker_id="v")
        assert code == ExitCode.USAGE
        assert "another process listens on" in text


def test_a_worker_waits_for_what_is_left_of_its_last_life(folder: Path, leader: Leader) -> None:
    with started(folder, leader):
        pass
    with (folder / "kvharbor-testing-w-dram0").open("r+b") as segment:
        # As the transfer engines of a worker that was killed have it.
        fcntl.flock(segment, fcntl.LOCK_EX)
        process = subprocess.Popen(command(folder, leader), stderr=subprocess.PIPE, text=True)
        with closing_of(process) as log:
            for line in log:
                if "another process owns this segment" in line:
                    break
            fcntl.flock(segment, fcntl.LOCK_UN)
            announced(folder, process)


def test_too_little_memory_is_refused_with_both_numbers(folder: Path, leader: Leader) -> None:
    room = os.statvfs(folder)
    wanted = (room.f_bavail * room.f_frsize // (1 << 30) + 64) << 30
    code, text = refused(folder, leader, dram=str(wanted), chunk="64MiB")
    assert code == ExitCode.NO_SPACE
    assert f"the segment needs {wanted + 4096}" in text
    assert " bytes free" in text


def test_a_wrong_secret_ends_the_start(folder: Path) -> None:
    leader = Leader(secret=b"a secret of some length")
    try:
        code, text = refused(folder, leader)
    finally:
        leader.stop()
    assert code == ExitCode.DENIED
    assert "kvharbor-worker: " in text


@pytest.mark.parametrize(
    ("option", "value", "text"),
    [
        ("dram", "much", "option --dram: got 'much', want a size"),
        ("worker_id", "a/b", "option --worker-id"),
        ("listen", "127.0.0.1", "option --listen"),
        ("listen", "192.0.2.1:7710", "can be reached from other hosts"),
        ("transports", "shm", "option --transports"),
        ("segment_dir", "/nowhere", "/nowhere: cannot hold a segment"),
        ("nvme", "/nowhere:4MiB", "/nowhere: cannot hold a segment"),
        ("nvme", "/proc:4MiB", "/proc: cannot hold a segment"),
        ("nvme", "somewhere", "option --nvme: got 'somewhere', want a folder and a size"),
        ("nvme_codec", "gzip", "option --nvme-codec: got 'gzip', want one of auto, none"),
    ],
)
def test_a_bad_option_ends_the_start(
    folder: Path, leader: Leader, option: str, value: str, text: str
) -> None:
    code, said = refused(folder, leader, **{option: value})
    assert code == ExitCode.USAGE
    assert text in said
    assert "Traceback" not in said


def test_a_file_may_say_everything(folder: Path, leader: Leader) -> None:
    file = folder / "pool.toml"
    file.write_text(
        f'[cluster]\nname = "testing"\n[worker]\nid = "w"\nmaster = ["{leader.address}"]\n'
        f'data_dir = "{folder}"\nsegment_dir = "{folder}"\ndram = "4MiB"\nchunk = "1MiB"\n'
        'listen = "127.0.0.1:0"\nadmin = "off"\n'
    )
    process = subprocess.Popen(
        [sys.executable, "-P", "-m", "workers", f"--config={file}"], stderr=subprocess.DEVNULL
    )
    try:
        leader.await_served()
        assert announced(folder, process).admin is None
    finally:
        process.kill()
        process.wait()


def test_a_worker_may_be_told_the_masters_unix_socket(folder: Path) -> None:
    leader = Leader(address=f"unix:{folder}/master.sock")
    try:
        with started(folder, leader) as process:
            assert leader.expect(RegisterWorker).worker == "w"
            process.terminate()
            assert process.wait(TIMEOUT_S) == ExitCode.OK
    finally:
        leader.stop()


def test_without_a_master_the_worker_says_that_it_takes_nothing(folder: Path) -> None:
    leader = Leader()
    leader.stop()
    process = subprocess.Popen(command(folder, leader), stderr=subprocess.DEVNULL)
    try:
        status, body = get(f"http://{announced(folder, process).admin}/health")
        assert (status, json.loads(body)) == (503, {"serving": False, "fenced": True, "epoch": 0})
    finally:
        process.kill()
        process.wait()


BUGGY = """
import sys
from workers import program, rounds
from workers.__main__ import main

def fail(*_):
    raise IndexError("a bug that nobody knows of")

def in_the_control_thread():
    rounds.Rounds.look = fail

def in_a_callback_of_the_main_thread():
    announce = program._announce
    def announced(*given):
        announce(*given)
        program.asyncio.get_running_loop().call_soon(fail)
    program._announce = announced

def in_a_callback_of_the_control_thread():
    follow = program.ControlLink._follow
    async def followed(self):
        self._loop.call_soon(fail)
        await follow(self)
    program.ControlLink._follow = followed

locals()[sys.argv.pop(1)]()
sys.argv[0] = "kvharbor-worker"
main()
"""


@pytest.mark.parametrize(
    "place",
    [
        "in_the_control_thread",
        "in_a_callback_of_the_main_thread",
        "in_a_callback_of_the_control_thread",
    ],
)
def test_a_bug_ends_the_program_and_says_where_it_is(
    folder: Path, leader: Leader, place: str
) -> None:
    options = command(folder, leader)[4:]
    process = subprocess.run(
        [sys.executable, "-c", BUGGY, place, *options],
        stderr=subprocess.PIPE, text=True, timeout=TIMEOUT_S, check=False,
    )  # fmt: skip
    assert process.returncode == ExitCode.INTERNAL
    assert "IndexError: a bug that nobody knows of" in process.stderr
    assert read_announcement(folder, "worker") is None
