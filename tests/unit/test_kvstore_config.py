"""The configuration reader: what is accepted, which source wins, and every bad input's text."""

from __future__ import annotations

import re
from pathlib import Path

import msgspec
import pytest

from kvstore.config import ClusterConfig, Sources, Table, read_file, read_secret
from kvstore.config_values import (
    DeviceSpace,
    DiskSpace,
    Seconds,
    SizeBytes,
    parse_any_address,
    parse_device_space,
    parse_disk_space,
    parse_endpoint,
    parse_size,
)
from kvstore.errors import BadValue, ConfigError
from kvstore.rpc.address import TcpAddress, UnixAddress


class Sample(msgspec.Struct, frozen=True):
    """A section with a field of each kind."""

    data_dir: Path
    listen: TcpAddress = TcpAddress("127.0.0.1", 7700)
    admin: TcpAddress | None = TcpAddress("127.0.0.1", 7701)
    dram: SizeBytes = SizeBytes(1 << 30)
    lease_ttl_s: Seconds = Seconds(10.0)
    low: float = 0.5
    high: float = 0.9
    count: int = 3
    prefault: bool = True
    masters: tuple[TcpAddress, ...] = ()

    def __post_init__(self) -> None:
        if self.low >= self.high:
            raise BadValue("low", self.low, f"less than high ({self.high})")


class Prefixed(msgspec.Struct, frozen=True):
    """A section with a key that begins with the section's name."""

    sample_id: str = ""
    id: str = ""


PATH = {"data_dir": "/d"}


def sample(
    table: Table | None = None,
    environment: dict[str, str] | None = None,
    options: dict[str, str | None] | None = None,
) -> Sample:
    tables = {"sample": PATH | dict(table or {})}
    return Sources(Path("f.toml"), tables, environment or {}, options or {}).section(
        Sample, "sample"
    )


def test_defaults_hold_where_nothing_is_said() -> None:
    assert sample() == Sample(Path("/d"))


def test_where_a_section_is_mentioned() -> None:
    def mention(
        tables: dict[str, dict[str, str]], *environment: str, **options: str | None
    ) -> str | None:
        variables = dict.fromkeys(environment, "x")
        return Sources(Path("f.toml"), tables, variables, options).mention_of(Sample, "sample")

    assert mention({"other": {"listen": "x"}}, "KVHARBOR_OTHER_LISTEN", sample_listen=None) is None
    assert mention({"sample": {}}) == "f.toml: [sample]"
    assert mention({"sample": {"listen": "x"}}) == "f.toml: sample.listen"
    assert mention({}, "KVHARBOR_SAMPLE_LISTEN") == "environment: KVHARBOR_SAMPLE_LISTEN"
    assert mention({}, sample_listen="x") == "option --sample-listen"


def test_every_kind_of_value_is_read_from_a_file(tmp_path: Path) -> None:
    file = tmp_path / "c.toml"
    file.write_text(
        """
        [sample]
        data_dir = "/var/lib/k"
        listen = "[::1]:0"
        admin = "off"
        dram = "1.5GiB"
        lease_ttl_s = 2
        low = 0
        high = 1.5
        count = 7
        prefault = false
        masters = ["a:1", "b:2"]
        """
    )
    tables = read_file(file, ("sample", "other"))
    assert Sources(file, tables).section(Sample, "sample") == Sample(
        data_dir=Path("/var/lib/k"),
        listen=TcpAddress("::1", 0),
        admin=None,
        dram=SizeBytes(3 << 29),
        lease_ttl_s=Seconds(2.0),
        low=0.0,
        high=1.5,
        count=7,
        prefault=False,
        masters=(TcpAddress("a", 1), TcpAddress("b", 2)),
    )


def test_every_kind_of_value_is_read_from_text() -> None:
    read = sample(
        environment={
            "KVHARBOR_SAMPLE_COUNT": "12",
            "KVHARBOR_SAMPLE_PREFAULT": "false",
            "KVHARBOR_SAMPLE_HIGH": "0.75",
            "KVHARBOR_SAMPLE_MASTERS": "a:1, b:2",
            "KVHARBOR_SAMPLE_ADMIN": "off",
            "KVHARBOR_HOME": "/not/of/this/section",
            "PATH": "/bin",
        }
    )
    assert (read.count, read.prefault, read.high, read.admin) == (12, False, 0.75, None)
    assert read.masters == (TcpAddress("a", 1), TcpAddress("b", 2))


def test_option_beats_environment_beats_file() -> None:
    table = {"count": 1, "dram": 4096, "listen": "f:1"}
    environment = {"KVHARBOR_SAMPLE_COUNT": "2", "KVHARBOR_SAMPLE_DRAM": "8192"}
    options: dict[str, str | None] = {"count": "3", "listen": None, "of_another_section": "x"}
    read = sample(table, environment, options)
    assert (read.count, read.dram, str(read.listen)) == (3, 8192, "f:1")


@pytest.mark.parametrize(
    ("text", "size_bytes"),
    [(1, 1), ("4096", 4096), ("512MiB", 512 << 20), ("2 GiB", 2 << 30), ("1gb", 10**9),
     ("1.5k", 1500), ("1t", 10**12), ("64Ki", 65536), ("10B", 10)],
)  # fmt: skip
def test_sizes(text: object, size_bytes: int) -> None:
    assert parse_size(text) == size_bytes


@pytest.mark.parametrize(
    "text",
    ["", "x", "-1", "0", 0, -1, True, 1.5, "1.0001k", "1PiB", "1e3", "GiB", "1 G i B", None, [],
     "٣", "1" * 5000, "9999999TiB"],
)  # fmt: skip
def test_bad_sizes(text: object) -> None:
    with pytest.raises(ValueError, match=r"a size|whole number of bytes"):
        parse_size(text)


@pytest.mark.parametrize(
    ("written", "path"),
    [("/mnt/a:1GiB", "/mnt/a"), ("/mnt/a:b:1GiB", "/mnt/a:b"), ("a:1GiB", "a"),
     ({"path": "/mnt/a", "size": "1GiB"}, "/mnt/a"),
     ({"path": "/mnt/a", "size": 1 << 30}, "/mnt/a")],
)  # fmt: skip
def test_room_in_a_folder(written: object, path: str) -> None:
    assert parse_disk_space(written) == DiskSpace(Path(path), SizeBytes(1 << 30))


@pytest.mark.parametrize(
    "written",
    ["", "/mnt/a", "/mnt/a:", ":1GiB", "/mnt/a:much", 7, None, [], {"path": "/a"},
     {"path": "/a", "size": 1, "codec": "lz4"}, {"path": 7, "size": 1}],
)  # fmt: skip
def test_bad_room_in_a_folder(written: object) -> None:
    with pytest.raises(ValueError, match="a folder and a size, path:size"):
        parse_disk_space(written)


@pytest.mark.parametrize(
    ("written", "device"),
    [("cuda:0:1GiB", "cuda:0"), ("cpu:1GiB", "cpu"), ({"device": "cpu", "size": "1GiB"}, "cpu")],
)
def test_memory_of_a_device(written: object, device: str) -> None:
    assert parse_device_space(written) == DeviceSpace(device, SizeBytes(1 << 30))


@pytest.mark.parametrize("written", ["", "cpu", ":1GiB", "cuda:0", 7, {"path": "/a", "size": 1}])
def test_bad_memory_of_a_device(written: object) -> None:
    with pytest.raises(ValueError, match="a device and a size, device:size"):
        parse_device_space(written)


@pytest.mark.parametrize("text", ["127.0.0.1:7700", "[::1]:0", "a-host.example:65535"])
def test_endpoints_are_written_as_they_are_read(text: str) -> None:
    assert str(parse_endpoint(text)) == str(parse_any_address(text)) == text


def test_an_address_may_be_that_of_a_unix_socket() -> None:
    assert parse_any_address("unix:/run/m.sock") == UnixAddress("/run/m.sock")


@pytest.mark.parametrize("text", ["h", "unix:", "unix:/" + "x" * 107, "/run/m.sock", 80, None])
def test_bad_addresses(text: object) -> None:
    with pytest.raises(ValueError, match=r"^host:port, or unix:/path of 107 bytes at most$"):
        parse_any_address(text)


@pytest.mark.parametrize(
    "text",
    ["", ":1", "h", "h:", "h:x", "h:-1", "h:65536", "h:1:2", "::1:80", "[]:1", "[h:1", "h]:1", 80,
     "h:٣", "a b:1", "http://h:1", "h:" + "1" * 5000,
     "unix:/tmp/x", "unix:1"],
)  # fmt: skip
def test_bad_endpoints(text: object) -> None:
    with pytest.raises(ValueError, match="host:port"):
        parse_endpoint(text)


BAD_VALUES = [
    ("listen", 7700, "host:port"),
    ("admin", "7701", 'host:port with a port of 0 to 65535 or "off"'),
    ("dram", "lots", "a size such as"),
    ("lease_ttl_s", 0, "a positive number of seconds"),
    ("lease_ttl_s", "soon", "a number of seconds"),
    ("lease_ttl_s", float("nan"), "a number of seconds"),
    ("high", "x", "a number"),
    ("high", True, "a number"),
    ("high", float("inf"), "a number"),
    ("count", -1, "a whole number, not negative"),
    ("count", 1.5, "a whole number"),
    ("count", "1_000", "a whole number"),
    ("count", True, "a whole number"),
    ("prefault", "no", "true or false"),
    ("prefault", 1, "true or false"),
    ("prefault", "False", "true or false"),
    ("data_dir", "", "a path"),
    ("data_dir", "a\0b", "a path"),
    ("data_dir", "~no-such-user-of-ours/x", "a path whose ~ names a known user"),
    ("data_dir", 3, "a path"),
    ("masters", 5, "a list"),
    ("masters", ["a:1", "b"], "host:port"),
    ("masters", "a:1,,b:2", "host:port"),
]


@pytest.mark.parametrize(("key", "value", "want"), BAD_VALUES)
def test_a_bad_value_names_file_key_value_and_what_would_do(
    key: str, value: object, want: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        sample({key: value})
    text = str(caught.value)
    assert text.startswith(f"f.toml: sample.{key}: got {value!r}, want ")
    assert want in text


def test_a_bad_value_of_the_environment_names_the_variable() -> None:
    with pytest.raises(ConfigError, match=r"^environment: KVHARBOR_SAMPLE_COUNT: got 'many', want"):
        sample(environment={"KVHARBOR_SAMPLE_COUNT": "many"})


def test_a_bad_value_of_an_option_names_the_option() -> None:
    with pytest.raises(ConfigError, match=r"^option --lease-ttl-s: got '-1', want a positive"):
        sample(options={"lease_ttl_s": "-1"})


def test_an_option_may_carry_the_sections_name() -> None:
    sources = Sources(options={"cluster_name": "x", "secret_file": None})
    assert sources.section(ClusterConfig, "cluster") == ClusterConfig("x")
    whole = Sources(options={"sample_id": "whole"}).section(Prefixed, "sample")
    assert whole == Prefixed("whole", "")
    with pytest.raises(ConfigError, match=r"^option --cluster-name: got 'X', want at most"):
        Sources(options={"cluster_name": "X"}).section(ClusterConfig, "cluster")


def test_an_unknown_key_names_the_nearest_known_one() -> None:
    with pytest.raises(
        ConfigError, match=r"^f.toml: sample.liste: unknown key, did you mean listen\?$"
    ):
        sample({"liste": "h:1"})
    with pytest.raises(ConfigError, match="KVHARBOR_SAMPLE_LISTE: unknown key, did you mean"):
        sample(environment={"KVHARBOR_SAMPLE_LISTE": "h:1"})


def test_an_unknown_key_unlike_any_other_lists_the_known_ones() -> None:
    with pytest.raises(ConfigError, match="unknown key, known are admin, count, data_dir, "):
        sample({"zzz": 1})


def test_values_that_do_not_fit_together_name_the_one_to_change() -> None:
    with pytest.raises(ConfigError, match=r"^f.toml: sample.low: got 0.95, want less than"):
        sample({"low": 0.95})
    with pytest.raises(ConfigError, match=r"^\[sample\]: low: got 0.5, want less than high"):
        sample({"high": 0.1})


def test_a_missing_value_says_how_to_set_it() -> None:
    with pytest.raises(ConfigError, match=r"sample.data_dir is not set: give --data-dir or a file"):
        Sources().section(Sample, "sample")


@pytest.mark.parametrize(
    ("content", "want"),
    [
        (b"[sample", "not TOML: "),
        (b"\xff\xfe", "not TOML: "),
        (b"a = 1\na = 2", "not TOML: "),
        (b"[sampel]", r"unknown section \[sampel\], did you mean sample\?"),
        (b"zz = 1", r"unknown section \[zz\], known are other, sample"),
        (b"sample = 3", r"sample: got 3, want a section \[sample\]"),
        (b"[[sample]]", r"sample: got \[{}\], want a section"),
    ],
)
def test_a_bad_file_is_named(tmp_path: Path, content: bytes, want: str) -> None:
    file = tmp_path / "c.toml"
    file.write_bytes(content)
    with pytest.raises(ConfigError, match=f"^{re.escape(str(file))}: {want}"):
        read_file(file, ("sample", "other"))


def test_a_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    for path in (tmp_path / "absent.toml", tmp_path):
        with pytest.raises(ConfigError, match=f"{re.escape(str(path))}: cannot be read: "):
            read_file(path, ())


@pytest.mark.parametrize("name", ["", "A", "a_b", "a/b", "-a", ".a", "a" * 64, "ä"])
def test_a_cluster_name_can_be_part_of_a_file_name(name: str) -> None:
    with pytest.raises(BadValue, match="name: got "):
        ClusterConfig(name)


def secret_file(tmp_path: Path, content: bytes, mode: int = 0o600) -> Path:
    file = tmp_path / "secret"
    file.write_bytes(content)
    file.chmod(mode)
    return file


def test_a_secret_is_read_without_its_line_end(tmp_path: Path) -> None:
    file = secret_file(tmp_path, b"0123456789abcdef\n")
    assert ClusterConfig(secret_file=file).secret() == b"0123456789abcdef"
    assert ClusterConfig().secret() is None


@pytest.mark.parametrize("content", [b"", b"short", b" " * 100, b"x" * 5000])
def test_a_secret_of_bad_length_is_refused(tmp_path: Path, content: bytes) -> None:
    with pytest.raises(ConfigError, match="bytes, want 16 to 4096"):
        read_secret(secret_file(tmp_path, content))


@pytest.mark.parametrize("mode", [0o644, 0o640, 0o602])
def test_a_secret_that_others_may_read_is_refused(tmp_path: Path, mode: int) -> None:
    with pytest.raises(ConfigError, match=f"mode {mode:04o} lets others read it"):
        read_secret(secret_file(tmp_path, b"0123456789abcdef", mode))


def test_a_missing_secret_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"secret file .*absent: cannot be read"):
        read_secret(tmp_path / "absent")
