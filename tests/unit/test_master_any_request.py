"""Any well-formed message from anybody, with any values: answered or refused, never an accident."""

from __future__ import annotations

import types
from typing import TYPE_CHECKING, Any, Union, get_args, get_origin

import msgspec
from hypothesis import given, settings
from hypothesis import strategies as st

from kvstore.ids import ROOT_PARENT
from kvstore.namespace import Attention
from kvstore.record import RECORD_BYTES, pack_record
from kvstore.wire.messages import REGISTRY
from master.events import CommandAnswered, CommandId, Request
from tests.unit.master_rig import CHUNK, TENANT, Rig, chain

if TYPE_CHECKING:
    from kvstore.wire.messages.base import Message
    from master.events import SessionId

KEYS = chain(1, 6)
MASTERED = sorted(REGISTRY)


def prepared() -> tuple[Rig, list[SessionId]]:
    """A pool with pages, an open put and a waiting one; the sessions that may speak."""
    rig = Rig()
    worker = rig.add_worker(chunks=2)
    space = rig.open_namespace()
    space.put(KEYS)
    space.match(KEYS[:64])
    space.plans(chain(2, 3))
    other = rig.open("engine", TENANT, "other")
    space.begin(chain(2, 3), wait=True, session=other)
    stranger = rig.open("engine", "another", "e")
    operator = rig.open("operator", "", "o")
    assert worker.session is not None
    data = rig.open("worker", "", "w1")
    return rig, [rig.engine, other, stranger, operator, worker.session, data]


def known_bytes() -> list[bytes]:
    """Values that mean something in the prepared pool, and some that do not."""
    rig, _ = prepared()
    records = list(rig.workers["w1"].records.values())
    namespace = next(iter(rig.master.core.namespaces)).namespace.id
    return [
        b"", b"x", bytes(16), bytes(8), bytes(32), ROOT_PARENT, namespace, KEYS, KEYS[:32],
        KEYS[32:64], KEYS[64:96] + KEYS[:32], chain(2, 3), chain(3, 2),
        b"".join(map(pack_record, records)), bytes(RECORD_BYTES), pack_record(records[0])[::-1],
    ]  # fmt: skip


BYTES = st.sampled_from(known_bytes()) | st.binary(max_size=40)
INTEGERS = st.sampled_from(
    [
        0,
        1,
        2,
        3,
        7,
        -1,
        4096,
        8192,
        CHUNK,
        2 * CHUNK,
        (1 << 32) + 1,
        (1 << 32) + 2,
        2**63,
        2**64 - 1,
    ]
)
FLOATS = st.sampled_from([0.0, 0.5, 5.0, -1.0, 1e300, float("inf"), float("nan")])
TEXTS = st.sampled_from(["", "w1", "w1-dram", "w2", "dram", "tcp", TENANT, "x" * 700, "float16"])


def values(kind: Any) -> st.SearchStrategy[Any]:  # noqa: ANN401  # annotations of any message
    """Values of a message field's type."""
    if kind is bytes:
        return BYTES
    if kind is bool:
        return st.booleans()
    if kind is int:
        return INTEGERS
    if kind is float:
        return FLOATS
    if kind is str:
        return TEXTS
    if kind is type(None):
        return st.none()
    origin = get_origin(kind)
    if origin in (Union, types.UnionType):
        return st.one_of([values(each) for each in get_args(kind)])
    if origin is tuple:
        return st.lists(values(get_args(kind)[0]), max_size=3).map(tuple)
    if origin is dict:
        return st.just({})
    if isinstance(kind, type) and issubclass(kind, Attention):
        return st.sampled_from(Attention)
    assert isinstance(kind, type), kind
    return structs(kind)


def structs(kind: type[Any]) -> st.SearchStrategy[Any]:
    """Values of a message or of a struct within one."""
    fields = msgspec.structs.fields(kind)
    made = st.fixed_dictionaries({field.name: values(field.type) for field in fields})
    return made.map(lambda each: kind(**each))


MESSAGES: st.SearchStrategy[Message] = st.sampled_from(MASTERED).flatmap(
    lambda tag: structs(REGISTRY[tag])
)


@settings(max_examples=150)
@given(st.lists(st.tuples(st.integers(0, 5), MESSAGES, st.booleans()), min_size=1, max_size=8))
def test_any_messages(story: list[tuple[int, Message, bool]]) -> None:
    rig, sessions = prepared()
    for number, (who, message, confirms) in enumerate(story):
        if confirms:
            rig.holds_commands = True
        before = len(rig.replies)
        rig.send(Request(sessions[who], 10_000 + number, message))
        answered = len(rig.replies) > before
        waits = rig.master.core.jobs or rig.commands or len(rig.master.core.waiting)
        assert answered or waits, message
        for command in rig.commands:
            rig.send(CommandAnswered(command.command, message))
        rig.send(CommandAnswered(CommandId(number), message))
        rig.commands.clear()
        rig.tick(0.3)
    rig.pass_time(1.0)
