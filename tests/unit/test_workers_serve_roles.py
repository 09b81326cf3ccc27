"""How an inference worker gives up a role: nothing that it has is left behind."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import msgspec

from kvstore.wire.messages.tickets import JoinFleet
from workers.serve_roles import Roles

if TYPE_CHECKING:
    from collections.abc import Callable

WISH = JoinFleet(b"n" * 32, "w1", "decode", "host:1", "host", "", "", 100, 8, (), True)


class Desk:
    """Both desks of a worker, which write down what they are told."""

    def __init__(self, story: list[str]) -> None:
        self._story = story
        self.queued_tokens = 0
        self.is_draining = False

    async def shed(self) -> None:
        """As if answers ran."""
        self._story.append("shed" if self.is_draining else "shed too soon")


class Fleet:
    """A membership that is asked for roles, one after the other."""

    def __init__(self, story: list[str], *roles: str) -> None:
        self._story = story
        self._roles = iter(roles)
        self.on_beat: Callable[[], object] = lambda: None
        self.wishes: list[JoinFleet] = []

    async def asked(self) -> str:
        """The next role; none: for ever."""
        role = next(self._roles, "")
        if not role:
            await asyncio.get_running_loop().create_future()
        return role

    async def beat_if_heard(self) -> None:
        """Written down."""
        self._story.append("beat")
        self.on_beat()

    async def change(self, wish: JoinFleet) -> None:
        """Written down."""
        self._story.append(wish.role)
        self.wishes.append(wish)


class Case:
    """A worker with both desks that begins in one role and is asked for others."""

    def __init__(self, role: str, *asked: str) -> None:
        self.story: list[str] = []
        self.desk = Desk(self.story)
        self.roles = Roles(msgspec.structs.replace(WISH, role=role), self.desk, self.desk)
        self.fleet: Any = Fleet(self.story, *asked)

    async def follow(self) -> None:
        """Until nothing is asked any more, or a prompt is waited for."""
        following = asyncio.ensure_future(self.roles.follow(self.fleet))
        for _ in range(20):
            await asyncio.sleep(0)
        following.cancel()


def test_a_decode_worker_hands_over_before_it_computes() -> None:
    case = Case("decode", "prefill")
    case.fleet.on_beat = lambda: case.story.append(f"draining: {case.roles.is_draining}")
    asyncio.run(case.follow())
    assert case.story == ["beat", "draining: True", "shed", "prefill"]
    joined = case.fleet.wishes[0]
    assert (joined.capacity_tokens, joined.batch_max, joined.switches) == (0, 0, True)
    # A ticket that was routed here before is refused from now on.
    assert (case.desk.is_draining, case.roles.is_draining, case.roles.role) == (
        True, False, "prefill",
    )  # fmt: skip


def test_a_prefill_worker_computes_what_waits_before_it_generates() -> None:
    case = Case("prefill", "decode")
    case.desk.queued_tokens = 9
    asyncio.run(case.follow())
    assert case.story == ["beat", "shed"]
    assert case.roles.is_draining
    case = Case("prefill", "decode")
    asyncio.run(case.follow())
    assert case.story[-1] == "decode"
    assert not case.desk.is_draining


def test_it_holds_as_much_as_before_when_it_generates_again() -> None:
    case = Case("decode", "prefill", "decode")
    asyncio.run(case.follow())
    assert case.fleet.wishes[1] == WISH
    assert not case.desk.is_draining


def test_the_role_that_it_has_changes_nothing() -> None:
    case = Case("decode", "decode")
    asyncio.run(case.follow())
    assert case.story == []


def test_who_only_computes_has_nothing_to_shed() -> None:
    story: list[str] = []
    fleet: Any = Fleet(story)
    roles = Roles(msgspec.structs.replace(WISH, role="prefill"), Desk(story), None)
    asyncio.run(roles.hand_over(fleet))
    assert story == ["beat"]
    assert roles.is_draining
