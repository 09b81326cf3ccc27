"""The byte strings that may never change: ids, keys, records, headers, and each message's bytes.

`python -m tests.unit.golden_vectors` prints what the code gives today. With `--add` it writes the
vectors that the files beside it lack, for a new message; those that are there stay as they are.
"""

from __future__ import annotations

import json
import sys
import types
from enum import StrEnum
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Final, Union, get_args, get_origin, get_type_hints

import msgspec

from kvstore.ids import ROOT_PARENT, Generation, Incarnation, NamespaceId, PageKey, SegmentId
from kvstore.namespace import (
    Attention,
    CacheGroup,
    Content,
    Layout,
    content_id,
    namespace_id,
    opaque,
)
from kvstore.page import (
    PageChain,
    engine_key,
    name_key,
    packed_name,
    page_key,
    payload_checksum,
)
from kvstore.record import Record, RecordFlag, RecordState, pack_record
from kvstore.segment import Geometry, SegmentHeader, pack_header
from kvstore.wire.encoding import encode
from kvstore.wire.framing import FrameKind, pack_frame
from kvstore.wire.messages import REGISTRY
from kvstore.wire.messages.base import Message
from kvstore.wire.messages.hello import Done

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

FOLDER: Final = Path(__file__).parent / "golden"

NAMESPACE: Final = NamespaceId(bytes(range(32)))
GQA: Final = Content(
    tenant="acme",
    model="Llama-3.1-8B",
    revision="0e9e39f",
    adapter="",
    kv_dtype="bfloat16",
    groups=(CacheGroup(Attention.FULL, 32, 8, 128, 128),),
    position="rope theta=500000.0",
    salt="s1",
)
MLA: Final = Content(
    tenant="default",
    model="DeepSeek-V3",
    revision="main",
    adapter="lora-é",
    kv_dtype="float8_e4m3",
    groups=(CacheGroup(Attention.LATENT, 61, 1, 576, 0),),
    position="yarn",
)
MIXED: Final = Content(
    tenant="default",
    model="gemma-3",
    revision="",
    adapter="",
    kv_dtype="float16",
    groups=(
        CacheGroup(Attention.FULL, 4, 4, 256, 256),
        CacheGroup(Attention.SLIDING, 20, 4, 256, 256, 1024),
    ),
    position="",
)
RECORD: Final = Record(
    state=RecordState.SEALED,
    key=PageKey(bytes(range(32))),
    part=3,
    generation=Generation(5 << 32 | 17),
    incarnation=Incarnation(9),
    payload_bytes=100_000,
    checksum=0x0123_4567_89AB_CDEF,
    offset=1 << 24,
    size_class=102_400,
    namespace_ordinal=12,
    parent=PageKey(bytes(range(32, 64))),
    token_count=64,
    stored_bytes=90_000,
    codec=1,
    flags=RecordFlag.PRIVATE | RecordFlag.NAME,
    name_offset=4096,
)
HEADER: Final = SegmentHeader(
    "cluster-é", SegmentId("worker-1/dram-0"), Incarnation(3), Geometry(1 << 30, 1 << 26)
)


def identity_vectors() -> dict[str, str]:
    """Name to hex, of everything that is stored or compared across processes and years."""
    chain = PageChain.of_tokens(NAMESPACE, range(10), 4, extra=b"x")
    found: dict[str, bytes] = {
        "page: three tokens at the root": page_key(NAMESPACE, ROOT_PARENT, [1, 2, 3]),
        "page: no tokens": page_key(NAMESPACE, ROOT_PARENT, []),
        "page: largest token, parent, extra": page_key(
            NAMESPACE, PageKey(b"p" * 32), [(1 << 32) - 1], b"picture"
        ),
        "page: other namespace": page_key(NamespaceId(b"n" * 32), ROOT_PARENT, [1, 2, 3]),
        "engine key": engine_key(NAMESPACE, b"block hash"),
        "engine key: empty": engine_key(NAMESPACE, b""),
        "name key": name_key(NAMESPACE, "vllm@a/b é".encode()),
        "chain: two full pages of four, with extra": chain.packed,
        "content: gqa": content_id(GQA),
        "content: mla": content_id(MLA),
        "content: two groups": content_id(MIXED),
        "namespace: gqa, default layout": namespace_id(GQA, Layout()),
        "namespace: gqa, tp 4, pp 2": namespace_id(GQA, Layout(16, 4, 2, "other", "vllm")),
        "namespace: mla": namespace_id(MLA, Layout()),
        "namespace: opaque": opaque("acme", "objects", "salt").id,
        "namespace: opaque, with names": opaque("acme", "objects", keeps_names=True).id,
        "kept name": packed_name("vllm@a/b é".encode()),
        "checksum: page of one byte": _u64(payload_checksum(b"a", b"k" * 32, 0)),
        "checksum: part 7": _u64(payload_checksum(bytes(range(256)) * 40, b"k" * 32, 7)),
        "record": pack_record(RECORD),
        "segment header": pack_header(HEADER),
        "frame of Done": pack_frame(FrameKind.REPLY, 7, Done()),
    }
    return {name: value.hex() for name, value in found.items()}


def message_vectors() -> dict[str, str]:
    """Name to hex of the encoded examples."""
    return {name: encode(message).hex() for name, message in message_examples().items()}


def message_examples() -> dict[str, Message]:
    """At least one of each message type; of one with a union field, one for each member."""
    return {
        f"{tag} {kind.__name__} {number}": message
        for tag, kind in sorted(REGISTRY.items())
        for number, message in enumerate(_examples(kind))
    }


def _examples(kind: type[Message]) -> Iterator[Message]:
    variants = max(
        (len(_members(hint)) for hint in _field_hints(kind).values()),
        default=1,
    )
    for variant in range(variants):
        made = _struct(kind, f"{kind.__name__}.", variant)
        assert isinstance(made, Message), kind
        yield made


def _field_hints(kind: type) -> dict[str, object]:
    """Types of the fields."""
    hints = get_type_hints(kind)
    return {field.name: hints[field.name] for field in msgspec.structs.fields(kind)}


def _members(hint: object) -> list[object]:
    return list(get_args(hint)) if get_origin(hint) in (Union, types.UnionType) else [hint]


def _value(hint: object, name: str, variant: int) -> object:
    """A value of the hinted type, made of the field's name so that swapped fields show."""
    members = _members(hint)
    if len(members) > 1:
        return _value(members[variant % len(members)], name, variant)
    make = partial(_value, variant=variant)
    match get_origin(hint) or hint:
        case origin if origin is tuple:
            element, *rest = get_args(hint)
            assert rest == [...], hint
            return (make(element, name + "0"), make(element, name + "1"))
        case origin if origin is dict:
            return {name: make(get_args(hint)[1], name)}
        case builtin if builtin in _SCALARS:
            return _SCALARS[builtin](name)
        case kind if isinstance(kind, type) and issubclass(kind, StrEnum):
            return next(iter(kind))
        case kind:
            return _struct(kind, name, variant)


def _struct(kind: object, name: str, variant: int) -> msgspec.Struct:
    assert isinstance(kind, type), kind
    hints = _field_hints(kind)
    made = kind(**{field: _value(hints[field], f"{name}{field}", variant) for field in hints})
    assert isinstance(made, msgspec.Struct), kind
    return made


def _u64(value: int) -> bytes:
    return value.to_bytes(8, "little")


def _number(name: str) -> int:
    return sum(index * byte for index, byte in enumerate(name.encode(), 1))


_SCALARS: Final[dict[object, Callable[[str], object]]] = {
    int: _number,
    float: lambda name: _number(name) / 4,
    bool: lambda name: len(name) % 2 == 0,
    str: lambda name: name,
    bytes: lambda name: name.encode(),
    type(None): lambda name: None,
}


def stored(file_name: str) -> dict[str, str]:
    """The golden vectors in a file."""
    path = FOLDER / file_name
    return dict(json.loads(path.read_text())) if path.exists() else {}


def everything() -> dict[str, dict[str, str]]:
    """File name to vectors, as the code gives them now."""
    return {"identity.json": identity_vectors(), "messages.json": message_vectors()}


def main() -> None:
    """Print the vectors as JSON, or add missing ones."""
    for file_name, vectors in everything().items():
        if "--add" in sys.argv[1:]:
            merged = vectors | stored(file_name)
            text = json.dumps(merged, indent=1, ensure_ascii=False)
            (FOLDER / file_name).write_text(text + "\n")
    print(json.dumps(everything(), sort_keys=True))


if __name__ == "__main__":
    main()
