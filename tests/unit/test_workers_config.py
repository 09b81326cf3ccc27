"""Section [worker]: defaults, derived places, and every value that stops the start."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvstore import limits
from kvstore.codec import Codec
from kvstore.config import Sources, Table
from kvstore.errors import ConfigError
from kvstore.rpc.address import TcpAddress
from kvstore.segment import check_geometry
from workers.config import WorkerConfig

GIB = 1024 * limits.MIB
CHUNK = limits.CHUNK_BYTES


def read(**keys: object) -> WorkerConfig:
    tables: dict[str, Table] = {"worker": keys}
    return Sources(Path("made-up.toml"), tables).section(WorkerConfig, "worker")


def test_everything_has_a_default_that_works() -> None:
    config = read()
    assert config.geometry() == check_geometry(GIB)
    assert config.master == (TcpAddress("127.0.0.1", limits.MASTER_PORT),)
    assert config.listen == TcpAddress("127.0.0.1", limits.WORKER_PORT)
    assert config.unix_path() == config.data_dir / "worker.sock"


def test_the_socket_is_below_the_data_folder_for_everybody(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert read(data_dir="d").unix_path() == tmp_path / "d" / "worker.sock"
    assert read(data_dir="d", unix="w").unix_path() == tmp_path / "d" / "w"


def test_places_follow_from_the_names() -> None:
    config = read(id="w7", data_dir="/d", segment_dir="/dev/shm/x", unix="/run/w.sock")
    assert config.segment_id() == "w7-dram0"
    assert config.segment_path("blue") == Path("/dev/shm/x/kvharbor-blue-w7-dram0")
    assert config.unix_path() == Path("/run/w.sock")


def test_several_masters_may_be_named() -> None:
    found = read(master="a:1,unix:/run/m.sock,b:2").master
    assert [str(each) for each in found] == ["a:1", "unix:/run/m.sock", "b:2"]


def test_memory_is_rounded_down_to_whole_chunks() -> None:
    config = read(dram="1GB", chunk="1MiB")
    assert config.geometry() == check_geometry(953 * limits.MIB, limits.MIB)


def test_each_disk_has_a_segment_of_its_own_wherever_it_stands_in_the_list() -> None:
    one = read(id="w7", nvme=[{"path": "/mnt/a", "size": "1GiB"}, "/mnt/b:100GB"])
    other = read(id="w7", nvme="/mnt/b:100GB,/mnt/a:1GiB")
    names = [one.disk_segment_id(disk) for disk in one.nvme]
    assert names == [other.disk_segment_id(disk) for disk in reversed(other.nvme)]
    assert len(set(names)) == 2
    assert all(name.startswith("w7-nvme-") and len(name) <= 64 for name in names)
    assert one.rounded(one.nvme[1].size) == check_geometry(100 * 10**9 // CHUNK * CHUNK)


def test_each_device_has_a_segment() -> None:
    config = read(id="w7", hbm=[{"device": "cuda:1", "size": "1GB"}, "cpu:64MiB"])
    assert [config.device_segment_id(each) for each in config.hbm] == ["w7-hbm-cuda1", "w7-hbm-cpu"]
    assert config.rounded(config.hbm[0].size) == check_geometry(10**9 // CHUNK * CHUNK)


@pytest.mark.parametrize(("written", "pace"), [("8MiB", 8 * limits.MIB), ("0", 0), (0, 0)])
def test_verifying_unasked_has_a_pace_or_none(written: object, pace: int) -> None:
    assert read(scrub_bytes_per_s=written).scrub_bytes_per_s == pace


@pytest.mark.parametrize(
    ("name", "codec"),
    [("auto", None), ("none", Codec.NONE), ("zstd-planes", Codec.ZSTD_PLANES)],
)
def test_codecs_have_names(name: str, codec: Codec | None) -> None:
    assert read(nvme_codec=name).codec() == codec


BAD: dict[str, tuple[dict[str, object], str]] = {
    "an unknown key": ({"drma": "1GiB"}, "did you mean dram?"),
    "less than a chunk": ({"dram": "1MiB"}, "at least one chunk"),
    "a chunk that is no power of two": ({"chunk": "3MiB"}, "a power of two"),
    "a chunk beyond the limit": ({"chunk": "128MiB"}, "at most"),
    "no size": ({"dram": "much"}, "a size such as"),
    "a name with a slash": ({"id": "../w"}, "at most 50"),
    "an empty name": ({"id": ""}, "text"),
    "a name that is too long": ({"id": "w" * 51}, "at most 50"),
    "a host with a space": ({"host": "big one"}, "at most 64"),
    "a rack that is too long": ({"rack": "r" * 65}, "at most 64"),
    "a zone of dots": ({"zone": ".."}, "at most 64"),
    "a label that there is not": ({"racks": "r1"}, "did you mean rack?"),
    "several hosts": ({"host": ["a", "b"]}, "want text"),
    "no master": ({"master": []}, "at least one address"),
    "a master without a port": ({"master": "somewhere"}, "host:port, or unix:/path"),
    "a socket that is too far down": ({"data_dir": "/d" * 54}, "unix: got '/d/d/d"),
    "an unknown transport": ({"transports": ["shm", "tcp", "quic"]}, "tcp and any of"),
    "no stream": ({"transports": ["shm"]}, "tcp and any of"),
    "all interfaces unadvertised": ({"listen": "0.0.0.0:7710"}, "all interfaces"),
    "no flag": ({"huge_pages": "perhaps"}, "true or false"),
    "a device without a size": ({"hbm": "cpu"}, "a device and a size, device:size"),
    "a device of no size": ({"hbm": [{"device": "cpu", "size": 0}]}, "at least 1"),
    "a device that is a number": ({"hbm": "1:64MiB"}, "devices such as cuda:0, or cpu"),
    "a device of another kind": ({"hbm": "../x:64MiB"}, "devices such as cuda:0, or cpu"),
    "a device of less than a chunk": ({"hbm": "cuda:0:1MiB"}, "at least one chunk"),
    "a device twice": ({"hbm": "cuda:0:1GiB,cuda:0:1GiB"}, "each device once"),
    "a disk without a size": ({"nvme": ["/mnt/a"]}, "a folder and a size, path:size"),
    "a disk of no size": ({"nvme": [{"path": "/mnt/a", "size": 0}]}, "at least 1"),
    "a disk without a path": ({"nvme": ":1GiB"}, "a path"),
    "a disk with more": ({"nvme": [{"path": "/a", "size": 1, "codec": "lz4"}]}, "path:size"),
    "a disk of less than a chunk": ({"nvme": "/mnt/a:1MiB"}, "at least one chunk"),
    "a folder twice": ({"nvme": "/mnt/a:1GiB,/mnt/a:2GiB"}, "each folder once"),
    "a folder twice by two ways": ({"nvme": "/mnt/a:1GiB,/mnt/./a:2GiB"}, "each folder once"),
    "too many disks": ({"nvme": [f"/mnt/{i}:1GiB" for i in range(65)]}, "at most 64"),
    "an unknown codec": ({"nvme_codec": "gzip"}, "one of auto, none, lz4, zstd, lz4-planes"),
    "no room to stage": ({"nvme": "/mnt/a:1GiB", "staging": "1MiB"}, "staging: got 1048576"),
    "a pace below nothing": ({"scrub_bytes_per_s": -1}, "at least 1, or 0"),
    "a pace that is none": ({"scrub_bytes_per_s": False}, "512MiB or 1.5GiB, or 0"),
    "no mover": ({"mover_threads": 0}, "at least 1"),
    "no copier": ({"copy_threads": 0}, "at least 1"),
}


@pytest.mark.parametrize(("keys", "text"), BAD.values(), ids=BAD)
def test_a_bad_value_stops_the_start(keys: dict[str, object], text: str) -> None:
    with pytest.raises(ConfigError) as refused:
        read(**keys)
    assert text in str(refused.value)
    assert "worker" in str(refused.value)


def test_all_interfaces_may_be_bound_under_an_advertised_address() -> None:
    config = read(listen="0.0.0.0:7710", advertise="pool.example:7710")
    assert [str(each) for each in config.advertise] == ["pool.example:7710"]
