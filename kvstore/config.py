"""Configuration: a strict reader of TOML files, environment and options, and the cluster's part.

Owns how a value is written and which source wins: option over environment over file over default.
An unknown section or key, or a bad value, stops the start with the source, the key and the value
named. Must not know the servers' own sections: they hand in their structs.

A section is a frozen msgspec.Struct. Its fields' annotations say how they are written (`PARSERS`);
`| None` is written "off", a tuple is a list, or in the environment text with commas. A struct's
`__post_init__` raises BadValue for values that do not fit together.
"""

from __future__ import annotations

import difflib
import math
import re
import tomllib
import types
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Final, NewType, TypeVar, get_args, get_origin, get_type_hints

import msgspec

from kvstore import limits
from kvstore.errors import BadValue, ConfigError
from kvstore.private_file import read_private
from kvstore.rpc.address import (
    UNIX_PATH_BYTES_MAX,
    UNIX_PREFIX,
    AnyAddress,
    TcpAddress,
    parse_address,
)

Section = TypeVar("Section", bound=msgspec.Struct)
Place = TypeVar("Place")
Table = Mapping[str, object]

SizeBytes = NewType("SizeBytes", int)
"""Written as bytes, or with a unit: 512MiB."""

SizeBytesOrZero = NewType("SizeBytesOrZero", int)
"""As `SizeBytes`, or 0: nothing."""

Seconds = NewType("Seconds", float)
"""Written as a number of seconds; positive."""

SecondsOrInf = NewType("SecondsOrInf", float)
"""As `Seconds`, or inf: for ever."""

Numbers = NewType("Numbers", Mapping[str, float])
"""Written as a table of numbers, or as text: name=1,other=2.5."""


class DiskSpace(msgspec.Struct, frozen=True):
    """Room in a folder. Written as a table of path and size, or as text: /mnt/disk:200GiB."""

    path: Path
    size: SizeBytes


class DeviceSpace(msgspec.Struct, frozen=True):
    """Memory of a device. Written as a table of device and size, or as text: cuda:0:64GiB."""

    device: str
    size: SizeBytes


ENVIRONMENT_PREFIX: Final = "KVHARBOR_"
SECRET_BYTES_MIN: Final = 16
SECRET_BYTES_MAX: Final = 4096
CLUSTER_NAME: Final = re.compile(r"[a-z0-9][a-z0-9.-]{0,62}")

_SIZE: Final = re.compile(r"([0-9]{1,18}(?:\.[0-9]{1,9})?)\s*([KMGT]i?)?B?", re.IGNORECASE)
_HOST: Final = re.compile(r"[A-Za-z0-9_.:%-]+")
_WHOLE: Final = re.compile(r"[0-9]{1,18}")
_UNITS: Final = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12} | {
    "ki": 1 << 10,
    "mi": 1 << 20,
    "gi": 1 << 30,
    "ti": 1 << 40,
}


class ClusterConfig(msgspec.Struct, frozen=True):
    """Section [cluster]: what every process of a cluster must be told alike."""

    name: str = "local"
    secret_file: Path | None = None
    """Holds the cluster secret. Without one, every listener stays on loopback."""

    def __post_init__(self) -> None:
        """Raise BadValue unless the name can be part of file names and keys."""
        if not CLUSTER_NAME.fullmatch(self.name):
            raise BadValue("name", self.name, "at most 63 of a-z, 0-9, dot and hyphen")

    def secret(self) -> bytes | None:
        """The secret, without white space around it, or None where no file is named."""
        return None if self.secret_file is None else read_secret(self.secret_file)


def parse_size(value: object) -> SizeBytes:
    """Bytes from a number, or from text with a unit: 4096, "512MiB", "1.5 GiB", "2GB"."""
    if isinstance(value, int) and not isinstance(value, bool):
        number, unit = float(value), 1
    else:
        match = _SIZE.fullmatch(value.strip()) if isinstance(value, str) else None
        if match is None:
            raise ValueError("a size such as 4096, 512MiB or 1.5GiB")
        number, unit = float(match[1]), _UNITS[(match[2] or "").lower()]
    if not 0 < number * unit < 1 << 62 or (number * unit) % 1:
        raise ValueError("a whole number of bytes, at least 1")
    return SizeBytes(int(number * unit))


def parse_size_or_zero(value: object) -> SizeBytesOrZero:
    """As `parse_size`, or 0."""
    if value in (0, "0") and value is not False:
        return SizeBytesOrZero(0)
    try:
        return SizeBytesOrZero(parse_size(value))
    except ValueError as error:
        raise ValueError(f"{error}, or 0") from error


def parse_endpoint(value: object) -> TcpAddress:
    """Host and port from text: 127.0.0.1:7700, [::1]:7700, name:0 (0 takes a free port)."""
    want = "host:port with a port of 0 to 65535"
    if not isinstance(value, str):
        raise ValueError(want)
    try:
        address = parse_address(value)
    except ValueError as error:
        raise ValueError(want) from error
    if not isinstance(address, TcpAddress) or not _HOST.fullmatch(address.host):
        raise ValueError(want)
    return address


def parse_any_address(value: object) -> AnyAddress:
    """Host and port, or the path of a Unix socket of this host: unix:/run/kvharbor/master.sock."""
    try:
        if isinstance(value, str) and value.startswith(UNIX_PREFIX):
            return parse_address(value)
        return parse_endpoint(value)
    except ValueError as error:
        raise ValueError(
            f"host:port, or unix:/path of {UNIX_PATH_BYTES_MAX} bytes at most"
        ) from error


def parse_text(value: object) -> str:
    """Text of sensible length without control characters."""
    if not isinstance(value, str) or not value.isprintable() or not value.strip():
        raise ValueError("text")
    if len(value.encode()) > limits.NAME_BYTES_MAX:
        raise ValueError(f"at most {limits.NAME_BYTES_MAX} bytes of text")
    return value


def parse_path(value: object) -> Path:
    """A path; ~ is the home folder."""
    if not isinstance(value, str) or not value or "\0" in value:
        raise ValueError("a path")
    try:
        return Path(value).expanduser()
    except RuntimeError as error:
        raise ValueError("a path whose ~ names a known user") from error


def parse_disk_space(value: object) -> DiskSpace:
    """A folder and how much of it."""
    return DiskSpace(*_room(value, "path", "a folder", parse_path))


def parse_device_space(value: object) -> DeviceSpace:
    """A device and how much of it."""
    return DeviceSpace(*_room(value, "device", "a device", parse_text))


def _room(
    value: object, key: str, what: str, parse: Callable[[object], Place]
) -> tuple[Place, SizeBytes]:
    want = f"{what} and a size, {key}:size"
    if isinstance(value, str):
        where, _, size = value.rpartition(":")
        value = {key: where, "size": size}
    if not isinstance(value, Mapping) or set(value) != {key, "size"}:
        raise ValueError(want)
    try:
        return parse(value[key]), parse_size(value["size"])
    except ValueError as error:
        raise ValueError(f"{want}: {error}") from error


def parse_flag(value: object) -> bool:
    """True or false, nothing else: the text "false" must not count as true."""
    known = {True: True, False: False, "true": True, "false": False}
    if not isinstance(value, bool | str) or value not in known:
        raise ValueError("true or false")
    return known[value]


def parse_integer(value: object) -> int:
    """A whole number, not negative."""
    if isinstance(value, str) and _WHOLE.fullmatch(value):
        return int(value)
    if not isinstance(value, int) or isinstance(value, bool) or value < 0:
        raise ValueError("a whole number, not negative")
    return value


def parse_number(value: object) -> float:
    """A finite number."""
    if isinstance(value, str):
        try:
            value = float(value)
        except ValueError as error:
            raise ValueError("a number") from error
    if not isinstance(value, int | float) or isinstance(value, bool) or not math.isfinite(value):
        raise ValueError("a number")
    return float(value)


def parse_seconds(value: object) -> Seconds:
    """A positive number of seconds."""
    try:
        seconds = parse_number(value)
    except ValueError as error:
        raise ValueError("a number of seconds") from error
    if seconds <= 0:
        raise ValueError("a positive number of seconds")
    return Seconds(seconds)


def parse_seconds_or_inf(value: object) -> SecondsOrInf:
    """A positive number of seconds, or inf."""
    if value in (math.inf, "inf"):
        return SecondsOrInf(math.inf)
    try:
        return SecondsOrInf(parse_seconds(value))
    except ValueError as error:
        raise ValueError(f"{error}, or inf") from error


def parse_numbers(value: object) -> Numbers:
    """Numbers by name, from a table or from text."""
    want = "a table of numbers, or name=number,name=number"
    if isinstance(value, str):
        pairs = [each.partition("=") for each in value.split(",") if each.strip()]
        value = {name.strip(): number.strip() for name, _, number in pairs}
    if not isinstance(value, Mapping):
        raise ValueError(want)
    try:
        return Numbers({str(name): parse_number(number) for name, number in value.items()})
    except ValueError as error:
        raise ValueError(want) from error


PARSERS: Final[Mapping[object, Callable[[object], object]]] = {
    SizeBytes: parse_size,
    SizeBytesOrZero: parse_size_or_zero,
    Seconds: parse_seconds,
    SecondsOrInf: parse_seconds_or_inf,
    Numbers: parse_numbers,
    TcpAddress: parse_endpoint,
    AnyAddress: parse_any_address,
    Path: parse_path,
    DeviceSpace: parse_device_space,
    DiskSpace: parse_disk_space,
    bool: parse_flag,
    int: parse_integer,
    float: parse_number,
    str: parse_text,
}
"""How a value is read, by the annotation of its field. Raises ValueError saying what would do."""


def default_data_dir(environment: Mapping[str, str]) -> Path:
    """$KVHARBOR_HOME, else kvharbor below $XDG_DATA_HOME, which is ~/.local/share by default."""
    home = environment.get("KVHARBOR_HOME")
    if home:
        return Path(home).expanduser()
    shared = environment.get("XDG_DATA_HOME") or "~/.local/share"
    return Path(shared).expanduser() / "kvharbor"


def read_file(path: Path, sections: tuple[str, ...]) -> dict[str, Table]:
    """The tables of a TOML file by section; ConfigError names the file and what is wrong with it.

    `sections` are all that the file may have: those of programs that share it, too.
    """
    try:
        with path.open("rb") as file:
            tables = tomllib.load(file)
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: not TOML: {error}") from error
    for name, table in tables.items():
        if name not in sections:
            raise ConfigError(f"{path}: unknown section [{name}]{_nearest(name, sections)}")
        if not isinstance(table, dict):
            raise ConfigError(f"{path}: {name}: got {_shown(table)}, want a section [{name}]")
    return tables


def read_secret(path: Path) -> bytes:
    """The cluster secret in a file; ConfigError when others may read it or it is too short."""
    secret = read_private(path, "secret")
    if not SECRET_BYTES_MIN <= len(secret) <= SECRET_BYTES_MAX:
        raise ConfigError(
            f"secret file {path}: {len(secret)} bytes, want {SECRET_BYTES_MIN} to "
            f"{SECRET_BYTES_MAX} (head -c 32 /dev/urandom | base64)"
        )
    return secret


class Sources(msgspec.Struct, frozen=True):
    """Everything that may set a value. Options are given as text, None where not given."""

    file: Path | None = None
    tables: Mapping[str, Table] = {}
    environment: Mapping[str, str] = {}
    options: Mapping[str, str | None] = {}

    def section(self, kind: type[Section], name: str) -> Section:
        """The section as its struct; ConfigError names source, key, value and what would do.

        Options count where they are named after a key of the section, alone or with the section's
        name before it (name or cluster_name); others are other sections'.
        """
        hints = get_type_hints(kind)
        values: dict[str, object] = {}
        origins: dict[str, str] = {}
        for key, written, origin in self._written(name, tuple(hints)):
            if key not in hints:
                raise ConfigError(f"{origin}: unknown key{_nearest(key, tuple(hints))}")
            values[key] = _parsed(hints[key], written, origin)
            origins[key] = origin
        for field in msgspec.structs.fields(kind):
            if field.required and field.name not in values:
                option = f"--{field.name.replace('_', '-')}"
                raise ConfigError(f"{name}.{field.name} is not set: give {option} or a file")
        try:
            return kind(**values)
        except BadValue as error:
            where, text = f"[{name}]", str(error)
            if error.field in origins:  # which name the key
                where, text = origins[error.field], text.removeprefix(f"{error.field}: ")
            raise ConfigError(f"{where}: {text}") from error

    def mention_of(self, kind: type[Section], section: str) -> str | None:
        """Where the section, or a key of it, is written; None where nothing of it is."""
        for _, _, origin in self._written(section, kind.__struct_fields__):
            return origin
        return f"{self.file}: [{section}]" if section in self.tables else None

    def _written(self, section: str, keys: tuple[str, ...]) -> list[tuple[str, object, str]]:
        """(key, value as written, where it is written), the strongest source last."""
        prefix = f"{ENVIRONMENT_PREFIX}{section.upper()}_"
        found = [
            (key, value, f"{self.file}: {section}.{key}")
            for key, value in self.tables.get(section, {}).items()
        ]
        found += [
            (name.removeprefix(prefix).lower(), value, f"environment: {name}")
            for name, value in self.environment.items()
            if name.startswith(prefix)
        ]
        for name, value in self.options.items():
            key = name if name in keys else name.removeprefix(f"{section}_")
            if key in keys and value is not None:
                found.append((key, value, f"option --{name.replace('_', '-')}"))
        return found


def _parsed(hint: object, written: object, origin: str) -> object:
    arguments = get_args(hint)
    optional = types.NoneType in arguments
    if optional:
        if written == "off":
            return None
        (hint,) = (each for each in arguments if each is not types.NoneType)
    try:
        if get_origin(hint) is tuple:
            return tuple(PARSERS[get_args(hint)[0]](each) for each in _items(written))
        return PARSERS[hint](written)
    except ValueError as error:
        off = ' or "off"' if optional else ""
        raise ConfigError(f"{origin}: got {_shown(written)}, want {error}{off}") from error


def _shown(written: object) -> str:
    text = repr(written)
    return text if len(text) <= 80 else f"{text[:77]}..."


def _items(written: object) -> list[object]:
    if isinstance(written, str):
        return [each.strip() for each in written.split(",")]
    if not isinstance(written, list):
        raise ValueError("a list")
    return written


def _nearest(name: str, known: tuple[str, ...]) -> str:
    near = difflib.get_close_matches(name, known, 1)
    return f", did you mean {near[0]}?" if near else f", known are {', '.join(sorted(known))}"
