"""Policies by name, per kind. A new one is its file, one line here, and its test."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Final, Generic, TypeVar

from kvstore.errors import BadValue
from policies.admission.all import All
from policies.admission.budget import Budget
from policies.admission.learned import Learned
from policies.admission.none import Nothing
from policies.admission.second_touch import SecondTouch
from policies.erasure.off import Off as NoStripes
from policies.erasure.reed_solomon import ReedSolomon
from policies.eviction.lrfu import Lrfu
from policies.eviction.lru import Lru
from policies.eviction.rent import Rent
from policies.eviction.s3_fifo import S3Fifo
from policies.eviction.ttl_lfu import TtlLfu
from policies.parameters import Parametrised, amended
from policies.placement.local_first import LocalFirst
from policies.placement.most_free import MostFree
from policies.placement.two_choices import TwoChoices
from policies.replication.off import Off
from policies.replication.read_rate import ReadRate
from policies.roles.balance import Balance
from policies.roles.off import Off as SameRoles
from policies.routing.always import Always
from policies.routing.break_even import BreakEven
from policies.routing.deadline_aware import DeadlineAware
from policies.routing.kv_aware import KvAware
from policies.routing.least_loaded import LeastLoaded
from policies.routing.least_queued import LeastQueued
from policies.routing.never import Never
from policies.routing.prefix_load import PrefixLoad
from policies.routing.same_prefix import SamePrefix
from policies.routing.shortest_first import ShortestFirst
from policies.routing.transfer_balance import TransferBalance

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from policies.admission.protocol import AdmissionPolicy
    from policies.erasure.protocol import ErasurePolicy
    from policies.eviction.protocol import EvictionPolicy
    from policies.placement.protocol import PlacementPolicy
    from policies.replication.protocol import ReplicationPolicy
    from policies.roles.protocol import RolesPolicy
    from policies.routing.protocol import ColocationPolicy, DecodePolicy, PrefillPolicy

P = TypeVar("P", bound=Parametrised)

EVICTION: Final[dict[str, Callable[[], EvictionPolicy]]] = {
    "lrfu": Lrfu,
    "lru": Lru,
    "rent": Rent,
    "s3-fifo": S3Fifo,
    "ttl-lfu": TtlLfu,
}
ADMISSION: Final[dict[str, Callable[[], AdmissionPolicy]]] = {
    "all": All,
    "budget": Budget,
    "learned": Learned,
    "none": Nothing,
    "second-touch": SecondTouch,
}
PLACEMENT: Final[dict[str, Callable[[], PlacementPolicy]]] = {
    "local_first": LocalFirst,
    "most_free": MostFree,
    "two_choices": TwoChoices,
}
REPLICATION: Final[dict[str, Callable[[], ReplicationPolicy]]] = {
    "enforce": partial(ReadRate, acts=True),
    "observe": partial(ReadRate, acts=False),
    "off": Off,
}
ERASURE: Final[dict[str, Callable[[], ErasurePolicy]]] = {
    "off": NoStripes,
    "reed-solomon": ReedSolomon,
}
PREFILL_ROUTING: Final[dict[str, Callable[[], PrefillPolicy]]] = {
    "least_queued": LeastQueued,
    "prefix_load": PrefixLoad,
}
DECODE_ROUTING: Final[dict[str, Callable[[], DecodePolicy]]] = {
    "deadline_aware": DeadlineAware,
    "kv_aware": KvAware,
    "least_loaded": LeastLoaded,
    "same_prefix": SamePrefix,
    "shortest_first": ShortestFirst,
    "transfer_balance": TransferBalance,
}
COLOCATION: Final[dict[str, Callable[[], ColocationPolicy]]] = {
    "always": Always,
    "break_even": BreakEven,
    "never": Never,
}
ROLES: Final[dict[str, Callable[[], RolesPolicy]]] = {
    "enforce": partial(Balance, acts=True),
    "observe": partial(Balance, acts=False),
    "off": SameRoles,
}


class Kind(Generic[P]):
    """The policies of one kind. Each that is made has a state of its own: one pool, one policy."""

    def __init__(self, name: str, known: Mapping[str, Callable[[], P]]) -> None:
        """`known`: how each is made, by its name."""
        self.name: Final = name
        self.known: Final = known

    def __call__(self, name: str, parameters: Mapping[str, object] | None = None) -> P:
        """A new policy; BadValue naming what exists for an unknown name or parameter."""
        make = self.known.get(name)
        if make is None:
            raise BadValue(self.name, name, f"one of {', '.join(sorted(self.known))}")
        policy = make()
        policy.parameters = amended(policy.parameters, parameters or {})
        return policy


eviction: Final = Kind("eviction", EVICTION)
admission: Final = Kind("admission", ADMISSION)
"""Of one tier."""
placement: Final = Kind("placement", PLACEMENT)
replication: Final = Kind("replication", REPLICATION)
erasure: Final = Kind("erasure", ERASURE)
prefill_routing: Final = Kind("prefill_routing", PREFILL_ROUTING)
decode_routing: Final = Kind("decode_routing", DECODE_ROUTING)
colocation: Final = Kind("colocation", COLOCATION)
roles: Final = Kind("roles", ROLES)
