"""The proxy that cluster tests put between processes does what each command says, and no more."""

from __future__ import annotations

import socket
import threading
from contextlib import suppress
from typing import TYPE_CHECKING

import pytest

from tests.cluster.tcp_proxy import Proxies

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.cluster.tcp_proxy import TcpProxy

SOON_S = 10.0
SILENCE_S = 0.2


class Echo:
    """Sends back what it gets; `heard` is all that arrived."""

    def __init__(self) -> None:
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self._listener.getsockname()[1]}"
        self.heard = bytearray()
        self.arrived = threading.Semaphore(0)
        self._threads = [threading.Thread(target=self._accept)]
        self._threads[0].start()

    def _accept(self) -> None:
        while True:
            try:
                peer, _ = self._listener.accept()
            except OSError:
                return
            peer.settimeout(SOON_S)
            self._threads.append(threading.Thread(target=self._serve, args=(peer,)))
            self._threads[-1].start()

    def _serve(self, peer: socket.socket) -> None:
        with peer, suppress(OSError):
            while data := peer.recv(1 << 16):
                self.heard += data
                self.arrived.release()
                peer.sendall(data)

    def close(self) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        for each in self._threads:
            each.join()


@pytest.fixture
def echo() -> Iterator[Echo]:
    made = Echo()
    yield made
    made.close()


@pytest.fixture
def proxies() -> Iterator[Proxies]:
    with Proxies() as made:
        yield made


@pytest.fixture
def proxy(echo: Echo, proxies: Proxies) -> TcpProxy:
    return proxies.front_of(echo.address, seed=1)


def dial(proxy: TcpProxy) -> socket.socket:
    host, _, port = proxy.address.rpartition(":")
    return socket.create_connection((host, int(port)), timeout=SOON_S)


def take(line: socket.socket, count: int) -> bytes:
    got = b""
    while len(got) < count:
        data = line.recv(count - len(got))
        assert data, "ended early"
        got += data
    return got


def is_echoed(line: socket.socket, said: bytes) -> bool:
    line.sendall(said)
    return take(line, len(said)) == said


def assert_silent(line: socket.socket) -> None:
    line.settimeout(SILENCE_S)
    with pytest.raises(TimeoutError):
        line.recv(1)
    line.settimeout(SOON_S)


def assert_reset(line: socket.socket) -> None:
    with pytest.raises(ConnectionResetError):
        line.recv(1)


def test_everything_passes_and_an_end_reaches_the_other_side(proxy: TcpProxy) -> None:
    said = bytes(range(256)) * 4096
    with dial(proxy) as line:
        sender = threading.Thread(target=line.sendall, args=(said,))
        sender.start()
        assert take(line, len(said)) == said
        sender.join()
        line.shutdown(socket.SHUT_WR)
        assert line.recv(1) == b""


def test_a_cut_resets_and_refuses_until_it_is_healed(proxy: TcpProxy) -> None:
    with dial(proxy) as line:
        assert is_echoed(line, b"before")
        proxy.cut()
        assert_reset(line)
    with pytest.raises(ConnectionRefusedError):
        dial(proxy)
    proxy.heal()
    with dial(proxy) as line:
        assert is_echoed(line, b"after")


def test_a_reset_ends_what_is_connected_only(proxy: TcpProxy) -> None:
    with dial(proxy) as line:
        assert is_echoed(line, b"before")
        proxy.reset()
        assert_reset(line)
    with dial(proxy) as line:
        assert is_echoed(line, b"after")


def test_what_is_held_arrives_once_healed(proxy: TcpProxy, echo: Echo) -> None:
    with dial(proxy) as old:
        assert is_echoed(old, b"before")
        proxy.hold()
        old.sendall(b"held")
        with dial(proxy) as new:
            new.sendall(b"new")
            assert_silent(old)
            assert_silent(new)
            assert echo.heard == b"before"
            proxy.heal()
            assert take(old, 4) == b"held"
            assert take(new, 3) == b"new"


def test_answers_alone_can_be_held(proxy: TcpProxy, echo: Echo) -> None:
    with dial(proxy) as line:
        proxy.hold(forward=False)
        line.sendall(b"question")
        assert echo.arrived.acquire(timeout=SOON_S)
        assert echo.heard == b"question"
        assert_silent(line)
        proxy.heal()
        assert take(line, 8) == b"question"


def test_slow_pieces_keep_their_order(proxy: TcpProxy) -> None:
    with dial(proxy) as line:
        proxy.slow(0.02)
        assert all(is_echoed(line, bytes([number])) for number in range(10))


def test_fragile_connections_break_where_the_seed_says(proxies: Proxies, echo: Echo) -> None:
    def lengths(seed: int) -> list[int]:
        proxy = proxies.front_of(echo.address, seed)
        proxy.fragile(1000)
        found = []
        for _ in range(5):
            sent = 0
            with dial(proxy) as line, suppress(ConnectionResetError):
                while is_echoed_or_ended(line):
                    sent += 1
            found.append(sent)
        return found

    def is_echoed_or_ended(line: socket.socket) -> bool:
        line.sendall(b"x")
        return bool(line.recv(1))

    first, again = lengths(7), lengths(7)
    # The reset may overtake the last echo.
    assert all(abs(a - b) <= 1 for a, b in zip(first, again, strict=True)), (first, again)
    assert max(first) - min(first) > 100
    assert max(first) <= 1000


def test_a_target_that_is_not_there_is_a_reset(proxies: Proxies) -> None:
    with socket.socket() as taken:  # bound, so that nobody else gets the port, and not listening
        taken.bind(("127.0.0.1", 0))
        proxy = proxies.front_of(f"127.0.0.1:{taken.getsockname()[1]}")
        with pytest.raises(ConnectionResetError), dial(proxy) as line:  # the dial, or what follows
            line.recv(1)
