"""Stripes made of cold pages: which parts go together, and who says what their parity is.

Cold parts of one size and tenant are remembered as drives are looked through, one at a time; where
as many hosts have some as a code wants data, a worker on another host hashes their parity, and the
stripe is entered. Its parity is made by whoever tends it (striping). See the step table "stripe" in
ARCHITECTURE.md.
"""

from __future__ import annotations

from itertools import islice
from typing import TYPE_CHECKING, Final

import msgspec
from msgspec.structs import asdict

from kvstore import limits
from kvstore.errors import BadValue
from kvstore.lease import granter_release_s
from kvstore.replica import Tier
from kvstore.wire.messages.common import Outcome
from kvstore.wire.messages.stripes import HashParity, ParityHashed
from master import degraded, namespaces, placing, replica_counts, victims
from master.events import Command
from master.packed import WORD, words
from master.segments import Segment
from master.stripes import PARITY, PREFIX, STRIPES_MAX, Member, Stripe, pack, parity_key
from master.suspects import Suspect, check
from policies import registry
from policies.erasure.protocol import Code, Resting

if TYPE_CHECKING:
    from kvstore.wire.messages.base import Message
    from kvstore.wire.messages.operator import SetPolicy
    from master.core import Core
    from master.degraded import Standing
    from master.events import CommandId
    from master.namespaces import KnownNamespace
    from master.run import Copy, Run

MAKING_MAX: Final = 4
NOTHING_COLD: Final = "nothing more on drives is cold enough"
REST_S: Final = 2.0
CANDIDATES_MAX: Final = 64
"""Of one size on one host."""
CLASSES_MAX: Final = 256
DATA_BYTES_MAX: Final = 256 << 20
"""Of one stripe: so much memory takes who decodes a page."""
TRIED_MAX: Final = 16
"""Candidates of one host that may prove to be none any more, each time."""
_DOUBTS: Final = (Outcome.CHECKSUM, Outcome.STALE)

Part = tuple[int, int, bytes]
"""Of a page: namespace, part and key."""


class Making(msgspec.Struct, eq=False):
    """Data whose parity a worker was asked to hash."""

    number: int
    code: Code
    part_bytes: int
    members: tuple[Member, ...]
    sources: tuple[Suspect, ...]
    """Where each of them was read."""


def require_hosts(core: Core, code: Code | None) -> None:
    """BadValue unless as many hosts lend drives as a stripe has shards."""
    hosts = len({replica_counts.domain(core, segment) for segment in _drives(core)})
    if code is not None and code.k + code.m > hosts:
        raise BadValue("k + m", code.k + code.m, f"at most {hosts}: so many hosts lend drives")


def check_wish(core: Core, wish: SetPolicy) -> None:
    """BadValue, naming both numbers, where an operator wants wider stripes than there are hosts."""
    current = core.erasure
    known = asdict(current.policy.parameters) if wish.name == current.name else {}
    require_hosts(core, registry.erasure(wish.name, {**known, **wish.parameters}).code)


def _drives(core: Core) -> list[Segment]:
    drives = (s for s in core.segments.values() if s.tier is Tier.NVME)
    return [s for s in drives if s.takes_plans and not s.drained]


def make(core: Core, code: Code) -> None:
    """Look through a drive, and have parity hashed as far as hosts have cold parts enough."""
    stripes = core.stripes
    try:
        require_hosts(core, code)
    except BadValue as error:
        stripes.lacks = str(error)
        return
    was_barren = stripes.lacks == NOTHING_COLD
    stripes.lacks = "" if len(stripes) < STRIPES_MAX else f"{STRIPES_MAX} stripes are the most"
    drives = _drives(core)
    if core.now >= stripes.search_at_s:
        _search(core, drives, code)
    # Until something is found: whoever asks in the middle of a search is told of the last one.
    if not (stripes.lacks or _noted(core)) and (was_barren or core.now < stripes.search_at_s):
        stripes.lacks = NOTHING_COLD
    for (tenant, part_bytes), by_host in stripes.candidates.items():
        while len(stripes.making) < MAKING_MAX and len(stripes) < STRIPES_MAX:  # I7
            if not _begin(core, code, by_host, tenant, part_bytes):
                break


def _search(core: Core, drives: list[Segment], code: Code) -> None:
    """Look through the next drive; rest when all were looked through in vain."""
    stripes = core.stripes
    stripes.turn = (stripes.turn + 1) % len(drives)
    known = _noted(core)
    _note_cold(core, drives[stripes.turn], code)
    stripes.in_vain = stripes.in_vain + 1 if _noted(core) == known else 0
    if stripes.in_vain > len(drives):
        stripes.in_vain = 0
        stripes.search_at_s = core.now + REST_S


def _noted(core: Core) -> int:
    hosts = (each for by_host in core.stripes.candidates.values() for each in by_host.values())
    return sum(map(len, hosts))


def _note_cold(core: Core, segment: Segment, code: Code) -> None:
    """Remember cold parts of pages on a drive."""
    host = replica_counts.domain(core, segment)
    for run in victims.coldest(core, segment):
        known = core.namespaces.by_ordinal(run.namespace)
        assert known is not None, run.namespace
        if not _is_cold(core, run, code):
            continue
        for copy in run.copies:
            if copy.segment is segment and code.k * copy.part_bytes <= DATA_BYTES_MAX:
                kind = known.namespace.content.tenant, copy.part_bytes
                _note_pages(core, run, copy, core.stripes.candidates.setdefault(kind, {}), host)
    while len(core.stripes.candidates) > CLASSES_MAX:  # I7: they will be found again
        del core.stripes.candidates[next(iter(core.stripes.candidates))]


def _note_pages(
    core: Core, run: Run, copy: Copy, by_host: dict[str, dict[Part, None]], host: str
) -> None:
    noted = by_host.setdefault(host, {})
    there = copy.present(0, len(run))
    for page in range(len(run)):
        if len(noted) >= CANDIDATES_MAX:
            return
        key = run.key(page)
        if there[page] and core.stripes.find(run.namespace, copy.part, key) is None:
            noted[run.namespace, copy.part, key] = None


def _is_cold(core: Core, run: Run, code: Code) -> bool:
    """Whether its pages may be striped: nobody reads or puts them, and m + 1 replicas are enough.

    Parity is none: it would be parity of parity.
    """
    used_s = max(run.touched_s, run.progress_s, run.created_s)
    resting = Resting(core.now - used_s, run.expires_s - core.now)
    return (
        run.namespace != core.stripes.parity
        and not run.plans
        and run.leased_until_s <= core.now
        and replica_counts.wanted(core, run) <= code.m + 1
        and core.erasure.policy.takes(resting)
    )


def _begin(
    core: Core, code: Code, by_host: dict[str, dict[Part, None]], tenant: str, part_bytes: int
) -> bool:
    """Have the parity of k candidates hashed, if so many hosts have one; whether they had."""
    known = parity_space(core)
    hosts = sorted((h for h in by_host if by_host[h]), key=lambda h: (-len(by_host[h]), h))
    if known is None or len(hosts) < code.k:
        return False
    chosen: dict[str, Standing] = {}
    for host in hosts:
        if len(chosen) == code.k:
            break
        one = _take(core, code, by_host[host], host)
        if one is not None and all(one.member != other.member for other in chosen.values()):
            chosen[host] = one
    target = _who_hashes(core, set(chosen), code, part_bytes)
    if len(chosen) < code.k or target is None:
        for host, one in chosen.items():
            by_host[host][one.member.namespace, one.member.part, one.member.key] = None
        return False
    _ask(core, code, list(chosen.values()), part_bytes, target)
    return True


def _take(core: Core, code: Code, noted: dict[Part, None], host: str) -> Standing | None:
    """One of a host's candidates that still is one; it is noted no more."""
    for namespace, part, key in list(islice(noted, TRIED_MAX)):
        del noted[namespace, part, key]
        tree = core.tree(namespace)
        run = tree.get(key)
        if run is None or core.stripes.find(namespace, part, key) is not None:
            continue
        page = run.page_of(key)
        here = [
            copy
            for copy in run.copies_of(part)
            if copy.segment.tier is Tier.NVME
            and copy.segment.readable
            and copy.generation(page)
            and replica_counts.domain(core, copy.segment) == host
        ]
        if here and _is_cold(core, run, code) and not _is_asked(core, namespace, part, key):
            checksum = words(here[0].checksums)[page]
            member = Member(namespace, part, key, checksum)
            return degraded.Standing(member, run, page, (here[0],), is_there=True)
    return None


def _is_asked(core: Core, namespace: int, part: int, key: bytes) -> bool:
    """Whether it is in a stripe that is being made."""
    wanted = namespace, part, key
    members = (member for each in core.stripes.making.values() for member in each.members)
    return any((m.namespace, m.part, m.key) == wanted for m in members)


def _who_hashes(core: Core, taken: set[str], code: Code, part_bytes: int) -> Segment | None:
    """A drive of a worker that has none of the data; None unless m hosts have room for parity."""
    by_host: dict[str, Segment] = {}
    for segment in with_room(core, limits.EXTENT_ALIGN_BYTES):
        host = replica_counts.domain(core, segment)
        if host not in taken and segment.geometry.chunk_bytes >= part_bytes:
            by_host.setdefault(host, segment)
    if len(by_host) < code.m:
        core.stripes.lacks = f"{code.m} more hosts with room on a drive"
        return None
    rate = core.tunables.copy_bytes_per_s
    lanes = ((core.workers[s.worker].copies.free_at_s(core.now, rate), s) for s in by_host.values())
    return next((segment for free_at_s, segment in lanes if free_at_s <= core.now), None)


def with_room(core: Core, size_class: int) -> list[Segment]:
    """Drives below the low watermark, the emptiest first: nothing goes for what is cold.

    As they were at the first question of an event: a pool may have thousands.
    """
    now_s, known = core.stripes.roomy
    if now_s != core.now:
        known = {}
        core.stripes.roomy = core.now, known
    if size_class not in known:
        low = core.tunables.watermark_low
        fitting = [
            (_share(segment), segment.id, segment)
            for segment in _drives(core)
            if placing.is_open(core, segment, size_class) and _share(segment) < low
        ]
        known[size_class] = [s for _, _, s in sorted(fitting, key=lambda row: row[:2])]
    return known[size_class]


def _share(segment: Segment) -> float:
    return segment.allocator.used_bytes / max(1, segment.allocator.capacity_bytes)


def _ask(core: Core, code: Code, data: list[Standing], part_bytes: int, target: Segment) -> None:
    """Have a worker hash the parity of these; what it reads is leased meanwhile (I35)."""
    assert target.session is not None, target.id
    size_bytes = code.k * part_bytes
    lasts_s = min(core.tunables.put_timeout_s(size_bytes), limits.LEASE_TTL_MAX_S)
    until_s = granter_release_s(core.now, lasts_s)
    number, indexes = core.new_generation(), dict[Segment, int]()
    shards, sources = [], []
    for at, one in enumerate(data):
        degraded.lease_all(one, until_s)
        copy = one.copies[0]
        shards.append(degraded.shard(at, one, copy, indexes))
        sources.append(Suspect(copy.segment, copy.offset(one.page), copy.generation(one.page)))
    keys = b"".join([parity_key(number, code.k + at) for at in range(code.m)])
    question = HashParity(
        core.epoch, part_bytes, code.m, keys, tuple([segment.ref for segment in indexes]),
        tuple(shards),
    )  # fmt: skip
    members = tuple([one.member for one in data])
    command = core.orders.new_command()
    core.stripes.making[command] = Making(number, code, part_bytes, members, tuple(sources))
    core.workers[target.worker].copies.budget.spend(size_bytes)
    core.actions.append(Command(command, target.session, question))


def answered(core: Core, command: CommandId, reply: Message | None) -> bool:
    """Whether this command was about parity; its stripe is entered, and made once it is durable."""
    making = core.stripes.making.pop(command, None)
    if making is None:
        return False
    core.stripes.look(core.now)
    hashed = reply if isinstance(reply, ParityHashed) else ParityHashed(b"", b"")
    if hashed.outcomes == bytes(making.code.k) and len(hashed.checksums) == making.code.m * WORD:
        _enter(core, making, hashed.checksums)
        return True
    core.counters["stripes_failed"] += 1
    for source, outcome in zip(making.sources, hashed.outcomes, strict=False):
        if outcome in _DOUBTS:
            check(core, source)
    return True


def _find(core: Core, member: Member) -> Stripe | None:
    return core.stripes.find(member.namespace, member.part, member.key)


def _enter(core: Core, making: Making, checksums: bytes) -> None:
    """Parity is written only once it is durable whose it is: else nobody would know its pages."""
    known = parity_space(core)
    if known is None or any(_find(core, member) for member in making.members):
        return
    k, m = making.code.k, making.code.m
    parity = [
        Member(known.ordinal, 0, parity_key(making.number, k + at), checksum)
        for at, checksum in enumerate(words(checksums))
    ]
    stripe = Stripe(making.number, k, m, making.part_bytes, (*making.members, *parity))
    core.stripes.add(stripe)
    core.counters["stripes_made"] += 1

    def written() -> None:
        stripe.is_durable = True
        core.stripes.want(stripe, core.now)

    core.persist(puts=((PREFIX + str(stripe.number), pack(stripe)),), then=written)


def parity_space(core: Core) -> KnownNamespace | None:
    """The namespace of parity; None until it is durable."""
    known = core.namespaces.find(PARITY.id)
    if known is None:
        known = namespaces.open_own(core, PARITY)
    core.stripes.parity = known.ordinal
    return known if known.is_durable else None
