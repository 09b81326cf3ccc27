"""Messages as names and values, for JSON that people and their programs read. One way only."""

from __future__ import annotations

import msgspec


def named(value: object) -> object:
    """The value with every struct in it as a dict; on the wire structs are arrays without names."""
    if isinstance(value, msgspec.Struct):
        return {name: named(each) for name, each in msgspec.structs.asdict(value).items()}
    if isinstance(value, dict):
        return {name: named(each) for name, each in value.items()}
    if isinstance(value, tuple | list):
        return [named(each) for each in value]
    return value
