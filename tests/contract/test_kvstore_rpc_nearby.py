"""Going over from loopback TCP to the listener's Unix socket: when it happens, and when not.

Two servers stand for the two addresses of one listener, so that each tells who came to it.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import time
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

from kvstore.errors import AccessDenied, Unavailable
from kvstore.rpc import dialling, nearby, server
from kvstore.rpc.connection import Connection
from kvstore.rpc.identity import Identity, ListenerIdentity, Role
from kvstore.rpc.server import dial_peer
from kvstore.wire.messages.hello import Welcome
from kvstore.wire.messages.reads import Probe, Probed
from tests.contract.rpc_server import LOOPS, PATIENCE_S, RunningServer

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from kvstore.wire.messages.hello import Hello

SECRET = b"secret of the cluster"
ME = Identity(Role.ENGINE, name="engine", secret=SECRET)
LISTENER = ListenerIdentity("blue", SECRET, epoch=3)
PROBE = Probe(bytes(32), bytes(64))


def ask_blocking(address: str, check: Callable[[], None]) -> None:
    """Dial, let the caller look, and call once."""
    with contextlib.closing(Connection.open(address, ME, PATIENCE_S)) as connection:
        check()
        assert connection.call(PROBE, PATIENCE_S) == Probed(b"\1\1")


def ask_on(loop: str) -> Callable[[str, Callable[[], None]], None]:
    """The same on an event loop; its owner is told of the end once, and of no other end."""

    def ask(address: str, check: Callable[[], None]) -> None:
        async def life() -> None:
            ended: asyncio.Queue[object] = asyncio.Queue()
            peer = await dial_peer(
                address, ME, lambda *_: None, ended.put_nowait, timeout_s=PATIENCE_S
            )
            await asyncio.to_thread(check)  # what closes by it needs the loop
            assert await peer.call(PROBE, PATIENCE_S) == Probed(b"\1\1")
            assert ended.empty()
            peer.close()
            assert await ended.get() is peer

        with asyncio.Runner(loop_factory=LOOPS[loop]) as runner:
            runner.run(life())

    return ask


ASKS = {"blocking": ask_blocking, **{name: ask_on(name) for name in LOOPS}}


@pytest.fixture(params=ASKS)
def ask(request: pytest.FixtureRequest) -> Callable[[str, Callable[[], None]], None]:
    return ASKS[request.param]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "master.sock"


@pytest.fixture
def far(path: Path) -> Iterator[RunningServer]:
    """The listener at its TCP address, where it names `path`."""
    with RunningServer(replace(LISTENER, local_address=f"unix:{path}")) as running:
        yield running


def stays(far: RunningServer, ask: Callable[[str, Callable[[], None]], None]) -> None:
    """The connection is made by TCP and works."""
    ask(far.address, lambda: None)
    assert far.opened.get(timeout=PATIENCE_S) == ME.name
    assert far.closed.get(timeout=PATIENCE_S) == ME.name
    assert far.opened.empty()


def test_a_listener_of_this_host_is_met_at_its_socket(
    far: RunningServer, path: Path, ask: Callable[[str, Callable[[], None]], None]
) -> None:
    with RunningServer(LISTENER, f"unix:{path}") as near:

        def check() -> None:
            assert near.opened.get(timeout=PATIENCE_S) == ME.name
            assert far.closed.get(timeout=PATIENCE_S) == ME.name

        ask(far.address, check)
        assert [said.session for said in near.hellos + far.hellos] == [ME.session] * 2
        assert near.closed.get(timeout=PATIENCE_S) == ME.name


def cut_off(far: RunningServer) -> None:
    """End what the listener at the TCP address has, and wait until it has ended there."""

    def abort() -> None:
        for peer in far.server.peers:
            peer.abort(Unavailable("as the test wants"))

    far.call(abort)
    assert far.closed.get(timeout=PATIENCE_S) == ME.name


@pytest.mark.parametrize("loop", LOOPS)
def test_the_first_connection_may_end_before_the_second_is_made(
    far: RunningServer, path: Path, loop: str
) -> None:
    with RunningServer(LISTENER, f"unix:{path}", admit=lambda _: cut_off(far)):
        ask_on(loop)(far.address, lambda: None)  # it checks that its owner hears of no end


@pytest.mark.parametrize("loop", LOOPS)
def test_a_connection_that_ends_within_the_dial_is_an_error_of_the_dial(
    far: RunningServer, path: Path, loop: str
) -> None:
    def refuse(hello: Hello) -> None:
        cut_off(far)
        raise AccessDenied(f"{hello.name} may not come in")

    with (
        RunningServer(LISTENER, f"unix:{path}", admit=refuse),
        pytest.raises(Unavailable, match=r"the peer closed the connection|connection lost"),
    ):
        ask_on(loop)(far.address, lambda: None)


@pytest.mark.parametrize(
    "there",
    [
        pytest.param(replace(LISTENER, life=b"another's life.."), id="another life"),
        pytest.param(replace(LISTENER, epoch=4), id="another epoch"),
        pytest.param(replace(LISTENER, secret=b"another secret"), id="another secret"),
        pytest.param(replace(LISTENER, cluster="green", secret=None), id="no secret"),
    ],
)
def test_another_listener_at_the_path_is_left_again(
    far: RunningServer,
    path: Path,
    there: ListenerIdentity,
    ask: Callable[[str, Callable[[], None]], None],
) -> None:
    with RunningServer(there, f"unix:{path}"):
        stays(far, ask)


@pytest.mark.parametrize("what", ["nothing", "a file", "a dead socket", "a folder"])
def test_where_nobody_listens_the_connection_stays(
    far: RunningServer, path: Path, what: str, ask: Callable[[str, Callable[[], None]], None]
) -> None:
    if what == "a file":
        path.write_text("")
    elif what == "a folder":
        path.mkdir()
    elif what == "a dead socket":
        with socket.socket(socket.AF_UNIX) as dead:
            dead.bind(str(path))
    stays(far, ask)


@pytest.mark.parametrize("address", ["unix:", "127.0.0.1:1", "nonsense", "unix:" + "x" * 200])
def test_what_is_no_unix_address_is_not_dialled(
    address: str, ask: Callable[[str, Callable[[], None]], None]
) -> None:
    with RunningServer(replace(LISTENER, local_address=address)) as far:
        stays(far, ask)


@pytest.fixture
def stranger(path: Path) -> Iterator[socket.socket]:
    """Listens at the path and takes nothing up."""
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(str(path))
        listening.listen()
        yield listening


def test_a_stranger_that_does_not_greet_is_not_waited_for(
    far: RunningServer,
    stranger: socket.socket,
    monkeypatch: pytest.MonkeyPatch,
    ask: Callable[[str, Callable[[], None]], None],
) -> None:
    for module in (dialling, server):
        monkeypatch.setattr(module, "PATIENCE_S", 0.05)
    stays(far, ask)
    caller, _ = stranger.accept()
    with caller:
        assert caller.recv(64) == b""  # nothing was said before a Challenge


def test_the_second_greeting_has_what_the_first_has_left(
    far: RunningServer, stranger: socket.socket, monkeypatch: pytest.MonkeyPatch
) -> None:
    del stranger
    monkeypatch.setattr(dialling, "PATIENCE_S", 10 * PATIENCE_S)
    link, _ = dialling.dial(far.address, ME, time.monotonic() + 0.2)
    link.close()


def test_another_user_at_the_path_hears_nothing(
    far: RunningServer,
    path: Path,
    monkeypatch: pytest.MonkeyPatch,
    ask: Callable[[str, Callable[[], None]], None],
) -> None:
    monkeypatch.setattr(nearby, "_user_behind", lambda _: os.geteuid() + 1)
    with RunningServer(LISTENER, f"unix:{path}") as near:
        stays(far, ask)
        assert not near.hellos


def test_the_user_behind_a_socket_is_whom_the_kernel_names(
    stranger: socket.socket, path: Path
) -> None:
    del stranger
    welcome = Welcome(1, 3, LISTENER.life, f"unix:{path}", b"")
    for here in (("127.0.0.1", 7700), ("::1", 7700, 0, 0)):
        sock = nearby.connect_nearby(here, welcome)
        assert sock is not None
        sock.close()


@pytest.mark.parametrize("name", [("10.0.0.1", 7700), ("fe80::1%eth0", 7700, 0, 2), "", None])
def test_a_path_that_another_host_names_is_not_dialled(
    stranger: socket.socket, path: Path, name: object
) -> None:
    del stranger
    assert nearby.connect_nearby(name, Welcome(1, 3, b"", f"unix:{path}", b"")) is None


def test_a_full_socket_is_not_waited_for(stranger: socket.socket, path: Path) -> None:
    stranger.listen(0)
    welcome = Welcome(1, 3, b"", f"unix:{path}", b"")
    with contextlib.ExitStack() as undo:
        while (sock := nearby.connect_nearby(("127.0.0.1", 1), welcome)) is not None:
            undo.enter_context(sock)


def test_a_listener_without_a_life_is_known_nowhere() -> None:
    welcome = Welcome(1, 3, b"", "", b"")
    assert not nearby.is_same_life(welcome, welcome)
