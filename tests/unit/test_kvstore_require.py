"""What callers may hand in: every argument of the SDK with every kind of wrong value."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final

import msgspec
import pytest

from kvstore.aio import AsyncKVStore
from kvstore.client import checks
from kvstore.client.calls import Calls
from kvstore.client.locations import Match
from kvstore.client.namespaces import OpenedNamespace
from kvstore.client.store import KVStore
from kvstore.client.writes import PutWishes
from kvstore.errors import BadValue
from kvstore.hints import Hints
from kvstore.namespace import Layout, opaque, open_layout
from kvstore.page import PageChain, engine_key, name_key
from kvstore.require import require, require_text
from kvstore.rpc.identity import Identity, Role
from kvstore.transfer.buffer import Buffer
from tests.fakes import ManualClock
from tests.unit.client_scripts import opened

if TYPE_CHECKING:
    from kvstore.client.writes import PutRequest

Wrong = Any  # what a caller hands in whose program no type checker has read
Several = tuple[Wrong, ...]
Call = Callable[[Wrong], object]

SPACE: Final = opened(tensor_parallel=2)
OBJECTS: Final = OpenedNamespace(opaque("tests", "objects"), 1)
CHAIN: Final = SPACE.chain(range(8))
MATCH: Final = Match(SPACE, CHAIN, (), (), b"\1\1")
CONTENT: Final = SPACE.namespace.content
CALLS: Final = Calls(ManualClock(), 10.0)

NAN: Final = float("nan")
NO_INT: Final[Several] = (None, "1", b"1", 1.0, NAN, [], {}, True, object())
NO_NUMBER: Final[Several] = (None, "1", b"1", [], {}, True, object())
NO_TEXT: Final[Several] = (None, 1, 1.0, b"a", ["a"], True, "\ud800", object())
NO_BYTES: Final[Several] = (None, 1, 1.0, "a", ["a"], True, object())
NO_STRUCT: Final[Several] = (None, 1, 1.0, "a", b"a", [], {}, True, object())
NO_LIST: Final[Several] = (None, 1, 1.0, True, object())
NO_BOOL: Final[Several] = (None, 0, 1, "yes", [])


def content(field: str) -> Call:
    """Open a namespace whose content has this value in a field."""
    return lambda value: open_layout(
        msgspec.structs.replace(CONTENT, **{field: value}), SPACE.namespace.layout
    )


def group(field: str) -> Call:
    """The same of a field of its only cache group."""

    def call(value: Wrong) -> object:
        changed = msgspec.structs.replace(CONTENT.groups[0], **{field: value})
        return content("groups")((changed,))

    return call


def layout(field: str) -> Call:
    """The same of the layout."""
    return lambda value: open_layout(CONTENT, msgspec.structs.replace(Layout(), **{field: value}))


def put(
    space: Wrong = SPACE,
    chain: Wrong = CHAIN,
    offsets: Wrong = None,
    size_bytes: Wrong = None,
    **wishes: Wrong,
) -> PutRequest:
    """Prepare a put of which one argument is wrong."""
    offsets = {0: [0, 4096]} if offsets is None else offsets
    return CALLS.put_request(space, chain, offsets, size_bytes, PutWishes(**wishes))


def pin(
    opened: Wrong = SPACE,
    chain: Wrong = CHAIN,
    owner: Wrong = "o",
    ttl_s: Wrong = 60.0,
    hard: Wrong = True,
) -> object:
    """Prepare a pin of which one argument is wrong."""
    return next(CALLS.pin_steps(opened, chain, owner, ttl_s, None, hard=hard))


ARGUMENTS: Final[dict[str, tuple[Call, Several]]] = {
    "masters": (KVStore.connect, (*NO_LIST, [], [None], [7700], [b"a:1"])),
    "masters, async": (lambda v: asyncio.run(AsyncKVStore.connect(v)), (*NO_LIST, [], [None])),
    "transports": (lambda v: KVStore.connect(transports=v), (*NO_LIST, "shm", [None], [b"shm"])),
    "tenant": (lambda v: Identity(Role.ENGINE, tenant=v), (*NO_TEXT, "x" * 513)),
    "name": (lambda v: Identity(Role.ENGINE, name=v), (*NO_TEXT, "x" * 513)),
    "host": (lambda v: Identity(Role.ENGINE, host=v), (*NO_TEXT, "x" * 513)),
    "secret": (lambda v: Identity(Role.ENGINE, secret=v), ("a", 1, [1], b"", bytearray(8))),
    "content": (lambda v: open_layout(v, Layout()), NO_STRUCT),
    "layout": (lambda v: open_layout(CONTENT, v), NO_STRUCT),
    "name, opaque": (lambda v: opaque("tests", v), (*NO_TEXT, "x" * 513)),
    **{
        f"content.{field}": (content(field), (*NO_TEXT, "x" * 5000))
        for field in ("tenant", "model", "revision", "adapter", "kv_dtype", "position", "salt")
    },
    "content.schema_version": (content("schema_version"), (*NO_INT, 0, 1 << 70)),
    "content.groups": (content("groups"), (None, 1, "a", [], (), list(CONTENT.groups))),
    "content.groups[0]": (content("groups"), ((None,), ("a",), (1,))),
    "content.groups[0].attention": (group("attention"), (None, "full", 1)),
    **{
        f"content.groups[0].{field}": (group(field), (*NO_INT, -1, 1 << 70))
        for field in ("layers", "kv_heads", "key_dim", "value_dim", "window_tokens")
    },
    **{
        f"layout.{field}": (layout(field), (*NO_INT, 0, -1, 1 << 70))
        for field in ("page_tokens", "tensor_parallel", "pipeline_parallel")
    },
    **{f"layout.{field}": (layout(field), (*NO_TEXT, "x" * 513)) for field in ("order", "engine")},
    "size_bytes, buffer": (lambda v: Buffer(1, v), (*NO_INT, 0, -1)),
    "tokens": (SPACE.chain, (None, 1, "abc", b"abcd", bytearray(4), [1.0], [-1], [1 << 32])),
    "extra": (lambda v: SPACE.chain(range(4), extra=v), NO_BYTES),
    "parent": (lambda v: SPACE.chain(range(4), parent=v), (*NO_BYTES, b"short")),
    "names": (OBJECTS.names, NO_LIST),
    "name, of names": (lambda v: OBJECTS.names([v]), NO_BYTES),
    "name, one": (lambda v: name_key(OBJECTS.namespace.id, v), NO_BYTES),
    "block_hash": (lambda v: engine_key(SPACE.namespace.id, v), NO_BYTES),
    "keys": (PageChain, (*NO_BYTES, bytes(33))),
    "parent, of keys": (lambda v: PageChain(b"", v), (*NO_BYTES, b"short")),
    "opened": (lambda v: CALLS.query(v, CHAIN, None), NO_STRUCT),
    "chain": (lambda v: CALLS.query(SPACE, v, None), NO_STRUCT),
    "lease": (lambda v: CALLS.query(SPACE, CHAIN, None, lease=v), NO_BOOL),
    "parts": (
        lambda v: CALLS.query(SPACE, CHAIN, None, v),
        (*NO_LIST, "0", [None], ["0"], [True], [0.0], [-1], [2], [1 << 70]),
    ),
    "timeout_s": (lambda v: CALLS.query(SPACE, CHAIN, v), (*NO_NUMBER[1:], NAN, 0, -1, 1e300)),
    "timeout_s, usual": (lambda v: Calls(ManualClock(), v), (*NO_NUMBER, NAN, 0, -1, 10**400)),
    "opened, put": (lambda v: put(space=v), NO_STRUCT),
    "chain, put": (lambda v: put(chain=v), NO_STRUCT),
    "offsets": (lambda v: put(offsets=v), (1, "a", [0, 1])),
    "offsets, of a part": (
        lambda v: put(offsets={0: v}),
        (*NO_LIST, "ab", [0], [0, 1, 2], [0, None], [0, 1.0], [0, "1"]),
    ),
    "part, put": (lambda v: put(offsets={v: [0, 1]}), (None, "0", b"0", 0.0, NAN, -1, 2, 1 << 70)),
    "part, one": (checks.part_number, NO_INT),
    "size_bytes": (lambda v: put(OBJECTS, size_bytes=v), NO_INT),
    "part_bytes": (lambda v: put(OBJECTS, size_bytes=v), (0, -1, 1 << 70)),
    "ttl_s": (
        lambda v: put(ttl_s=v),
        (*NO_NUMBER[1:], NAN, float("-inf"), 0, -1, 10**400),
    ),
    "ttl_s, open": (
        lambda v: next(CALLS.open_steps(SPACE.namespace, v)),
        (*NO_NUMBER[1:], NAN, float("-inf"), 0, -1, 10**400),
    ),
    "opened, pin": (lambda v: pin(opened=v), NO_STRUCT),
    "chain, pin": (lambda v: pin(chain=v), NO_STRUCT),
    "chain, unpin": (lambda v: next(CALLS.unpin_steps(SPACE, v, "o", None)), NO_STRUCT[1:]),
    "owner": (lambda v: pin(owner=v), (*NO_TEXT, "", " ", "a\nb", "x" * 513)),
    "owner, unpin": (
        lambda v: next(CALLS.unpin_steps(SPACE, CHAIN, v, None)),
        (*NO_TEXT, "", "x" * 513),
    ),
    "hard": (lambda v: pin(hard=v), NO_BOOL),
    "ttl_s, pin": (lambda v: pin(ttl_s=v), (*NO_NUMBER, NAN, 0, -1, 10**400)),
    "hints": (lambda v: CALLS.query(SPACE, CHAIN, None, hints=v), NO_STRUCT[1:]),
    "hints, put": (lambda v: put(hints=v), NO_STRUCT[1:]),
    "turn": (lambda v: put(hints=Hints(turn=v)), (*NO_INT[1:], 0, -1, 1 << 70)),
    "wait": (lambda v: put(wait=v), NO_BOOL),
    "replicas": (lambda v: put(replicas=v), (*NO_INT, -1, 17, 1 << 70)),
    "replicas, open": (
        lambda v: next(CALLS.open_steps(SPACE.namespace, None, v)),
        (*NO_INT, -1, 17, 1 << 70),
    ),
    "strict": (lambda v: put(strict=v), NO_BOOL),
    "replicas_now": (lambda v: put(replicas_now=v), NO_BOOL),
    "locations": (lambda v: CALLS.read_request(v, 0, [0], None), NO_STRUCT),
    "part, read": (
        lambda v: CALLS.read_request(MATCH, v, [0], None),
        (*NO_INT, -1, 2, 1 << 70),
    ),
    "part, size": (MATCH.part_bytes, (*NO_INT, -1, 2, 1 << 70)),
    "offsets, read": (
        lambda v: CALLS.read_request(MATCH, 0, v, None),
        (*NO_LIST, "ab", [0, 1, 2], [None], [1.0]),
    ),
    "locations, views": (lambda v: checks.view_places(v, None), NO_STRUCT),
    "pages": (lambda v: checks.view_places(MATCH, v), (*NO_INT[1:], -1, 3, 1 << 70)),
}


@pytest.mark.parametrize("argument", ARGUMENTS)
def test_a_wrong_argument_is_named(argument: str) -> None:
    call, values = ARGUMENTS[argument]
    field = argument.partition(",")[0]
    for value in values:
        with pytest.raises(BadValue) as raised:
            call(value)
        assert raised.value.field == field, value
        assert ", want " in str(raised.value), value


def test_right_arguments_pass() -> None:
    assert put().deadline_s > 0
    assert put(OBJECTS, OBJECTS.names([b"a", b"b"]), size_bytes=1).sources[0].part_bytes == 1
    assert put(ttl_s=60, wait=False, timeout_s=1).ttl_s == 60
    assert put(ttl_s=float("inf")).ttl_s == float("inf")
    assert CALLS.query(SPACE, CHAIN, 1, [1, 0], lease=False).parts == (1, 0)
    assert CALLS.query(OBJECTS, OBJECTS.names([b"a"]), None, (0,)).parts == (0,)
    assert checks.view_places(MATCH, None) == range(2)
    assert checks.view_places(MATCH, 0) == range(0)
    assert checks.texts("masters", ("a:1",)) == ["a:1"]


def test_a_secret_is_never_shown() -> None:
    with pytest.raises(BadValue) as raised:
        Identity(Role.ENGINE, secret="hidden")  # type: ignore[arg-type]  # as above
    assert "hidden" not in str(raised.value)


def test_texts_are_measured_in_bytes() -> None:
    require_text("name", "é" * 4, 8)
    with pytest.raises(BadValue, match=r"name: got .*, want text of at most 8 bytes"):
        require_text("name", "é" * 5, 8)
    with pytest.raises(BadValue, match="n: got True, want a number"):
        require("n", True, int, "a number")
    require("flag", True, bool, "True or False")
