"""Parameters of policies: read from what a file, an option or an operator wrote, with bounds.

A policy's parameters are a frozen struct whose annotations carry the bounds; a policy takes new
ones at any time by being handed another struct.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, Protocol, TypeVar

import msgspec

from kvstore.errors import BadValue

if TYPE_CHECKING:
    from collections.abc import Mapping


class Parameters(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Parameters of one policy. Fields are numbers with defaults and bounds (msgspec.Meta)."""


class Parametrised(Protocol):
    """What policies of all kinds have."""

    parameters: Parameters


P = TypeVar("P", bound=Parameters)

WORDS: Final = {"`float`": "a number", "`int`": "a whole number"}
"""What msgspec calls values, and what people do."""


def amended(current: P, written: Mapping[str, object]) -> P:
    """`current` with what is written in the place of its values; numbers may come as text.

    BadValue names the parameters that exist, or the one whose value is out of bounds.
    """
    kind = type(current)
    known = kind.__struct_fields__
    for name in written:
        if name not in known:
            raise BadValue("parameter", name, f"one of {', '.join(known)}" if known else "none")
    try:
        return msgspec.convert({**msgspec.structs.asdict(current), **written}, kind, strict=False)
    except msgspec.ValidationError as error:
        want, _, place = str(error).partition(" - at `$.")
        name = place.rstrip("`")
        want = want.removeprefix("Expected ").partition(", got")[0]
        for code, words in WORDS.items():
            want = want.replace(code, words)
        raise BadValue(name, written[name], want) from error
