"""What needs no engine: versions, requests joined and split, and processes lent out."""

from __future__ import annotations

import gc
import importlib.metadata
import os
from typing import ClassVar

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstore.errors import ConfigError, OutOfSpace, Unavailable
from kvstore.transfer import mooncake
from kvstore.transfer.mooncake import neighbours, require, settings_towards
from kvstore.transfer.mooncake_child import joined
from kvstore.transfer.mooncake_process import (
    EngineSettings,
    ProcessPool,
    check_installed,
    check_version,
)

FAR_FUTURE_S = 1e12


@pytest.mark.parametrize("version", ["0.3.13.post1", "0.3.13.post2", "0.3.14", "0.4.0rc1", "1.0.0"])
def test_releases_that_acknowledge_what_they_write_are_taken(version: str) -> None:
    assert check_version("engine", version) == version


@pytest.mark.parametrize("version", ["0.3.13", "0.3.12.post1", "0.2.99", "0.3", "unknown", ""])
def test_releases_known_to_tear_and_unknown_ones_are_refused(version: str) -> None:
    with pytest.raises(ConfigError, match=r"engine: got version .*, want at least 0\.3\.13\.post1"):
        check_version("engine", version)


def test_the_unacknowledged_protocol_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MC_TCP_PROTO", "1")
    with pytest.raises(ConfigError, match="MC_TCP_PROTO: got 1"):
        require()


def test_an_absent_engine_is_named_with_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    def absent(name: str) -> str:
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "version", absent)
    with pytest.raises(ConfigError, match=r"install one of kvharbor\[cpu\]"):
        check_installed()


@pytest.mark.parametrize(
    ("host", "confined"),
    [("127.0.0.1", True), ("127.8.0.1", True), ("::1", True), ("localhost", True),
     ("10.0.0.1", False), ("0.0.0.0", False), ("node-7", False)],
)  # fmt: skip
def test_an_engine_on_loopback_is_for_this_host_alone(host: str, confined: bool) -> None:
    assert EngineSettings(host).confined is confined


def test_only_tcp_refuses_what_a_peer_writes() -> None:
    assert EngineSettings().read_only
    assert not EngineSettings(protocol="rdma").read_only


@pytest.mark.parametrize("address", ["unix:/run/worker.sock", "127.0.0.1:7710"])
def test_a_client_of_this_host_serves_on_loopback(address: str) -> None:
    assert settings_towards(address).confined


pages = st.lists(st.tuples(st.integers(0, 20), st.integers(0, 20)), min_size=1, max_size=40)


@given(pages, st.sampled_from([1, 4096, 3 << 20]))
def test_joined_requests_bring_the_same_bytes(pairs: list[tuple[int, int]], size: int) -> None:
    places = [a * size for a, _ in pairs]
    addresses = [b * size for _, b in pairs]
    bytes_of = [
        (place + i * size, address + i * size)
        for place, address, length in joined(places, addresses, size)
        for i in range(length // size)
    ]
    assert bytes_of == list(zip(places, addresses, strict=True))
    assert all(
        length == size or length <= 4 << 20 for _, _, length in joined(places, addresses, size)
    )


@given(st.lists(st.integers(0, 20), min_size=1, max_size=40), st.sampled_from([1, 64, 4096]))
def test_the_bounce_buffer_is_emptied_to_the_right_places(numbers: list[int], size: int) -> None:
    places = [number * size for number in numbers]
    copied = [
        (bounce + i * size, place + i * size)
        for bounce, place, length in neighbours(places, size)
        for i in range(length // size)
    ]
    assert copied == [(i * size, place) for i, place in enumerate(places)]


class Refusing:
    """An engine process that maps nothing."""

    made: ClassVar[list[Refusing]] = []

    def __init__(self, settings: EngineSettings) -> None:
        self.settings = settings
        self.closed = 0
        self.made.append(self)

    def map(self, fd: int, *stretch: int, writable: bool, served: bool) -> tuple[int, int]:
        raise Unavailable(f"cannot register {fd}, {stretch}, {writable}, {served}")

    def close(self) -> None:
        self.closed += 1


def test_an_engine_that_refuses_its_bounce_buffer_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mooncake, "BOUNCE_BYTES", 4096)
    monkeypatch.setattr(mooncake, "EngineProcess", Refusing)
    engines = mooncake.ClientEngines(EngineSettings())
    before = len(os.listdir("/proc/self/fd"))
    with pytest.raises(Unavailable, match="cannot register"), engines.readers.one(FAR_FUTURE_S):
        pass
    assert [process.closed for process in Refusing.made] == [1]
    gc.collect()  # a traceback may hold the map for a moment longer
    assert len(os.listdir("/proc/self/fd")) == before


class Process:
    """Stands for something with an engine process inside."""

    def __init__(self) -> None:
        self.alive = True
        self.closed = 0

    def close(self) -> None:
        self.alive = False
        self.closed += 1


def test_a_process_is_used_again_while_it_lives() -> None:
    pool = ProcessPool(Process, 1)
    with pool.one(FAR_FUTURE_S) as first:
        pass
    with pool.one(FAR_FUTURE_S) as second:
        assert second is first
        first.alive = False
    assert first.closed == 1
    with pool.one(FAR_FUTURE_S) as third:
        assert third is not first


def test_a_process_that_died_while_idle_is_not_lent() -> None:
    pool = ProcessPool(Process, 1)
    with pool.one(FAR_FUTURE_S) as first:
        pass
    first.alive = False
    with pool.one(FAR_FUTURE_S) as second:
        assert second is not first
    assert first.closed == 1


def test_no_more_than_its_size_are_lent_at_once() -> None:
    pool = ProcessPool(Process, 1)
    with pool.one(FAR_FUTURE_S), pytest.raises(OutOfSpace), pool.one(0.0):
        pass
    with pool.one(0.0):
        pass


def test_a_failed_start_gives_its_turn_back() -> None:
    def fail() -> Process:
        raise ConfigError("no engine")

    pool = ProcessPool(fail, 1)
    for _ in range(3):
        with pytest.raises(ConfigError), pool.one(0.0):
            pass


def test_a_closed_pool_ends_what_is_lent_when_it_comes_back() -> None:
    pool = ProcessPool(Process, 2)
    with pool.one(FAR_FUTURE_S) as idle:
        pass
    with pool.one(FAR_FUTURE_S) as lent:
        assert lent is idle
        with pool.one(FAR_FUTURE_S) as other:
            pass
        pool.close()
        pool.close()
        assert other.closed == 1
        assert lent.closed == 0
    assert lent.closed == 1
    with pytest.raises(Unavailable), pool.one(FAR_FUTURE_S):
        pass
