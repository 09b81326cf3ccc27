"""Torch views of pages: the same bytes, in the order that the layout names."""

from __future__ import annotations

import weakref

import pytest
import torch

from kvstore import errors
from kvstore.client import tensors
from kvstore.namespace import Attention, CacheGroup, Content, Layout, Namespace, open_layout
from kvstore.transfer.device import Move
from kvstore.transfer.memory import Memory
from tests.devices import DEVICES, device_named

LAYERS, HEADS, KEY_DIM, VALUE_DIM, TOKENS = 3, 2, 4, 6, 5


def namespace(
    attention: Attention = Attention.FULL,
    value_dim: int = VALUE_DIM,
    heads: int = HEADS,
    tensor_parallel: int = 1,
    pipeline_parallel: int = 1,
    window: int = 0,
) -> Namespace:
    group = CacheGroup(attention, LAYERS, heads, KEY_DIM, value_dim, window)
    content = Content("t", "m", "r", "", "float32", (group,), "{}")
    return open_layout(content, Layout(TOKENS, tensor_parallel, pipeline_parallel))


def test_every_element_is_where_the_order_says() -> None:
    names = namespace()
    memory = memoryview(bytearray(2 * names.page_bytes))
    flat = torch.frombuffer(memory, dtype=torch.float32)
    flat.copy_(torch.arange(flat.numel()))
    at = 0
    layers = tensors.layer_pages(memory, names)
    assert len(layers) == LAYERS
    for page in range(2):
        for layer in layers:
            for kind in (layer.keys, layer.values):
                count = kind[page].numel()
                assert kind[page].flatten().tolist() == list(range(at, at + count))
                at += count
    assert at == flat.numel()


def test_views_write_through() -> None:
    names = namespace()
    memory = memoryview(bytearray(names.page_bytes))
    layers = tensors.layer_pages(memory, names)
    layers[-1].values.fill_(1.0)
    values_bytes = HEADS * TOKENS * VALUE_DIM * 4
    assert bytes(memory[-values_bytes:]) == torch.ones(values_bytes // 4).numpy().tobytes()
    assert not any(memory[:-values_bytes])


def test_pipeline_parts_keep_the_layers_in_order() -> None:
    """Parts one after another are the whole page, so the views do not depend on the cut."""
    whole, cut = namespace(), namespace(pipeline_parallel=3)
    assert len(cut.parts) == 3
    assert cut.page_bytes == whole.page_bytes
    memory = memoryview(bytearray(whole.page_bytes))
    tensors.layer_pages(memory, whole)[1].keys.fill_(1.0)
    part = cut.parts[1]
    assert part.layer_start == 1
    assert any(memory[cut.parts[0].size_bytes :][: part.size_bytes])
    assert torch.equal(
        tensors.layer_pages(memory, cut)[1].keys, tensors.layer_pages(memory, whole)[1].keys
    )


def test_groups_follow_each_other_and_latents_have_no_values() -> None:
    latent = CacheGroup(Attention.LATENT, 2, 1, KEY_DIM + 1, 0)
    heads = CacheGroup(Attention.FULL, 1, HEADS, KEY_DIM, VALUE_DIM)
    content = Content("t", "m", "r", "", "float32", (latent, heads), "{}")
    names = open_layout(content, Layout(TOKENS))
    memory = memoryview(bytearray(names.page_bytes))
    flat = torch.frombuffer(memory, dtype=torch.float32)
    flat.copy_(torch.arange(flat.numel()))
    layers = tensors.layer_pages(memory, names)
    assert [tuple(layer.keys.shape) for layer in layers] == [
        (1, 1, TOKENS, KEY_DIM + 1), (1, 1, TOKENS, KEY_DIM + 1), (1, HEADS, TOKENS, KEY_DIM)
    ]  # fmt: skip
    assert [layer.values.numel() for layer in layers] == [0, 0, HEADS * TOKENS * VALUE_DIM]
    seen = [half.flatten() for layer in layers for half in layer]
    assert torch.equal(torch.cat(seen), flat)
    (alone,) = tensors.layer_pages(memory[-names.parts[1].size_bytes :], names, part=1)
    assert torch.equal(alone.values, layers[2].values)


@pytest.mark.parametrize(
    "odd",
    [
        namespace(Attention.SLIDING, window=8),
        namespace(tensor_parallel=2),
        open_layout(
            Content("t", "m", "r", "", "float32", (CacheGroup(Attention.FULL, 1, 1, 4, 4),), ""),
            Layout(page_tokens=TOKENS, order="kv,layer,head,token,dim"),
        ),
    ],
    ids=["sliding", "tensor_parallel", "order"],
)
def test_a_layout_without_whole_layers_is_refused(odd: Namespace) -> None:
    with pytest.raises(errors.LayoutMismatch):
        tensors.layer_pages(memoryview(bytearray(odd.page_bytes)), odd)


@pytest.mark.parametrize("extra", [-1, 1])
def test_memory_that_is_not_whole_pages_is_refused(extra: int) -> None:
    names = namespace()
    with pytest.raises(errors.LayoutMismatch, match=str(names.page_bytes)):
        tensors.layer_pages(memoryview(bytearray(names.page_bytes + extra)), names)


def test_no_memory_is_refused() -> None:
    with pytest.raises(errors.LayoutMismatch):
        tensors.layer_pages(memoryview(b""), namespace())


def test_read_only_memory_is_refused() -> None:
    with pytest.raises(errors.BadValue, match="writable"):
        tensors.tensor_view(memoryview(bytes(8)), torch.float32, (2,))


def test_dtypes_have_names_both_ways() -> None:
    for name, dtype in tensors.DTYPES.items():
        assert tensors.dtype_of(name) is dtype
        assert tensors.dtype_name(dtype) == name
    with pytest.raises(errors.BadValue, match="float64"):
        tensors.dtype_of("float64")
    with pytest.raises(errors.BadValue, match="float64"):
        tensors.dtype_name(torch.float64)


@pytest.mark.parametrize("name", DEVICES)
def test_a_tensor_is_a_block_of_its_device(name: str) -> None:
    device = device_named(name)
    tensor = torch.arange(24, dtype=torch.float32, device=name).reshape(4, 6)
    block = tensors.device_block(tensor[1:3])
    assert (block.device.name, block.size_bytes) == (device.name, 48)
    into = Memory.of("into", bytearray(48), writable=True)
    device.asked()()
    block.copy_to(into, [Move(0, 0, 48)])
    assert torch.frombuffer(into.view, dtype=torch.float32).tolist() == list(range(6, 18))
    block.copy_from(into, [Move(8, 0, 4)])
    assert tensor[1].tolist() == [6, 7, 6, 9, 10, 11]


def test_a_block_keeps_its_tensor_alive() -> None:
    tensor = torch.zeros(3, requires_grad=True)
    alive = weakref.ref(tensor.untyped_storage())
    block = tensors.device_block(tensor)
    del tensor
    assert alive() is not None
    block.close()
    assert alive() is None


def test_tensors_that_no_block_can_be_of_are_refused() -> None:
    for tensor in (torch.zeros(4, 6).T, torch.zeros(4, 6)[:, 2:], torch.zeros(0)):
        with pytest.raises(errors.BadValue, match="a tensor without gaps"):
            tensors.device_block(tensor)
    with pytest.raises(errors.ConfigError, match="device: got 'meta', want one of cpu"):
        tensors.device_block(torch.zeros(4, device="meta"))
