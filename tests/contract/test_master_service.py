"""The master's shell over real sockets around a scripted core: who gets told what, and its end."""

from __future__ import annotations

import asyncio
import logging
import math
from typing import TYPE_CHECKING

import pytest

from kvstore import limits
from kvstore.errors import BadValue, InvariantBroken, StaleEpoch, Unavailable
from kvstore.rpc.identity import Role, this_host
from kvstore.wire.messages.hello import Done
from kvstore.wire.messages.membership import Heartbeat, HeartbeatNoted
from kvstore.wire.messages.reads import Probe, Probed
from master import events
from master.service import INSIDE
from tests.contract.master_bench import PROBE, STATUS, Bench, run

if TYPE_CHECKING:
    from collections.abc import Callable


def test_a_session_lives_from_greeting_to_close() -> None:
    async def use(bench: Bench) -> None:
        first, second = await bench.dial(), await bench.dial(Role.WORKER)
        first.close()
        (closed,) = await bench.core.until(events.SessionClosed)
        _, opened, other = await bench.core.until(events.SessionOpened)
        assert isinstance(opened, events.SessionOpened)
        assert isinstance(other, events.SessionOpened)
        assert (opened.role, opened.tenant, opened.name) == ("engine", "default", "n")
        assert opened.host == this_host()
        assert other.role == "worker"
        assert closed == events.SessionClosed(opened.session)
        assert opened.session != other.session != INSIDE
        second.close()

    run(use)


def test_a_request_is_answered_now_or_later() -> None:
    async def use(bench: Bench) -> None:
        held: list[events.Request] = []

        def answer(event: events.Event) -> list[events.Action]:
            if isinstance(event, events.Request):
                held.append(event)
                if len(held) == 2:
                    return [
                        events.Reply(each.session, each.request_id, Probed(bytes([number])))
                        for number, each in enumerate(held)
                    ]
            return []

        bench.core.answer = answer
        peer = await bench.dial()
        answers = await asyncio.gather(peer.call(PROBE, 5), peer.call(PROBE, 5))
        assert list(answers) == [Probed(b"\0"), Probed(b"\1")]
        _, counts = bench.office.look()
        assert counts.requests["Probe"].count == 2

    run(use)


def test_an_answer_larger_than_a_frame_is_refused() -> None:
    async def use(bench: Bench) -> None:
        def answer(event: events.Event) -> list[events.Action]:
            match event:
                case events.Request(session, request_id, Probe()):
                    large = Probed(bytes(limits.FRAME_BYTES_MAX))
                    return [events.Reply(session, request_id, large)]
            return []

        bench.core.answer = answer
        peer = await bench.dial()
        with pytest.raises(BadValue, match="Probed"):
            await peer.call(PROBE, 5)
        assert (await bench.dial()).closed_because is None

    run(use)


def test_an_answer_to_a_session_that_has_gone_is_no_error() -> None:
    async def use(bench: Bench) -> None:
        def answer(event: events.Event) -> list[events.Action]:
            if isinstance(event, events.SessionClosed):
                return [
                    events.Reply(event.session, 1, Done()),
                    events.CloseSession(event.session),
                ]
            return []

        bench.core.answer = answer
        (await bench.dial()).close()
        await bench.core.until(events.SessionClosed)

    run(use)


async def command_from(bench: Bench) -> events.CommandAnswered:
    """Let the core send a command to a worker when it is asked for a heartbeat."""

    def answer(event: events.Event) -> list[events.Action]:
        match event:
            case events.Request(session, request_id, Heartbeat()):
                return [
                    events.Command(events.CommandId(5), session, PROBE),
                    events.Reply(session, request_id, HeartbeatNoted(1, known=True)),
                ]
        return []

    bench.core.answer = answer
    worker = await bench.dial(Role.WORKER)
    await worker.call(Heartbeat("w", 1, 0), 5)
    (answered,) = await bench.core.until(events.CommandAnswered)
    worker.close()
    assert isinstance(answered, events.CommandAnswered)
    return answered


def test_a_command_brings_its_answer_back() -> None:
    async def use(bench: Bench) -> None:
        answered = await command_from(bench)
        assert answered == events.CommandAnswered(events.CommandId(5), Done())
        assert bench.commands == [PROBE]

    run(use)


def test_a_command_without_answer_brings_none() -> None:
    async def use(bench: Bench) -> None:
        bench.command_answer = None
        answered = await command_from(bench)
        assert answered.reply is None
        assert bench.office.look()[1].commands_failed == 1

    run(use)


def test_a_command_to_a_session_that_has_gone_brings_none() -> None:
    async def use(bench: Bench) -> None:
        def answer(event: events.Event) -> list[events.Action]:
            if isinstance(event, events.SessionClosed):
                return [events.Command(events.CommandId(1), event.session, PROBE)]
            return []

        bench.core.answer = answer
        (await bench.dial()).close()
        (answered,) = await bench.core.until(events.CommandAnswered)
        assert answered == events.CommandAnswered(events.CommandId(1), None)

    run(use)


def test_the_core_can_end_a_session() -> None:
    async def use(bench: Bench) -> None:
        def answer(event: events.Event) -> list[events.Action]:
            match event:
                case events.Request(session):
                    return [events.CloseSession(session)]
            return []

        bench.core.answer = answer
        peer = await bench.dial()
        with pytest.raises(Unavailable):
            await peer.call(PROBE, 5)
        await bench.core.until(events.SessionClosed)

    run(use)


def test_what_the_core_notes_is_one_line_of_the_log(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)

    async def use(bench: Bench) -> None:
        def answer(event: events.Event) -> list[events.Action]:
            match event:
                case events.Request(session, request_id, Probe()):
                    told = events.Note("100 % of w\n1")
                    return [told, events.Reply(session, request_id, Done())]
            return []

        bench.core.answer = answer
        await (await bench.dial()).call(PROBE, 5)

    run(use)
    assert "100 % of w?1" in [each.getMessage() for each in caplog.records]


def persist_on_request(write: int) -> Callable[[events.Event], list[events.Action]]:
    """A core that stores something for every probe."""

    def answer(event: events.Event) -> list[events.Action]:
        match event:
            case events.Request(session, request_id, Probe()):
                return [
                    events.Persist(events.WriteId(write), (("k", b"v"),), ()),
                    events.Reply(session, request_id, Probed(b"")),
                ]
        return []

    return answer


def test_what_is_stored_durably_is_told() -> None:
    async def use(bench: Bench) -> None:
        bench.core.answer = persist_on_request(9)
        await (await bench.dial()).call(PROBE, 5)
        assert await bench.core.until(events.Persisted) == [events.Persisted(events.WriteId(9))]
        assert bench.disk.entries == {"k": b"v"}

    run(use)


def test_what_waits_for_the_store_at_the_end_is_stored() -> None:
    async def use(bench: Bench) -> None:
        bench.core.answer = persist_on_request(9)
        bench.disk.refusals = [Unavailable("away")]
        await (await bench.dial()).call(PROBE, 5)

    assert run(use).disk.entries == {"k": b"v"}


def test_a_tick_comes_when_it_is_due() -> None:
    async def use(bench: Bench) -> None:
        bench.core.wakeup_s = 0.0
        await bench.dial()
        await bench.core.until(events.Tick, 3)
        bench.core.wakeup_s = math.inf

    run(use)


def test_another_leader_ends_the_service() -> None:
    async def use(bench: Bench) -> None:
        bench.disk.epoch += 1  # type: ignore[assignment]  # a NewType of int
        bench.core.answer = persist_on_request(9)
        await (await bench.dial()).call(PROBE, 5)
        async with asyncio.timeout(10):
            await bench.lost.wait()

    with pytest.raises(StaleEpoch):
        run(use)


def test_a_bug_in_the_core_ends_the_service() -> None:
    async def use(bench: Bench) -> None:
        def answer(event: events.Event) -> list[events.Action]:
            if isinstance(event, events.Request):
                raise InvariantBroken("I5: two extents overlap")
            return []

        bench.core.answer = answer
        peer = await bench.dial()
        with pytest.raises(Unavailable):
            await peer.call(PROBE, 5)

    with pytest.raises(InvariantBroken, match="I5"):
        run(use)


def test_the_process_can_look_at_its_own_pool() -> None:
    async def use(bench: Bench) -> None:
        status, counts = bench.office.look()
        assert status == STATUS
        assert counts.is_persisting

    run(use)
