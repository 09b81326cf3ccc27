"""What a blocking store is made of: the link to the masters, the transports, and what runs plans.

Owns connecting and closing. Must not know what calls there are.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Final, Self, TypeVar

from kvstore import limits
from kvstore.client import checks
from kvstore.client.calls import Calls
from kvstore.client.performer import Blocking, Mover, Viewer
from kvstore.client.steps import ask, drive
from kvstore.clock import SystemClock
from kvstore.rpc.identity import Identity, Role, this_host
from kvstore.rpc.link import MasterLink
from kvstore.transfer.choice import Choice
from kvstore.wire.messages.reads import GetStatus, Status

if TYPE_CHECKING:
    from collections.abc import Sequence
    from types import TracebackType

    from kvstore.client.counters import ClientCounters
    from kvstore.client.steps import Steps
    from kvstore.clock import Clock

DEFAULT_MASTERS: Final = f"127.0.0.1:{limits.MASTER_PORT}"
DEFAULT_TRANSPORTS: Final = ("shm", "tcp")

T = TypeVar("T")


class Connected:
    """The connections of a `KVStore`, and how long they are open."""

    def __init__(
        self,
        link: MasterLink,
        choice: Choice,
        clock: Clock,
        *,
        tenant: str = "default",
        timeout_s: float = limits.CALL_TIMEOUT_S,
        hedge: bool = False,
    ) -> None:
        """Own `link` and `choice`. `connect` is the usual way."""
        self.tenant: Final = tenant
        self._link = link
        self._choice = choice
        self._calls = Calls(clock, timeout_s, hedge=hedge)
        self._asking = Blocking(link.call, Viewer(choice), time.sleep)

    @classmethod
    def connect(
        cls,
        masters: str | Sequence[str] = DEFAULT_MASTERS,
        *,
        tenant: str = "default",
        secret: bytes | None = None,
        name: str = "",
        host: str | None = None,
        transports: Sequence[str] = DEFAULT_TRANSPORTS,
        timeout_s: float = limits.CALL_TIMEOUT_S,
        hedge: bool = False,
    ) -> Self:
        """Reach a master of the pool, whichever of `masters` leads: "host:port" or "unix:/path".

        A text may name several, with commas between.

        `host` names the machine that this process runs on, as its workers do, who take the
        system's name for it, too, unless told otherwise: what is put lies best on that machine.
        `transports` are those that may be used; ConfigError when this process cannot use one.
        With `hedge` a small read over a network whose worker is late goes to the next replica as
        well: one read in twenty at most, by threads of the store, for one more copy of each read.
        Unavailable when no master answers, AccessDenied when it refuses the secret.
        """
        addresses = checks.master_addresses(masters)
        checks.texts("transports", transports)
        clock = SystemClock()
        host = this_host() if host is None else host
        identity = Identity(Role.ENGINE, tenant, name, secret, host=host)
        link = MasterLink(addresses, identity, clock)
        try:
            choice = Choice(transports, lambda: link.identity, clock)
            store = cls(link, choice, clock, tenant=tenant, timeout_s=timeout_s, hedge=hedge)
            store.stat()
        except BaseException:
            link.close()
            raise
        return store

    def stat(self, *, timeout_s: float | None = None) -> Status:
        """The pool at this moment: workers, bytes by state, counters."""
        return self._run(ask(GetStatus(), Status, self._calls.left_s(timeout_s)))

    def carry_out(self, plan: Steps[T]) -> T:
        """Run a plan that only asks the master, such as those of kvstore.client.tickets."""
        return self._run(plan)

    def counters(self) -> ClientCounters:
        """What this store has counted of its own calls."""
        return self._calls.counters

    def close(self) -> None:
        """Close buffers, transports and the link to the masters. Safe to repeat."""
        self._calls.close()
        self._choice.close()
        self._link.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def _run(self, steps: Steps[T], pages: Mover | Viewer | None = None) -> T:
        if pages is None:
            return drive(steps, self._asking)
        return drive(steps, Blocking(self._link.call, pages, time.sleep))
