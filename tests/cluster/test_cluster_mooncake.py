"""One program on the installed Mooncake Store and, unchanged, on this pool: what differs is known.

Differences stand in a table of ARCHITECTURE.md, whose rows with a label are held against both.
"""

from __future__ import annotations

import ctypes
import hashlib
import importlib.util
import json
import os
import socket
import subprocess
import sys
import time
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Final

import pytest

from kvstore import KVStore
from kvstore.connectors.mooncake import MooncakeDistributedStore, session
from tests.cluster.up import START_S, Up, clean_environment, remove_segments
from tests.fakes import payload
from workers.drills.ports import free_port

if TYPE_CHECKING:
    from collections.abc import Iterator

    from kvstore.connectors.mooncake.settings import Settings

ROOT: Final = Path(__file__).parents[2]
PROGRAM: Final = Path(__file__).with_name("mooncake_program.py")
LEASE_MS: Final = 600_000
"""No lease ends while the program runs, however busy the machine is."""
RUN_S: Final = 240

pytestmark = [pytest.mark.cluster, pytest.mark.slow]


@pytest.fixture
def mooncake_master(tmp_path: Path) -> Iterator[str]:
    """A master of the installed Mooncake; its memory is lent by the program itself."""
    found = importlib.util.find_spec("mooncake")
    assert found is not None, "mooncake is not installed"
    assert found.origin is not None
    port = free_port()
    command = [
        str(Path(found.origin).with_name("mooncake_master")),
        f"--rpc_port={port}",
        "--rpc_address=127.0.0.1",
        f"--metrics_port={free_port()}",
        "--metrics_host=127.0.0.1",
        "--enable_metric_reporting=false",
        f"--default_kv_lease_ttl={LEASE_MS}",
    ]
    log = (tmp_path / "master.log").open("wb")
    with log, subprocess.Popen(command, stdout=log, stderr=log) as process:
        try:
            ends_s = time.monotonic() + START_S
            while not _listens(port):
                assert process.poll() is None, (tmp_path / "master.log").read_text(errors="replace")
                assert time.monotonic() < ends_s, "mooncake_master does not listen"
                time.sleep(0.02)
            yield f"127.0.0.1:{port}"
        finally:
            process.kill()


def _listens(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


def said_by(tmp_path: Path, name: str, *command: str, **environment: str) -> dict[str, object]:
    """What the program wrote down, run by this command."""
    result = tmp_path / f"{name}.json"
    done = subprocess.run(
        [*command, str(result)],
        env=clean_environment() | environment,
        capture_output=True,
        text=True,
        timeout=RUN_S,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    found: dict[str, object] = json.loads(result.read_text())
    return found


def listed_differences() -> dict[str, tuple[object, object]]:
    """Rows of the document's table that begin with a label: what both return, as JSON."""
    rows = {}
    for line in (ROOT / "ARCHITECTURE.md").read_text().splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if len(cells) == 4 and cells[0].startswith("program: "):
            label = cells[0].removeprefix("program: ").strip("`")
            rows[label] = json.loads(cells[1].strip("`")), json.loads(cells[2].strip("`"))
    return rows


def test_an_unchanged_program_finds_what_it_finds_with_mooncake(
    shared_pool: Up, mooncake_master: str, tmp_path: Path
) -> None:
    program = sys.executable, "-P", str(PROGRAM)
    theirs = said_by(tmp_path, "mooncake", *program, mooncake_master, GLOG_minloglevel="2")
    shim = sys.executable, "-P", "-m", "kvstore.cli.main", "mooncake-shim", "--namespace=program"
    pool = f"--master={shared_pool.master}"
    ours = said_by(tmp_path, "kvharbor", *shim, pool, "--", *program, mooncake_master)
    assert list(theirs) == list(ours)
    assert len(ours) > 120
    differing = {
        label: (theirs[label], said) for label, said in ours.items() if said != theirs[label]
    }
    assert differing == listed_differences()


def test_an_object_of_many_pieces_is_read_by_another_process(
    shared_pool: Up, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KVHARBOR_MASTER", shared_pool.master)
    monkeypatch.setenv("KVHARBOR_MOONCAKE_NAMESPACE", "pieces")
    value = bytes(payload(b"pieces", 0, (64 << 20) + 12_345))
    reader = (
        "import hashlib, sys\n"
        "from kvstore.connectors.mooncake import MooncakeDistributedStore\n"
        "store = MooncakeDistributedStore()\n"
        "assert store.setup({'local_hostname': 'r', 'metadata_server': 'x'}) == 0\n"
        "print(hashlib.sha256(store.get('large')).hexdigest())\n"
        "print(store.remove_all(), store.is_exist('large'))\n"
    )
    with connected("") as store:
        assert store.put("large", value) == 0
        done = subprocess.run(
            [sys.executable, "-P", "-c", reader],
            env=dict(os.environ), capture_output=True, text=True, timeout=RUN_S, check=True,
        )  # fmt: skip
        assert done.stdout.split() == [hashlib.sha256(value).hexdigest(), "1", "0"]
        assert store.get("large") == b""


def test_memory_by_address_is_filled_over_tcp_too(
    shared_pool: Up, monkeypatch: pytest.MonkeyPatch
) -> None:
    def by_tcp(settings: Settings) -> KVStore:
        return KVStore.connect(settings.masters, transports=("tcp",))

    monkeypatch.setattr(session, "_connect", by_tcp)
    monkeypatch.setenv("KVHARBOR_MOONCAKE_NAMESPACE", "tcp")
    value = bytes(payload(b"tcp", 0, 300_000))
    into = ctypes.create_string_buffer(len(value))
    at = ctypes.addressof(into)
    with connected(shared_pool.master) as store:
        assert store.put("a", value) == 0
        assert store.get_into("a", at, len(value)) == len(value)
        assert into.raw == value
        parts = [[at + 200_000, at]], [[100_000, 200_000]]
        assert store.batch_get_into_multi_buffers(["a"], *parts) == [len(value)]
        assert into.raw == value[100_000:] + value[:100_000]
        assert store.remove_by_regex("^a$") == 1


def test_a_restart_finds_objects_and_their_names(tmp_path: Path) -> None:
    folder, names = tmp_path / "pool", [f"layer/{number}" for number in range(20)]
    with Up(folder) as up, connected(up.master) as store:
        assert store.put_batch(names, [name.encode() * 700 for name in names]) == 0
    with Up(folder) as up, connected(up.master) as store:
        assert store.get_batch(names) == [name.encode() * 700 for name in names]
        assert store.remove_by_regex("^layer/1") == 11
        assert store.batch_is_exist(names).count(1) == 9
    remove_segments(folder)


@contextmanager
def connected(master: str) -> Iterator[MooncakeDistributedStore]:
    """A store on that pool, else on the environment's."""
    store = MooncakeDistributedStore()
    assert store.setup({"local_hostname": "h", "master_server_addr": master}) == 0
    yield store
    store.close()
