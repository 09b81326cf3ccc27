"""What every device promises: ranges, copies, room, and blocks that other processes open."""

from __future__ import annotations

import contextlib
import gc
import os
import subprocess
import sys
import threading
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import torch

from kvstore.errors import BadValue, BufferClosed, ConfigError, OutOfSpace, Unavailable
from kvstore.transfer.buffer import Buffer, sealed_memfd
from kvstore.transfer.device import CpuDevice, Handle, Move, open_device
from kvstore.transfer.memory import Memory
from tests.devices import DEVICES, device_named

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from kvstore.transfer.device import Block, Device

    Ask = Callable[..., str]

ROOT = Path(__file__).parents[2]
SIZE = 1 << 16
DATA = bytes(range(256)) * (SIZE // 256)


@pytest.fixture(params=DEVICES)
def device(request: pytest.FixtureRequest) -> Device:
    return device_named(request.param)


def host(data: bytes) -> Memory:
    return Memory.of("host", bytearray(data), writable=True)


def block_with(device: Device, data: bytes) -> Block:
    block = device.allocate(len(data))
    block.copy_from(host(data), [Move(0, 0, len(data))])
    return block


def held_by(block: Block) -> bytes:
    into = host(bytes(block.size_bytes))
    block.copy_to(into, [Move(0, 0, block.size_bytes)])
    return bytes(into.view)


def test_bytes_go_in_and_out_at_any_range(device: Device) -> None:
    block = block_with(device, DATA)
    block.copy_from(host(b"abcdefgh"), [Move(100, 2, 3), Move(SIZE - 1, 0, 1), Move(0, 7, 1)])
    want = bytearray(DATA)
    want[100:103], want[-1:], want[:1] = b"cde", b"a", b"h"
    assert held_by(block) == want
    into = host(bytes(8))
    block.copy_to(into, [Move(1, 100, 3), Move(7, SIZE - 1, 1)])
    assert bytes(into.view) == b"\0cde\0\0\0a"


def test_blocks_of_one_device_copy_to_each_other(device: Device) -> None:
    first, second = block_with(device, DATA), block_with(device, bytes(SIZE))
    second.copy_from(first, [Move(4096, 1, 5000), Move(0, SIZE - 2, 2)])
    want = bytearray(SIZE)
    want[4096:9096], want[:2] = DATA[1:5001], DATA[-2:]
    assert held_by(second) == want


@pytest.mark.parametrize(
    "wrong",
    [Move(-1, 0, 1), Move(0, -1, 1), Move(0, 0, -1), Move(SIZE, 0, 1), Move(SIZE - 7, 0, 8),
     Move(0, 1, 8), Move(0, 1 << 63, 1), Move(0, 0, 1 << 63)],
)  # fmt: skip
def test_a_range_outside_of_either_side_is_refused_and_nothing_copied(
    device: Device, wrong: Move
) -> None:
    block, small = block_with(device, DATA), block_with(device, bytes(8))
    good = Move(0, 0, 8)
    for source in (host(bytes(8)), small):
        with pytest.raises(BadValue, match="move: got Move"):
            block.copy_from(source, [good, wrong])
    into = host(bytes(8))
    with pytest.raises(BadValue, match="move: got Move"):
        block.copy_to(into, [good, Move(wrong.source, wrong.to, wrong.size_bytes)])
    assert held_by(block) == DATA
    assert bytes(into.view) == bytes(8)


@pytest.mark.parametrize("size", [0, -1, True, 1.5])
def test_a_block_has_a_size(device: Device, size: int) -> None:
    with pytest.raises(BadValue, match="size_bytes"):
        device.allocate(size)


def test_a_block_that_does_not_fit_is_refused_with_both_numbers(device: Device) -> None:
    with pytest.raises(OutOfSpace, match=rf"{device.name} has \d+ bytes free.* {1 << 50}"):
        device.allocate(1 << 50)


def test_memory_of_a_closed_block_can_be_had_again(device: Device) -> None:
    size = 1 << 30 if device.name != "cpu" else SIZE
    block = device.allocate(size)
    before = device.free_bytes
    block.close()
    device.trim()
    assert device.free_bytes >= before + size
    block = device.allocate(size)
    del block  # nobody closed it
    gc.collect()
    device.trim()
    assert device.free_bytes >= before + size


def test_a_closed_block_is_refused(device: Device) -> None:
    block = block_with(device, DATA)
    block.close()
    block.close()
    for use in (lambda: held_by(block), block.export, lambda: block.address):
        with pytest.raises(BufferClosed):
            use()


def test_memory_of_others_is_used_where_it_lies(device: Device) -> None:
    owner = block_with(device, DATA)
    wrapped = device.wrap(owner.address + 256, 512, owner)
    wrapped.copy_from(host(b"x" * 512), [Move(0, 0, 512)])
    assert held_by(owner) == DATA[:256] + b"x" * 512 + DATA[768:]
    wrapped.close()
    assert owner.address


def test_pinned_memory_copies_as_any_other(device: Device) -> None:
    buffer = Buffer(1, SIZE)
    unpin = device.pin(buffer.address, SIZE)
    buffer.view[:] = DATA
    block = device.allocate(SIZE)
    block.copy_from(buffer.memory, [Move(0, 0, SIZE)])
    assert held_by(block) == DATA
    unpin()
    buffer.close()


@contextlib.contextmanager
def opener(device: Device, handle: Handle, descriptors: tuple[int, ...]) -> Iterator[Ask]:
    """Another process that opens the block: it answers with what it prints next."""
    program = [
        sys.executable, "-P", "-m", "tests.contract.device_opener", device.name, handle.device,
        str(handle.size_bytes), handle.ipc.hex(), str(handle.offset), *map(str, descriptors),
    ]  # fmt: skip
    with subprocess.Popen(
        program,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        pass_fds=descriptors,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    ) as child:
        assert child.stdin is not None
        assert child.stdout is not None
        ask, answers = child.stdin, child.stdout

        def next_answer(question: str = "") -> str:
            ask.write(question)
            ask.flush()
            return answers.readline().strip()

        yield next_answer
        ask.close()


def test_another_process_reads_a_block_and_cannot_write_it(device: Device) -> None:
    block = block_with(device, DATA)
    with opener(device, block.export(), block.descriptors) as ask:
        assert ask() == "read-only block"
        assert bytes.fromhex(ask("show\n")) == DATA
        block.copy_from(host(b"new"), [Move(500, 0, 3)])
        assert bytes.fromhex(ask("show\n")) == DATA[:500] + b"new" + DATA[503:]
    assert held_by(block) == DATA[:500] + b"new" + DATA[503:]


def test_a_handle_that_names_more_than_there_is_is_refused(device: Device) -> None:
    block = block_with(device, DATA)
    named = block.export()
    more = Handle(named.device, 1 << 40, named.ipc, named.offset)
    with opener(device, more, block.descriptors) as ask:
        assert ask().startswith("refused ")


def test_a_handle_of_another_device_is_refused(device: Device) -> None:
    fd = sealed_memfd("strange", SIZE)
    with pytest.raises(BadValue, match=r"handle\.device: got 'cuda-ff', want"):
        device.open(Handle("cuda-ff", SIZE), [fd])
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(fd)


@pytest.mark.gpu
@pytest.mark.parametrize("device", ["cuda:0"], indirect=True)
def test_a_name_of_no_memory_is_refused(device: Device) -> None:
    for ipc, error in ((b"", BadValue), (b"\0" * 63, BadValue), (b"\0" * 64, Unavailable)):
        with pytest.raises(error):
            device.open(Handle(device.identity, SIZE, ipc), [])


@pytest.mark.gpu
@pytest.mark.parametrize("device", ["cuda:0"], indirect=True)
def test_a_tensor_in_the_middle_of_an_allocation_is_shared_from_there(device: Device) -> None:
    whole = block_with(device, DATA)
    middle = device.wrap(whole.address + 512, 1024, whole)
    with opener(device, middle.export(), ()) as ask:
        assert ask() == "read-only block"
        assert bytes.fromhex(ask("show\n")) == DATA[512:1536]
    assert not device.is_read_only_enforced


@pytest.mark.gpu
@pytest.mark.parametrize("device", ["cuda:0"], indirect=True)
def test_work_of_a_stream_of_ones_own_is_waited_for_in_another_thread(device: Device) -> None:
    tensor = torch.zeros(SIZE, dtype=torch.uint8, device=device.name)
    block = device.wrap(tensor.data_ptr(), SIZE, tensor)
    torch.cuda.synchronize()
    found: list[bytes] = []

    def look(done: Callable[[], object]) -> None:
        done()
        found.append(held_by(block))

    work = torch.zeros(8192, 8192, device=device.name)
    stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]  # torch annotates it not
    with torch.cuda.stream(stream):
        for _ in range(40):  # about a second
            work = work @ work
        tensor.fill_(7)
        thread = threading.Thread(target=look, args=(device.asked(),))
    thread.start()
    thread.join()
    assert found == [b"\7" * SIZE]


def test_a_cpu_block_is_mapped_read_only_by_who_opened_it() -> None:
    device = CpuDevice()
    block = block_with(device, DATA)
    opened = device.open(block.export(), [os.dup(block.descriptors[0])])
    assert held_by(opened) == DATA
    (line,) = (
        line for line in Path("/proc/self/maps").read_text().splitlines()
        if line.startswith(f"{opened.address:x}-")
    )  # fmt: skip
    assert line.split()[1] == "r--s"
    assert device.is_read_only_enforced
    opened.close()


def test_only_sealed_memory_is_opened() -> None:
    device = CpuDevice()
    unsealed = os.memfd_create("loose", os.MFD_ALLOW_SEALING)
    os.ftruncate(unsealed, SIZE)
    with pytest.raises(BadValue, match="a memfd that can shrink"):
        device.open(Handle("cpu", SIZE), [unsealed])
    with pytest.raises(BadValue, match="size_bytes"):
        device.open(Handle("cpu", SIZE + 1), [sealed_memfd("short", SIZE)])
    with pytest.raises(BadValue, match="descriptors: got 0"):
        device.open(Handle("cpu", SIZE), [])


def test_memory_that_the_cpu_device_did_not_make_is_not_shared() -> None:
    device = CpuDevice()
    block = block_with(device, DATA)
    opened = device.open(block.export(), [os.dup(block.descriptors[0])])
    wrapped = device.wrap(block.address, SIZE, block)
    for other in (opened, wrapped):
        assert not other.descriptors
        with pytest.raises(BadValue, match="want"):
            other.export()


@pytest.mark.parametrize("name", ["cuda:99", "cuda", "hbm", ""])
def test_an_absent_device_is_refused_with_those_there_are(name: str) -> None:
    with pytest.raises(ConfigError, match=rf"device: got '{name}', want one of cpu"):
        open_device(name)
