"""Configuration: a strict reader of TOML files, environment and options, and the cluster's part.

Owns which source wins: option over environment over file over default. An unknown section or key,
or a bad value, stops the start with the source, the key and the value named. Must not know the
servers' own sections: they hand in their structs. How values are written:
`kvstore.config_values`.

A section is a frozen msgspec.Struct. Its fields' annotations say how they are written (`PARSERS`);
`| None` is written "off", a tuple is a list, or in the environment text with commas. A struct's
`__post_init__` raises BadValue for values that do not fit together.
"""

from __future__ import annotations

import difflib
import re
import tomllib
import types
from collections.abc import Mapping
from pathlib import Path
from typing import Final, TypeVar, get_args, get_origin, get_type_hints

import msgspec

from kvstore.config_values import PARSERS
from kvstore.errors import BadValue, ConfigError
from kvstore.private_file import read_private

Section = TypeVar("Section", bound=msgspec.Struct)
Table = Mapping[str, object]

ENVIRONMENT_PREFIX: Final = "KVHARBOR_"
SECRET_BYTES_MIN: Final = 16
SECRET_BYTES_MAX: Final = 4096
CLUSTER_NAME: Final = re.compile(r"[a-z0-9][a-z0-9.-]{0,62}")


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
