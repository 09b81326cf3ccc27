"""The Mooncake drop-in has names, arguments and numbers of the installed wheel; its settings."""

from __future__ import annotations

import inspect
import re
from typing import TYPE_CHECKING

import pytest
from mooncake import store as wheel

from kvstore.connectors import mooncake as ours
from kvstore.connectors.mooncake.settings import MASTER, NAMESPACE, SECRET_FILE, settings_of
from kvstore.errors import BadValue, Unavailable
from tests.unit.object_store import SETUP, installed

if TYPE_CHECKING:
    from pathlib import Path

ABSENT = {
    "EngramStore",
    "EngramStoreConfig",
    "MooncakeDistributedNoFRegister",
    "MooncakeHostMemAllocator",
    "BufferLeaseView",
    "QueryTaskResponse",
    "RegisteredBufferLeaseView",
    "bind_to_numa_node",
    "get_alloc_func_addr",
    "get_free_func_addr",
}
"""What README.md says is not there."""
CALLS = sorted(name for name in dir(wheel.MooncakeDistributedStore) if not name.startswith("_"))


def test_every_public_name_is_there_but_those_that_are_said_not_to_be() -> None:
    missing = {name for name in dir(wheel) if name[0] != "_" and not hasattr(ours, name)}
    assert missing == ABSENT


@pytest.mark.parametrize("call", CALLS)
def test_every_call_takes_the_arguments_of_the_wheel(call: str) -> None:
    said = getattr(wheel.MooncakeDistributedStore, call).__doc__.strip().splitlines()[0]
    mine = inspect.signature(getattr(ours.MooncakeDistributedStore, call))
    if call == "setup":
        return  # both forms: test_setup_takes_both_forms
    theirs = re.sub(r"<[^>]*>", "0", said[said.index("(") + 1 : said.rindex(")")])
    names = [name for name in re.findall(r"(\w+)(?:: )", theirs) if name != "self"]
    if "arg0" in names:  # they have no name there: as many, by place
        assert len(mine.parameters) - 1 >= len(names)
        return
    kept = [name for name, each in mine.parameters.items() if each.kind is not each.VAR_POSITIONAL]
    assert kept[1:] == names


@pytest.mark.parametrize(
    "kind", ["ObjectDataType", "ReplicaStatus", "SoftPinAction", "TaskStatus", "TaskType"]
)
def test_enumerations_have_the_numbers_of_the_wheel(kind: str) -> None:
    theirs = {name: int(each.value) for name, each in getattr(wheel, kind).__members__.items()}
    assert {each.name: each.value for each in getattr(ours, kind)} == theirs


def test_the_settings_of_a_put_have_the_defaults_of_the_wheel() -> None:
    theirs, mine = wheel.ReplicateConfig(), ours.ReplicateConfig()
    names = [name for name in dir(theirs) if not name.startswith("_")]
    assert sorted(mine.__slots__) == names
    for name in names:
        want, got = getattr(theirs, name), getattr(mine, name)
        assert got == (want if isinstance(want, int | str | list | None) else int(want)), name
    with pytest.raises(AttributeError):
        mine.with_softpin = True  # type: ignore[attr-defined]  # as a program might
    assert str(mine).startswith("ReplicateConfig: { ")


def test_setup_takes_both_forms() -> None:
    long = settings_of(SETUP, {}, {})
    assert (long.masters, long.hostname, long.tenant) == ("127.0.0.1:7700", "host:1", "default")
    assert long.namespace == "mooncake"
    words = dict(
        zip(("local_hostname", "metadata_server", "global_segment_size"), SETUP, strict=False)
    )
    config = {**words, "master_server_addr": "a:1,b:2", "tenant_id": "acme"}
    for short in (settings_of((config,), {}, {}), settings_of((), {"config": config}, {})):
        assert (short.masters, short.tenant) == ("a:1,b:2", "acme")
    by_name = settings_of(SETUP[:6], {"master_server_addr": "c:3", "tenant_id": "t"}, {})
    assert (by_name.masters, by_name.tenant) == ("c:3", "t")


def test_the_environment_names_the_pool(tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_bytes(b"s3cret\n")
    environment = {MASTER: "m:7700", NAMESPACE: "models", SECRET_FILE: str(secret)}
    found = settings_of(({"local_hostname": "h", "metadata_server": "x"},), {}, environment)
    assert (found.masters, found.namespace, found.secret()) == ("m:7700", "models", b"s3cret")
    assert settings_of(SETUP, {}, {}).secret() is None


@pytest.mark.parametrize(
    ("args", "field"),
    [
        (({"local_hostname": "h"},), "master_server_addr"),
        (({"local_hostname": "h", "master_server_addr": "etcd://e:1"},), "master_server_addr"),
        (({"master_server_addr": "m:1"},), "local_hostname"),
        (({"local_hostname": "h", "master_server_addr": "m:1", "tenant_id": "x" * 600},), "tenant"),
    ],
)
def test_wrong_settings_are_named(args: tuple[object, ...], field: str) -> None:
    with pytest.raises(BadValue, match=field):
        settings_of(args, {}, {})
    assert ours.MooncakeDistributedStore().setup(*args) == -600


def test_arguments_of_neither_form_raise_as_in_the_wheel() -> None:
    for args, kwargs in ((SETUP[:3], {}), ((*SETUP, *range(9)), {}), (SETUP, {"what": 1})):
        with pytest.raises(TypeError):
            ours.MooncakeDistributedStore().setup(*args, **kwargs)


def test_a_setup_that_reaches_nobody_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    fake = installed(monkeypatch)
    fake.fail = Unavailable("nobody listens")
    store = ours.MooncakeDistributedStore()
    assert store.setup(*SETUP) == -900
    assert store.health_check() == 1
    monkeypatch.undo()
    monkeypatch.setenv(SECRET_FILE, "/nowhere/secret")
    assert store.setup(*SETUP) == -600


def test_what_is_not_offered_says_so_in_the_form_of_the_call() -> None:
    store = ours.MooncakeDistributedStore()
    assert store.setup_dummy(1, 1, "a:1") == store.init_all("tcp", "", 1) == -1011
    assert store.mount_segment("/x", 1) == {"ret": -1011, "segment_ids": []}
    assert store.allocate_and_mount_segment(1)["ret"] == -1011
    assert store.unmount_segment([]) == store.unmount_and_free_segment([]) == -1011
    assert store.unmount_local_disk_segment() == store.save_tensor_to_safetensor("k") == -1011
    assert (
        store.create_copy_task("k", []) == store.create_move_task("k", "a", "b") == ((0, 0), -1011)
    )
    assert store.query_task((1, 2)) == (None, -1400)
    assert store.batch_get_tensor_into_cuda(["a", "b"], []) == [-1011, -1011]
    assert store.get_tensor_into_cuda("a", None) == -1011
    assert (store.alloc_from_mem_pool(1), store.get_offload_rpc_read_count()) == (0, 0)
    store.load_tensor_from_safetensor("k", "f")
