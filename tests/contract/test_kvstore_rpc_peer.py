"""Peers on both event loops: calls both ways, order, deadlines, bounds, garbage, endings."""

from __future__ import annotations

import asyncio
import time
from contextlib import closing
from typing import TYPE_CHECKING

import pytest

from kvstore import limits
from kvstore.errors import DeadlineExceeded, MalformedMessage, OutOfSpace, Unavailable
from kvstore.rpc.connection import Connection
from kvstore.rpc.dialling import dial
from kvstore.wire.framing import FrameKind, pack_frame
from kvstore.wire.messages.hello import Done
from kvstore.wire.messages.reads import GetStatus, Probe, Probed, Remove
from tests.contract.rpc_peers import BLUE, ENGINE, Both, garbage, run, serving
from tests.contract.rpc_server import LOOPS, PATIENCE_S, RunningServer

if TYPE_CHECKING:
    from pathlib import Path

    from kvstore.rpc.frame_socket import FrameSocket


@pytest.fixture(params=sorted(LOOPS))
def loop(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    return name


async def dial_raw(both: Both) -> FrameSocket:
    """A greeted connection through which anything can be sent."""
    raw, _ = await asyncio.to_thread(dial, both.address, ENGINE, time.monotonic() + PATIENCE_S)
    return raw


def test_calls_go_both_ways(loop: str, tmp_path: Path) -> None:
    async def body() -> None:
        for address in ("127.0.0.1:0", "[::1]:0", f"unix:{tmp_path}/s"):
            async with serving(address=address) as both:
                dialled = await both.dial()
                accepted = await both.opened.get()
                assert dialled.welcome is not None
                assert dialled.welcome.epoch == 3
                for caller in (dialled, accepted):
                    answer = await caller.call(Probe(b"", b"keys"), PATIENCE_S)
                    assert answer == Probed(b"keys")
                    with pytest.raises(OutOfSpace, match="not now"):
                        await caller.call(Remove(b"", b"", 1.0), PATIENCE_S)
                dialled.close()
                assert {await both.closed.get(), await both.closed.get()} == {dialled, accepted}

    run(loop, body)


def test_requests_are_pipelined_and_answered_in_any_order(loop: str) -> None:
    async def body() -> None:
        async with serving() as both:
            dialled = await both.dial()
            calls = [asyncio.create_task(dialled.call(GetStatus(), PATIENCE_S)) for _ in range(9)]
            held = [await both.requests.get() for _ in calls]
            assert held[0][0].unanswered == dialled.in_flight == 9
            for peer, request_id, _ in reversed(held):
                peer.reply(request_id, Probed(bytes([request_id])))
            answers = await asyncio.gather(*calls)
            assert answers == [Probed(bytes([n])) for n in range(1, 10)]
            assert held[0][0].unanswered == dialled.in_flight == 0

    run(loop, body)


def test_a_deadline_ends_the_call_alone(loop: str) -> None:
    async def body() -> None:
        async with serving() as both:
            dialled = await both.dial()
            with pytest.raises(DeadlineExceeded):
                await dialled.call(GetStatus(), 0.01)
            peer, request_id, _ = await both.requests.get()
            peer.reply(request_id, Done())
            assert await dialled.call(Probe(b"", b"k"), PATIENCE_S) == Probed(b"k")
            assert dialled.in_flight == 0

    run(loop, body)


def test_a_cancelled_call_leaves_nothing_behind(loop: str) -> None:
    async def body() -> None:
        async with serving() as both:
            dialled = await both.dial()
            call = asyncio.create_task(dialled.call(GetStatus(), PATIENCE_S))
            await both.requests.get()
            call.cancel()
            with pytest.raises(asyncio.CancelledError):
                await call
            assert dialled.in_flight == 0
            assert await dialled.call(Probe(b"", b"k"), PATIENCE_S) == Probed(b"k")

    run(loop, body)


def test_the_end_of_a_connection_fails_its_calls(loop: str) -> None:
    async def body() -> None:
        async with serving() as both:
            dialled = await both.dial()
            calls = [asyncio.create_task(dialled.call(GetStatus(), PATIENCE_S)) for _ in range(2)]
            peer, _, _ = await both.requests.get()
            peer.close()
            for each in await asyncio.gather(*calls, return_exceptions=True):
                assert isinstance(each, Unavailable)
                assert "closed the connection" in str(each)
            with pytest.raises(Unavailable):
                await dialled.call(GetStatus(), PATIENCE_S)
            peer.reply(1, Done())
            dialled.close()
            dialled.abort(Unavailable("again"))

    run(loop, body)


def test_too_many_calls_in_flight_are_refused_on_both_sides(loop: str) -> None:
    async def body() -> None:
        async with serving() as both:
            dialled = await both.dial()
            limit = limits.REQUESTS_IN_FLIGHT_MAX
            calls = [
                asyncio.create_task(dialled.call(GetStatus(), PATIENCE_S)) for _ in range(limit)
            ]
            held = [await both.requests.get() for _ in calls]
            with pytest.raises(OutOfSpace, match="1024 requests"):
                await dialled.call(GetStatus(), PATIENCE_S)
            # A peer that gave up on its calls still occupies the listener.
            calls[0].cancel()
            await asyncio.gather(calls[0], return_exceptions=True)
            with pytest.raises(OutOfSpace, match="of this peer are open"):
                await dialled.call(GetStatus(), PATIENCE_S)
            for peer, request_id, _ in held:
                peer.reply(request_id, Done())
            await asyncio.gather(*calls[1:])

    run(loop, body)


def test_a_peer_that_does_not_read_is_cut_off(loop: str) -> None:
    async def body() -> None:
        async with serving() as both:
            with closing(await dial_raw(both)):
                peer = await both.opened.get()
                answer = Probed(bytes(limits.MIB))
                sent = 0
                while peer.closed_because is None:
                    peer.reply(sent, answer)
                    sent += 1
                    await asyncio.sleep(0)
                assert "unread" in str(peer.closed_because)
                assert await both.closed.get() is peer
                # What the kernel takes comes on top of the queue.
                assert sent * limits.MIB > limits.SEND_QUEUE_BYTES_MAX
                assert sent * limits.MIB < 4 * limits.SEND_QUEUE_BYTES_MAX

    run(loop, body)


def test_a_slow_reader_gets_everything(loop: str) -> None:
    with (
        RunningServer(BLUE, loop=loop) as server,
        closing(Connection.open(server.address, ENGINE, PATIENCE_S)) as opened,
    ):
        ids = [opened.start(GetStatus()) for _ in range(16)]
        answer = Probed(bytes(limits.MIB))
        server.release(16, answer)
        assert all(opened.finish(request_id, PATIENCE_S) == answer for request_id in ids)


def test_garbage_after_the_greeting_ends_the_session(loop: str) -> None:
    async def body() -> None:
        async with serving() as both:
            for data in garbage(seed=12):
                raw = await dial_raw(both)
                with closing(raw):
                    peer = await both.opened.get()
                    raw.send_packed(data + bytes(16))
                    await both.until_closed(peer)
                assert isinstance(peer.closed_because, MalformedMessage)

    run(loop, body)


def test_a_peer_that_dies_in_mid_frame_is_noticed(loop: str) -> None:
    async def body() -> None:
        async with serving() as both:
            raw = await dial_raw(both)
            peer = await both.opened.get()
            frame = pack_frame(FrameKind.REQUEST, 1, Probe(b"", bytes(3200)))
            raw.send_packed(frame[:1000])
            raw.close()
            await both.until_closed(peer)
            assert both.requests.empty()

    run(loop, body)
