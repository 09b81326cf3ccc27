"""How values of the configuration are written: text, TOML or an option's, by the field's type.

Owns the types by which a section's fields say so, and their parsers. Must not know sections, nor
where a value comes from.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Final, NewType, TypeVar

import msgspec

from kvstore import limits
from kvstore.rpc.address import (
    UNIX_PATH_BYTES_MAX,
    UNIX_PREFIX,
    AnyAddress,
    TcpAddress,
    parse_address,
)

Place = TypeVar("Place")

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


_SIZE: Final = re.compile(r"([0-9]{1,18}(?:\.[0-9]{1,9})?)\s*([KMGT]i?)?B?", re.IGNORECASE)
_HOST: Final = re.compile(r"[A-Za-z0-9_.:%-]+")
_WHOLE: Final = re.compile(r"[0-9]{1,18}")
_UNITS: Final = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12} | {
    "ki": 1 << 10,
    "mi": 1 << 20,
    "gi": 1 << 30,
    "ti": 1 << 40,
}


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
