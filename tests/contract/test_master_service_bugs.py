"""A bug of ours ends the master, whatever task or callback of a term it is met in."""

from __future__ import annotations

import asyncio
import math

import pytest

from kvstore.errors import Unavailable
from kvstore.rpc.identity import Role
from kvstore.rpc.peer import Peer
from master import events
from tests.contract.master_bench import PROBE, Bench, ScriptedCore, run


class Bug(Exception):
    """What nobody expects."""


def test_a_bug_in_what_a_command_does_ends_the_service(monkeypatch: pytest.MonkeyPatch) -> None:
    """Or its answer would be waited for in vain, by a master that looks alive."""

    async def use(bench: Bench) -> None:
        monkeypatch.setattr(Peer, "call", buggy_call)
        bench.core.answer = lambda event: (
            [events.Command(events.CommandId(5), event.session, PROBE)]
            if isinstance(event, events.SessionOpened)
            else []
        )
        await bench.dial(Role.WORKER)
        async with asyncio.timeout(10):
            await bench.lost.wait()

    with pytest.raises(Bug):
        run(use)


async def buggy_call(*_: object) -> None:
    raise Bug


class Sleepless(ScriptedCore):
    """A core that cannot tell when it wants to be woken, once it has been asked something."""

    @property
    def wakeup_s(self) -> float:
        if any(isinstance(each, events.Request) for each in self.events):
            raise Bug
        return math.inf

    @wakeup_s.setter
    def wakeup_s(self, value: float) -> None:
        """Nothing a test sets matters."""


def test_a_core_that_does_not_say_when_it_is_to_be_woken_ends_the_service() -> None:
    """Or it would not be woken any more, in a master that looks alive."""

    async def use(bench: Bench) -> None:
        bench.core = Sleepless()
        bench.office._term._state = bench.core  # type: ignore[union-attr]  # noqa: SLF001 -- leads
        peer = await bench.dial()
        with pytest.raises(Unavailable):
            await peer.call(PROBE, 5)

    with pytest.raises(Bug):
        run(use)
