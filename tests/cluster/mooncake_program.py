"""A program of Mooncake Store's: makes each call, and writes down what came of it.

Not a test: tests/cluster/test_cluster_mooncake.py runs it on the installed Mooncake and, unchanged,
under `kvharbor mooncake-shim`, and compares. Arguments: the master's address, the file to write.
"""

from __future__ import annotations

import ctypes
import json
import sys
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
import torch
from mooncake.store import MooncakeDistributedStore, ReplicateConfig, SoftPinAction
from mooncake.structured_object_store import MooncakeBundleTransfer, StructuredObjectPayload

if TYPE_CHECKING:
    from collections.abc import Callable

Either: TypeAlias = Any
"""A store of Mooncake's or ours, or what comes of it."""
MIB = 1 << 20
PAGE = 4096


class Memory:
    """Registered memory of the program's own."""

    def __init__(self, store: Either, size: int, seed: int | None = None) -> None:
        """Zeros, or bytes that a seed gives."""
        data = bytes(size) if seed is None else bytes((seed + i * 7) % 251 for i in range(size))
        self._held = ctypes.create_string_buffer(data, size)
        self.at = ctypes.addressof(self._held)
        self.size = size
        assert store.register_buffer(self.at, size) == 0

    def read(self, start: int, size: int) -> bytes:
        """What lies there now."""
        return self._held.raw[start : start + size]


class Program:
    """The calls, in groups that need each other's objects."""

    def __init__(self, master: str) -> None:
        """Set up in the long form."""
        self.said: dict[str, object] = {}
        self.store: Either = MooncakeDistributedStore()
        self.note("setup", lambda: self._set_up(master))
        self.source = Memory(self.store, 64 * PAGE, seed=3)
        self.into = Memory(self.store, 64 * PAGE)

    def _set_up(self, master: str) -> object:
        return self.store.setup("127.0.0.1", "P2PHANDSHAKE", 64 * MIB, 16 * MIB, "tcp", "", master)

    def note(self, label: str, call: Callable[[], object]) -> None:
        """Write down what a call returns, or the type of what it raises."""
        assert label not in self.said, label
        try:
            self.said[label] = plain(call())
        except Exception as error:
            self.said[label] = type(error).__name__

    def bytes_in_and_out(self) -> None:
        """Whole objects."""
        store, note = self.store, self.note
        note("put", lambda: store.put("a", b"one"))
        note("put again", lambda: store.put("a", b"two"))
        note("put empty", lambda: store.put("empty", b""))
        note("put bytearray", lambda: store.put("array", bytearray(b"array")))
        note("put memoryview", lambda: store.put("view", memoryview(b"a view")[2:]))
        note("put text", lambda: store.put("text", "text"))
        note("put number as key", lambda: store.put(1, b"x"))
        note("put_parts", lambda: store.put_parts("parts", b"two", b" ", b"parts"))
        note("put_batch", lambda: store.put_batch(["b", "c"], [b"4", b"55"]))
        note("put_batch again", lambda: store.put_batch(["b", "d"], [b"x", b"666"]))
        note("put_batch unequal", lambda: store.put_batch(["b", "d"], [b"x"]))
        for key in ("a", "array", "view", "parts", "d", "no"):
            note(f"get {key}", partial(store.get, key))
            note(f"get_size {key}", partial(store.get_size, key))
            note(f"is_exist {key}", partial(store.is_exist, key))
        note("get_batch", lambda: store.get_batch(["a", "no", "c"]))
        note("batch_is_exist", lambda: store.batch_is_exist(["a", "no", "c"]))
        note("batch_is_exist none", lambda: store.batch_is_exist([]))
        note("get_batch none", lambda: store.get_batch([]))
        note("get_buffer", lambda: handle(store.get_buffer("parts")))
        note("get_buffer no", lambda: store.get_buffer("no"))
        note("batch_get_buffer", lambda: [handle(h) for h in store.batch_get_buffer(["a", "no"])])
        note("unicode key", lambda: store.put("schlüssel/é", b"k"))
        note("get unicode key", lambda: store.get("schlüssel/é"))

    def memory_by_address(self) -> None:
        """From, into, several buffers, ranges."""
        store, note, at, to = self.store, self.note, self.source.at, self.into.at
        keys, places = ["p1", "p2"], [at, at + PAGE]
        note("put_from", lambda: store.put_from("p0", at, 100))
        note("put_from nothing", lambda: store.put_from("p-", at, 0))
        note("batch_put_from", lambda: store.batch_put_from(keys, places, [PAGE, 3000]))
        note("batch_put_from again", lambda: store.batch_put_from(keys, places, [PAGE, 10]))
        note("batch_put_from unequal", lambda: store.batch_put_from(keys, places, [PAGE]))
        note("get_into", lambda: store.get_into("p0", to, PAGE))
        note("get_into bytes", lambda: self.into.read(0, 100) == self.source.read(0, 100))
        note("get_into too small", lambda: store.get_into("p0", to, 99))
        note("get_into no", lambda: store.get_into("no", to, 99))
        spots, rooms = [to, to + PAGE, to + 2 * PAGE], [PAGE, 10, PAGE]
        note("batch_get_into", lambda: store.batch_get_into(["p2", "no", "p1"], spots, rooms))
        note(
            "batch_get_into bytes",
            lambda: self.into.read(2 * PAGE, PAGE) == self.source.read(0, PAGE),
        )
        pointers, sizes = [[at, at + 2 * PAGE], [at + PAGE]], [[500, 700], [900]]
        multi = store.batch_put_from_multi_buffers
        note("put multi", lambda: multi(["m1", "m2"], pointers, sizes))
        note("get_size multi", lambda: store.get_size("m1"))
        targets, spaces = [[to + 2 * PAGE, to], [to + PAGE]], [[500, 700], [900]]
        multi_into = store.batch_get_into_multi_buffers
        note("get multi", lambda: multi_into(["m1", "m2"], targets, spaces))
        note("get multi bytes", lambda: self.into.read(0, 700) == self.source.read(2 * PAGE, 700))
        note("get multi no", lambda: multi_into(["no"], [[to]], [[10]]))
        note("with metadata", lambda: store.put_from_with_metadata("md", at + 10, at, 20, 5))
        note("get with metadata", lambda: store.get("md"))
        note(
            "ranges",
            lambda: store.get_into_ranges([to], [["p1"]], [[[0, 20]]], [[[1, 30]]], [[[4, 3]]]),
        )
        note("ranges bytes", lambda: self.into.read(20, 3) == self.source.read(30, 3))
        note(
            "ranges beyond",
            lambda: store.get_into_ranges([to], [["p0"]], [[[0]]], [[[99]]], [[[2]]]),
        )
        note("ranges no", lambda: store.get_into_ranges([to], [["no"]], [[[0]]], [[[0]]], [[[2]]]))
        more = Memory(store, PAGE)
        note("register again", lambda: store.register_buffer(more.at, PAGE))
        note("unregister", lambda: store.unregister_buffer(more.at))
        note("unregister again", lambda: store.unregister_buffer(more.at))

    def sessions(self) -> None:
        """Objects that are put and read range by range."""
        store, note, at, to = self.store, self.note, self.source.at, self.into.at
        note("session start", lambda: store.batch_put_session_start(["s1", "s2"], [200, 100]))
        put = store.batch_put_from_multi_buffer_ranges
        note("session first range", lambda: put(["s1"], [[at]], [[120]], [[80]]))
        note("session unseen", lambda: store.is_exist("s1"))
        note("session second range", lambda: put(["s1"], [[at + 120]], [[80]], [[0]]))
        note("session revoke", lambda: store.batch_put_session_revoke(["s2"]))
        note("session end", lambda: store.batch_put_session_end(["s1"]))
        note("session seen", lambda: [store.is_exist(key) for key in ("s1", "s2")])
        note(
            "session value",
            lambda: store.get("s1") == self.source.read(120, 80) + self.source.read(0, 120),
        )
        note("session of one that is there", lambda: store.batch_put_session_start(["s1"], [200]))
        note("get session start", lambda: store.batch_get_session_start(["s1", "no"]))
        get = store.batch_get_into_multi_buffer_ranges
        note("get session ranges", lambda: get(["s1"], [[to, to + 100]], [[30, 20]], [[80, 0]]))
        note("get session bytes", lambda: self.into.read(0, 30) == self.source.read(0, 30))
        note("get session end", lambda: store.batch_get_session_end(["s1"]))

    def upserts(self) -> None:
        """In place of what is there."""
        store, note, at = self.store, self.note, self.source.at
        note("upsert new", lambda: store.upsert("u", b"first"))
        note("upsert same size", lambda: store.upsert("u", b"again"))
        note("upsert other size", lambda: store.upsert("u", b"longer than before"))
        note("get upserted", lambda: store.get("u"))
        note("upsert_parts", lambda: store.upsert_parts("u", b"p", b"q"))
        note("upsert_batch", lambda: store.upsert_batch(["u", "v"], [b"1", b"2"]))
        note("upsert_from", lambda: store.upsert_from("v", at, 50))
        note("batch_upsert_from", lambda: store.batch_upsert_from(["u", "w"], [at, at], [10, 20]))
        note("get_size upserted", lambda: [store.get_size(key) for key in ("u", "v", "w")])

    def settings_of_a_put(self) -> None:
        """Replicas and pins."""
        store, note, config = self.store, self.note, ReplicateConfig()
        config.replica_num = 2
        note("two replicas", lambda: store.put("r2", b"x", config))
        config.replica_num, config.soft_pin_action = 1, SoftPinAction.ENABLE
        note("soft pin", lambda: store.put("soft", b"x", config))
        config.soft_pin_ttl_ms = 60_000
        note("soft pin for a time", lambda: store.put("soft 2", b"x", config))
        hard = ReplicateConfig()
        hard.with_hard_pin = True
        hard.preferred_segment = store.get_hostname()
        note("hard pin", lambda: store.put("hard", b"x", hard))
        note("unknown setting", lambda: setattr(hard, "with_softpin", True))
        note("replicas", lambda: described(store.get_replica_desc("a")))
        note("replicas no", lambda: store.get_replica_desc("no"))
        note("batch replicas", lambda: sorted(store.batch_get_replica_desc(["a", "c", "no"])))

    def tensors(self) -> None:
        """Whole and in shards."""
        store, note, to = self.store, self.note, self.into.at
        tensor = torch.arange(24, dtype=torch.float32).reshape(4, 6)
        half = torch.arange(5).to(torch.bfloat16)
        note("put_tensor", lambda: store.put_tensor("t", tensor))
        note("batch_put_tensor", lambda: store.batch_put_tensor(["t1", "t2"], [half, tensor[:2]]))
        note("get_tensor", lambda: same(store.get_tensor("t"), tensor))
        note("get_tensor no", lambda: store.get_tensor("no"))
        note("get_tensor of bytes", lambda: store.get_tensor("a"))
        note(
            "batch_get_tensor",
            lambda: [same(t, half) for t in store.batch_get_tensor(["t1", "no"])],
        )
        note("tensor object", lambda: store.get("t")[:40].hex())
        note("tensor size", lambda: store.get_size("t"))
        note("put no tensor", lambda: store.put_tensor("t3", [1, 2]))
        note("put complex", lambda: store.put_tensor("t4", torch.zeros(2, dtype=torch.complex64)))
        note("put scalar", lambda: store.put_tensor("t5", torch.tensor(7.0)))
        note("get scalar", lambda: list(store.get_tensor("t5").shape))
        note("put strided", lambda: store.put_tensor("t6", tensor.t()))
        note("get strided", lambda: same(store.get_tensor("t6"), tensor.t()))
        note("upsert_tensor", lambda: store.upsert_tensor("t", tensor + 1))
        note("get upserted tensor", lambda: same(store.get_tensor("t"), tensor + 1))
        note("get_tensor_into", lambda: same(store.get_tensor_into("t", to, 64 * PAGE), tensor + 1))
        note("put_tensor_from", lambda: store.put_tensor_from("t7", to, store.get_size("t")))
        note("get put_tensor_from", lambda: same(store.get_tensor("t7"), tensor + 1))
        note("pub_tensor", lambda: store.pub_tensor("t8", half, ReplicateConfig()))
        note(
            "put with tp",
            lambda: store.put_tensor_with_tp("weight", tensor, tp_size=2, split_dim=1),
        )
        note(
            "exist with tp", lambda: store.batch_is_exist(["weight", "weight_tp_0", "weight_tp_1"])
        )
        note(
            "get with tp", lambda: same(store.get_tensor_with_tp("weight", 1, 2, 1), tensor[:, 3:])
        )
        note("with parallelism", lambda: store.put_tensor_with_parallelism("pw", tensor))
        note("get with parallelism", lambda: same(store.get_tensor_with_parallelism("pw"), tensor))

    def structured(self) -> None:
        """What Mooncake's own library of structured objects does with the store."""
        transfer = MooncakeBundleTransfer(self.store, key_prefix="structured")
        tokens, tensor = np.arange(24, dtype=np.int32).reshape(6, 4), torch.arange(5.0)
        buffers = {"tokens": tokens, "text": b"text", "tensor": tensor}
        wish = StructuredObjectPayload(metadata={"step": 7}, buffers=buffers)
        put = transfer.put_structured_object(wish)
        whole = transfer.materialize(transfer.read_spec(put))
        self.note("structured metadata", lambda: whole.metadata["step"])
        self.note("structured array", lambda: bool((whole.objects["tokens"] == tokens).all()))
        self.note("structured bytes", lambda: bytes(whole.objects["text"]))
        self.note("structured tensor", lambda: same(whole.objects["tensor"], tensor))
        rows = transfer.read_spec(put).slice_member("tokens", axis=0, start=2, end=5)
        part = transfer.materialize(rows.select_members(["tokens"])).objects["tokens"]
        self.note("structured rows", lambda: bool((part == tokens[2:5]).all()))

    def removals(self) -> None:
        """By name, by pattern, all."""
        store, note = self.store, self.note
        store.put_batch([f"rm/{number}" for number in range(6)], [b"x"] * 6)
        note("remove", lambda: store.remove("rm/0"))
        note("remove again", lambda: store.remove("rm/0"))
        note("remove forced", lambda: store.remove("rm/1", True))
        note("batch_remove", lambda: store.batch_remove(["rm/2", "no"], True))
        note("remove_by_regex", lambda: store.remove_by_regex("^rm/[34]$", True))
        note("left by regex", lambda: store.batch_is_exist(["rm/3", "rm/4", "rm/5"]))
        note("remove just asked for", lambda: store.remove("rm/5"))
        note("remove_all leaves", lambda: store.remove_all(True) > 10)
        note("after remove_all", lambda: store.batch_is_exist(["a", "t", "rm/5"]))

    def rest(self) -> None:
        """Health, refusals, the end."""
        store, note = self.store, self.note
        note("health_check", store.health_check)
        note("get_hostname", lambda: isinstance(store.get_hostname(), str))
        note("query_task", lambda: store.query_task((1, 2))[0])
        note("close", store.close)
        note("health_check closed", store.health_check)
        note("setup by dict", lambda: self.store.setup({"metadata_server": "P2PHANDSHAKE"}))


def plain(value: object) -> object:
    """The value as JSON has it."""
    if isinstance(value, bytes):
        return f"bytes:{value.hex()}"
    if isinstance(value, list | tuple):
        return [plain(each) for each in value]
    if value is None or isinstance(value, str | bool):
        return value
    return int(value) if isinstance(value, int) else repr(value)


def handle(found: Either) -> object:
    """What a buffer handle says of itself."""
    if found is None:
        return None
    at = ctypes.string_at(found.ptr(), found.size())
    return [found.size(), len(found), bytes(memoryview(found)).hex(), at.hex()]


def described(replicas: Either) -> object:
    """What is comparable of replica descriptors."""
    return [
        [
            each.status.name,
            each.is_memory_replica(),
            each.get_memory_descriptor().buffer_descriptor.size,
        ]
        for each in replicas
    ]


def same(got: Either, want: torch.Tensor) -> object:
    """Whether a tensor is as it should be; None for none."""
    if got is None:
        return None
    return got.dtype == want.dtype and got.shape == want.shape and bool(torch.equal(got, want))


def main() -> None:
    """Make all calls."""
    master, result = sys.argv[1:]
    program = Program(master)
    program.bytes_in_and_out()
    program.memory_by_address()
    program.sessions()
    program.upserts()
    program.settings_of_a_put()
    program.tensors()
    program.structured()
    program.removals()
    program.rest()
    Path(result).write_text(json.dumps(program.said, indent=1))


if __name__ == "__main__":
    main()
