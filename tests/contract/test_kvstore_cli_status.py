"""`kvharbor status` as a program against listeners of every kind: its output and exit codes."""

from __future__ import annotations

import json
import socket
import threading
from contextlib import contextmanager
from typing import TYPE_CHECKING

import pytest

from kvstore.exit_codes import ExitCode
from kvstore.rpc.identity import ListenerIdentity, Role
from kvstore.wire.messages.hello import Done
from tests.contract.cli_rig import STATUS, ScriptedMaster, kvharbor, refused

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


SECRET = b"0123456789abcdef"


@pytest.fixture(scope="module")
def master() -> Iterator[str]:
    """The address of a master without a secret."""
    with ScriptedMaster(ListenerIdentity("c", epoch=4), STATUS) as running:
        yield running.address


def test_status_for_people(master: str) -> None:
    done = kvharbor("status", "--master", master)
    assert done.returncode == 0, done.stderr
    for text in (
        "cluster c, epoch 4, m1 leads, up 62 s: 10 pages in 2 runs of 1 namespaces",
        "w[red]1", "live", "tcp 127.0.0.1:1", "w-dram", "1 GiB", "768 MiB", "256 MiB", "serving",
        "segment w-nvme is failed: read at 4096: EIO", "hits", "tiers", "512 GiB", "1.5",
        "2 pins: 1 MiB held softly, 3 MiB hard",
        "7 stripes of cold pages, with 5 MiB of parity; 2 are being made whole",
        "no stripes are made: k + m: got 6, want at most 4: so many hosts lend drives",
        "r1", "z1",
        "metadata is not stored in time: 2 chunks wait, the first for 12 s",
    ):  # fmt: skip
        assert text in done.stdout


@pytest.mark.parametrize("arguments", [("--json", "status"), ("status", "--json")])
def test_status_for_programs(master: str, arguments: tuple[str, ...]) -> None:
    done = kvharbor(*arguments, KVHARBOR_MASTER=master)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("\n") == 1
    found = json.loads(done.stdout)
    assert found["pages"] == 10
    assert found["segments"][0]["sealed_bytes"] == 1 << 28
    assert found["workers"][0]["worker"] == "w[red]1"


def test_nobody_listens() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        address = "{}:{}".format(*taken.getsockname())
        text = refused(ExitCode.UNAVAILABLE, "status", "--master", address)
    assert text == f"cannot reach {address}: Connection refused"


@contextmanager
def stranger(words: bytes) -> Iterator[str]:
    """A listener of another protocol that says a few words to the first caller and hangs up."""
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def speak() -> None:
            caller, _ = listener.accept()
            with caller:
                caller.sendall(words)

        thread = threading.Thread(target=speak)
        thread.start()
        yield "{}:{}".format(*listener.getsockname())
        thread.join(10)


def test_another_protocol_listens() -> None:
    with stranger(b"SSH-2.0-OpenSSH_9.2p1 Debian-2\r\n" * 4) as address:
        text = refused(ExitCode.DENIED, "status", "--master", address)
    assert text.startswith(f"{address} is no kvharbor listener: ")


def test_a_listener_hangs_up() -> None:
    with stranger(b"") as address:
        text = refused(ExitCode.UNAVAILABLE, "status", "--master", address)
    assert address in text


def test_another_cluster_is_refused(master: str) -> None:
    text = refused(ExitCode.DENIED, "status", "--master", master, "--cluster", "d")
    assert "this is cluster 'c', not 'd'" in text


def test_a_worker_is_no_master() -> None:
    listener = ListenerIdentity("c", roles=frozenset({Role.ENGINE}))
    with ScriptedMaster(listener, STATUS) as running:
        text = refused(ExitCode.DENIED, "status", "--master", running.address)
    assert "role 'operator' is not served here" in text


def test_a_master_that_is_not_ready() -> None:
    with ScriptedMaster(ListenerIdentity("c"), None) as running:
        text = refused(ExitCode.UNAVAILABLE, "status", "--master", running.address)
    assert text == "not ready"


def test_an_answer_of_another_kind() -> None:
    with ScriptedMaster(ListenerIdentity("c"), Done()) as running:
        text = refused(ExitCode.DENIED, "status", "--master", running.address)
    assert text == f"{running.address} answered GetStatus by Done"


@pytest.fixture(scope="module")
def guarded() -> Iterator[str]:
    """The address of a master with a secret."""
    with ScriptedMaster(ListenerIdentity("c", SECRET), STATUS) as running:
        yield running.address


def secret_file(folder: Path, secret: bytes) -> str:
    path = folder / "secret"
    path.write_bytes(secret)
    path.chmod(0o600)
    return str(path)


def test_the_right_secret_opens(guarded: str, tmp_path: Path) -> None:
    file = secret_file(tmp_path, SECRET + b"\n")
    assert kvharbor("status", "--master", guarded, "--secret-file", file).returncode == 0
    done = kvharbor("status", "--master", guarded, KVHARBOR_CLUSTER_SECRET_FILE=file)
    assert done.returncode == 0, done.stderr


def test_a_wrong_secret_does_not(guarded: str, master: str, tmp_path: Path) -> None:
    file = secret_file(tmp_path, SECRET[::-1])
    options = ("--secret-file", file)
    assert "secret" in refused(ExitCode.DENIED, "status", "--master", guarded, *options)
    assert "secret" in refused(ExitCode.DENIED, "status", "--master", guarded)
    assert "secret" in refused(ExitCode.DENIED, "status", "--master", master, *options)


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (("status", "--master", "nonsense"), "address: got 'nonsense', want host:port"),
        (("status", "--secret-file", "/absent"), "secret file /absent: cannot be read: "),
        (("up", "--config", "/absent.toml"), "/absent.toml: cannot be read: "),
        (("up", "--data-dir", "/proc/x"), "folder /proc/x: cannot be made: "),
    ],
)
def test_bad_values_are_one_line(arguments: tuple[str, ...], text: str) -> None:
    assert refused(ExitCode.USAGE, *arguments).startswith(text)


def test_a_standalone_pool_shares_its_metadata_with_nobody(tmp_path: Path) -> None:
    want = "got 'etcd', want sqlite: with etcd start kvharbor-master and kvharbor-worker"
    file = tmp_path / "pool.toml"
    file.write_text('[master]\nmetadata = "etcd"\nlisten = "127.0.0.1:0"\n')
    said = refused(ExitCode.USAGE, "up", "--data-dir", str(tmp_path), "--config", str(file))
    assert said.startswith(f"{file}: master.metadata: {want}")
    done = kvharbor("up", "--data-dir", str(tmp_path), KVHARBOR_MASTER_METADATA="etcd")
    assert done.returncode == ExitCode.USAGE
    assert f"environment: KVHARBOR_MASTER_METADATA: {want}" in done.stderr


@pytest.mark.parametrize(
    "arguments", [("status", "--nope"), ("frobnicate",), ("status", "extra"), ("up", "--dram")]
)
def test_bad_command_lines_are_explained(arguments: tuple[str, ...]) -> None:
    done = kvharbor(*arguments)
    assert done.returncode == ExitCode.USAGE
    assert "Error" in done.stderr


def test_help_and_version() -> None:
    assert "standalone pool" in kvharbor("--help").stdout
    assert json.loads(kvharbor("--json", "version").stdout).keys() == {"version"}
