"""A decode worker ahead of its prompt: what it pulls, who gets it, and what ends it."""

from __future__ import annotations

import asyncio
import threading
from typing import TYPE_CHECKING, Any

import pytest

from kvstore.client.namespaces import OpenedNamespace
from kvstore.client.steps import Ask
from kvstore.client.tickets import Member
from kvstore.errors import BadValue, Fenced, Unavailable
from kvstore.namespace import open_layout
from kvstore.wire.messages import tickets as wire
from tests.unit.master_rig import small_content, small_layout
from workers.serve_ahead import AheadDesk
from workers.serve_messages import PrepareAsk

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from kvstore.client.steps import Steps

SPACE = OpenedNamespace(open_layout(small_content(), small_layout()), 1)
MEMBER = Member(SPACE.namespace.id, "d1", 3, 0.5, 3.0)
PROMPT = tuple(range(300))
ASK = PrepareAsk(7, 5, "r", PROMPT)
TOKEN = 70


class Pool:
    """Master and KV: claims what is asked, and pulls until it is told to stop."""

    opened = SPACE

    def __init__(self) -> None:
        self.claimed = wire.TicketClaimed(
            TOKEN, SPACE.namespace.id, 128, 300, SPACE.chain(PROMPT).packed, wire.TailRef(), ()
        )
        self.asked: list[object] = []
        self.pulling = threading.Event()
        self.has_ended = threading.Event()
        self.error: Exception | None = None

    def carry_out(self, plan: Steps[Any]) -> Any:  # noqa: ANN401 -- whatever the plan returns
        step = next(plan)
        assert isinstance(step, Ask)
        self.asked.append(step.message)
        try:
            plan.send(self.claimed)
        except StopIteration as stop:
            return stop.value
        raise AssertionError("one question each")

    def expect(self, tokens: tuple[int, ...]) -> str:
        return f"room for {len(tokens)}"

    def pull_ahead(
        self, ticket: int, claimed: object, arriving: object, unwanted: threading.Event
    ) -> None:
        assert (ticket, claimed, arriving) == (7, self.claimed, "room for 300")
        self.pulling.set()
        assert unwanted.wait(30)
        self.has_ended.set()
        if self.error is not None:
            raise self.error


def run(pool: Pool, act: Callable[[AheadDesk], Awaitable[None]]) -> None:
    async def whole() -> None:
        fake: Any = pool
        desk = AheadDesk(fake, fake, lambda: MEMBER)
        await act(desk)
        assert desk.running() == ()
        desk.close()
        assert pool.has_ended.is_set() or not pool.pulling.is_set()

    asyncio.run(whole())


async def prepared(pool: Pool, desk: AheadDesk) -> asyncio.Task[None]:
    """Somebody is waiting, and pages come."""
    task = asyncio.ensure_future(desk.prepare(ASK))
    await asyncio.to_thread(pool.pulling.wait, 30)
    assert desk.running() == (wire.Running(7, TOKEN, 0),)
    return task


@pytest.mark.parametrize("error", [None, Fenced("claimed anew"), Unavailable("no master")])
def test_what_has_come_goes_to_the_answer_once(error: Exception | None) -> None:
    pool = Pool()
    pool.error = error

    async def act(desk: AheadDesk) -> None:
        task = await prepared(pool, desk)
        taken: Any = await desk.take(7)
        assert taken == "room for 300"
        assert pool.has_ended.is_set()
        await task
        assert await desk.take(7) is None

    run(pool, act)
    assert pool.asked == [wire.ClaimTicket(7, 5, "d1", 3, True)]


def test_who_hangs_up_ends_it() -> None:
    pool = Pool()

    async def act(desk: AheadDesk) -> None:
        task = await prepared(pool, desk)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert await desk.take(7) is None

    run(pool, act)


def test_what_is_somebody_elses_is_dropped() -> None:
    pool = Pool()

    async def act(desk: AheadDesk) -> None:
        task = await prepared(pool, desk)
        desk.drop(7, TOKEN + 1)  # the claim that has followed, not this one
        desk.drop(8, TOKEN)
        assert desk.running()
        desk.drop(7, TOKEN)
        await task
        assert await desk.take(7) is None

    run(pool, act)


@pytest.mark.parametrize(
    ("field", "value", "name"),
    [("prompt_tokens", 299, "prompt_tokens"), ("keys", bytes(64), "keys"), ("tokens", (1,), "tok")],
)
def test_a_claim_that_is_wrong_is_not_pulled(field: str, value: object, name: str) -> None:
    pool = Pool()
    changed = {each: getattr(pool.claimed, each) for each in pool.claimed.__struct_fields__}
    pool.claimed = wire.TicketClaimed(**(changed | {field: value}))

    async def act(desk: AheadDesk) -> None:
        with pytest.raises(BadValue, match=name):
            await desk.prepare(ASK)

    run(pool, act)
    assert not pool.pulling.is_set()
