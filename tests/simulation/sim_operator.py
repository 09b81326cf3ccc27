"""An operator of the simulation: drains workers, fills them again, has pages copied and moved.

Asks whoever leads, as a command does, and goes on with another wish when that is answered.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from kvstore.errors import KVStoreError, Unavailable
from kvstore.wire.messages.relocation import (
    CancelRelocation,
    GetRelocations,
    RelocationKind,
    RelocationRow,
    Relocations,
    RelocationState,
    StartRelocation,
)
from tests.simulation.pages import HALVES, WHOLE
from tests.simulation.sim_client import SimClient

if TYPE_CHECKING:
    from kvstore.wire.messages.base import Message
    from tests.simulation.checks import Checks
    from tests.simulation.sim_master import SimMaster
    from tests.simulation.sim_worker import SimWorker
    from tests.simulation.tasks import Steps
    from tests.simulation.world import World

TIMEOUT_S: Final = 5.0
OPERATOR: Final = "operator"
CANCELS: Final = 0.2
"""Share of the wishes that end what was begun before."""
KINDS: Final = (
    RelocationKind.DRAIN,
    RelocationKind.DRAIN,
    RelocationKind.MOVE,
    RelocationKind.COPY,
    RelocationKind.REBALANCE,
)


class SimOperator(SimClient):
    """One who changes where pages lie."""

    role = OPERATOR

    def __init__(
        self,
        world: World,
        name: str,
        masters: dict[str, SimMaster],
        workers: dict[str, SimWorker],
        checks: Checks,
    ) -> None:
        """Not started."""
        super().__init__(world, name, masters, workers, checks)
        self.is_stopped = False
        self._begun: list[str] = []
        """Ids of relocations, whatever has become of them."""

    def work(self, rate: float) -> Steps[None]:
        """So many wishes a second, until it is stopped; then every worker is filled again."""
        while not self.is_stopped:
            yield self.random.uniform(0.0, 2.0 / rate)
            if not self.is_stopped:
                yield from self.wish(self._any())
        yield from self.undrain()

    def wish(self, message: Message) -> Steps[tuple[RelocationRow, ...] | None]:
        """What the leader says of it; None where it refuses, or nobody leads in time."""
        try:
            reply = yield from self.ask(message, TIMEOUT_S)
        except KVStoreError as error:
            late = isinstance(error, Unavailable)
            self.world.counts["operator not answered" if late else "operator refused"] += 1
            return None
        assert isinstance(reply, Relocations), reply
        if isinstance(message, StartRelocation):
            (row,) = reply.rows
            self.world.counts[f"operator began {row.kind}"] += 1
            self._begun.append(row.id)
        return reply.rows

    def undrain(self) -> Steps[None]:
        """Cancel what is open, again and again until nothing is."""
        while True:
            rows = yield from self.wish(GetRelocations())
            open_ones = [row.id for row in rows or () if _is_open(row)]
            if rows is not None and not open_ones:
                return
            for number in open_ones:
                yield from self.wish(CancelRelocation(number))
            yield 0.5

    def _any(self) -> Message:
        random = self.random
        if self._begun and random.random() < CANCELS:
            return CancelRelocation(random.choice(self._begun))
        kind = random.choice(KINDS)
        source, target = random.choices(list(self.workers), k=2)
        match kind:
            case RelocationKind.DRAIN:
                return StartRelocation(kind, source)
            case RelocationKind.REBALANCE:
                return StartRelocation(kind)
        namespace = random.choice((b"", WHOLE.id, HALVES.id))
        return StartRelocation(
            kind, "" if namespace and random.random() < 0.5 else source, target, namespace
        )


def _is_open(row: RelocationRow) -> bool:
    is_kept = row.kind == RelocationKind.DRAIN and row.state == RelocationState.DONE
    return is_kept or row.state == RelocationState.RUNNING
