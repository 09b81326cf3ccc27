"""The faults that chaos draws from: each begins, lasts a while and is undone.

What a fault meets is drawn, or follows from who leads at that moment. Of etcd, never more members
are harmed at once than may be, except where all of it is away on purpose.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Final

from kvstore.wire.messages.relocation import (
    CancelRelocation,
    RelocationKind,
    Relocations,
    StartRelocation,
)
from tests.cluster import segment_files
from tests.cluster.servers import until

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from random import Random

    from tests.cluster.rig import Rig
    from tests.cluster.servers import Server
    from tests.cluster.tcp_proxy import TcpProxy
    from tests.etcd_server import EtcdMember

    Undo = Callable[[], object]
    Fault = Callable[[Rig, Random], Undo]

DELAY_MAX_S: Final = 0.05
REPAIRED_S: Final = 60.0
"""Long enough for a machine that has much else to do."""
FRAGILE_BYTES_MAX: Final = 200_000
"""The value of a chunk has to come through now and then, else nobody ever stores or loads it."""


def _killed(server: Server) -> Undo:
    server.kill()
    return server.launch


def _ended(server: Server) -> Undo:
    server.end()
    return server.launch


def _stopped(server: Server) -> Undo:
    server.stop()
    return server.go_on


def _member_killed(rig: Rig, member: EtcdMember) -> Undo:
    member.kill()
    return partial(rig.etcd.restart, member)


def _members_stopped(members: Sequence[EtcdMember]) -> Undo:
    def undo() -> None:
        for each in members:
            each.thaw()

    for each in members:
        each.freeze()
    return undo


def _harmed(proxies: Sequence[TcpProxy], harm: Callable[[TcpProxy], None]) -> Undo:
    def undo() -> None:
        for each in proxies:
            each.heal()

    for each in proxies:
        harm(each)
    return undo


def _hold(proxy: TcpProxy) -> None:
    proxy.hold()


def _lose_answers(proxy: TcpProxy) -> None:
    proxy.hold(forward=False)


def _slow(proxy: TcpProxy) -> None:
    proxy.slow(DELAY_MAX_S)


def _make_fragile(proxy: TcpProxy) -> None:
    proxy.fragile(FRAGILE_BYTES_MAX)
    proxy.reset()


def _cut(proxy: TcpProxy) -> None:
    proxy.cut()


def _holder(rig: Rig, draw: Random) -> int:
    """A worker in whose memory pages lie."""
    numbers = range(len(rig.workers))
    return draw.choice([n for n in numbers if any(segment_files.sealed(rig.segment_file(n)))])


def _host_lost(rig: Rig, draw: Random) -> Undo:
    """A worker and its memory are gone: what comes again is empty."""
    number = _holder(rig, draw)
    rig.workers[number].kill()
    rig.segment_file(number).unlink()
    return rig.workers[number].launch


def _host_gone(rig: Rig, draw: Random) -> Undo:
    """The same, and the others make up for it before it comes again."""
    number = _holder(rig, draw)
    rig.workers[number].kill()
    rig.segment_file(number).unlink()
    until("it is lost", lambda: rig.state_of(f"w{number}") == "lost", REPAIRED_S)
    until("the others have its pages", rig.has_replicas, REPAIRED_S)
    return rig.workers[number].launch


def _drained(rig: Rig, draw: Random) -> Undo:
    """A worker is emptied, and only then lost."""
    number = _holder(rig, draw)
    wish = StartRelocation(RelocationKind.DRAIN, source=f"w{number}")
    (row,) = rig.ask(wish, Relocations).rows
    until("it is drained", lambda: rig.state_of(f"w{number}") == "drained", REPAIRED_S)
    assert not list(segment_files.sealed(rig.segment_file(number)))  # I36
    rig.workers[number].kill()
    rig.segment_file(number).unlink()

    def undo() -> None:
        rig.workers[number].launch()
        rig.ask(CancelRelocation(row.id), Relocations)

    return undo


def _spoilt(rig: Rig, draw: Random) -> Undo:
    """Bits turn over in a worker's memory, until it has found them."""
    path = rig.segment_file(_holder(rig, draw))
    segment_files.spoil(path, draw)
    return lambda: until("nothing spoilt is left", lambda: not segment_files.damaged(path))


def _leader(rig: Rig) -> Server:
    return rig.masters[rig.leader()]


def _leader_to_etcd(harm: Callable[[TcpProxy], None]) -> Fault:
    return lambda rig, _: _harmed(rig.to_etcd[rig.leader()], harm)


def _workers_to_leader(harm: Callable[[TcpProxy], None]) -> Fault:
    return lambda rig, _: _harmed([rig.to_masters[rig.leader()]], harm)


def _all_to_etcd(harm: Callable[[TcpProxy], None]) -> Fault:
    return lambda rig, _: _harmed([proxy for some in rig.to_etcd for proxy in some], harm)


FAULTS: Final[dict[str, Fault]] = {
    "leader killed": lambda rig, _: _killed(_leader(rig)),
    "leader stopped": lambda rig, _: _stopped(_leader(rig)),
    "leader ended": lambda rig, _: _ended(_leader(rig)),
    "standby killed": lambda rig, _: _killed(rig.masters[rig.standby()]),
    "leader cut from etcd": _leader_to_etcd(_cut),
    "leader and etcd silent": _leader_to_etcd(_hold),
    "etcd's answers to the leader lost": _leader_to_etcd(_lose_answers),
    "etcd slow": _all_to_etcd(_slow),
    "connections to etcd fragile": _all_to_etcd(_make_fragile),
    "workers cut from leader": _workers_to_leader(_cut),
    "workers and leader silent": _workers_to_leader(_hold),
    "leader's answers to workers lost": _workers_to_leader(_lose_answers),
    "connections to the leader fragile": _workers_to_leader(_make_fragile),
    "worker killed": lambda rig, draw: _killed(draw.choice(rig.workers)),
    "worker stopped": lambda rig, draw: _stopped(draw.choice(rig.workers)),
    "worker ended": lambda rig, draw: _ended(draw.choice(rig.workers)),
    "etcd's leader killed": lambda rig, _: _member_killed(rig, rig.etcd.leader()),
    "etcd's leader stopped": lambda rig, _: _members_stopped([rig.etcd.leader()]),
    "all of etcd stopped": lambda rig, _: _members_stopped(rig.etcd.members),
}


HOST_FAULTS: Final[dict[str, Fault]] = {
    "host lost": _host_lost,
    "host gone": _host_gone,
    "worker drained": _drained,
    "memory spoilt": _spoilt,
    **{
        name: FAULTS[name]
        for name in (
            "worker killed", "worker stopped", "worker ended", "leader killed", "leader stopped",
        )
    },
}  # fmt: skip
"""Those that replicas are for: each takes one host's pages at most, and leaves nothing else."""


def deck(draw: Random, faults: Mapping[str, Fault] = FAULTS) -> list[str]:
    """The names of all faults once, in an order that is drawn."""
    names = sorted(faults)
    draw.shuffle(names)
    return names
