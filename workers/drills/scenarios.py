"""The drills: what is broken, what has to go on meanwhile, and how it is mended.

Each is given a whole deployment under load; what it killed may be dead when it returns.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Final, NamedTuple

from workers.drills.deployment import REVISIONS
from workers.drills.network import RAILS
from workers.drills.report import Outcome

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from workers.drills.deployment import Deployment
    from workers.drills.load import Load

SETTLED: Final = 4
"""Answers by which a deployment shows that it serves."""
LOSS: Final = 0.01


class Drill(NamedTuple):
    """One drill."""

    summary: str
    play: Callable[[Deployment, Load], Outcome]
    decodes: int = 1
    """Decode workers that it takes."""
    masters: int = 1
    hosts: int = 1


def prefill_dead(site: Deployment, load: Load) -> Outcome:
    """Streams go on, who is new is asked to come later."""
    streams, refused = load.streaming(), load.refusals()
    dead = site.named("prefill")
    for name in dead:
        site.workers[name].kill()
    load.await_so("requests are refused", lambda: load.refusals() > refused)
    load.await_ended(streams)
    began_s = time.monotonic()
    site.restore()
    recovery_s = load.recovery_s(began_s)
    load.settle(SETTLED)
    facts = (f"{len(streams)} streams went on without a prefill worker",)
    return Outcome(recovery_s, "they were started again, models to be loaded", facts)


def decode_half_dead(site: Deployment, load: Load) -> Outcome:
    """Their streams go on elsewhere."""
    dead: list[str] = []

    def are_at_work() -> bool:
        running = _running(site)
        dead[:] = _busiest_first(running)[: len(running) // 2]
        return all(running[name] for name in dead)

    load.await_so("decode workers are at work", are_at_work)
    streams = load.streaming()
    began_s = time.monotonic()
    for name in dead:
        site.workers[name].kill()
    recovery_s = load.recovery_s(began_s)
    load.await_ended(streams)
    load.settle(SETTLED)
    return Outcome(recovery_s, "they were killed", (f"killed: {', '.join(dead)}",))


def packet_loss(site: Deployment, load: Load) -> Outcome:
    """Answers come, later."""
    began_s = time.monotonic()
    site.network.lose(LOSS)
    load.settle(3 * SETTLED)
    lost_s = (time.monotonic() - began_s) / (3 * SETTLED)
    lost = site.network.heal()
    began_s = time.monotonic()
    recovery_s = load.recovery_s(began_s)
    load.settle(3 * SETTLED)
    well_s = (time.monotonic() - began_s) / (3 * SETTLED)
    facts = (f"{lost} packets lost; an answer every {lost_s:.2f} s, without loss {well_s:.2f} s",)
    faults = () if lost else ("no packet was lost",)
    return Outcome(recovery_s, "the network was well again", facts, faults)


def address_gone(site: Deployment, load: Load) -> Outcome:
    """Others find the pool worker and the masters by their second address."""
    began_s = time.monotonic()
    site.network.cut(RAILS[0])
    recovery_s = load.recovery_s(began_s)
    load.settle(3 * SETTLED)
    site.network.mend(RAILS[0])
    load.settle(SETTLED)
    return Outcome(recovery_s, "the first address of each was gone")


def master_dead(site: Deployment, load: Load) -> Outcome:
    """The one that stands by leads; streams go on meanwhile, and no ticket is lost."""
    dead, streams = site.leader(), load.streaming()
    began_s = time.monotonic()
    site.masters[dead].kill()
    recovery_s = load.recovery_s(began_s)
    load.await_ended(streams)
    load.settle(SETTLED)
    facts = (f"{len(streams)} streams were under way; {site.leader()} leads",)
    return Outcome(recovery_s, "the leader was killed", facts)


def rolling_upgrade(site: Deployment, load: Load) -> Outcome:
    """Workers of other weights come with a gateway of theirs, then those before them leave.

    What a decode worker runs goes to others of its revision. The last ones are asked to leave when
    nothing of it runs any more.
    """
    old, gateway = site.target.model, site.gateway
    prefills, decodes = site.named("prefill"), site.named("decode")
    began_s = time.monotonic()
    site.model = next(each for each in REVISIONS if each != old)
    fresh = [f"{name}-{site.model}" for name in (*prefills, *decodes)]
    for name in fresh:
        site.start_worker(name)
    site.start_gateway(f"gateway-{site.model}", fresh)
    load.streaming()
    turned_s = time.monotonic()
    load.target = site.target
    *busier, last = (name for name in _busiest_first(_running(site)) if name in decodes)
    site.retire(*busier)
    recovery_s = load.recovery_s(turned_s)
    load.await_ended([each for each in load.all() if each.target.model == old])
    site.retire(last, *prefills)
    gateway.end()
    load.settle(SETTLED)
    took_s = time.monotonic() - began_s
    facts = (f"{len(fresh)} workers exchanged in {took_s:.0f} s",)
    return Outcome(recovery_s, "requests went to the new revision", facts)


def _running(site: Deployment) -> dict[str, int]:
    """How many tickets each decode worker runs."""
    fleet = site.fleet()
    return {name: fleet[name].running if name in fleet else 0 for name in site.named("decode")}


def _busiest_first(running: Mapping[str, int]) -> list[str]:
    return sorted(running, key=lambda name: -running[name])


DRILLS: Final[Mapping[str, Drill]] = {
    "prefill-dead": Drill("all prefill workers are killed, and started again", prefill_dead),
    "decode-half-dead": Drill("half of the decode workers are killed", decode_half_dead, decodes=2),
    "packet-loss": Drill("1 % of the packets between two hosts are lost", packet_loss, hosts=2),
    "address-gone": Drill("one of two links between two hosts goes", address_gone, hosts=2),
    "master-dead": Drill("the master that leads is killed", master_dead, masters=2),
    "rolling-upgrade": Drill(
        "workers of another revision of the model take over", rolling_upgrade, decodes=2
    ),
}
"""By their names."""
