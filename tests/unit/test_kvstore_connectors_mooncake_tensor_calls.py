"""The Mooncake drop-in's tensors: their format, which is the installed wheel's, and their calls."""

from __future__ import annotations

import ctypes
from typing import TYPE_CHECKING

import pytest
import torch
from mooncake import store as wheel

from kvstore.connectors import mooncake as ours
from kvstore.connectors.mooncake import ReadTarget, TensorParallelism, tensor_format
from kvstore.connectors.mooncake.tensor_format import DTYPES, HEADER_BYTES, header_of
from tests.unit.object_store import installed, region, set_up

if TYPE_CHECKING:
    from collections.abc import Iterator

    from kvstore.connectors.mooncake import MooncakeDistributedStore

NOT_OFFERED = -1011


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch) -> Iterator[MooncakeDistributedStore]:
    with set_up(installed(monkeypatch)) as made:
        yield made


def there(tensor: torch.Tensor | None) -> torch.Tensor:
    assert tensor is not None
    return tensor


def numbers(*shape: int) -> torch.Tensor:
    return torch.arange(torch.Size(shape).numel(), dtype=torch.float32).reshape(shape)


@pytest.mark.parametrize("name", DTYPES)
def test_headers_are_those_of_the_wheel(name: str) -> None:
    dtype = getattr(torch, name)
    assert wheel._tensor_metadata_size() == HEADER_BYTES  # noqa: SLF001 -- nothing else tells
    for shape in ((3,), (2, 5), (1, 2, 3, 4, 1, 2, 1, 3), (0, 4)):
        tensor = torch.zeros(shape, dtype=dtype)
        packed, _, size, _ = wheel._serialize_tensor(tensor)  # noqa: SLF001 -- as above
        header = header_of(tensor)
        assert (header.pack(), header.data_bytes) == (packed, size)
        assert tensor_format.unpack(packed, HEADER_BYTES + size) == header


def test_the_helpers_of_mooncakes_own_library_are_those_of_the_wheel() -> None:
    tensor = numbers(3, 4).t()
    packed, at, size, kept = ours._serialize_tensor(tensor)  # noqa: SLF001 -- its name there
    theirs = wheel._serialize_tensor(tensor.contiguous())  # noqa: SLF001 -- as above
    assert (packed, size) == (theirs[0], theirs[2])
    value = packed + ctypes.string_at(at, size)
    assert at == kept.data_ptr()
    assert torch.equal(ours._deserialize_tensor(value), tensor)  # noqa: SLF001 -- as above
    assert ours._tensor_metadata_size() == HEADER_BYTES  # noqa: SLF001 -- as above
    with pytest.raises(ValueError, match="no tensor that can be stored"):
        ours._serialize_tensor([1])  # noqa: SLF001 -- as above
    with pytest.raises(ValueError, match="hold no tensor"):
        ours._deserialize_tensor(b"short")  # noqa: SLF001 -- as above


def test_a_tensor_comes_back_as_it_was_put(store: MooncakeDistributedStore) -> None:
    tensors = [
        numbers(3, 4),
        numbers(4, 6).transpose(0, 1)[::2],
        torch.tensor([True, False]),
        numbers(5).to(torch.bfloat16),
        torch.empty(0, 4),
        torch.tensor(7.5),
        torch.tensor([1 + 2j]).conj().imag,
    ]
    keys = [str(number) for number in range(len(tensors))]
    assert store.batch_put_tensor(keys, tensors) == [0] * len(keys)
    for tensor, got in zip(tensors, store.batch_get_tensor(keys), strict=True):
        assert got is not None
        assert (got.dtype, got.shape) == (tensor.dtype, tensor.shape)
        assert torch.equal(got, tensor)
    assert store.put_tensor("0", numbers(1)) == 0
    assert torch.equal(there(store.get_tensor("0")), tensors[0]), "a put keeps what is there"
    assert store.upsert_tensor("0", numbers(1)) == 0
    assert there(store.get_tensor("0")).shape == (1,)


def test_what_is_no_tensor_is_refused_or_none(store: MooncakeDistributedStore) -> None:
    assert store.batch_put_tensor(["a", "b"], [numbers(2), [1, 2]]) == [0, -600]
    assert store.put_tensor("c", torch.zeros(2, dtype=torch.complex64)) == -600
    assert store.put_tensor("d", torch.zeros([1] * 9)) == -600
    for other in (numbers(3).to_sparse(), torch.empty(3, device="meta")):
        assert store.put_tensor("e", other) == -600
    store.put("bytes", bytes(500))
    header = header_of(numbers(4)).pack()
    store.put("short", header + bytes(15))
    wrong_shape = tensor_format.TensorHeader("float32", (5,), 16).pack()
    store.put("shape", wrong_shape + bytes(16))
    store.put("hollow", tensor_format.TensorHeader("float32", (100, 1 << 50), 0).pack())
    keys = ["a", "bytes", "short", "shape", "no", "hollow"]
    assert [each is not None for each in store.batch_get_tensor(keys)] == [
        True, False, False, False, False, False,
    ]  # fmt: skip


def test_tensors_lie_in_memory_with_their_headers(store: MooncakeDistributedStore) -> None:
    tensor = numbers(2, 3)
    packed = header_of(tensor).pack() + bytes(tensor.numpy().tobytes())
    _source, at = region(packed)
    assert store.batch_put_tensor_from(["a", "b"], [at, at], [len(packed), 10]) == [0, -600]
    assert torch.equal(there(store.get_tensor("a")), tensor)
    into, to = region(bytes(1000))
    got = store.get_tensor_into("a", to, 1000)
    assert got is not None
    assert torch.equal(got, tensor)
    assert got.data_ptr() == to + HEADER_BYTES, "it shares the program's memory"
    assert into.raw[: len(packed)] == packed
    assert store.get_tensor_into("a", to, 10) is store.get_tensor_into("no", to, 1000) is None
    ctypes.memset(at + HEADER_BYTES, 0, 4)
    assert store.upsert_tensor_from("a", at, len(packed)) == 0
    assert there(store.get_tensor("a"))[0, 0] == 0
    assert store.put_tensor_with_tp_from("w", at, len(packed), 0, 3, 1) == 0
    assert there(store.get_tensor_with_tp("w", 1, 3)).flatten().tolist() == [1.0, 4.0]


def test_shards_of_all_ranks_lie_under_keys_of_their_own(store: MooncakeDistributedStore) -> None:
    weight = numbers(4, 6)
    assert store.put_tensor_with_tp("w", weight, tp_size=2, split_dim=1) == 0
    assert store.batch_is_exist(["w", "w_tp_0", "w_tp_1", "w_tp_2"]) == [0, 1, 1, 0]
    for rank in range(2):
        shard = store.get_tensor_with_tp("w", rank, 2, 1)
        assert torch.equal(there(shard), weight.chunk(2, 1)[rank])
    assert store.put_tensor_with_tp("whole", weight) == 0
    assert torch.equal(there(store.get_tensor_with_tp("whole")), weight)
    assert store.batch_put_tensor_with_tp(["x", "y"], [weight, weight[:1]], 0, 3) == [-600, -600]
    assert store.put_tensor_with_tp("z", weight, 0, 2, 5) == -600
    _into, to = region(bytes(1000))
    got = store.batch_get_tensor_with_tp_into(["w", "no"], [to, to], [500, 500], 1, 2)
    assert [each is None for each in got] == [False, True]
    assert store.batch_get_tensor_with_tp(["w"], 5, 8) == [None]


def test_tensors_of_other_parallelism_are_whole_or_refused(
    store: MooncakeDistributedStore,
) -> None:
    tensor, cut, target = numbers(4), TensorParallelism(), ReadTarget()
    assert store.put_tensor_with_parallelism("a", tensor) == 0
    assert store.batch_upsert_tensor_with_parallelism(["a", "b"], [tensor + 1, tensor]) == [0, 0]
    assert torch.equal(there(store.get_tensor_with_parallelism("a", target)), tensor + 1)
    assert store.put_tensor_with_parallelism("c", tensor, cut) == NOT_OFFERED
    assert store.upsert_tensor_with_parallelism("a", tensor, cut) == NOT_OFFERED
    assert store.put_tensor_with_parallelism("c", tensor, writer_partition=(0, 2, 0)) == NOT_OFFERED
    target.mode = "full"
    assert store.get_tensor_with_parallelism("a", target) is None
    packed = header_of(tensor).pack() + bytes(tensor.numpy().tobytes())
    _source, at = region(packed)
    assert store.put_tensor_with_parallelism_from("d", at, len(packed)) == 0
    assert store.upsert_tensor_with_parallelism_from("d", at, len(packed)) == 0
    into, to = region(bytes(len(packed)))
    got = store.get_tensor_with_parallelism_into("d", to, len(packed))
    assert torch.equal(there(got), tensor)
    assert store.get_tensor_with_parallelism_into("d", to, len(packed), target) is None
    assert into.raw == packed
