"""A simulated client's link to the masters: does what kvstore.rpc.link does, in virtual time."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Final

from kvstore import limits
from kvstore.errors import DeadlineExceeded, StaleEpoch, Unavailable
from kvstore.rpc.failure import error_of
from kvstore.rpc.search import SILENT_PATIENCE_S, Search
from kvstore.wire.messages.base import Message
from kvstore.wire.messages.hello import Failure
from kvstore.wire.messages.reads import is_in_doubt
from tests.simulation.tasks import Signal, Steps

if TYPE_CHECKING:
    from kvstore.errors import KVStoreError
    from tests.simulation.channel import Channel
    from tests.simulation.rpc import Endpoint
    from tests.simulation.sim_client import SimClient

PORT: Final = f":{limits.MASTER_PORT}"


def address_of(master: str) -> str:
    """Where a master listens."""
    return master + PORT


def name_of(address: str) -> str:
    """The master that listens there."""
    return address.removesuffix(PORT)


class SimLink:
    """One connection at a time, to whoever leads; used by all threads of one life of a client."""

    def __init__(self, client: SimClient) -> None:
        """Not connected."""
        self._client = client
        self._world = client.world
        self._search = Search([address_of(name) for name in client.masters], client.random)
        self._highest_epoch = 0
        self._link: Endpoint | None = None
        self._address = ""
        self._epoch = 0
        """Of the master at the other end, when it greeted."""
        self._looked_s = float("-inf")
        self._was_silent = False

    def ask(self, message: Message, timeout_s: float) -> Steps[Message]:
        """The leader's reply; its error, or DeadlineExceeded."""
        deadline_s = self._world.now + timeout_s
        while True:
            if self._was_silent:
                yield from self._look_elsewhere(deadline_s)
            link = yield from self._connected(deadline_s)
            error: KVStoreError = DeadlineExceeded("nobody greets")
            if link is not None and self._world.now < deadline_s:
                reply = yield from self._call(link, message, deadline_s)
                if isinstance(reply, Message):
                    if not is_in_doubt(message, reply) or not (
                        yield from self._has_left(link, deadline_s)
                    ):
                        self._search.succeeded()
                        return reply
                    continue
                error = reply
            pause_s = yield from self._pause_s(link, error, deadline_s)
            if self._world.now + pause_s >= deadline_s:
                raise DeadlineExceeded(type(message).__name__)
            yield pause_s

    def _has_left(self, link: Endpoint, deadline_s: float) -> Steps[bool]:
        """Whether there was somebody else to go to, who may grant a lease."""
        if self._search.has_others:
            yield from self._look_elsewhere(deadline_s)
        return self._link is not link

    # --- calls --------------------------------------------------------------------------------

    def _call(
        self, link: Endpoint, message: Message, deadline_s: float
    ) -> Steps[Message | KVStoreError]:
        answered: Signal[object | None] = Signal()
        left_s = deadline_s - self._world.now
        link.call(message, min(left_s, self._patience_s()), answered.fire)
        while self._search.has_others and not answered.is_set:
            woken: Signal[None] = Signal()
            answered.watch(partial(woken.fire, None))
            self._after(limits.CALL_PATIENCE_S, partial(woken.fire, None))
            yield woken
            if not answered.is_set:
                yield from self._look_elsewhere(deadline_s)
        if not answered.is_set:
            yield answered
        reply = answered.value
        if isinstance(reply, Failure):
            error = error_of(reply)
            if not isinstance(error, Unavailable | StaleEpoch):
                raise error
            return error
        if reply is None:
            return DeadlineExceeded("no answer") if link.is_open else Unavailable("it broke")
        assert isinstance(reply, Message), reply
        return reply

    def _after(self, delay_s: float, action: partial[None]) -> None:
        self._world.after_on(self._client.name, delay_s, action)

    def _patience_s(self) -> float:
        """Where the network may swallow a single message, it is sent again now and then."""
        return 1e9 if self._world.weather.ordered else self._client.random.uniform(0.3, 1.5)

    def _pause_s(
        self, link: Endpoint | None, error: KVStoreError, deadline_s: float
    ) -> Steps[float]:
        """See to it that the next try has better chances; how long to wait for it."""
        if link is None:
            return self._search.next_s(0.0)
        if link.is_open and not isinstance(error, StaleEpoch):
            if self._search.has_others:
                self._was_silent = isinstance(error, DeadlineExceeded)
                if deadline_s - self._world.now > limits.CALL_PATIENCE_S:
                    yield from self._look_elsewhere(deadline_s)
            self._search.refused(self._address, error)
            return self._search.again_s(error.retry_after_s)
        if self._link is link:
            self._link = None
            self._search.failed(self._address, error)
        link.close()
        return 0.0 if self._link is not None else self._search.next_s(error.retry_after_s)

    # --- connections --------------------------------------------------------------------------

    def _connected(self, deadline_s: float) -> Steps[Endpoint | None]:
        if self._link is not None and self._link.is_open:
            return self._link
        address = self._search.next()
        patience_s = self._search.patience_s(address, deadline_s - self._world.now)
        found = yield from self._open(address, patience_s, self._highest_epoch)
        if self._link is not None and self._link.is_open:
            if found is not None:
                found[0].close()  # another thread of this client was faster
        elif found is not None:
            self._adopt(address, *found)
        return self._link if found is not None else None

    def _open(
        self, address: str, patience_s: float, epoch: int
    ) -> Steps[tuple[Endpoint, int] | None]:
        """A connection, and the epoch that was shown, unless that is too low."""
        client = self._client
        master = client.masters[name_of(address)]
        link = client.new_endpoint()
        channel: Channel | None = yield from client.dial(
            master.name, link, master.accept, self._world.now + patience_s
        )
        if channel is None:
            self._search.failed(address, DeadlineExceeded("it does not greet"))
            return None
        if channel.welcome < epoch:
            link.close()
            self._search.failed(address, StaleEpoch(f"epoch {channel.welcome}"))
            return None
        return link, channel.welcome

    def _adopt(self, address: str, link: Endpoint, epoch: int) -> None:
        self._search.greeted(address)
        self._highest_epoch = max(self._highest_epoch, epoch)
        self._link, self._address, self._epoch = link, address, epoch

    def _look_elsewhere(self, deadline_s: float) -> Steps[None]:
        """Leave the present master if another one shows a higher epoch; seldom, and briefly."""
        present, now = self._link, self._world.now
        if present is None or now < self._looked_s + limits.CALL_PATIENCE_S:
            return
        self._looked_s, self._was_silent = now, False
        for address in self._search.others(self._address):
            patience_s = min(SILENT_PATIENCE_S, deadline_s - self._world.now)
            if patience_s <= 0:
                return
            found = yield from self._open(address, patience_s, self._epoch + 1)
            if found is not None and self._link is present:
                self._adopt(address, *found)
                present.close()  # who waits for it asks the other one
                return
