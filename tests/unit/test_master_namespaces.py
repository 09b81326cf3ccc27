"""Namespaces: durable before the first plan, numbered for good, kept apart by tenant."""

from __future__ import annotations

import msgspec
import pytest

from kvstore import limits
from kvstore.errors import ConfigError
from kvstore.ids import Epoch
from kvstore.namespace import open_layout
from kvstore.wire.messages.namespaces import NamespaceOpened, OpenNamespace
from master import namespaces, tombstones
from master.state import MasterState
from master.tunables import Tunables
from tests.unit.master_rig import (
    OpenedNamespace,
    Rig,
    chain,
    failure,
    small_content,
    small_layout,
)


def opened(parts: int = 1, tenant: str = "tenant", ttl_s: float | None = None) -> OpenNamespace:
    """A request."""
    return OpenNamespace(small_content(parts, tenant), small_layout(parts), ttl_s)


def test_the_answer_waits_for_the_store() -> None:
    rig = Rig()
    rig.holds_persists = True
    assert rig.ask(rig.engine, opened()) is None
    first = rig.last_request
    assert rig.ask(rig.engine, opened()) is None
    second = rig.last_request
    assert len(rig.persists) == 1
    rig.holds_persists = False
    rig.store_all()
    answers = [rig.reply(rig.engine, request) for request in (first, second)]
    assert answers[0] == answers[1]
    assert isinstance(answers[0], NamespaceOpened)
    assert answers[0].ordinal == 1


def test_nothing_is_planned_before_the_namespace_is_durable() -> None:
    rig = Rig()
    rig.add_worker()
    rig.holds_persists = True
    assert rig.ask(rig.engine, opened()) is None
    namespace = open_layout(small_content(), small_layout())
    space = OpenedNamespace(rig, namespace, 1)
    assert failure(space.begin(chain(1, 2))).code == "unknown_namespace"
    rig.holds_persists = False
    rig.store_all()
    space.put(chain(1, 2))


def test_an_open_namespace_is_opened_again_at_once() -> None:
    rig = Rig()
    first = rig.open_namespace()
    stored = dict(rig.store)
    assert rig.open_namespace().ordinal == first.ordinal
    assert rig.store == stored


def test_ordinals_are_never_reused() -> None:
    rig = Rig()
    ordinals = [rig.open_namespace(parts).ordinal for parts in (1, 2, 4)]
    assert ordinals == [1, 2, 3]
    rig.takeover(2)
    assert rig.open_namespace(8).ordinal == 4
    assert rig.open_namespace(2).ordinal == 2


def test_a_namespaces_ttl_is_durable_before_the_answer() -> None:
    rig = Rig()
    rig.open_namespace()
    rig.holds_persists = True
    assert rig.ask(rig.engine, opened(ttl_s=60.0)) is None
    told = rig.last_request
    assert rig.ask(rig.engine, opened()) is None, "the value that holds for it is not durable yet"
    known = next(iter(rig.master.core.namespaces))
    assert rig.master.core.namespaces.get(known.namespace.id) is known, "puts go on meanwhile"
    rig.holds_persists = False
    rig.store_all()
    assert isinstance(rig.reply(rig.engine, told), NamespaceOpened)
    stored = dict(rig.store)
    rig.ask(rig.engine, opened(ttl_s=60.0))
    rig.ask(rig.engine, opened())
    assert rig.store == stored
    rig.takeover(2)
    assert [each.ttl_s for each in rig.master.core.namespaces] == [60.0]


def test_a_namespaces_replicas_are_durable_and_leave_its_ttl_alone() -> None:
    rig = Rig()
    rig.ask(rig.engine, opened(ttl_s=60.0))
    rig.ask(rig.engine, msgspec.structs.replace(opened(), replicas=3))
    rig.ask(rig.engine, opened(ttl_s=70.0))
    rig.takeover(2)
    (known,) = rig.master.core.namespaces
    assert (known.ttl_s, known.replicas) == (70.0, 3)
    stored = dict(rig.store)
    rig.ask(rig.engine, opened())
    assert rig.store == stored


def test_only_another_number_of_replicas_has_all_pages_looked_through() -> None:
    rig = Rig()
    for name in ("w1", "w2"):
        rig.add_worker(name)
    rig.ask(rig.engine, opened(ttl_s=60.0))
    rig.pass_time(60.0)
    scans = rig.master.core.replication.scans
    assert not scans
    rig.ask(rig.engine, opened(ttl_s=70.0))
    assert not scans
    rig.ask(rig.engine, msgspec.structs.replace(opened(), replicas=3))
    assert scans


def test_values_of_before_there_were_replicas_ask_for_none() -> None:
    rig = Rig()
    rig.open_namespace()
    ((key, value),) = rig.store.items()
    tag, *fields = msgspec.msgpack.decode(value[4:])
    assert fields[-1] == 0
    older = value[:4] + msgspec.msgpack.encode([tag, *fields[:-1]])
    (known,) = MasterState(Tunables(), Epoch(2), [(key, older)]).core.namespaces
    assert known.replicas == 0


@pytest.mark.parametrize("wrong", [-1, 17])
def test_a_number_of_replicas_that_is_never_right_is_named(wrong: int) -> None:
    rig = Rig()
    reply = failure(rig.ask(rig.engine, msgspec.structs.replace(opened(), replicas=wrong)))
    assert reply.text == f"replicas: got {wrong}, want 1 to 16, or 0 for as many as usual"
    assert not rig.store


@pytest.mark.parametrize("wrong", [0.0, -1.0, 0.5, 1e9, float("nan"), float("-inf")])
def test_a_ttl_that_is_never_right_is_named(wrong: float) -> None:
    reply = failure(Rig().ask(Rig().engine, opened(ttl_s=wrong)))
    assert reply.code == "bad_value"
    assert reply.text == f"ttl_s: got {wrong!r}, want 1.0 to 604800.0 seconds, or inf"


def test_another_tenants_namespace_is_refused() -> None:
    rig = Rig()
    reply = failure(rig.ask(rig.engine, opened(tenant="another")))
    assert reply.code == "access_denied"
    assert not rig.store
    operator = rig.open("operator", "", "admin")
    assert isinstance(rig.ask(operator, opened(tenant="another")), NamespaceOpened)


def test_a_bad_layout_is_refused_with_the_reason() -> None:
    rig = Rig()
    bad = OpenNamespace(small_content(2), small_layout(3))
    assert "tensor_parallel" in failure(rig.ask(rig.engine, bad)).text


def test_the_bound_on_namespaces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "NAMESPACES_MAX", 1)
    rig = Rig()
    rig.open_namespace(1)
    assert failure(rig.ask(rig.engine, opened(2))).code == "out_of_space"
    assert isinstance(rig.ask(rig.engine, opened(1)), NamespaceOpened)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        (namespaces.PREFIX + "00", b""),
        (namespaces.PREFIX + "00", b"\1\0\0\0garbage"),
        (tombstones.PREFIX + "s", b"short"),
    ],
)
def test_values_that_are_not_ours_stop_the_start(key: str, value: bytes) -> None:
    with pytest.raises(ConfigError, match=key):
        MasterState(Tunables(), Epoch(1), [(key, value)])


def test_a_value_under_another_name_stops_the_start() -> None:
    rig = Rig()
    rig.open_namespace()
    (value,) = rig.store.values()
    with pytest.raises(ConfigError, match="holds namespace"):
        MasterState(Tunables(), Epoch(2), [(namespaces.PREFIX + "00", value)])


def test_keys_of_others_are_left_alone() -> None:
    state = MasterState(Tunables(), Epoch(1), [("epoch", b"1")])
    assert len(state.core.namespaces) == 0


def test_pages_of_equal_tokens_in_two_namespaces_stay_apart() -> None:
    rig = Rig()
    rig.add_worker()
    one, two = rig.open_namespace(1), rig.open_namespace(2)
    one.put(chain(1, 3))
    two.put(chain(1, 3), parts=(0, 1))
    one.remove(chain(1, 3))
    assert two.probe(chain(1, 3)) == b"\1" * 3
