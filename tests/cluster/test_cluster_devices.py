"""`kvharbor up --hbm` with real processes: pages put on a device, read, gone with the worker."""

from __future__ import annotations

import asyncio
import signal
from collections import Counter
from typing import TYPE_CHECKING

import pytest
import torch

from kvstore import AsyncKVStore, BadValue, Hit, Miss, MissReason, Stored
from kvstore.client.tensors import device_block
from kvstore.exit_codes import ExitCode
from kvstore.transfer import worker_devices
from kvstore.transfer.device import Move, open_device
from kvstore.transfer.memory import Memory
from tests.cluster.pages import SIZE, Pages
from tests.cluster.transports import TRANSPORTS, every_transport
from tests.cluster.up import FREE_PORTS, Up, kvharbor, remove_segments
from tests.devices import DEVICES, device_named, served_device
from tests.fakes import payload

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from kvstore import OpenedNamespace

pytestmark = [pytest.mark.cluster, pytest.mark.slow]


@pytest.fixture
def data_dir(tmp_path: Path) -> Iterator[Path]:
    """The data folder of a pool that leaves nothing in /dev/shm."""
    folder = tmp_path / "pool"
    yield folder
    remove_segments(folder)


@pytest.fixture(scope="module", params=DEVICES)
def lent(request: pytest.FixtureRequest) -> str:
    """The option that lends a device."""
    return f"--hbm={device_named(request.param).name}:64MiB"


@pytest.fixture(scope="module", params=TRANSPORTS)
def transport(request: pytest.FixtureRequest) -> str:
    """Each transport that we offer; the tests of one follow each other, on one pool."""
    return str(request.param)


only_shm = pytest.mark.parametrize("transport", ["shm"], indirect=True, scope="module")


@pytest.fixture(scope="module")
def lending(transport: str, lent: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Up]:
    """A pool that lends the device and offers the transport, for the tests that only use it."""
    folder = tmp_path_factory.mktemp("lending") / "pool"
    with Up(folder, *offering(transport, lent, folder)) as up:
        yield up
    remove_segments(folder)


@pytest.fixture
def pages(lending: Up, transport: str, request: pytest.FixtureRequest) -> Iterator[Pages]:
    """A store on that pool, and a namespace that no other test uses."""
    with Pages(lending.master, transport, request.node.nodeid) as made:
        yield made


def offering(transport: str, lent: str, data_dir: Path) -> list[str]:
    """The options of a pool that lends a device and offers this transport."""
    if transport != "mooncake":
        return [lent]
    served_device(named(lent))
    return [lent, every_transport(data_dir)]


def named(lent: str) -> str:
    """The device that the option lends."""
    return lent.removeprefix("--hbm=").removesuffix(":64MiB")


def sealed_bytes(pages: Pages) -> Counter[str]:
    """Bytes of readable pages, by tier."""
    return Counter({each.tier: each.sealed_bytes for each in pages.store.stat().segments})


def test_pages_are_put_on_a_device_and_read(pages: Pages) -> None:
    opened = pages.open()
    asked, usual = opened.chain(range(64)), opened.chain(range(100, 132))
    before = sealed_bytes(pages)
    assert pages.put(opened, asked, tier="hbm") == [Stored()] * 16
    pages.store_all(opened, usual)
    assert sealed_bytes(pages) - before == {"hbm": 1 << 20, "dram": 1 << 19}
    pages.assert_readable(opened, asked)
    with pages.store.views(pages.store.match_prefix(opened, asked)) as views:
        assert views == [Miss(MissReason.UNREACHABLE)] * 16
    assert pages.store.remove(opened, asked) == [True] * 16
    assert pages.store.probe(opened, asked) == [False] * 16


@pytest.mark.parametrize("tier", ["hbm", "dram"])
def test_pages_go_from_a_tensor_to_the_pool_and_back(pages: Pages, lent: str, tier: str) -> None:
    opened = pages.open()
    chain, places = opened.chain(range(64)), [SIZE * i for i in reversed(range(16))]
    data = b"".join(payload(key, 0, SIZE) for key in reversed(list(chain)))
    source = torch.frombuffer(bytearray(data), dtype=torch.uint8).to(named(lent))
    before = sealed_bytes(pages)
    assert (
        pages.store.put(opened, chain, device_block(source), places, tier=tier) == [Stored()] * 16
    )
    assert sealed_bytes(pages) - before == {tier: 1 << 20}
    pages.assert_readable(opened, chain)
    into = torch.full_like(source, 7)
    match = pages.store.match_prefix(opened, chain)
    assert pages.store.read(match, device_block(into), places) == [Hit()] * 16
    assert torch.equal(into, source)


@only_shm
def test_asyncio_programs_use_tensors_too(lending: Up, pages: Pages, lent: str) -> None:
    async def both_ways(opened: OpenedNamespace) -> None:
        chain, places = opened.chain(range(16)), range(0, 4 * SIZE, SIZE)
        data = bytearray(b"".join(payload(key, 0, SIZE) for key in chain))
        source = torch.frombuffer(data, dtype=torch.uint8).to(named(lent))
        into = torch.full_like(source, 7)
        async with await AsyncKVStore.connect(lending.master) as store:
            put = await store.put(opened, chain, device_block(source), places, tier="hbm")
            assert put == [Stored()] * 4
            await store.prefetch(opened, chain, tier="hbm")
            match = await store.match_prefix(opened, chain)
            assert await store.read(match, device_block(into), places) == [Hit()] * 4
        assert torch.equal(into, source)

    asyncio.run(both_ways(pages.open()))


@only_shm
@pytest.mark.parametrize("tier", ["hbm", "dram"])
def test_memory_of_the_device_that_others_can_open_is_pulled_from(
    pages: Pages, lent: str, tier: str
) -> None:
    device = open_device(named(lent))
    opened = pages.open()
    chain, places = opened.chain(range(64)), range(0, 16 * SIZE, SIZE)
    data = bytearray(b"".join(payload(key, 0, SIZE) for key in chain))
    source, into = device.allocate(len(data)), device.allocate(len(data))
    whole = [Move(0, 0, len(data))]
    source.copy_from(Memory.of("data", data, writable=True), whole)
    assert pages.store.put(opened, chain, source, places, tier=tier) == [Stored()] * 16
    match = pages.store.match_prefix(opened, chain)
    assert pages.store.read(match, into, places) == [Hit()] * 16
    seen = bytearray(len(data))
    into.copy_to(Memory.of("seen", seen, writable=True), whole)
    assert seen == data
    with pytest.raises(BadValue, match="offsets: got 1048575"):
        pages.store.read(match, into, [len(data) - 1])


def test_a_device_s_pages_end_with_the_worker_and_others_do_not(data_dir: Path, lent: str) -> None:
    with Up(data_dir, lent) as up, Pages(up.master, "shm", "devices") as pages:
        opened = pages.open()
        asked, usual = opened.chain(range(64)), opened.chain(range(100, 132))
        pages.put(opened, asked, tier="hbm")
        pages.store_all(opened, usual)
        up.end(signal.SIGKILL)
    with Up(data_dir, lent) as up, Pages(up.master, "shm", "devices") as pages:
        opened = pages.open()
        assert pages.store.probe(opened, asked) == [False] * 16
        pages.assert_readable(opened, usual)
        assert pages.put(opened, asked, tier="hbm") == [Stored()] * 16
        assert pages.read_back(pages.store.match_prefix(opened, asked), 16) == [Hit()] * 16


@pytest.mark.parametrize("transport", ["shm", "mooncake"], indirect=True, scope="module")
def test_a_device_gives_memory_back_while_a_client_reads_from_it(
    data_dir: Path, lent: str, transport: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(worker_devices, "SHARE_S", 0.0)
    device = open_device(named(lent))
    options, config = offering(transport, lent, data_dir), data_dir.with_suffix(".toml")
    with config.open("a") as file:
        file.write("[master]\nlease_ttl_s = 2\n")
    with (
        Up(data_dir, *options, f"--config={config}") as up,
        Pages(up.master, transport, "devices") as pages,
    ):
        opened = pages.open()
        chain, into = opened.chain(range(64)), device.allocate(16 * SIZE)
        pages.put(opened, chain, tier="hbm")
        (segment,) = [each.segment for each in pages.store.stat().segments if each.tier == "hbm"]

        def read() -> list[object]:
            match = pages.store.match_prefix(opened, chain)
            return [*pages.store.read(match, into, range(0, 16 * SIZE, SIZE))]

        assert read() == [Hit()] * 16
        done = kvharbor("tier", "shrink", segment, "0B", f"--master={up.master}")
        assert done.returncode == 0, done.stderr
        assert f"{segment}: 0 B stay, 64 MiB are being given back" in done.stdout
        capacity = 64 << 20
        while capacity:  # the last lease ends after two seconds
            assert read() == [Hit()] * 16
            capacity = {each.segment: each.capacity_bytes for each in pages.store.stat().segments}[
                segment
            ]
        assert sealed_bytes(pages) == {"hbm": 0, "dram": 1 << 20}


def test_a_device_that_does_not_do_is_named(data_dir: Path) -> None:
    for given, code, text in (
        ("cuda:99:64MiB", ExitCode.USAGE, "device: got 'cuda:99', want one of cpu"),
        ("cpu", ExitCode.USAGE, "a device and a size, device:size"),
        ("cpu:1MiB", ExitCode.USAGE, "at least one chunk of 67108864 bytes"),
        ("cpu:4000000GiB", ExitCode.NO_SPACE, "bytes free, segment standalone-hbm-cpu needs"),
    ):
        done = kvharbor("up", f"--data-dir={data_dir}", *FREE_PORTS, f"--hbm={given}")
        assert (done.returncode, text in done.stderr) == (code, True), done.stderr
        assert "Traceback" not in done.stderr
