"""The gateways, prefill and decode workers of a simulation, and the sign of life that they give."""

from __future__ import annotations

from functools import partial
from random import Random
from typing import TYPE_CHECKING

from tests.simulation.pd_checks import PdChecks
from tests.simulation.pd_gateway import PdGateway
from tests.simulation.pd_prompts import Prompts
from tests.simulation.pd_workers import PdWorker
from tests.simulation.tasks import Steps, spawn

if TYPE_CHECKING:
    from tests.simulation.pd_node import PdNode
    from tests.simulation.simulation import Simulation

PATIENCE_S = 60.0


class PdFleet:
    """All of one namespace."""

    def __init__(self, simulation: Simulation) -> None:
        """Build the processes; none runs yet."""
        self._simulation = simulation
        self.world = simulation.world
        self.checks = simulation.checks.tickets = PdChecks(simulation.checks)
        random = Random(f"tickets served {simulation.seed}")
        self.prompts = Prompts(random)
        self.gateways = {
            name: PdGateway(simulation, name, self)
            for name in self._names("gateway", random.choice((1, 2)))
        }
        spare, both = int(simulation.options.roles), simulation.options.both
        counts = {"prefill": random.choice((1, 2)) + spare, "decode": random.choice((1, 2, 3))}
        self.workers = {
            name: PdWorker(simulation, name, self, role)
            for role, count in {**counts, "both": both}.items()
            for name in self._names(role, count)
        }
        self.nodes: dict[str, PdNode] = {**self.gateways, **self.workers}

    def _names(self, kind: str, count: int) -> list[str]:
        hosts = self._simulation.options.hosts
        names = [f"{kind}{number}" for number in range(count)]
        for number, name in enumerate(names):
            self.world.add_node(name, f"host{number % hosts}")
        return names

    def start(self) -> None:
        """Start every process."""
        for node in self.nodes.values():
            node.start()

    def stop_work(self) -> None:
        """Let every gateway end the requests that it has."""
        for gateway in self.gateways.values():
            gateway.is_stopped = True

    def show_life(self) -> None:
        """Once all is healed, every gateway gets an answer to the last token."""
        for gateway in self.gateways.values():
            done: list[bool] = []
            spawn(self.world, gateway.name, self._served(gateway, done))
            if not self.world.run_until(partial(bool, done), PATIENCE_S):
                self._simulation.checks.fail("liveness", f"{gateway.name} serves no request")

    def _served(self, gateway: PdGateway, done: list[bool]) -> Steps[None]:
        while (yield from gateway.serve(20.0)) != "finished":
            yield 0.5
        done.append(True)
