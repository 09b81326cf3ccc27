"""The Server on both event loops: where it listens, who gets in, and who is told what."""

from __future__ import annotations

import asyncio
import errno
import os
import socket
import stat
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from kvstore import limits
from kvstore.errors import (
    AccessDenied,
    ConfigError,
    DeadlineExceeded,
    KVStoreError,
    MalformedMessage,
    OutOfSpace,
    Unavailable,
    VersionMismatch,
)
from kvstore.rpc.acceptor import Acceptor
from kvstore.rpc.address import bind, require_free
from kvstore.rpc.connection import Connection
from kvstore.rpc.identity import Identity, ListenerIdentity, Role, VersionRange
from kvstore.rpc.server import dial_peer
from kvstore.wire.messages.reads import GetStatus, Probe, Probed
from tests.contract.rpc_peers import BLUE, ENGINE, garbage, run, serving
from tests.contract.rpc_server import LOOPS, PATIENCE_S, RunningServer

if TYPE_CHECKING:
    from kvstore.wire.messages.hello import Hello

SECRET = b"shared"


@pytest.fixture(params=sorted(LOOPS))
def loop(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    return name


def test_sessions_are_capped_and_the_place_of_one_that_left_is_free(loop: str) -> None:
    async def body() -> None:
        async with serving(sessions_max=2) as both:
            first, second = await both.dial(), await both.dial()
            with pytest.raises(OutOfSpace, match="2 sessions"):
                await both.dial()
            first.close()
            await both.closed.get()
            await both.closed.get()
            third = await both.dial()
            for peer in (second, third):
                assert await peer.call(Probe(b"", b""), PATIENCE_S) == Probed(b"")

    run(loop, body)


def test_handlers_may_refuse_a_session(loop: str) -> None:
    def admit(hello: Hello) -> None:
        raise AccessDenied(f"tenant {hello.tenant!r} is unknown")

    with (
        RunningServer(BLUE, loop=loop, admit=admit) as server,
        pytest.raises(AccessDenied, match="tenant 'default' is unknown"),
    ):
        Connection.open(server.address, ENGINE, PATIENCE_S)


BLUE_SECRET = ListenerIdentity("blue", SECRET)
REFUSED: dict[str, tuple[ListenerIdentity, Identity, type[KVStoreError], str]] = {
    "wrong secret": (BLUE_SECRET, replace(ENGINE, secret=b"x"), AccessDenied, "wrong cluster"),
    "no secret": (BLUE_SECRET, ENGINE, AccessDenied, "wrong cluster secret"),
    "needless secret": (BLUE, replace(ENGINE, secret=SECRET), AccessDenied, "has no cluster"),
    "wrong cluster": (BLUE, replace(ENGINE, cluster="green"), AccessDenied, "not 'green'"),
    "wrong role": (
        replace(BLUE, roles=frozenset({Role.WORKER})), ENGINE, AccessDenied, "role 'engine'",
    ),
    "strange version": (
        BLUE, replace(ENGINE, versions=VersionRange(7, 8)), VersionMismatch, "1 to 1.*7 to 8",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", sorted(REFUSED))
def test_who_may_not_come_in_is_told_why(loop: str, case: str) -> None:
    listener, identity, error, text = REFUSED[case]
    with RunningServer(listener, loop=loop) as server:
        with pytest.raises(error, match=text):
            Connection.open(server.address, identity, PATIENCE_S)

        async def body() -> None:
            with pytest.raises(error, match=text):
                await dial_peer(
                    server.address, identity, lambda *_: None, lambda _: None, PATIENCE_S
                )

        run(loop, body)
        assert server.opened.empty()
        assert server.hellos == []


def test_neighbouring_versions_talk(loop: str) -> None:
    """A listener of versions 1 and 2 serves both; frames carry the version agreed on."""
    both = replace(BLUE, secret=SECRET, versions=VersionRange(1, 2))
    old = replace(ENGINE, secret=SECRET)
    with RunningServer(both, loop=loop) as server:
        for versions in (VersionRange(1, 1), VersionRange(1, 2), VersionRange(2, 3)):
            identity = replace(old, versions=versions)
            with closing(Connection.open(server.address, identity, PATIENCE_S)) as opened:
                assert opened.call(Probe(b"", bytes(32)), PATIENCE_S) == Probed(b"\1")

        async def body() -> None:
            identity = replace(old, versions=VersionRange(2, 3))
            peer = await dial_peer(server.address, identity, lambda *_: None, lambda _: None)
            assert peer.welcome is not None
            assert peer.welcome.version == 2
            assert await peer.call(Probe(b"", bytes(32)), PATIENCE_S) == Probed(b"\1")
            peer.close()

        run(loop, body)


def raw_socket(address: str) -> socket.socket:
    host, port = address.rsplit(":", 1)
    sock = socket.create_connection((host, int(port)), PATIENCE_S)
    sock.settimeout(PATIENCE_S)
    return sock


def until_closed(sock: socket.socket) -> bytes:
    received = b""
    try:
        while piece := sock.recv(65536):
            received += piece
    except ConnectionResetError:
        pass
    return received


def test_random_bytes_on_the_port_end_that_connection_only(loop: str) -> None:
    with (
        RunningServer(BLUE, loop=loop) as server,
        closing(Connection.open(server.address, ENGINE, PATIENCE_S)) as opened,
    ):
        for data in garbage(seed=11):
            with raw_socket(server.address) as sock:
                sock.sendall(data)
                sock.shutdown(socket.SHUT_WR)
                until_closed(sock)
        assert opened.call(Probe(b"", b""), PATIENCE_S) == Probed(b"")
        assert len(server.hellos) == 1


def test_one_that_never_introduces_itself_is_shown_out(
    loop: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "HELLO_TIMEOUT_S", 0.05)
    with RunningServer(BLUE, loop=loop) as server, raw_socket(server.address) as sock:
        assert len(until_closed(sock)) > 16
        assert server.opened.empty()


def test_greetings_are_capped(loop: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "GREETINGS_MAX", 3)
    with RunningServer(BLUE, loop=loop) as server:
        waiting = [raw_socket(server.address) for _ in range(3)]
        for sock in waiting:
            assert sock.recv(16)
        with raw_socket(server.address) as one_more:
            assert until_closed(one_more) == b""
        for sock in waiting:
            sock.close()
        # Their places become free as soon as the server has noticed.
        while True:
            try:
                Connection.open(server.address, ENGINE, PATIENCE_S).close()
            except Unavailable:
                continue
            break


def test_without_a_secret_only_loopback_is_listened_on(loop: str) -> None:
    for address in ("0.0.0.0:0", "[::]:0"):
        with (
            pytest.raises(ConfigError, match="set a cluster secret"),
            RunningServer(BLUE, address, loop=loop),
        ):
            pass
    with RunningServer(BLUE_SECRET, "0.0.0.0:0", loop=loop) as server:
        where = server.address.replace("0.0.0.0", "127.0.0.1")
        Connection.open(where, replace(ENGINE, secret=SECRET), PATIENCE_S).close()


def test_a_taken_address_is_named(loop: str, tmp_path: Path) -> None:
    for wanted in ("127.0.0.1:0", f"unix:{tmp_path}/s"):
        with (
            RunningServer(BLUE, wanted, loop=loop) as server,
            pytest.raises(ConfigError, match=server.address.rpartition("/")[2]),
            RunningServer(BLUE, server.address, loop=loop),
        ):
            pass


def test_a_unix_socket_is_the_owners_and_replaces_a_dead_one(loop: str, tmp_path: Path) -> None:
    path = tmp_path / "s"
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(str(path))
    with RunningServer(BLUE, f"unix:{path}", loop=loop) as server:
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
        Connection.open(server.address, ENGINE, PATIENCE_S).close()
    assert not path.exists()
    path.write_text("precious")
    with (
        pytest.raises(ConfigError, match="not a socket"),
        RunningServer(BLUE, f"unix:{path}", loop=loop),
    ):
        pass
    assert path.read_text() == "precious"
    with (
        pytest.raises(ConfigError, match="cannot listen on"),
        RunningServer(BLUE, f"unix:{tmp_path}/none/s", loop=loop),
    ):
        pass


@pytest.mark.parametrize("backlog", [0, 8], ids=["full", "roomy"])
def test_a_listener_that_takes_nobody_up_is_left_its_path(tmp_path: Path, backlog: int) -> None:
    path = tmp_path / "s"
    with socket.socket(socket.AF_UNIX) as living, socket.socket(socket.AF_UNIX) as waiting:
        living.bind(str(path))
        living.listen(backlog)
        waiting.connect(str(path))
        for refuse in (lambda: bind(f"unix:{path}", None), lambda: require_free(path)):
            with pytest.raises(ConfigError, match=f"another process listens on unix:{path}"):
                refuse()
        assert path.is_socket()


def test_a_path_is_freed_of_the_dead_alone(tmp_path: Path) -> None:
    path = tmp_path / "s"
    require_free(path)
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(str(path))
    link = tmp_path / "link"
    link.symlink_to(path)
    with pytest.raises(ConfigError, match="link exists and is not a socket"):
        require_free(link)
    require_free(path)
    assert not path.exists()
    with pytest.raises(ConfigError, match=r"cannot listen on unix:/dev/null/s: Not a directory"):
        require_free(Path("/dev/null/s"))


def test_several_listeners_share_the_handlers(loop: str, tmp_path: Path) -> None:
    with RunningServer(BLUE, "127.0.0.1:0", f"unix:{tmp_path}/s", loop=loop) as server:
        for name, address in zip("ab", server.addresses, strict=True):
            Connection.open(address, replace(ENGINE, name=name), PATIENCE_S).close()
            assert server.closed.get(timeout=PATIENCE_S) == name


def test_closing_ends_even_those_that_do_not_read(
    loop: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvstore.rpc.server.CLOSE_PATIENCE_S", 0.05)
    with (
        RunningServer(BLUE, loop=loop) as server,
        closing(Connection.open(server.address, ENGINE, PATIENCE_S)) as deaf,
    ):
        for _ in range(20):
            deaf.start(GetStatus())
        server.release(20, Probed(bytes(limits.MIB)))
    assert server.closed.get(timeout=PATIENCE_S) == "engine"


def test_dialling_where_nobody_listens(loop: str, tmp_path: Path) -> None:
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        nowhere = f"127.0.0.1:{bound.getsockname()[1]}"
        for address in (nowhere, f"unix:{tmp_path}/none"):
            with pytest.raises(Unavailable, match="cannot reach"):
                Connection.open(address, ENGINE, PATIENCE_S)

            async def body(address: str = address) -> None:
                with pytest.raises(Unavailable, match="cannot reach"):
                    await dial_peer(address, ENGINE, lambda *_: None, lambda _: None)

            run(loop, body)


def test_dialling_something_else(loop: str) -> None:
    """A listener that says nothing, and one that says something strange."""
    with socket.create_server(("127.0.0.1", 0)) as stranger:
        address = f"127.0.0.1:{stranger.getsockname()[1]}"
        with pytest.raises(DeadlineExceeded, match="is it a kvharbor listener"):
            Connection.open(address, ENGINE, 0.05)
        accepted, _ = stranger.accept()
        accepted.close()

        async def silent() -> None:
            with pytest.raises(DeadlineExceeded, match="is it a kvharbor listener"):
                await dial_peer(address, ENGINE, lambda *_: None, lambda _: None, 0.05)
            stranger.accept()[0].close()

        run(loop, silent)

        async def strange() -> None:
            dialling = asyncio.create_task(
                dial_peer(address, ENGINE, lambda *_: None, lambda _: None, PATIENCE_S)
            )
            accepted, _ = await asyncio.to_thread(stranger.accept)
            with accepted:
                accepted.sendall(b"220 smtp.example.org ESMTP\r\n")
                with pytest.raises(MalformedMessage):
                    await dialling

        run(loop, strange)


def test_a_cancelled_dial_leaves_nothing_behind(loop: str) -> None:
    async def body() -> None:
        with socket.create_server(("127.0.0.1", 0)) as stranger:
            address = f"127.0.0.1:{stranger.getsockname()[1]}"
            dialling = asyncio.create_task(
                dial_peer(address, ENGINE, lambda *_: None, lambda _: None, PATIENCE_S)
            )
            accepted, _ = await asyncio.to_thread(stranger.accept)
            dialling.cancel()
            with pytest.raises(asyncio.CancelledError):
                await dialling
            with accepted:
                accepted.settimeout(PATIENCE_S)
                assert await asyncio.to_thread(accepted.recv, 1) == b""

    run(loop, body)


def test_nothing_listens_after_a_failed_start(loop: str) -> None:
    descriptors = len(os.listdir("/proc/self/fd"))
    with (
        pytest.raises(ConfigError),
        RunningServer(BLUE, "127.0.0.1:0", "0.0.0.0:0", loop=loop),
    ):
        pass
    assert len(os.listdir("/proc/self/fd")) == descriptors


class Exhausted(socket.socket):
    """A listening socket whose process is out of descriptors at the first connection."""

    is_exhausted = True

    def accept(self) -> tuple[socket.socket, object]:
        if self.is_exhausted:
            self.is_exhausted = False
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
        return super().accept()


def test_accepting_goes_on_after_descriptors_have_run_out(
    loop: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvstore.rpc.acceptor.RETRY_DELAY_S", 0.01)

    async def body() -> None:
        accepted: asyncio.Queue[socket.socket] = asyncio.Queue()
        with socket.create_server(("127.0.0.1", 0)) as listening:
            exhausted = Exhausted(fileno=listening.detach())
        acceptor = Acceptor(exhausted, accepted.put_nowait)
        with socket.create_connection(exhausted.getsockname()), await accepted.get():
            assert not exhausted.is_exhausted
        acceptor.close()
        assert exhausted.fileno() == -1

    run(loop, body)
